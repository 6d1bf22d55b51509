#!/bin/sh
# The first and only user land of a guest that runs one test program as root, with all that works on disks: file
# systems, encryption, LVM and device mapper, taken from this machine's packages.
#
#   disk-lab.sh KERNEL-DIRECTORY TEST-PROGRAM OUT
set -eu
kernel=$1
program=$2
out=$3
release=$(ls "$kernel/lib/modules")
modules="ext4 xfs btrfs vfat nls_cp437 nls_ascii loop dm-mod dm-crypt xts ecb aesni-intel algif_skcipher algif_hash
    sd_mod scsi_debug"
programs="sh blkdiscard blkid blockdev btrfs cp cryptsetup dd df dmsetup dumpe2fs e2fsck findmnt fsck.fat grep losetup
    lvm mkfs.btrfs mkfs.ext4 mkfs.fat mkfs.xfs mkswap mount partx readlink resize2fs sed sfdisk stat sync truncate
    umount unshare wipefs xfs_growfs xfs_io xfs_repair"
lvm="lvcreate lvextend lvreduce lvs pvcreate pvresize pvs vgchange vgcreate vgs"

tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
chmod 755 "$tree"
cd "$tree"
mkdir -p bin lib lib64 usr/lib dev proc sys run tmp root etc/lvm modules var/lib
ln -s bin sbin
ln -s ../bin usr/bin
ln -s ../bin usr/sbin
libraries() {
    ldd "$1" | grep -o '/[^ )]*' | while read -r file; do
        case $file in /lib64/*) to=lib64 ;; *) to=lib ;; esac
        [ -e "$to/${file##*/}" ] || cp -L "$file" "$to/"
    done
}
cp /bin/busybox bin/busybox
for applet in $(/bin/busybox --list); do
    [ -e "bin/$applet" ] || ln -s busybox "bin/$applet"
done
for name in $programs; do
    found=$(readlink -f "$(command -v "$name")")
    rm -f "bin/$name"
    cp "$found" "bin/$name"
    libraries "$found"
done
for name in $lvm; do ln -s lvm "bin/$name"; done
cp "$program" bin/tests
libraries "$program"
cp /etc/mke2fs.conf etc/
# There is no udev.
cat > etc/lvm/lvm.conf << 'END'
activation { udev_sync = 0 udev_rules = 0 monitoring = 0 }
global { use_lvmpolld = 0 }
devices { external_device_info_source = "none" obtain_device_list_from_udev = 0 use_devicesfile = 0 }
END
printf 'root:x:0:0:root:/root:/bin/sh\n' > etc/passwd
printf 'root:x:0:\n' > etc/group

for module in $modules; do
    modprobe -d "$kernel" -S "$release" --show-depends --ignore-install "$module"
done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' | while read -r path; do
    cp "$path" modules/
    basename "$path"
done > modules/order

cat > init << 'END'
#!/bin/sh
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
while read -r module; do
    case $module in
    # A disk whose sectors 2 to 9 cannot be read: where ext4 and others have their superblocks.
    scsi_debug.ko) options="dev_size_mb=64 opts=2 medium_error_start=2 medium_error_count=8" ;;
    *) options= ;;
    esac
    insmod "/modules/$module" $options || echo "disk lab: cannot load $module"
done < /modules/order
mkdir -p /run/lock /run/lvm /run/cryptsetup
tests --test-threads 1
echo "disk lab: ended with $?"
poweroff -f
END
chmod 755 init
find . | sort | cpio --quiet -o -H newc -R 0:0 | gzip -1 > "$out"
