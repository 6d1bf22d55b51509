#!/bin/sh
# What rpm does with the packages in this folder, in a root that is thrown away (root.sh).
set -eu
. "${0%/*}/inside.sh"
# Debian's systemd and shell are none of rpm's packages.
rpm --install --nodeps guestlet-*.rpm
rpm --verify --nodeps guestlet guestlet-host
systemctl is-enabled guestlet.service guestlet.socket qemu-guest-agent.service guestlet-host.service
id guestlet-host
guestlet --version
echo '# kept' >> /etc/guestlet/agent.toml
rpm --upgrade --nodeps --force guestlet-*.rpm
tail -n 1 /etc/guestlet/agent.toml | grep -qx '# kept'
test "$(systemctl is-enabled guestlet.service)" = enabled
rpm --erase --nodeps guestlet guestlet-host
tail -n 1 /etc/guestlet/agent.toml.rpmsave | grep -qx '# kept'
nothing_is_left
echo "rpm installs, upgrades and removes them"
