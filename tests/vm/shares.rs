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
/// What reaches nobody: frames for another machine.
const DEAD: &str = "for number in 1 2; do ip neighbour replace 10.99.$number.1 lladdr 02:00:00:00:00:99 \
                    dev out-$number nud permanent; done";
const ALIVE: &str = "for number in 1 2; do ip neighbour delete 10.99.$number.1 dev out-$number; done";

struct Share<'v>(Csi<'v>);

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

fn capability() -> VolumeCapability {
    let mode = AccessMode { mode: Mode::MultiNodeMultiWriter.into() };
    let access_type =
        Some(AccessType::Mount(MountVolume { fs_type: "ext4".into(), ..MountVolume::default() }));
    VolumeCapability { access_mode: Some(mode), access_type }
}

impl Share<'_> {
    fn stage(&self, server: &str) -> Result<(), Status> {
        let request = NodeStageVolumeRequest {
            volume_id: ID.into(),
            publish_context: context(server),
            staging_target_path: staging(),
            volume_capability: Some(capability()),
            ..NodeStageVolumeRequest::default()
        };
        self.0.node(async |mut client| client.node_stage_volume(request).await).map(drop)
    }

    fn publish(&self, server: &str, pod: &str, readonly: bool) -> Result<(), Status> {
        let request = NodePublishVolumeRequest {
            volume_id: ID.into(),
            publish_context: context(server),
            staging_target_path: staging(),
            target_path: target(pod),
            volume_capability: Some(capability()),
            readonly,
            ..NodePublishVolumeRequest::default()
        };
        self.0.node(async |mut client| client.node_publish_volume(request).await).map(drop)
    }

    fn unpublish(&self, pod: &str) -> Result<(), Status> {
        let request = NodeUnpublishVolumeRequest { volume_id: ID.into(), target_path: target(pod) };
        self.0.node(async |mut client| client.node_unpublish_volume(request).await).map(drop)
    }

    fn unstage(&self) -> Result<(), Status> {
        let request = NodeUnstageVolumeRequest { volume_id: ID.into(), staging_target_path: staging() };
        self.0.node(async |mut client| client.node_unstage_volume(request).await).map(drop)
    }

    fn condition(&self, pod: &str) -> VolumeCondition {
        let request = NodeGetVolumeStatsRequest {
            volume_id: ID.into(),
            volume_path: target(pod),
            staging_target_path: staging(),
        };
        let told = self.0.node(async |mut client| client.node_get_volume_stats(request).await).unwrap();
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
    let share = Share(Csi::of(&vm).unwrap());
    vm.write("/root/servers", SERVERS.as_bytes()).unwrap();
    vm.run("sh /root/servers").unwrap();
    assert_eq!(vm.run("command -v mount.nfs || echo none").unwrap().trim(), "none", "nothing is installed");
    let folders = ["a", "b", "c"].map(|pod| target(pod).trim_end_matches("/mount").to_owned()).join(" ");
    let above = staging().trim_end_matches("/globalmount").to_owned();
    vm.run(&format!("mkdir -p {above} {folders}")).unwrap();

    let (one, two) = ("10.99.1.1", "10.99.2.1");
    let staged = || match share.stage(one) {
        Ok(()) => Some(()),
        // kubelet's folder is new, and the server has its grace period.
        Err(status) if matches!(status.code(), Code::Unavailable | Code::Aborted) => None,
        Err(status) => panic!("{status:?}"),
    };
    wait_for("the share", BOOT, staged).unwrap();
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

    // Another address of the same server: the kernel knows it.
    share.stage("10.99.1.2").unwrap();
    assert!(shown(&vm, &staging()).starts_with("10.99.1.1:/pvc-1 nfs4 rw"));
    assert_eq!(mounts(&vm), "3");

    // The agent forgets all, and the server is elsewhere.
    vm.run("systemctl kill --signal=KILL guestlet; true").unwrap();
    let moved = || match share.stage(two) {
        Ok(()) => Some(()),
        Err(status) if status.code() == Code::Unavailable => None,
        Err(status) => panic!("{status:?}"),
    };
    wait_for("the share at its new server", BOOT, moved).unwrap();
    assert!(shown(&vm, &staging()).starts_with("10.99.2.1:/pvc-1 nfs4 rw"));
    assert!(shown(&vm, &target("a")).starts_with("10.99.2.1:/pvc-1 nfs4 rw"));
    assert!(shown(&vm, &target("b")).starts_with("10.99.2.1:/pvc-1 nfs4 ro"));
    assert_eq!(vm.run(&format!("cat {}/file", target("a"))).unwrap().trim(), "kept");

    // It is dead, and so is the one before.
    vm.run(DEAD).unwrap();
    let told = share.condition("b");
    assert!(told.abnormal, "{told:?}");
    let refused = share.publish(two, "c", false).unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
    assert!(refused.message().contains("the server of the share 10.99.2.1:/pvc-1"), "{refused:?}");
    for pod in ["a", "b"] {
        share.unpublish(pod).unwrap();
    }
    share.unstage().unwrap();
    assert_eq!(mounts(&vm), "0", "nothing is left");
    let late = share.stage(one).unwrap_err();
    assert_eq!(late.code(), Code::Unavailable, "{late:?}");
    assert_eq!(mounts(&vm), "0", "nothing is left of the attempt");

    vm.run(ALIVE).unwrap();
    wait_for("the share that is back", BOOT, staged).unwrap();
    share.publish(one, "c", false).unwrap();
    assert_eq!(vm.run(&format!("cat {}/file", target("c"))).unwrap().trim(), "kept");
    vm.run("kill $(cat /root/user); true").unwrap();
    share.unpublish("c").unwrap();
    share.unstage().unwrap();
    assert_eq!(mounts(&vm), "0");
}
