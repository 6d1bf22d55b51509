#!/bin/sh
# The programs of a Kubernetes cluster, for tests of CSI with the real ones: kube-apiserver, kube-controller-manager,
# kube-scheduler and kubelet, built from Debian's source package, and Debian's etcd. Nothing is installed: compiler, sources
# and what is compiled are in a directory that is removed at the end.
#
#   kubernetes.sh VERSION OUT
set -eu
version=$1
out=$2
here=$(dirname "$(readlink -f "$0")")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
options=$("$here/backports.sh" "$work/apt" deb-src)

cd "$work"
# shellcheck disable=SC2086
apt-get $options -qq -o APT::Sandbox::User=root download \
    etcd-server golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev
for package in ./*.deb; do
    dpkg-deb -x "$package" "$work/tree"
done
# Debian keeps only the newest of its security updates: another patch of the same release will do.
for source in "kubernetes=$version" kubernetes; do
    # shellcheck disable=SC2086
    apt-get $options -qq -o APT::Sandbox::User=root --download-only source "$source" > /dev/null && break
done
mkdir -p go/src/k8s.io
dpkg-source --no-check -x kubernetes_*.dsc go/src/k8s.io/kubernetes > /dev/null

export GOPATH="$work/go" GOCACHE="$work/cache" GOTMPDIR="$work" GO111MODULE=off GOFLAGS= CGO_ENABLED=0
go="$work/tree/usr/lib/go-1.19/bin/go"
cd go/src/k8s.io/kubernetes

# The one that comes with the sources is too old for this compiler: kube-apiserver would crash.
rm -r vendor/github.com/modern-go/reflect2
cp -r "$work/tree/usr/share/gocode/src/github.com/modern-go/reflect2" vendor/github.com/modern-go/

# The schemas of the API are the only generated code that the source package leaves out.
"$go" build -o "$work/openapi-gen" k8s.io/kubernetes/vendor/k8s.io/kube-openapi/cmd/openapi-gen
packages=$(grep -rlE --include='*.go' '^ *// *\+k8s:openapi-gen=true' pkg/apis vendor/k8s.io/*/ |
    grep -v -e example -e sample-apiserver -e code-generator -e kube-openapi |
    xargs -n 1 dirname | sort -u | sed 's|^|k8s.io/kubernetes/|' | paste -sd ,)
PATH="${go%/*}:$PATH" "$work/openapi-gen" -i "$packages" -p k8s.io/kubernetes/pkg/generated/openapi \
    -O zz_generated.openapi -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r /dev/null

# Without cloud providers and Docker there is less to compile.
upstream=${version%-*}
upstream=${upstream##*really}
flags="-s -w"
for package in client-go/pkg component-base; do
    flags="$flags -X k8s.io/kubernetes/vendor/k8s.io/$package/version.gitVersion=v$upstream"
done
mkdir "$work/bin"
"$go" build -tags providerless,dockerless -ldflags "$flags" -o "$work/bin/" \
    k8s.io/kubernetes/cmd/kube-apiserver k8s.io/kubernetes/cmd/kube-controller-manager \
    k8s.io/kubernetes/cmd/kube-scheduler k8s.io/kubernetes/cmd/kubelet
cp "$work/tree/usr/bin/etcd" "$work/bin/"

rm -rf "$out"
mkdir -p "$(dirname "$out")"
mv "$work/bin" "$out"
