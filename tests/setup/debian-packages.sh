#!/bin/sh
# Packages of Debian for a real guest.
#
#   debian-packages.sh newest PACKAGE …     prints the version of each
#   debian-packages.sh fetch OUT PACKAGE …  leaves them in the folder OUT
set -eu
verb=$1
shift
case $verb in
newest)
    for package in "$@"; do
        apt-cache show --no-all-versions "$package" | awk '$1 == "Version:" { print $2; exit }'
    done
    ;;
fetch)
    cd "$1"
    shift
    apt-get -qq -o APT::Sandbox::User=root download "$@" ||
        { echo "cannot download $*: run apt-get update" >&2; exit 1; }
    ;;
*)
    echo "debian-packages.sh: unknown verb $verb" >&2
    exit 2
    ;;
esac
