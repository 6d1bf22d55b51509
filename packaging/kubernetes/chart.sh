#!/bin/sh
# A Helm chart of what kustomize installs: the same manifests, in which a few values can be chosen. It is made of them, so that
# there is one source; nothing of it is kept in the repository.
#
#   chart.sh VERSION OUT     OUT is the folder of the chart
set -eu
version=$1
out=$2
host=$(cd "$(dirname "$0")/host" && pwd)
rm -rf "$out"
mkdir -p "$out/templates" "$out/crds"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Replaces what can be chosen in a manifest by a reference to a value, and writes that to the file `values`.
template() {
    awk -v role="$1" -v values="$work/$1" -v image="$work/image" '
        function depth(line) { match(line, /^ */); return RLENGTH }
        function scalar(key, value) { print "  " key ": " value > values }
        # A block is whatever is indented more than its key.
        function block(key, form) {
            base = depth($0)
            inside = 1
            print "  " key ":" form > values
        }
        inside && ($0 == "" || depth($0) > base) {
            text = substr($0, base + 3)
            print (text == "" ? "" : "    " text) > values
            next
        }
        { inside = 0 }
        /^        - name: / { container = $3 }
        /^ *image: / {
            at = index($2, ":")
            print "  repository: " substr($2, 1, at - 1) "\n  tag: \"" substr($2, at + 1) "\"" > image
            print substr($0, 1, depth($0)) "image: \"{{ .Values.image.repository }}:{{ .Values.image.tag }}\""
            next
        }
        /^      (affinity|tolerations):$/ || (/^          resources:$/ && container == "guestlet-host") {
            key = $1
            sub(":", "", key)
            block(key, "")
            print
            print substr("            ", 1, base + 2) "{{- toYaml .Values." role "." key " | nindent " (base + 2) " }}"
            next
        }
        /^  host\.toml: \|$/ {
            block("settings", " |")
            print "  host.toml: {{ toJson .Values." role ".settings }}"
            next
        }
        /^  replicas: / {
            scalar("replicas", $2)
            print "  replicas: {{ .Values." role ".replicas }}"
            next
        }
        /^            path: \/var\/lib\/guestlet-host$/ {
            scalar("keys", $2)
            print "            path: {{ .Values." role ".keys }}"
            next
        }
        /^            path: \/var\/lib\/kubelet\// {
            scalar("kubelet", "/var/lib/kubelet")
            sub("/var/lib/kubelet", "{{ .Values." role ".kubelet }}")
        }
        { print }
    ' "$2"
}

# Adds policies, where the API server knows them.
policies() {
    echo "{{- if and $1 (semverCompare \">=1.30-0\" .Capabilities.KubeVersion.Version) }}"
    cat "$2"
    echo "{{- end }}"
}

template node "$host/base/node.yaml" > "$out/templates/node.yaml"
template controller "$host/base/controller.yaml" > "$out/templates/controller.yaml"
cp "$host/base/controller-role.yaml" "$host/base/network-policy.yaml" "$out/templates/"
cp "$host/base/crd.yaml" "$out/crds/"
{
    echo "{{- if .Values.harvester }}"
    cat "$host/overlays/harvester/controller-shares-role.yaml"
    echo "{{- end }}"
} > "$out/templates/controller-shares-role.yaml"
{
    echo "{{- if .Values.harvester }}"
    cat "$host/overlays/harvester/controller-balancers-role.yaml"
    echo "{{- end }}"
} > "$out/templates/controller-balancers-role.yaml"
policies .Values.policies "$host/components/policies/controller.yaml" > "$out/templates/policies-controller.yaml"
policies .Values.policies "$host/components/policies/node.yaml" > "$out/templates/policies-node.yaml"
policies ".Values.policies .Values.guestsHere" "$host/components/guests-here/guests-here.yaml" \
    > "$out/templates/policies-guests-here.yaml"
cat > "$out/templates/namespace.yaml" <<'YAML'
{{- if ne .Release.Namespace "guestlet-system" }}
{{- fail "guestlet is installed in the namespace guestlet-system, which its certificates and policies name" }}
{{- end }}
YAML

cat > "$out/Chart.yaml" <<YAML
apiVersion: v2
name: guestlet-host
description: The host half of guestlet for KubeVirt and Harvester
type: application
version: $version
appVersion: "$version"
kubeVersion: ">=1.21.0-0"
home: https://github.com/guestlet/guestlet
YAML
{
    echo "image:"
    cat "$work/image"
    printf '\n# guestlet-host node, on each node that runs VMs. On Harvester, keys have to be in /opt/guestlet-host.\nnode:\n'
    cat "$work/node"
    printf '\n# guestlet-host controller.\ncontroller:\n'
    cat "$work/controller"
    printf '\n# Whether this is a cluster of Harvester: the controller may have it serve volumes to many nodes (docs/kubevirt.md, Shares)\n# and give addresses to load balancers of guest clusters (docs/load-balancers.md).\n'
    printf 'harvester: false\n'
    printf '\n# Admission policies, where the API server has them; docs/kubevirt.md says what they add, and what guestsHere costs.\n'
    printf 'policies: true\nguestsHere: true\n'
} > "$out/values.yaml"
