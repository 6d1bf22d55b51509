#!/bin/sh
# Installs what building, the demo and the tests need on Debian 12: packages, tools built with `cargo install`, and
# programs unpacked from packages. It never removes or downgrades a package. Where everything is there, it says so at once.
#
#   install.sh demo|test|packages     each has what the one before it has
#
# To add a program: its package goes to the list of the first purpose that runs it, its name to that purpose's programs.
set -eu
here=$(dirname "$(readlink -f "$0")")
. "$here/versions"
purpose=${1:-test}
tools=${XDG_CACHE_HOME:-$HOME/.cache}/guestlet/tools

say() { echo "  $*"; }
fail() {
    echo "setup: $*" >&2
    exit 1
}

# Building, and a VM.
packages="busybox-static ca-certificates coreutils cpio dpkg-dev e2fsprogs gcc genisoimage git gzip kmod libc6-dev
    make mmdebstrap qemu-system-x86 qemu-utils util-linux xz-utils zstd"
programs="busybox cargo cc cpio dpkg-deb dpkg-shlibdeps genisoimage git depmod make mke2fs mmdebstrap qemu-img
    qemu-system-x86_64 sha256sum unshare xz zstd"
case $purpose in
demo) ;;
test | packages)
    packages="$packages btrfs-progs cryptsetup-bin dbus dmsetup dosfstools fdisk iproute2 lvm2 nftables socat xfsprogs"
    # Shells that complete what is typed.
    packages="$packages bash fish zsh"
    # gRPC clients that are not ours: the examples of docs/api are among them.
    packages="$packages libprotobuf-dev protobuf-compiler protobuf-compiler-grpc python3 python3-grpcio python3-protobuf"
    # What Debian's qemu-ga loads.
    packages="$packages libglib2.0-0 libnuma1 libudev1 liburing2"
    # Clients of a forwarded sshd, and what that loads.
    packages="$packages ansible-core libgssapi-krb5-2 libpam0g libwrap0 openssh-client rsync"
    # What PostgreSQL loads.
    packages="$packages libgssapi-krb5-2 libicu72 libldap-2.5-0 liblz4-1 libpam0g libssl3 libsystemd0 libxml2 libxslt1.1 libzstd1"
    # What MariaDB loads.
    packages="$packages libaio1 libcrypt1 libnuma1 libpcre2-8-0 libssl3 libstdc++6 libsystemd0 liburing2 zlib1g"
    # What libvirt loads.
    packages="$packages libacl1 libapparmor1 libaudit1 libbsd0 libcap-ng0 libcurl3-gnutls libgnutls30 libjson-c5
        libnl-3-200 libreadline8 libsasl2-2 libselinux1 libssh-4 libssh2-1 libtirpc3 libxml2"
    programs="$programs ansible blkid btrfs cryptsetup dbus-daemon dmsetup fish grpc_python_plugin ip losetup lvm mkfs.vfat mkfs.xfs protoc
        rsync scp sfdisk socat ssh ssh-keygen zsh
        $tools/openssh-server/usr/sbin/sshd $tools/postgresql/usr/lib/postgresql/15/bin/postgres setpriv
        $tools/mariadb/usr/sbin/mariadbd
        $tools/prometheus/usr/bin/prometheus
        $tools/prometheus/usr/bin/promtool $tools/prometheus/usr/bin/prometheus-node-exporter
        $tools/qemu-ga/usr/sbin/qemu-ga $tools/libvirt-$LIBVIRT/usr/sbin/libvirtd
        $tools/kubernetes-$KUBERNETES/kubelet $tools/grpc-go/client"
    [ "$purpose" = test ] || packages="$packages lintian rpm rpmlint"
    [ "$purpose" = test ] || programs="$programs lintian rpm rpmlint"
    ;;
*) fail "unknown purpose \"$purpose\"; demo, test or packages" ;;
esac

[ "$(uname -m)" = x86_64 ] || fail "the test VMs are x86_64; this machine is $(uname -m)"
command -v apt-get > /dev/null || fail "this needs a Debian 12 machine (apt-get is missing)"
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
export PATH DEBIAN_FRONTEND=noninteractive
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"

# Runs apt-get so that it cannot remove or downgrade anything. $options are apt's.
apt_install() {
    # shellcheck disable=SC2086
    apt-get $options -qq -y --no-remove --no-install-recommends "$@" > "$work/log" 2>&1
}

install() {
    options=
    if apt_install --simulate install "$@"; then
        apt_install install "$@" || install_failed "$@"
        return
    fi
    # Some do not fit to what is installed, such as a QEMU of which a newer part is there already: they, and what they
    # depend on, are taken from bookworm-backports.
    say "not all of that fits to what is installed: asking bookworm-backports, too"
    own=
    others=
    for package in "$@"; do
        if apt_install --simulate install "$package"; then own="$own $package"; else others="$others $package"; fi
    done
    # shellcheck disable=SC2086
    [ -z "$own" ] || apt_install install $own || install_failed $own
    options=$("$here/backports.sh" "$work/apt") || fail "cannot read bookworm-backports"
    # shellcheck disable=SC2086
    apt_install -t bookworm-backports install $others || install_failed $others
}

install_failed() {
    cat "$work/log" >&2
    fail "apt cannot install $* without removing or downgrading packages; install them by hand, then run this again"
}

missing=
for package in $packages; do
    state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2> /dev/null) || state=
    [ "$state" = installed ] || missing="$missing $package"
done
if [ -n "$missing" ]; then
    [ "$(id -u)" = 0 ] || fail "as root, run: apt-get install --no-remove --no-install-recommends$missing"
    say "installing$missing"
    apt-get -qq update
    # shellcheck disable=SC2086
    install $missing
elif ! apt-cache show linux-image-cloud-amd64 > /dev/null 2>&1; then
    [ "$(id -u)" = 0 ] || fail "as root, run: apt-get update"
    say "reading the list of packages"
    apt-get -qq update
fi

command -v cargo > /dev/null || fail "cargo is missing: install a Rust toolchain (https://rustup.rs)"
if [ "$purpose" != demo ]; then
    cargo clippy --version > /dev/null 2>&1 || fail "clippy is missing: rustup component add clippy"
    cargo fmt --version > /dev/null 2>&1 || fail "rustfmt is missing: rustup component add rustfmt"
fi

# These pack files and pass bytes on: what optimizing them more would take is not worth waiting for.
tool() {
    root=$tools/$1-$2
    [ -x "$root/bin/$1" ] && return
    say "building $1 $2, which takes about a minute"
    CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_OPT_LEVEL=1 \
        cargo install --quiet --locked --version "$2" --root "$root" "$1" > "$work/log" 2>&1 ||
        { cat "$work/log" >&2; fail "cannot build $1 $2"; }
}
tool cargo-deb "$CARGO_DEB"
tool vhost-device-vsock "$VHOST_DEVICE_VSOCK"
if [ "$purpose" = packages ]; then
    tool cargo-generate-rpm "$CARGO_GENERATE_RPM"
    tool cargo-cyclonedx "$CARGO_CYCLONEDX"
fi

if [ "$purpose" != demo ]; then
    # Debian's agent, to compare with: unpacked, not installed.
    if [ ! -x "$tools/qemu-ga/usr/sbin/qemu-ga" ]; then
        say "unpacking Debian's qemu-guest-agent"
        mkdir "$work/qemu-ga"
        (cd "$work/qemu-ga" && apt-get -qq -o APT::Sandbox::User=root download qemu-guest-agent) ||
            fail "cannot download qemu-guest-agent: run apt-get update"
        rm -rf "$tools/qemu-ga"
        dpkg-deb -x "$work"/qemu-ga/*.deb "$work/qemu-ga/tree"
        mv "$work/qemu-ga/tree" "$tools/qemu-ga"
    fi
    # A server of SSH, unpacked as well: installed it would listen to the network.
    if [ ! -x "$tools/openssh-server/usr/sbin/sshd" ]; then
        say "unpacking Debian's openssh-server"
        mkdir "$work/openssh-server"
        (cd "$work/openssh-server" && apt-get -qq -o APT::Sandbox::User=root download openssh-server) ||
            fail "cannot download openssh-server: run apt-get update"
        rm -rf "$tools/openssh-server"
        dpkg-deb -x "$work"/openssh-server/*.deb "$work/openssh-server/tree"
        mv "$work/openssh-server/tree" "$tools/openssh-server"
    fi
    # A database, unpacked as well: installed it would run.
    if [ ! -x "$tools/postgresql/usr/lib/postgresql/15/bin/postgres" ]; then
        say "unpacking Debian's PostgreSQL 15"
        mkdir "$work/postgresql"
        (cd "$work/postgresql" && apt-get -qq -o APT::Sandbox::User=root download postgresql-15 postgresql-client-15 libpq5) ||
            fail "cannot download postgresql-15: run apt-get update"
        rm -rf "$tools/postgresql"
        for package in "$work"/postgresql/*.deb; do dpkg-deb -x "$package" "$work/postgresql/tree"; done
        mv "$work/postgresql/tree" "$tools/postgresql"
    fi
    # Another one.
    if [ ! -x "$tools/mariadb/usr/sbin/mariadbd" ]; then
        say "unpacking Debian's MariaDB"
        mkdir "$work/mariadb"
        (cd "$work/mariadb" && apt-get -qq -o APT::Sandbox::User=root download mariadb-server-core mariadb-client-core) ||
            fail "cannot download mariadb-server-core: run apt-get update"
        rm -rf "$tools/mariadb"
        for package in "$work"/mariadb/*.deb; do dpkg-deb -x "$package" "$work/mariadb/tree"; done
        mv "$work/mariadb/tree" "$tools/mariadb"
    fi
    # Prometheus, which reads metrics and checks rules, and its exporter, which metrics are compared with: they would listen, too.
    if [ ! -x "$tools/prometheus/usr/bin/prometheus" ] || [ ! -x "$tools/prometheus/usr/bin/prometheus-node-exporter" ]; then
        say "unpacking Debian's prometheus and prometheus-node-exporter"
        mkdir "$work/prometheus"
        (cd "$work/prometheus" && apt-get -qq -o APT::Sandbox::User=root download prometheus prometheus-node-exporter) ||
            fail "cannot download prometheus: run apt-get update"
        for package in "$work"/prometheus/*.deb; do dpkg-deb -x "$package" "$work/prometheus/tree"; done
        rm -rf "$tools/prometheus"
        mv "$work/prometheus/tree" "$tools/prometheus"
    fi
    # libvirt, whose virsh drives a guest in the tests.
    if [ ! -x "$tools/libvirt-$LIBVIRT/usr/sbin/libvirtd" ]; then
        say "unpacking libvirt $LIBVIRT"
        "$here/libvirt.sh" "$LIBVIRT" "$tools/libvirt-$LIBVIRT" || fail "cannot unpack libvirt $LIBVIRT (tests/setup/versions)"
    fi
    # A cluster, whose kubelet has the agent for a driver.
    kubernetes=$tools/kubernetes-$KUBERNETES
    if [ ! -x "$kubernetes/kubelet" ]; then
        say "building Kubernetes $KUBERNETES, which takes about three minutes on two processors and 2 GB in ${TMPDIR:-/tmp}"
        "$here/kubernetes.sh" "$KUBERNETES" "$kubernetes" > "$work/log" 2>&1 ||
            { cat "$work/log" >&2; fail "cannot build Kubernetes $KUBERNETES (tests/setup/versions)"; }
    fi
    # A gRPC client that is what kubelet's is.
    if [ ! -x "$tools/grpc-go/client" ] || ! cmp -s "$here/grpc-go.go" "$tools/grpc-go/grpc-go.go"; then
        say "building a client of grpc-go, which takes half a minute"
        "$here/grpc-go.sh" "$tools/grpc-go" > "$work/log" 2>&1 ||
            { cat "$work/log" >&2; fail "cannot build a client of grpc-go (tests/setup/grpc-go.sh)"; }
    fi
fi

# A package that is installed says little: what is needed is that its programs run.
absent=
for program in $programs; do
    command -v "$program" > /dev/null || absent="$absent $program"
done
[ -z "$absent" ] || fail "missing:$absent; find the package of each with 'dpkg -S' or packages.debian.org, and install it"
qemu=$(qemu-system-x86_64 --version 2> "$work/log") ||
    fail "qemu-system-x86_64 does not run: $(cat "$work/log"); reinstall qemu-system-x86"
qemu-img --version > "$work/log" 2>&1 || fail "qemu-img does not run: $(cat "$work/log"); reinstall qemu-utils"
say "$(echo "$qemu" | head -n 1), for the VMs"
