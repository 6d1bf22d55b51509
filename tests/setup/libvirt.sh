#!/bin/sh
# libvirt with its QEMU driver, unpacked and not installed: its packages would start daemons on this machine.
# It comes from bookworm-backports, through apt folders of our own, because `virsh guestinfo --load` needs 11.2.
#
#   libvirt.sh VERSION OUT
set -eu
version=$1
out=$2
here=$(dirname "$(readlink -f "$0")")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
options=$("$here/backports.sh" "$work/apt")

cd "$work"
packages=
for package in libvirt-clients libvirt-common libvirt-daemon libvirt-daemon-common libvirt-daemon-driver-qemu libvirt0; do
    packages="$packages $package=$version"
done
# shellcheck disable=SC2086
apt-get $options -qq -o APT::Sandbox::User=root download $packages
for package in ./*.deb; do
    dpkg-deb -x "$package" "$work/tree"
done
rm -rf "$out"
mkdir -p "$(dirname "$out")"
mv "$work/tree" "$out"
