#!/bin/sh
# What the programs are made of (CycloneDX), one file for each package. The same sources give the same files.
#
#   sbom.sh CARGO-CYCLONEDX TARGET OUT
set -eu
tool=$1
target=$2
out=$3
cd "$(dirname "$0")/.."
make_one() {
    "$tool" cyclonedx --quiet --format json --target "$target" --no-default-features --features "$2" --no-build-deps --spec-version 1.5 \
        --override-filename "$1.cdx"
    # Without what differs from run to run and from machine to machine.
    sed -e '/"serialNumber"/d' -e "s|file://$PWD|.|g" -e "s|path+\.|.|g" "$1.cdx.json" > "$out/$1.cdx.json"
    rm "$1.cdx.json"
}
make_one guestlet agent
make_one guestlet-host host,ctl
