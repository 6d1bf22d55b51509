# Read by what changes the system that it runs in, which root.sh runs in a root that is thrown away.
[ -n "${INSIDE:-}" ] || { echo "$0: run it by root.sh, in a root that is thrown away" >&2; exit 1; }

nothing_is_left() {
    left=$(find /usr /etc/systemd -xdev \( -name '*guestlet*' -o -name 'qemu-guest-agent*' \) ! -type d)
    [ -z "$left" ] || { echo "$0: what is left after the removal: $left" >&2; exit 1; }
}
