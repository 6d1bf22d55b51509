#!/bin/sh
# What dnf does with the packages in this folder, and cloud-init with rpm.yaml, in a root that is thrown away (root.sh): a
# repository has them, with stand-ins for systemd and qemu-guest-agent.
set -eu
fail() { echo "by-dnf: $*" >&2; exit 1; }
. "${0%/*}/inside.sh"
export DEBIAN_FRONTEND=noninteractive
{ apt-get -qq update && apt-get -qq -y --no-install-recommends install cloud-init createrepo-c dnf rpm; } > log 2>&1 ||
    { cat log >&2; exit 1; }

# No systemd runs here: units can be enabled, and not be started.
cat > /usr/local/bin/systemctl << 'SYSTEMCTL'
#!/bin/sh
for word do
    shift
    [ "$word" = --now ] || set -- "$@" "$word"
done
exec /usr/bin/systemctl "$@"
SYSTEMCTL
chmod 755 /usr/local/bin/systemctl
export PATH="/usr/local/bin:$PATH"

# stand_in NAME: what stands in for it; the rest of its spec is read from standard input.
stand_in() {
    {
        printf 'Name: %s\nVersion: 9\nRelease: 1\nSummary: Stands in\nLicense: none\nBuildArch: noarch\n' "$1"
        cat
    } > "$1.spec"
    rpmbuild --quiet --define '_topdir /tmp/build' -bb "$1.spec"
}
stand_in systemd << 'SPEC'
Provides: /bin/sh
%description
With the shell.
%files
SPEC
# Its scripts are what Fedora's macros for units come to.
stand_in qemu-guest-agent << 'SPEC'
%description
A unit.
%install
mkdir -p %{buildroot}/usr/lib/systemd/system
printf '[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n' \
    > %{buildroot}/usr/lib/systemd/system/qemu-guest-agent.service
%post
[ $1 -ne 1 ] || systemctl --no-reload preset qemu-guest-agent.service || :
%preun
[ $1 -ne 0 ] || systemctl --no-reload disable --now qemu-guest-agent.service || :
%files
/usr/lib/systemd/system/qemu-guest-agent.service
SPEC
mkdir repository
mv ./*.rpm build/RPMS/noarch/*.rpm repository/
createrepo_c --quiet repository
mkdir -p /etc/yum.repos.d
cat > /etc/yum.repos.d/local.repo << 'REPO'
[local]
name=local
baseurl=file:///tmp/repository
gpgcheck=0
REPO

run_dnf() { dnf --quiet --releasever 9 -y "$@"; }

# A guest that had qemu-guest-agent, enabled.
run_dnf --setopt obsoletes=0 --exclude guestlet install qemu-guest-agent
systemctl --no-reload enable qemu-guest-agent.service
run_dnf upgrade
! rpm --query qemu-guest-agent || fail "qemu-guest-agent is still there"
names="guestlet.service guestlet.socket qemu-guest-agent.service"
# shellcheck disable=SC2086
systemctl is-enabled $names || fail "not all of $names are enabled after guestlet replaced qemu-guest-agent"
# The lines that images and tools have for qemu-guest-agent, twice.
for _ in 1 2; do
    run_dnf install qemu-guest-agent
    systemctl enable --now qemu-guest-agent.service
done
rpm --query guestlet
run_dnf remove guestlet
nothing_is_left
echo "dnf replaces qemu-guest-agent by guestlet, and removes it"

# One that cloud-init sets up for the first time, as rpm.yaml says.
rm /etc/yum.repos.d/local.repo
mkdir -p /var/lib/cloud/seed/nocloud
sed 's|https://packages.example.org/guestlet/rpm|file:///tmp/repository|' rpm.yaml > /var/lib/cloud/seed/nocloud/user-data
echo 'instance-id: by-dnf' > /var/lib/cloud/seed/nocloud/meta-data
cat > /etc/cloud/cloud.cfg << 'SETTINGS'
datasource_list: [NoCloud]
network: {config: disabled}
preserve_hostname: true
cloud_init_modules: []
cloud_config_modules: [yum-add-repo, runcmd]
cloud_final_modules: [package-update-upgrade-install, scripts-user]
system_info: {distro: fedora}
SETTINGS
rm -f /etc/cloud/cloud.cfg.d/*
for stage in "init --local" init "modules --mode config" "modules --mode final"; do
    # shellcheck disable=SC2086
    cloud-init $stage > log 2>&1 || { cat log /var/log/cloud-init.log >&2; fail "cloud-init $stage"; }
done
rpm --query guestlet || { cat /var/log/cloud-init.log >&2; fail "cloud-init has not installed guestlet"; }
# shellcheck disable=SC2086
systemctl is-enabled $names
! grep -E 'WARNING|ERROR' /var/log/cloud-init.log || fail "cloud-init complains"
echo "cloud-init installs it with dnf, as rpm.yaml says"
