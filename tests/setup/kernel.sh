#!/bin/sh
# The guests' kernel: Debian's newest cloud kernel, downloaded and unpacked, not installed.
#
#   kernel.sh newest        prints "<package>=<version>"
#   kernel.sh unpack P=V D  leaves D/vmlinuz and D/lib/modules/<release>
set -eu

case $1 in
newest)
    package=$(apt-cache depends linux-image-cloud-amd64 | awk '$1 == "Depends:" { print $2; exit }')
    [ -n "$package" ] || { echo "apt knows no linux-image-cloud-amd64: run 'apt-get update'" >&2; exit 1; }
    version=$(apt-cache show --no-all-versions "$package" | awk '$1 == "Version:" { print $2; exit }')
    echo "$package=$version"
    ;;
unpack)
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    cd "$work"
    apt-get -q -o APT::Sandbox::User=root download "$2" ||
        { echo "cannot download $2: if the archive has a newer one by now, run 'apt-get update'" >&2; exit 1; }
    dpkg-deb -x ./*.deb tree
    release=$(ls tree/lib/modules)
    mkdir -p "$3/lib/modules"
    mv "tree/boot/vmlinuz-$release" "$3/vmlinuz"
    mv "tree/lib/modules/$release" "$3/lib/modules/"
    depmod -b "$3" "$release"
    ;;
*)
    echo "kernel.sh: unknown verb $1" >&2
    exit 2
    ;;
esac
