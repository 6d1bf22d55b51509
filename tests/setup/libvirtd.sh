#!/bin/sh
# A libvirtd of the tests' own. It runs as the first program of PID and mount namespaces that the harness makes
# (unshare), so that it sees its own files where the machine's would be, and nothing outlives it.
#
#   libvirtd.sh TREE FOLDER
#
# TREE is what libvirt.sh unpacked. FOLDER gets what libvirt keeps: etc, run, lib, cache, log.
set -eu
tree=$1
folder=$2
for place in etc/libvirt var/lib/libvirt var/cache/libvirt var/log/libvirt run/libvirt; do
    mkdir -p "$folder/ground/$place"
done
mkdir "$folder/etc" "$folder/lib" "$folder/cache" "$folder/log" "$folder/run"
# Debian's libvirtd does not start without this user and group, though it then runs QEMU as root.
{ cat /etc/passwd; echo libvirt-qemu:x:64055:64055::/nonexistent:/bin/false; } > "$folder/ground/etc/passwd"
{ cat /etc/group; echo libvirt-qemu:x:64055:; } > "$folder/ground/etc/group"

# The programs, and folders to mount on, without a trace on the machine.
mount -t overlay -o "lowerdir=$tree/usr:/usr" libvirt /usr
for place in etc var run; do
    mount -t overlay -o "lowerdir=$folder/ground/$place:/$place" libvirt "/$place"
done
mount --bind "$folder/etc" /etc/libvirt
mount --bind "$folder/lib" /var/lib/libvirt
mount --bind "$folder/cache" /var/cache/libvirt
mount --bind "$folder/log" /var/log/libvirt
mount --bind "$folder/run" /run/libvirt

# What guest agents are asked and answer is logged in full.
cat > /etc/libvirt/libvirtd.conf <<'CONF'
unix_sock_rw_perms = "0700"
auth_unix_ro = "none"
auth_unix_rw = "none"
log_filters = "1:qemu.qemu_agent 3:*"
log_outputs = "1:file:/var/log/libvirt/libvirtd.log"
CONF
cat > /etc/libvirt/qemu.conf <<'CONF'
user = "root"
group = "root"
dynamic_ownership = 0
remember_owner = 0
security_driver = "none"
namespaces = []
cgroup_controllers = []
stdio_handler = "file"
CONF

# The first program of a PID namespace has to take leave of QEMU's processes: the shell does that.
libvirtd --pid-file /run/libvirt/libvirtd.pid &
wait $!
