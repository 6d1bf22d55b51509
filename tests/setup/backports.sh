#!/bin/sh
# Apt folders that know bookworm and bookworm-backports, so that the machine's own sources stay as they are.
# Prints the options by which apt-get uses them.
#
#   backports.sh FOLDER [deb-src]    with deb-src it knows their source packages, too
set -eu
folder=$1
mkdir -p "$folder/sources" "$folder/lists/partial"
# The mirror that this machine's apt uses.
mirror=$(apt-get indextargets --format '$(RELEASE) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' |
    awk '$1 == "bookworm" && $2 == "main" { print $3; exit }')
[ -n "$mirror" ] || { echo "apt is set up for no Debian 12 (bookworm) archive" >&2; exit 1; }
for suite in bookworm bookworm-backports; do
    for type in deb ${2:-}; do
        echo "$type [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main"
    done
done > "$folder/sources/guestlet.list"
options="-o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts=$folder/sources -o Dir::State::lists=$folder/lists"
# shellcheck disable=SC2086
apt-get $options -qq update >&2
echo "$options"
