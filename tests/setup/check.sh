#!/bin/sh
# `cargo check` with these arguments, for which a warning is a failure. (With RUSTFLAGS="-D warnings" cargo would compile
# every library anew.)
set -eu
said=$(cargo check --quiet "$@" 2>&1) || { printf '%s\n' "$said" >&2; exit 1; }
[ -z "$said" ] || { printf '%s\n' "$said" >&2; exit 1; }
