#!/bin/sh
# The libraries that this project is built with, compiled once for all clones:
#   dependencies.sh restore TARGET CACHE   gives a clone that has none what an earlier one has compiled
#   dependencies.sh keep TARGET CACHE      keeps what this one has compiled
# cargo itself judges whether what it finds fits. Nothing of guestlet is kept.
set -eu
verb=$1
target=$2
cache=$3/dependencies

key=$({ cat Cargo.toml Cargo.lock; rustc -vV; } | sha256sum | cut -c -32)
kept=$cache/$key

restore() {
    [ ! -e "$target" ] && [ -d "$kept" ] || return 0
    echo "  libraries that an earlier run has compiled: $kept"
    mkdir -p "$(dirname "$target")"
    cp -a "$kept" "$target.part"
    mv "$target.part" "$target"
}

# Libraries fit together only where one has been compiled with the other: a procedural macro that is compiled twice is not the
# same to what uses it, under the same name. So what is kept has an identity, and only a target with that one adds to it.
identity=.dependencies-identity

# What is to be kept of one profile, below its directory.
compiled() {
    cd "$target/$1"
    find .fingerprint build -mindepth 1 -maxdepth 1 ! -name 'guestlet-*'
    find deps -maxdepth 1 -type f -name 'lib*' ! -name 'libguestlet*'
}

# The demo compiles less than the tests do: what is there already stays. What was compiled apart from that takes its place.
keep() {
    mkdir -p "$cache"
    part=$(mktemp -d "$cache/part.XXXXXX")
    trap 'rm -rf "$part"' EXIT
    if cmp -s "$target/$identity" "$kept/$identity"; then
        cp -al "$kept/." "$part"
    else
        cat /proc/sys/kernel/random/uuid > "$part/$identity"
        cp "$part/$identity" "$target/$identity"
    fi
    for profile in gate release; do
        [ -d "$target/$profile/.fingerprint" ] || continue
        mkdir -p "$part/$profile"
        compiled "$profile" | tar -C "$target/$profile" --format=posix -c -T - |
            tar -C "$part/$profile" --skip-old-files -x
    done
    chmod 755 "$part"
    # Those for other versions are not needed any more.
    find "$cache" -mindepth 1 -maxdepth 1 ! -name "${part##*/}" -exec rm -rf {} +
    mv "$part" "$kept"
}

"$verb"
