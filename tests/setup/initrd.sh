#!/bin/sh
# The guests' first user land: busybox and the modules that find the disks, ports and vsock of a VM.
#
#   initrd.sh KERNEL-DIRECTORY OUT
set -eu
kernel=$1
out=$2
here=$(dirname "$(readlink -f "$0")")
release=$(ls "$kernel/lib/modules")
wanted="virtio_pci virtio_console virtio_scsi virtio_blk virtio_net virtio_rng vmw_vsock_virtio_transport
    sd_mod ext4 xfs loop isofs vfat nls_ascii nls_cp437"

tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
chmod 755 "$tree"
mkdir -p "$tree/bin" "$tree/dev" "$tree/proc" "$tree/sys" "$tree/run" "$tree/tmp" "$tree/root" "$tree/etc" "$tree/modules"
cp /bin/busybox "$tree/bin/busybox"
for applet in $(/bin/busybox --list); do
    [ -e "$tree/bin/$applet" ] || ln -s busybox "$tree/bin/$applet"
done

# In an order in which each finds what it depends on.
for module in $wanted; do
    modprobe -d "$kernel" -S "$release" --show-depends --ignore-install "$module"
done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' | while read -r path; do
    cp "$path" "$tree/modules/"
    basename "$path"
done > "$tree/modules/order"

install -m 755 "$here/guest-init" "$tree/init"
printf 'ID=testguest\nNAME="Test Guest"\nPRETTY_NAME="Test Guest 1"\nVERSION_ID="1"\n' > "$tree/etc/os-release"
printf 'root:x:0:0:root:/root:/bin/sh\n' > "$tree/etc/passwd"
printf 'root:x:0:\n' > "$tree/etc/group"
(cd "$tree" && find . | sort | cpio --quiet -o -H newc -R 0:0) | gzip -1 > "$out"
