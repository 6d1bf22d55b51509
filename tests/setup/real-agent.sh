#!/bin/sh
# Debian's qemu-guest-agent with what it needs beyond the real guest, as packages.
#
#   real-agent.sh newest     prints its version
#   real-agent.sh fetch OUT  leaves the packages in the folder OUT
set -eu
case $1 in
newest)
    apt-cache show --no-all-versions qemu-guest-agent | awk '$1 == "Version:" { print $2; exit }'
    ;;
fetch)
    cd "$2"
    apt-get -qq -o APT::Sandbox::User=root download qemu-guest-agent libglib2.0-0 libnuma1 liburing2 ||
        { echo "cannot download qemu-guest-agent: run apt-get update" >&2; exit 1; }
    ;;
*)
    echo "real-agent.sh: unknown verb $1" >&2
    exit 2
    ;;
esac
