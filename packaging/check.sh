#!/bin/sh
# check.sh DIST STATIC: checks the packages in DIST and the static programs in STATIC. Lintian and rpmlint have nothing to
# say of them, the programs need no library, and rpm installs, upgrades and removes its packages, with their scripts, in a
# root that is thrown away: this machine's, behind an overlay in a mount namespace. For root.
set -eu
here=$(dirname "$(readlink -f "$0")")
if [ "${3:-}" != inside ]; then
    for tool in lintian rpm rpmlint; do
        command -v "$tool" > /dev/null || { echo "$0: $tool is missing: apt-get install lintian rpm rpmlint" >&2; exit 1; }
    done
    lintian --fail-on error,warning,info "$1"/*.deb
    rpmlint --config "$here/rpm/rpmlint.toml" "$1"/*.rpm
    for program in guestlet guestlet-host guestctl; do
        ldd "$2/$program" 2>&1 | grep -q 'statically linked\|not a dynamic' ||
            { echo "$0: $2/$program needs libraries" >&2; exit 1; }
        "$2/$program" --version
    done
    exec unshare --mount --propagation private "$0" "$1" "$2" inside
fi

packages=$(readlink -f "$1")
mount -t tmpfs root /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay root -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root
mount -t proc proc /mnt/root/proc
mount -t tmpfs run /mnt/root/run
mount -t tmpfs tmp /mnt/root/tmp
cp "$packages"/*.rpm /mnt/root/tmp/
exec chroot /mnt/root /bin/sh -eu << 'INSIDE'
cd /tmp
# Debian's systemd and shell are none of rpm's packages.
rpm --install --nodeps guestlet-*.rpm
rpm --verify --nodeps guestlet guestlet-host
systemctl is-enabled guestlet.service guestlet.socket qemu-guest-agent.service guestlet-host.service
id guestlet-host
guestlet --version
echo '# kept' >> /etc/guestlet/agent.toml
rpm --upgrade --nodeps --force guestlet-*.rpm
tail -n 1 /etc/guestlet/agent.toml | grep -qx '# kept'
test "$(systemctl is-enabled guestlet.service)" = enabled
rpm --erase --nodeps guestlet guestlet-host
tail -n 1 /etc/guestlet/agent.toml.rpmsave | grep -qx '# kept'
left=$(find /usr /etc/systemd -xdev \( -name '*guestlet*' -o -name 'qemu-guest-agent*' \) ! -type d)
[ -z "$left" ] || { echo "what is left after the removal: $left" >&2; exit 1; }
echo "rpm installs, upgrades and removes them"
INSIDE
