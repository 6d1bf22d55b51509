#!/bin/sh
# A client of grpc-go for the tests: grpc-go.go, built with Debian's packages. Nothing is installed.
#
#   grpc-go.sh OUT    leaves OUT/client, and its source beside it
set -eu
out=$1
here=$(dirname "$(readlink -f "$0")")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
options=$("$here/backports.sh" "$work/apt")

cd "$work"
# shellcheck disable=SC2086
apt-get $options -qq -o APT::Sandbox::User=root download golang-1.19-go golang-1.19-src \
    golang-google-grpc-dev golang-google-genproto-dev golang-google-protobuf-dev golang-github-golang-protobuf-1-5-dev \
    golang-golang-x-net-dev golang-golang-x-sys-dev golang-golang-x-text-dev
for package in ./*.deb; do
    dpkg-deb -x "$package" tree
done
export GOPATH="$work/tree/usr/share/gocode" GOCACHE="$work/cache" GOTMPDIR="$work" GO111MODULE=off GOFLAGS= CGO_ENABLED=0
mkdir built
tree/usr/lib/go-1.19/bin/go build -ldflags "-s -w" -o built/client "$here/grpc-go.go"
cp "$here/grpc-go.go" built/

rm -rf "$out"
mkdir -p "$(dirname "$out")"
mv built "$out"
