#!/bin/sh
# The static programs with their units, settings, manual pages and documents as one tarball. The same programs and
# SOURCE_DATE_EPOCH give the same file.
#
#   tarball.sh PROGRAMS VERSION TARGET OUT     PROGRAMS is the folder of the static programs
set -eu
programs=$1
name=guestlet-$2-$3
out=$4
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tree=$work/$name
mkdir -p "$tree/bin" "$tree/systemd" "$tree/settings" "$tree/man" "$tree/docs" "$tree/examples"
install -m 755 "$programs/guestlet" "$programs/guestlet-host" "$programs/guestctl" "$programs/guestlet-ccm" "$tree/bin/"
cp -P packaging/kubectl-guestlet "$tree/bin/"
cp -P systemd/* "$tree/systemd/"
cp packaging/agent.toml packaging/host.toml "$tree/settings/"
cp packaging/man/*.8 "$tree/man/"
cp docs/*.md "$tree/docs/"
cp -r docs/api "$tree/docs/"
mkdir -p "$tree/proto/guestlet"
cp -r proto/guestlet/v1 "$tree/proto/guestlet/"
cp -r packaging/completion "$tree/completion"
cp -r packaging/cloud-init packaging/kubernetes packaging/apparmor "$tree/examples/"
cp README.md CHANGELOG.md LICENSE "$tree/"
tar --create --directory "$work" --sort name --mtime "@${SOURCE_DATE_EPOCH:-0}" --owner 0 --group 0 --numeric-owner \
    --mode go-w --format gnu "$name" | gzip --no-name -9 > "$out"
