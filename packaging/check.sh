#!/bin/sh
# check.sh DIST STATIC: checks the packages in DIST and the static programs in STATIC. Lintian and rpmlint have nothing to
# say of them, the programs need no library, and rpm, dnf and cloud-init install, upgrade and remove the rpms, with their
# scripts, in roots that are thrown away. For root.
set -eu
here=$(dirname "$(readlink -f "$0")")
for tool in lintian rpm rpmlint; do
    command -v "$tool" > /dev/null || { echo "$0: $tool is missing: apt-get install lintian rpm rpmlint" >&2; exit 1; }
done
lintian --fail-on error,warning,info "$1"/*.deb
rpmlint --config "$here/rpm/rpmlint.toml" "$1"/*.rpm
for program in guestlet guestlet-host guestctl guestlet-ccm; do
    ldd "$2/$program" 2>&1 | grep -q 'statically linked\|not a dynamic' ||
        { echo "$0: $2/$program needs libraries" >&2; exit 1; }
    "$2/$program" --version
done
"$here/rpm/root.sh" "$1" "$here/rpm/by-rpm.sh"
"$here/rpm/root.sh" "$1" "$here/rpm/by-dnf.sh" "$here/cloud-init/rpm.yaml"
