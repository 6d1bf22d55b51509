//! Shares in a real guest: the kernel's NFS client, and its server behind a wire of the test's own.

use std::collections::HashMap;

use guestlet::wire::proto::csi::volume_capability::access_mode::Mode;
use guestlet::wire::proto::csi::volume_capability::{AccessMode, AccessType, MountVolume};
use guestlet::wire::proto::csi::{
    NodeGetVolumeStatsRequest, NodePublishVolumeRequest, NodeStageVolumeRequest, NodeUnpublishVolumeRequest,
    NodeUnstageVolumeRequest, VolumeCapability, VolumeCondition,
};
use tonic::{Code, Status};

use crate::harness::csi::{Csi, KUBELET};
use crate::harness::vm::{BOOT, Vm};
use crate::harness::wait_for;
use crate::real;

/// Two NFS servers of one folder, each in a network namespace at the other end of a veth pair; the first has two addresses.
/// Nothing is installed for them: what exportfs(8) and rpc.mountd(8) would say to the kernel is said here. A server ends with
/// what is left running in its namespace.
const SERVERS: &str = r#"set -e
modprobe nfsd
mkdir -p /srv/nfs/pvc-1
cat > /root/serve <<'SERVE'
set -e
mount -t nfsd nfsd /proc/fs/nfsd
cd /proc/fs/nfsd
echo 10 > nfsv4leasetime
echo 10 > nfsv4gracetime
echo '-2 -3 +4 +4.1 +4.2' > versions || true
echo "nfsd 10.99.$1.254 2147483647 guest" > /proc/net/rpc/auth.unix.ip/channel
printf 'guest 1 \\x00000000 2147483647 /srv/nfs\n' > /proc/net/rpc/nfsd.fh/channel
echo 'guest /srv/nfs 2147483647 9234 65534 65534 0' > /proc/net/rpc/nfsd.export/channel
echo 'tcp 2049' > portlist
echo 4 > threads
touch /run/serves-$1
exec sleep infinity
SERVE
for number in 1 2; do
    ip netns add server-$number
    ip link add out-$number type veth peer name in netns server-$number
    ip address add 10.99.$number.254/24 dev out-$number
    ip link set out-$number up
    ip -n server-$number link set lo up
    for last in 1 2; do ip -n server-$number address add 10.99.$number.$last/24 dev in; done
    ip -n server-$number link set in up
    ip netns exec server-$number setsid sh /root/serve $number > /root/serve-$number.log 2>&1 < /dev/null &
    for try in $(seq 100); do [ -e /run/serves-$number ] && break; sleep 0.1; done
    [ -e /run/serves-$number ] || { cat /root/serve-$number.log; exit 1; }
done
"#;
/// The driver's name of the volume.
const ID: &str = "pvc-1";

/// A server is dead, or is back: frames for it go to another machine.
fn set_dead(vm: &Vm, server: &str, is_dead: bool) {
    let number = server.split('.').nth(2).unwrap();
    let change = if is_dead { "replace" } else { "delete" };
    let to = if is_dead { "lladdr 02:00:00:00:00:99 nud permanent" } else { "" };
    vm.run(&format!("ip neighbour {change} {server} dev out-{number} {to}")).unwrap();
}

struct Share<'v> {
    csi: Csi<'v>,
    /// Of the storage class.
    options: &'static [&'static str],
}

fn staging() -> String {
    format!("{KUBELET}/plugins/kubernetes.io/csi/x/{ID}/globalmount")
}

fn target(pod: &str) -> String {
    format!("{KUBELET}/pods/{pod}/volumes/kubernetes.io~csi/{ID}/mount")
}

fn context(server: &str) -> HashMap<String, String> {
    let options = "vers=4.1,softerr,timeo=30,retrans=2,noresvport";
    let pairs = [("server", server), ("path", "/pvc-1"), ("options", options)];
    pairs.map(|(key, value)| (format!("guestlet.io/nfs-{key}"), value.to_owned())).into()
}

impl<'v> Share<'v> {
    /// Of this guest, where servers serve it and kubelet has made its folders.
    fn of(vm: &'v Vm, options: &'static [&'static str]) -> Self {
        vm.write("/root/servers", SERVERS.as_bytes()).unwrap();
        vm.run("sh /root/servers").unwrap();
        assert_eq!(
            vm.run("command -v mount.nfs || echo none").unwrap().trim(),
            "none",
            "nothing is installed"
        );
        for place in ["a", "b", "c", "d"].map(target).into_iter().chain([staging()]) {
            let folder = place.rsplit_once('/').unwrap().0;
            let note = format!(r#"{{"driverName":"x","volumeHandle":"{ID}"}}"#);
            vm.run(&format!("mkdir -p {folder} && echo '{note}' > {folder}/vol_data.json")).unwrap();
        }
        Self { csi: Csi::of(vm).unwrap(), options }
    }

    fn capability(&self) -> VolumeCapability {
        let mode = AccessMode { mode: Mode::MultiNodeMultiWriter.into() };
        let mount_flags = self.options.iter().map(|&option| option.to_owned()).collect();
        let mount = MountVolume { fs_type: "ext4".into(), mount_flags, ..MountVolume::default() };
        VolumeCapability { access_mode: Some(mode), access_type: Some(AccessType::Mount(mount)) }
    }

    /// Stages it as kubelet does, which repeats what may be otherwise in a moment.
    fn is_staged(&self, vm: &Vm, server: &str) {
        let staged = || match self.stage(server) {
            Ok(()) => Some(()),
            // kubelet's folder is new, the server has its grace period, or the agent has just begun.
            Err(status) if matches!(status.code(), Code::Unavailable | Code::Aborted) => None,
            Err(status) => panic!("{status:?}"),
        };
        wait_for("the share", BOOT, staged).unwrap();
        assert!(
            shown(vm, &staging()).starts_with(&format!("{server}:/pvc-1 nfs4 rw")),
            "{}",
            shown(vm, &staging())
        );
    }

    fn stage(&self, server: &str) -> Result<(), Status> {
        let request = NodeStageVolumeRequest {
            volume_id: ID.into(),
            publish_context: context(server),
            staging_target_path: staging(),
            volume_capability: Some(self.capability()),
            ..NodeStageVolumeRequest::default()
        };
        self.csi.node(async |mut client| client.node_stage_volume(request).await).map(drop)
    }

    fn publish(&self, server: &str, pod: &str, readonly: bool) -> Result<(), Status> {
        let request = NodePublishVolumeRequest {
            volume_id: ID.into(),
            publish_context: context(server),
            staging_target_path: staging(),
            target_path: target(pod),
            volume_capability: Some(self.capability()),
            readonly,
            ..NodePublishVolumeRequest::default()
        };
        self.csi.node(async |mut client| client.node_publish_volume(request).await).map(drop)
    }

    fn unpublish(&self, pod: &str) -> Result<(), Status> {
        let request = NodeUnpublishVolumeRequest { volume_id: ID.into(), target_path: target(pod) };
        self.csi.node(async |mut client| client.node_unpublish_volume(request).await).map(drop)
    }

    fn unstage(&self) -> Result<(), Status> {
        let request = NodeUnstageVolumeRequest { volume_id: ID.into(), staging_target_path: staging() };
        self.csi.node(async |mut client| client.node_unstage_volume(request).await).map(drop)
    }

    fn condition(&self, pod: &str) -> VolumeCondition {
        let request = NodeGetVolumeStatsRequest {
            volume_id: ID.into(),
            volume_path: target(pod),
            staging_target_path: staging(),
        };
        let told = self.csi.node(async |mut client| client.node_get_volume_stats(request).await).unwrap();
        told.volume_condition.unwrap()
    }
}

/// What is mounted last at a place: where from, and its flags.
fn shown(vm: &Vm, place: &str) -> String {
    let found = vm.run(&format!("findmnt -n -o SOURCE,FSTYPE,VFS-OPTIONS {place} | tail -n 1")).unwrap();
    found.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn mounts(vm: &Vm) -> String {
    vm.run("grep -c ' - nfs' /proc/self/mountinfo || true").unwrap().trim().to_owned()
}

#[test]
fn a_share_is_mounted_moves_and_is_taken_away_from_a_dead_server() {
    let vm = real("node-1");
    let share = Share::of(&vm, &[]);
    let (one, two) = ("10.99.1.1", "10.99.2.1");
    share.is_staged(&vm, one);
    share.stage(one).unwrap();
    for _ in 0..2 {
        share.publish(one, "a", false).unwrap();
        share.publish(one, "b", true).unwrap();
    }
    assert!(shown(&vm, &target("a")).starts_with("10.99.1.1:/pvc-1 nfs4 rw"), "{}", shown(&vm, &target("a")));
    vm.run(&format!("echo kept > {}/file", target("a"))).unwrap();
    assert_eq!(vm.run("cat /srv/nfs/pvc-1/file").unwrap().trim(), "kept", "the server has it");
    assert_eq!(vm.run(&format!("cat {}/file", target("b"))).unwrap().trim(), "kept");
    assert!(vm.run(&format!("touch {}/other", target("b"))).is_err(), "it is read-only");
    assert!(!share.condition("a").abnormal);

    // Whoever uses it keeps it.
    vm.run(&format!("(cd {}; exec sleep infinity) > /dev/null 2>&1 & echo $! > /root/user", target("a")))
        .unwrap();
    let held = share.unpublish("a").unwrap_err();
    assert_eq!(held.code(), Code::FailedPrecondition, "{held:?}");
    assert!(held.message().contains("sleep"), "{held:?}");

    // An address that is not the one it is mounted from, which answers.
    share.stage("10.99.1.2").unwrap();
    assert!(shown(&vm, &staging()).starts_with("10.99.1.1:/pvc-1 nfs4 rw"));
    assert_eq!(mounts(&vm), "3");

    // The server dies while a program makes a file, and so holds the lock of the share's folder. The agent forgets all.
    set_dead(&vm, one, true);
    vm.run(&format!("(echo late > {}/late) > /dev/null 2>&1 & sleep 1", target("a"))).unwrap();
    vm.run("systemctl kill --signal=KILL guestlet; true").unwrap();
    share.is_staged(&vm, two);
    share.publish(two, "c", false).unwrap();
    assert_eq!(vm.run(&format!("cat {}/file", target("c"))).unwrap().trim(), "kept");
    // What pods had before has the new server when the lock is free.
    wait_for("the pods' share at its new server", BOOT, || {
        share.stage(two).unwrap();
        let is_new =
            |pod, flags| shown(&vm, &target(pod)).starts_with(&format!("10.99.2.1:/pvc-1 nfs4 {flags}"));
        (is_new("a", "rw") && is_new("b", "ro")).then_some(())
    })
    .unwrap();
    assert_eq!(vm.run(&format!("cat {}/file", target("a"))).unwrap().trim(), "kept");

    // It is dead, and so is the one before.
    set_dead(&vm, two, true);
    let told = share.condition("b");
    assert!(told.abnormal, "{told:?}");
    let refused = share.publish(two, "d", false).unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
    assert!(refused.message().contains("the server of the share 10.99.2.1:/pvc-1"), "{refused:?}");
    for pod in ["a", "b", "c"] {
        share.unpublish(pod).unwrap();
    }
    share.unstage().unwrap();
    assert_eq!(mounts(&vm), "0", "nothing is left");
    let late = share.stage(one).unwrap_err();
    assert_eq!(late.code(), Code::Unavailable, "{late:?}");
    assert_eq!(mounts(&vm), "0", "nothing is left of the attempt");

    for server in [one, two] {
        set_dead(&vm, server, false);
    }
    share.is_staged(&vm, one);
    share.publish(one, "c", false).unwrap();
    assert_eq!(vm.run(&format!("cat {}/file", target("c"))).unwrap().trim(), "kept");
    vm.run("kill $(cat /root/user); true").unwrap();
    share.unpublish("c").unwrap();
    share.unstage().unwrap();
    assert_eq!(mounts(&vm), "0");
}

/// umount2(2) with `MNT_FORCE` ends all that waits for a server, for whatever mount of it.
#[test]
fn what_a_pod_writes_waits_for_its_server_whoever_else_leaves() {
    let vm = real("node-1");
    let share = Share::of(&vm, &["hard"]);
    let server = "10.99.1.1";
    share.is_staged(&vm, server);
    for pod in ["a", "b"] {
        share.publish(server, pod, false).unwrap();
    }
    let file = format!("{}/file", target("b"));
    // It is open before, so that what waits is a write: the kernel asks again to open what it could not.
    let write = "open(F, '>>', $ARGV[0]) or die; open(O, '>', '/root/opened'); select(undef, undef, undef, 0.1) until -e '/root/go'; \
                 print F \"new\\n\"; F->flush and F->sync or die \"$!\"";
    vm.write("/root/write.pl", write.as_bytes()).unwrap();
    let run = format!("perl -MIO::Handle /root/write.pl {file}; echo $? > /root/written");
    vm.run(&format!("({run}) > /root/log 2>&1 & until [ -e /root/opened ]; do sleep 0.1; done")).unwrap();
    set_dead(&vm, server, true);
    vm.run("touch /root/go; sleep 2").unwrap();
    share.unpublish("a").unwrap();
    assert_eq!(mounts(&vm), "2");
    assert!(vm.run("test ! -e /root/written").is_ok(), "{}", vm.run("cat /root/log").unwrap());
    set_dead(&vm, server, false);
    let written = wait_for("what waits to be written", BOOT, || vm.run("cat /root/written").ok()).unwrap();
    assert_eq!(written.trim(), "0", "{}", vm.run("cat /root/log").unwrap());
    assert_eq!(vm.run("cat /srv/nfs/pvc-1/file").unwrap().trim(), "new", "the server has it");
    share.unpublish("b").unwrap();
    share.unstage().unwrap();
    assert_eq!(mounts(&vm), "0");
}
