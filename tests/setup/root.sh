#!/bin/sh
# The "real" guest: Debian 12 with systemd, udev, dbus and cloud-init, as an ext4 image without partitions.
#
#   root.sh KERNEL-DIRECTORY OUT
set -eu
kernel=$1
out=$2
release=$(ls "$kernel/lib/modules")
packages=systemd-sysv,udev,dbus,cloud-init,cloud-guest-utils,e2fsprogs,xfsprogs,util-linux,kmod,iproute2
packages=$packages,ifupdown,isc-dhcp-client,netbase,procps,python3-minimal,socat,strace
# Sessions of logind, for those that runuser opens.
packages=$packages,libpam-systemd

# The mirror that this machine's apt uses.
mirror=$(apt-get indextargets --format '$(RELEASE) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' |
    awk '$1 == "bookworm" && $2 == "main" { print $3; exit }')
[ -n "$mirror" ] || { echo "apt is set up for no Debian 12 (bookworm) archive" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tree=$work/root
mmdebstrap --quiet --mode=root --variant=minbase --include="$packages" \
    --aptopt='APT::Install-Recommends "false"' --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --format=directory bookworm "$tree" "$mirror"

mkdir -p "$tree/usr/lib/modules"
cp -a "$kernel/lib/modules/$release" "$tree/usr/lib/modules/"
: > "$tree/etc/machine-id"
echo real > "$tree/etc/hostname"
printf '127.0.0.1 localhost\n' > "$tree/etc/hosts"
printf '/dev/vda / ext4 defaults,noatime 0 1\n' > "$tree/etc/fstab"
printf 'datasource_list: [ NoCloud, None ]\n' > "$tree/etc/cloud/cloud.cfg.d/90-testguest.cfg"
# Timers that would only disturb a test.
for unit in apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer fstrim.timer; do
    ln -sf /dev/null "$tree/etc/systemd/system/$unit"
done
# The shell on the console, by which tests look, is in none of them.
sed -i '/pam_systemd/d' "$tree/etc/pam.d/common-session"
# A root shell on the console; dash, because line editing would garble what the tests read.
chroot "$tree" usermod --password '' --shell /bin/dash root
mkdir -p "$tree/etc/systemd/system/serial-getty@ttyS0.service.d"
cat > "$tree/etc/systemd/system/serial-getty@ttyS0.service.d/root.conf" <<'UNIT'
[Service]
ExecStart=
ExecStart=-/sbin/agetty --autologin root --noissue --keep-baud 115200 %I dumb
UNIT
: > "$tree/root/.hushlogin"
# What cloud-init says is for the journal: on the console it would run into what the tests read.
for unit in cloud-init-local cloud-init cloud-config cloud-final; do
    mkdir -p "$tree/etc/systemd/system/$unit.service.d"
    printf '[Service]\nStandardOutput=journal\n' > "$tree/etc/systemd/system/$unit.service.d/console.conf"
done
# But for its end.
echo "ExecStartPost=/bin/sh -c 'echo testguest: cloud-init done > /dev/console'" \
    >> "$tree/etc/systemd/system/cloud-final.service.d/console.conf"
rm -rf "$tree"/var/cache/apt/archives/*.deb "$tree"/var/lib/apt/lists/*
mke2fs -q -t ext4 -L root -d "$tree" "$out" 2500M
