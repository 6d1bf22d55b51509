#!/bin/sh
# A NoCloud seed for cloud-init, with the host name NAME.
#
#   seed.sh NAME OUT [USER-DATA]
#
# With a file of user data, what the tests need is in the vendor's.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
printf 'instance-id: iid-%s\nlocal-hostname: %s\n' "$1" "$1" > "$work/meta-data"
printf 'version: 2\nethernets: {}\n' > "$work/network-config"
# No locales and no SSH in this guest; cloud-init calls it an error to set them up.
cat > "$work/ours" <<'DATA'
#cloud-config
locale: false
ssh_deletekeys: false
ssh_genkeytypes: []
DATA
if [ $# -gt 2 ]; then
    cp "$3" "$work/user-data"
    # The archive of packages on a disk, and none that needs a network.
    cat "$work/ours" - > "$work/vendor-data" <<'DATA'
apt:
  sources_list: "# none"
bootcmd:
  - [ sh, -c, 'mkdir -p /srv/packages; mountpoint -q /srv/packages || mount -o ro -L PACKAGES /srv/packages' ]
  # The tests' side of vsock is a unix socket.
  - [ sh, -c, 'mkdir -p /etc/guestlet/agent.d; printf "[vsock]\nhybrid = true\n" > /etc/guestlet/agent.d/tests.toml' ]
DATA
else
    cp "$work/ours" "$work/user-data"
    : > "$work/vendor-data"
fi
rm "$work/ours"
genisoimage -quiet -output "$2" -volid cidata -joliet -rock "$work"
