#!/bin/sh
# A NoCloud seed for cloud-init, with the host name NAME.
#
#   seed.sh NAME OUT
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
printf 'instance-id: iid-%s\nlocal-hostname: %s\n' "$1" "$1" > "$work/meta-data"
printf 'version: 2\nethernets: {}\n' > "$work/network-config"
# No locales and no SSH in this guest; cloud-init calls it an error to set them up.
cat > "$work/user-data" <<'DATA'
#cloud-config
locale: false
ssh_deletekeys: false
ssh_genkeytypes: []
runcmd:
  - [ sh, -c, 'echo "testguest: cloud-init done" > /dev/ttyS0' ]
DATA
genisoimage -quiet -output "$2" -volid cidata -joliet -rock "$work/user-data" "$work/meta-data" "$work/network-config"
