#!/bin/sh
# root.sh PACKAGES SCRIPT [FILE]: runs SCRIPT in a root that is thrown away: this machine's, behind an overlay in a mount
# namespace, without a running systemd. The rpms in PACKAGES, and FILE, are in /tmp there. For root.
set -eu
if [ -z "${INSIDE:-}" ]; then
    INSIDE=1 exec unshare --mount --uts --propagation private "$0" "$@"
fi
packages=$(readlink -f "$1")
script=$(readlink -f "$2")
mount -t tmpfs root /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay root -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root
mount -t proc proc /mnt/root/proc
mount --rbind /dev /mnt/root/dev
mount -t tmpfs run /mnt/root/run
mount -t tmpfs tmp /mnt/root/tmp
cp "$packages"/*.rpm "$script" "${script%/*}/inside.sh" ${3:+"$3"} /mnt/root/tmp/
exec chroot /mnt/root /bin/sh -euc "cd /tmp; exec ./${script##*/}"
