//! A real guest, with the package installed, as the node of a Kubernetes cluster: kubelet runs in the guest and registers
//! the driver by itself; the control plane runs beside the host half.
//!
//! ```text
//!  the test's network                                     guest
//! ┌──────────────────────────────────────┐               ┌──────────────────────────────────────┐
//! │ etcd ◀── kube-apiserver ◀────────────┼─ vsock 6443 ──┼── socat ◀── kubelet ──▶ runtime      │
//! │            ▲   ▲                     │               │                │                     │
//! │ controllers┘   └── the tests'        │               │                ▼                     │
//! │                    sidecars ─────────┼─ vsock 7002 ──┼─▶ proxy ──▶ guestlet ──▶ disk, mounts│
//! │ guestlet-host ──▶ QMP                │               │                                      │
//! └──────────────────────────────────────┘               └──────────────────────────────────────┘
//! ```
//!
//! The container runtime in the guest is this test program, started once more. It and kubelet are on a read-only disk that
//! is plugged for them.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::json;

use crate::api::Api;
use crate::cluster::{CLAIMS, PODS, apply, claim, driver_when_ready, objects, pod};
use crate::components::{command, program};
use crate::harness::csi::{Csi, KUBELET, SIDECARS};
use crate::harness::host::{HostHalf, Listed};
use crate::harness::images::text;
use crate::harness::process::RunFolder;
use crate::harness::vm::{BOOT, SOON, Vm};
use crate::harness::{tools, turns, wait_for};
use crate::lab::wait;
use crate::namespace;
use crate::node::{self, Files, Who};
use crate::patience::until_within;
use crate::place::{NAMESPACES, settle};
use crate::plane::{ControlPlane, endpoint};
use crate::runtime::Runtime;
use crate::sidecars::Sidecars;
use crate::{installed, real};

/// The first one's address is the control plane's.
const WHO: &Who = &node::NODES[1];
/// Where the guest finds what is on the cluster's disk.
const DISK: &str = "/opt/cluster";
/// Where kubeadm has kubelet's credential. The agent finds it there, too.
const KUBECONFIG: &str = "/etc/kubernetes/kubelet.conf";
/// The runtime's socket in the guest.
const SOCKET: &str = "/run/runtime.sock";
/// Set for the process that is to be the runtime.
const RUNTIME: &str = "GUESTLET_TEST_RUNTIME";
/// The port of the guest's host by which it reaches the API server.
const PORT: u32 = 6443;

/// What runs in the guest for the cluster, at each of its boots.
const SERVICES: [&str; 3] = ["api-server", "runtime", "kubelet"];

/// In a process that the guest has started as the container runtime: serves kubelet, and never returns. Else nothing.
fn be_runtime_if_meant() {
    let Some(socket) = std::env::var_os(RUNTIME) else { return };
    wait(async {
        let runtime = Runtime::new(1, &std::process::id().to_string(), Path::new("/nonexistent"));
        runtime.serve(Path::new(&socket));
        std::future::pending::<()>().await;
    });
}

/// Runs the test that calls this again where its network is its own; false in there.
fn is_outside() -> bool {
    if namespace::inside().is_some() {
        // Looks up the newest kernel in apt's lists, which are hidden from then on.
        installed();
        settle();
        return false;
    }
    let _turn = turns::beside();
    installed();
    // The names of working folders are made of process ids, and those in there are somebody else's out here.
    let folder = RunFolder::new().unwrap();
    let inside = folder.file("inside");
    std::fs::create_dir(&inside).unwrap();
    namespace::run_inside(&NAMESPACES, &["env", &format!("TMPDIR={}", inside.display())])
}

/// A systemd service of the guest.
fn unit(after: &str, service: &str) -> String {
    format!(
        "[Unit]\nRequiresMountsFor={DISK}\nAfter={after}\n[Service]\nRestart=always\nRestartSec=1\n{service}\n\
         [Install]\nWantedBy=multi-user.target\n"
    )
}

/// The services by which the guest is a node.
fn units() -> [String; 3] {
    let (server, own) = (endpoint(), WHO.address);
    let mut forward = String::new();
    for address in [server.ip().to_string().as_str(), own] {
        writeln!(forward, "ExecStartPre=ip address replace {address}/32 dev lo").unwrap();
    }
    write!(
        forward,
        "ExecStart=socat TCP-LISTEN:{},bind={},reuseaddr,fork VSOCK-CONNECT:2:{PORT}",
        server.port(),
        server.ip()
    )
    .unwrap();
    let thread = std::thread::current();
    let test = thread.name().unwrap();
    let runtime = format!(
        "Environment={RUNTIME}={SOCKET}\nExecStartPre=rm -f {SOCKET}\n\
         ExecStart={DISK}/runtime {test} --exact --nocapture"
    );
    let files = Files {
        config: &Path::new(DISK).join("kubelet.json"),
        kubeconfig: Path::new(KUBECONFIG),
        root: Path::new(KUBELET),
        certificates: Path::new("/var/lib/kubelet-certificates"),
        runtime: Path::new(SOCKET),
    };
    let kubelet = command("kubelet", &node::options(WHO, &files));
    let kubelet = format!("ExecStart={DISK}/kubelet {}", kubelet[1..].join(" "));
    [unit("network.target", &forward), unit("network.target", &runtime), unit("api-server.service", &kubelet)]
}

/// Makes the cluster's disk.
fn disk(vm: &Vm, plane: &ControlPlane) -> PathBuf {
    let (folder, disk) = (vm.file("cluster"), vm.file("cluster.iso"));
    std::fs::create_dir(&folder).unwrap();
    let here = plane.authority.file("ca.crt").parent().unwrap().display().to_string();
    let credential = plane.kubelet_config(WHO.name);
    let credential_there = std::fs::read_to_string(&credential).unwrap().replace(&here, DISK);
    let settings = node::settings(WHO.address, &Path::new(DISK).join("ca.crt"));
    let mut files = vec![
        ("kubelet.conf".to_owned(), credential_there),
        ("kubelet.json".to_owned(), settings.to_string()),
    ];
    files.extend(SERVICES.iter().map(|name| format!("{name}.service")).zip(units()));
    for (name, contents) in files {
        std::fs::write(folder.join(name), contents).unwrap();
    }
    let pair = credential.with_extension("pem");
    let grafts = [
        format!("/={}", text(&folder).unwrap()),
        format!("/ca.crt={}", text(&plane.authority.file("ca.crt")).unwrap()),
        format!("/{}={}", pair.file_name().unwrap().to_str().unwrap(), text(&pair).unwrap()),
        format!("/kubelet={}", program("kubelet")),
        format!("/runtime={}", text(&std::env::current_exe().unwrap()).unwrap()),
    ];
    let mut arguments =
        vec!["-quiet", "-rock", "-V", "cluster", "-graft-points", "-output", text(&disk).unwrap()];
    arguments.extend(grafts.iter().map(String::as_str));
    tools::run("genisoimage".as_ref(), &arguments).unwrap();
    disk
}

/// A guest that is the cluster's node, now and after its next boots.
struct Guest {
    vm: Vm,
}

impl Guest {
    fn join(vm: Vm, plane: &ControlPlane) -> Self {
        vm.forward(PORT, endpoint()).unwrap();
        vm.plug_read_only("cluster", &disk(&vm, plane)).unwrap();
        Csi::of(&vm).unwrap();
        let guest = Self { vm };
        let folder = Path::new(KUBECONFIG).parent().unwrap().display();
        guest.run(&format!("mkdir -p {DISK} {folder}"));
        guest.run(&format!("echo 'LABEL=cluster {DISK} iso9660 ro,nofail 0 0' >> /etc/fstab"));
        wait_for("the cluster's disk", SOON, || guest.vm.run(&format!("mount {DISK}")).ok()).unwrap();
        guest
            .run(&format!("cp {DISK}/*.service /etc/systemd/system/ && cp {DISK}/kubelet.conf {KUBECONFIG}"));
        guest.run(&format!(
            "systemctl daemon-reload && systemctl enable --now {} && sync",
            SERVICES.join(" ")
        ));
        guest
    }

    fn run(&self, command: &str) -> String {
        self.vm.run(command).unwrap()
    }

    /// What it has of pods, kubelet's mounts, staged volumes, and disks.
    fn inventory(&self) -> String {
        let mounts = format!("grep -o ' {KUBELET}/[^ ]*' /proc/self/mountinfo");
        let staged = format!("find {KUBELET}/plugins -name globalmount");
        self.run(&format!("{mounts}; ls -A {KUBELET}/pods; {staged}; ls /sys/block"))
    }

    /// Bytes of the file system that is mounted there.
    fn size(&self, place: &str) -> u64 {
        let told = self.run(&format!("echo $(($(stat --file-system --format '%b*%S' {place})))"));
        told.trim().parse().unwrap()
    }

    /// Waits until the pod that has its volume there has written to it in these boots, and in no others.
    async fn has_run_in(&self, place: &str, boots: &[&str]) {
        until("the pod writes to its volume", async || {
            let written = self.vm.run(&format!("cat {place}/boots")).ok()?;
            written.lines().eq(boots.iter().copied()).then_some(())
        })
        .await;
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let units = "-u kubelet -u runtime -u api-server -u guestlet";
            let said = self.vm.run(&format!("journalctl --no-pager -n 200 -o cat {units}"));
            eprintln!("──── the node ────\n{}", said.unwrap_or_else(|error| error.to_string()));
        }
    }
}

/// Waits until there is something, as long as a guest may take that is emulated.
async fn until<T>(what: &str, look: impl AsyncFnMut() -> Option<T>) -> T {
    until_within(BOOT, what, look).await
}

/// Starts a pod that writes to the volume of this claim which boot it runs in, and waits until it does; where its volume
/// is mounted in the guest.
async fn start_writer(api: &Api, claim: &str) -> String {
    let script = "cat /proc/sys/kernel/random/boot_id >> /mnt/volume/boots; sync";
    api.create(PODS, &pod("writer", claim, "Filesystem", script)).await;
    let uid = until("the pod runs", async || {
        let pod = api.get(&format!("{PODS}/writer")).await.unwrap();
        let is_ready = pod["status"]["containerStatuses"][0]["ready"] == true;
        is_ready.then(|| pod["metadata"]["uid"].as_str().unwrap().to_owned())
    })
    .await;
    let claim = api.get(&format!("{CLAIMS}/{claim}")).await.unwrap();
    let volume = claim["spec"]["volumeName"].as_str().unwrap();
    format!("{KUBELET}/pods/{uid}/volumes/kubernetes.io~csi/{volume}/mount")
}

/// Asks for another size of a claim's volume, and waits until kubelet has given the file system that size.
async fn grow(api: &Api, claim: &str, size: &str) {
    let path = format!("{CLAIMS}/{claim}");
    let wanted = json!({ "spec": { "resources": { "requests": { "storage": size } } } });
    api.patch(&path, &wanted).await.unwrap();
    until("the volume has grown", async || {
        let claim = api.get(&path).await.unwrap();
        (claim["status"]["capacity"]["storage"] == size).then_some(())
    })
    .await;
}

/// Issue 17: no kubelet had ever registered the driver in a real guest; the one that the tests played did not mind its faults.
#[test]
fn a_pod_in_a_real_guest_has_its_volume_back_after_a_reset() {
    be_runtime_if_meant();
    if is_outside() {
        return;
    }
    wait(async {
        let cluster = ControlPlane::start().await;
        let api = &cluster.api;
        apply(api, false).await;
        let vm = real(WHO.name);
        let host = HostHalf::start(&[Listed::of(&vm)]).unwrap();
        host.wait_connected(WHO.name, BOOT).unwrap();
        let guest = Guest::join(vm, &cluster);
        let socket = guest.vm.reach(SIDECARS).unwrap();
        let _sidecars = Sidecars::start(Api::read(cluster.sidecars(), "sidecars"), socket);
        let begun = Instant::now();
        let driver =
            until("the node is ready, and has the driver", async || driver_when_ready(api, WHO.name).await)
                .await;
        println!("kubelet is ready, and has registered the driver, after {:?}", begun.elapsed());
        assert_eq!(driver["nodeID"], guest.vm.uuid());
        let before = guest.inventory();

        api.create(CLAIMS, &claim("guestlet", "data", 320, "Filesystem")).await;
        let begun = Instant::now();
        let place = start_writer(api, "data").await;
        println!("the pod runs, and has its volume, after {:?}", begun.elapsed());
        let first = guest.vm.boot_id().unwrap();
        guest.has_run_in(&place, &[&first]).await;
        assert_ne!(host.pool_files().unwrap(), Vec::<String>::new());
        grow(api, "data", "640Mi").await;
        assert!(guest.size(&place) > 500 << 20, "{}", guest.size(&place));

        // Its network ends first: the vsock device fails for good if the API server says something while the guest's driver
        // is not up.
        guest.run("systemctl stop api-server");
        host.reset(&guest.vm).unwrap();
        let begun = Instant::now();
        let second = guest.vm.boot_id().unwrap();
        // kubelet has staged and published it again: both lines are in one file.
        guest.has_run_in(&place, &[&first, &second]).await;
        println!("the pod has its volume again {:?} after the agent was back", begun.elapsed());
        assert!(guest.size(&place) > 500 << 20, "{}", guest.size(&place));

        for path in [format!("{PODS}/writer"), format!("{CLAIMS}/data")] {
            api.delete(&path).await;
            until(&format!("{path} is gone"), async || api.get(&path).await.is_none().then_some(())).await;
        }
        until("nothing is left in the cluster", async || objects(api).await.is_empty().then_some(())).await;
        let is_as_before = || (guest.inventory() == before).then_some(());
        wait_for("guest as it was before", SOON, is_as_before)
            .unwrap_or_else(|error| panic!("{error}: {}", guest.inventory()));
        assert_eq!(host.pool_files().unwrap(), Vec::<String>::new());
    });
}
