#!/bin/sh
# An archive of packages for apt, on a disk image with the label PACKAGES. Needs no tool but dpkg-deb.
#
#   repository.sh OUT PACKAGE … [-- PACKAGE …]
#
# Those after -- are on the disk, but not in the archive.
set -eu
out=$1
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
listed=yes
for package in "$@"; do
    [ "$package" != -- ] || { listed=no; continue; }
    name=${package##*/}
    cp "$package" "$work/$name"
    [ $listed = yes ] || continue
    # An empty line would end the section.
    dpkg-deb -f "$package" | sed '/^ *$/d'
    printf 'Filename: ./%s\nSize: %s\n' "$name" "$(stat -c %s "$package")"
    printf 'SHA256: %s\n\n' "$(sha256sum "$package" | cut -d ' ' -f 1)"
done > "$work/Packages"
genisoimage -quiet -output "$out" -volid PACKAGES -rock "$work"
