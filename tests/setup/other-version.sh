#!/bin/sh
# The same package with another version.
#
#   other-version.sh PACKAGE VERSION OUT
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
dpkg-deb -R "$1" "$work/tree"
sed -i "s/^Version: .*/Version: $2/" "$work/tree/DEBIAN/control"
dpkg-deb --root-owner-group -Zgzip -z1 -b "$work/tree" "$3" > /dev/null
