#!/bin/sh
# An OCI image of programs as a folder in the OCI image layout, without any container tool: from the static programs
# alone. The same programs and SOURCE_DATE_EPOCH give the same image.
#
#   oci.sh PROGRAMS VERSION OUT NAME...     PROGRAMS is the folder of the static programs; the first NAME is what is run
set -eu
programs=$1
version=$2
out=$3
shift 3
first=$1
epoch=${SOURCE_DATE_EPOCH:-0}
created=$(date -u -d "@$epoch" +%Y-%m-%dT%H:%M:%SZ)
case $(uname -m) in x86_64) machine=amd64 ;; aarch64) machine=arm64 ;; *) machine=$(uname -m) ;; esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir -p "$work/root/usr/bin" "$work/root/etc/guestlet" "$work/root/run/guestlet-host"
for program; do
    install -m 755 "$programs/$program" "$work/root/usr/bin/"
done
printf '%s:x:0:0::/:/sbin/nologin\n' "$first" > "$work/root/etc/passwd"
tar --create --file "$work/layer.tar" --directory "$work/root" --sort name --mtime "@$epoch" --owner 0 --group 0 \
    --numeric-owner --format gnu .
gzip --no-name -9 --keep "$work/layer.tar"

rm -rf "$out"
mkdir -p "$out/blobs/sha256"
# Moves a file to the blobs; prints its digest.
blob() {
    digest=$(sha256sum "$1" | cut -d ' ' -f 1)
    mv "$1" "$out/blobs/sha256/$digest"
    echo "$digest"
}
size() { stat -c %s "$out/blobs/sha256/$1"; }

layer_sum=$(sha256sum "$work/layer.tar" | cut -d ' ' -f 1)
layer=$(blob "$work/layer.tar.gz")
cat > "$work/config" <<JSON
{"created":"$created","architecture":"$machine","os":"linux","config":{"Entrypoint":["/usr/bin/$first"],"Env":["PATH=/usr/bin"],"WorkingDir":"/","Labels":{"org.opencontainers.image.title":"$first","org.opencontainers.image.version":"$version","org.opencontainers.image.licenses":"Apache-2.0","org.opencontainers.image.source":"https://github.com/guestlet/guestlet"}},"rootfs":{"type":"layers","diff_ids":["sha256:$layer_sum"]},"history":[{"created":"$created","created_by":"packaging/oci.sh"}]}
JSON
config=$(blob "$work/config")
cat > "$work/manifest" <<JSON
{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"sha256:$config","size":$(size "$config")},"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar+gzip","digest":"sha256:$layer","size":$(size "$layer")}]}
JSON
manifest=$(blob "$work/manifest")
cat > "$out/index.json" <<JSON
{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"sha256:$manifest","size":$(size "$manifest"),"platform":{"architecture":"$machine","os":"linux"},"annotations":{"org.opencontainers.image.ref.name":"$version"}}]}
JSON
printf '{"imageLayoutVersion":"1.0.0"}\n' > "$out/oci-layout"
echo "$out: sha256:$manifest"
