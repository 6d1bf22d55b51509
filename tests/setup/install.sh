#!/bin/sh
# Brings what building and testing need on Debian 12: packages, tools built with `cargo install`, and two
# programs unpacked from packages.
# Does nothing, quickly, where all is there.
set -eu
here=$(dirname "$(readlink -f "$0")")
. "$here/versions"

say() { echo "  $*"; }
fail() {
    echo "setup: $*" >&2
    exit 1
}

packages="btrfs-progs ca-certificates cpio cryptsetup-bin dbus dmsetup dosfstools e2fsprogs fdisk gcc genisoimage git
    iproute2 kmod libc6-dev lvm2 make mmdebstrap pkg-config
    busybox-static qemu-system-x86 qemu-utils socat util-linux xfsprogs xz-utils zstd"
# What Debian's qemu-ga loads.
packages="$packages libglib2.0-0 libnuma1 libudev1 liburing2"
# What libvirt loads.
packages="$packages libacl1 libapparmor1 libaudit1 libbsd0 libcap-ng0 libcurl3-gnutls libgnutls30 libjson-c5 libnl-3-200
    libreadline8 libsasl2-2 libselinux1 libssh-4 libssh2-1 libtirpc3 libxml2"

[ "$(uname -m)" = x86_64 ] || fail "the test VMs are x86_64; this machine is $(uname -m)"
command -v apt-get > /dev/null || fail "this needs a Debian 12 machine (apt-get is missing)"

# The backports' QEMU, for a machine that has a part of it already.
install_from_backports() {
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    chmod 755 "$folder"
    options=$("$here/backports.sh" "$folder/apt") || return 1
    # shellcheck disable=SC2086
    apt-get $options -qq -y --no-install-recommends -t bookworm-backports install "$@" > "$folder/log" 2>&1 ||
        { cat "$folder/log" >&2; return 1; }
}

missing=
for package in $packages; do
    state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2> /dev/null) || state=
    [ "$state" = installed ] || missing="$missing $package"
done
if [ -n "$missing" ]; then
    [ "$(id -u)" = 0 ] || fail "as root, run: apt-get install --no-install-recommends$missing"
    say "installing$missing"
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq update
    log=$(mktemp)
    # shellcheck disable=SC2086
    if ! apt-get -qq -y --no-install-recommends install $missing > "$log" 2>&1; then
        say "that does not fit to what is installed; trying bookworm-backports"
        # shellcheck disable=SC2086
        install_from_backports $missing || { cat "$log" >&2; fail "cannot install$missing"; }
    fi
    rm -f "$log"
elif ! apt-cache show linux-image-cloud-amd64 > /dev/null 2>&1; then
    [ "$(id -u)" = 0 ] || fail "as root, run: apt-get update"
    say "reading the list of packages"
    apt-get -qq update
fi

command -v cargo > /dev/null || fail "cargo is missing: install a Rust toolchain (https://rustup.rs)"
cargo clippy --version > /dev/null 2>&1 || fail "clippy is missing: rustup component add clippy"
cargo fmt --version > /dev/null 2>&1 || fail "rustfmt is missing: rustup component add rustfmt"

tools=${XDG_CACHE_HOME:-$HOME/.cache}/guestlet/tools
tool() {
    root=$tools/$1-$2
    [ -x "$root/bin/$1" ] && return
    say "building $1 $2, which takes about two minutes"
    log=$(mktemp)
    cargo install --quiet --locked --version "$2" --root "$root" "$1" > "$log" 2>&1 ||
        { cat "$log" >&2; fail "cannot build $1 $2"; }
    rm -f "$log"
}
tool cargo-deb "$CARGO_DEB"
tool cargo-generate-rpm "$CARGO_GENERATE_RPM"
tool cargo-cyclonedx "$CARGO_CYCLONEDX"
tool vhost-device-vsock "$VHOST_DEVICE_VSOCK"

# Debian's agent, to compare with: unpacked, not installed.
if [ ! -x "$tools/qemu-ga/usr/sbin/qemu-ga" ]; then
    say "unpacking Debian's qemu-guest-agent"
    folder=$(mktemp -d)
    (cd "$folder" && apt-get -qq -o APT::Sandbox::User=root download qemu-guest-agent) ||
        fail "cannot download qemu-guest-agent: run apt-get update"
    rm -rf "$tools/qemu-ga"
    dpkg-deb -x "$folder"/*.deb "$folder/tree"
    mv "$folder/tree" "$tools/qemu-ga"
    rm -rf "$folder"
fi

# libvirt, whose virsh drives a guest in the tests.
if [ ! -x "$tools/libvirt-$LIBVIRT/usr/sbin/libvirtd" ]; then
    say "unpacking libvirt $LIBVIRT"
    "$here/libvirt.sh" "$LIBVIRT" "$tools/libvirt-$LIBVIRT" || fail "cannot unpack libvirt $LIBVIRT (tests/setup/versions)"
fi
