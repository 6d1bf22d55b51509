//! A volume on its way into a pod's directory and to another VM, as its user and the operator of the host cluster see it.

use std::process::Command;
use std::time::Instant;

use serde_json::{Value, json};
use tokio::task::block_in_place;

use crate::harness::csi::{Csi, target};
use crate::harness::vm::{SOON, Vm};
use crate::harness::wait_for;
use crate::machines::Guest;
use crate::model::objects::{Kind, text};
use crate::stage::{Member, Stage};

const GUESTS: &str = "/apis/guestlet.io/v1alpha1/namespaces/default/guests";
const CLAIMS: &str = "/api/v1/namespaces/default/persistentvolumeclaims";
const MIB: i64 = 1 << 20;

struct Show {
    started: Instant,
    stage: Stage,
}

pub async fn run() {
    let started = Instant::now();
    step(
        started,
        "A host cluster: etcd and kube-apiserver, two nodes, KubeVirt as the tests play it, and the packaged roles",
    );
    println!("  guestlet-host controller, two replicas; guestlet-host node on each node");
    println!(
        "  VirtualMachines web-1 and web-2 of the guest cluster default/dev: Debian 12 in QEMU, with guestlet's package"
    );
    let stage = Stage::start(&[("web-1", Guest::Real), ("web-2", Guest::Real)]).await;
    let mut show = Show { started, stage };
    show.guests().await;
    show.topology().await;
    let id = show.claim().await;
    show.moves(&id).await;
    show.dies(&id).await;
    show.ends(&id).await;
    show.adopts().await;
    if std::env::var_os("KEEP").is_some_and(|keep| !keep.is_empty() && keep != "0") {
        show.stays().await;
    }
    println!("\nDone in {:.0} s; everything is stopped and removed.", started.elapsed().as_secs_f32());
}

fn step(started: Instant, title: &str) {
    println!("\n[{:>3.0} s] {title}", started.elapsed().as_secs_f32());
}

/// A claim that Harvester's CSI driver has made.
const ADOPTED: &str = "pvc-5b1f7a04-6f0e-4c55-8a39-2d9f0b6c7e11";

/// Asks the agent in a real guest as its sidecars and kubelet do, as often as it takes: calls are repeated while what became of
/// them is not known.
fn again<T>(what: &str, mut call: impl FnMut() -> Result<T, tonic::Status>) -> T {
    let mut last = String::new();
    let asked = wait_for(what, SOON, || call().map_err(|status| last = format!("{status:?}")).ok());
    asked.unwrap_or_else(|error| panic!("{error}: {last}"))
}

impl Show {
    fn step(&self, title: &str) {
        step(self.started, title);
    }

    fn member(&self, number: usize) -> &Member {
        &self.stage.vms[number]
    }

    /// What kubectl prints of Guests, and guestctl on the nodes.
    async fn guests(&self) {
        self.step("What the host cluster sees");
        println!("  # kubectl get guests -A");
        println!("    NAMESPACE   NAME    SESSION     READY   AGENT   CLUSTER       HOST");
        for member in &self.stage.vms {
            let path = format!("{GUESTS}/{}", member.name);
            let api = &self.stage.whole.cluster.api;
            let guest = crate::patience::until("the Guest says that it is ready", async || {
                let guest = api.get(&path).await?;
                let conditions = guest["status"]["conditions"].as_array()?;
                let is_ready = conditions.iter().any(|one| one["type"] == "Ready" && one["status"] == "True");
                is_ready.then_some(guest)
            })
            .await;
            let status = &guest["status"];
            let words = [&status["session"], &status["agentVersion"], &status["cluster"], &status["host"]];
            let [session, agent, cluster, host] = words.map(text);
            println!("    default     {}   {session}   True    {agent}   {cluster}   {host}", member.name);
        }
        for host in crate::cluster::HOSTS {
            println!("  {host} # guestctl ls");
            show(&self.stage.whole.nodes[host].words(&["ls"]));
        }
    }

    async fn topology(&self) {
        let member = self.member(0);
        self.step(&format!("The zone of {} is edited", member.host));
        let labels = json!({ "metadata": { "labels": { "topology.kubernetes.io/zone": "rack-7" } } });
        let begun = Instant::now();
        self.stage.whole.cluster.api.patch(&Kind::Node.path(member.host), &labels).await.unwrap();
        let lab = self.stage.node_of(member);
        block_in_place(|| {
            lab.until("the guest knows its zone", || {
                let all: Value = serde_json::from_str(&lab.words(&["topology", "-o", "json"])).unwrap();
                all["virtual_machines"].to_string().contains(r#""zone":"rack-7""#)
            });
        });
        println!("  {} knows it {} ms later", member.name, begun.elapsed().as_millis());
    }

    /// Makes a volume, and has it mounted in web-2.
    async fn claim(&self) -> String {
        self.step("A sidecar in web-1 asks its agent for a volume, for a pod on web-2");
        let (asker, user) = (self.member(0).run().unwrap(), self.member(1).run().unwrap());
        let id = block_in_place(|| {
            let begun = Instant::now();
            let id = again("volume", || {
                Csi::reachable(&asker.vm).create("pvc-0f6a1b0e-4b5e-4d55-9d0a-6c1f5a1c2b3d", 64 * MIB)
            });
            println!("  CreateVolume → {id}  ({} ms)", begun.elapsed().as_millis());
            id
        });
        self.attach(&id, &asker.vm, self.member(1), &user.vm).await;
        block_in_place(|| {
            user.vm.run(&format!("echo hello > {}/greeting && sync", target(&id))).unwrap();
            let begun = Instant::now();
            let user = Csi::reachable(&user.vm);
            wait_for("growth of the volume", SOON, || user.expand(&id, 128 * MIB).ok()).unwrap();
            println!(
                "  ControllerExpand, NodeExpand → 128 MiB, while it is mounted  ({} ms)",
                begun.elapsed().as_millis()
            );
            assert!(user.total(&id).unwrap() > 100 * MIB);
        });
        id
    }

    async fn attach(&self, id: &str, asker: &Vm, member: &Member, user: &Vm) {
        let begun = Instant::now();
        block_in_place(|| {
            let user = Csi::reachable(user);
            user.make_folders(id).unwrap();
            let context = again("published volume", || Csi::reachable(asker).attach(id, &member.uid));
            println!(
                "  ControllerPublish → {} has the disk, and says so  (after {} ms)",
                member.name,
                begun.elapsed().as_millis()
            );
            again("staged volume", || user.stage(id, context.clone()));
            again("mounted volume", || user.publish(id, context.clone()));
            println!(
                "  NodeStage, NodePublish → mounted for the pod  (after {} ms)",
                begun.elapsed().as_millis()
            );
        });
        let claims = self.stage.whole.cluster.api.list(CLAIMS).await;
        for claim in &claims {
            let (name, phase) = (text(&claim["metadata"]["name"]), text(&claim["status"]["phase"]));
            println!(
                "  # kubectl get pvc → {name}: {phase}, {}",
                text(&claim["status"]["capacity"]["storage"])
            );
        }
        assert_eq!(claims.len(), 1);
        let ready = self.stage.ready(member).await;
        println!("  # kubectl get vmi {} → volumes that are Ready: {ready:?}", member.name);
        assert_eq!(ready.len(), 1);
        self.is_in(&member.name);
    }

    /// The only machine that has a disk, as QEMU itself says, is this VM's.
    fn is_in(&self, name: &str) {
        let mut plugged = block_in_place(|| self.stage.whole.domains.plugged());
        plugged.retain(|(_, serials)| !serials.is_empty());
        let names: Vec<_> = plugged.iter().map(|(vm, _)| vm.as_str()).collect();
        println!("  QEMU's query-block → the disk is in {}", names.join(", "));
        assert_eq!(names, [name]);
    }

    /// The pod moves to web-1, while the controller that leads is killed.
    async fn moves(&mut self, id: &str) {
        let leader = self.stage.whole.leader().await;
        self.step(&format!("controller-{leader} leads, and is killed; the pod moves to web-1"));
        self.stage.whole.controllers[leader].kill();
        let (asker, user) = (self.member(0).run().unwrap(), self.member(1).run().unwrap());
        let begun = Instant::now();
        block_in_place(|| {
            let user = Csi::reachable(&user.vm);
            user.unpublish(id).unwrap();
            user.unstage(id).unwrap();
            again("detached volume", || Csi::reachable(&asker.vm).detach(id, &self.member(1).uid));
        });
        let now = self.stage.whole.leader().await;
        println!(
            "  NodeUnpublish, NodeUnstage, ControllerUnpublish → released; controller-{now} leads  (after {:.1} s)",
            begun.elapsed().as_secs_f32()
        );
        assert_ne!(leader, now);
        self.attach(id, &asker.vm, self.member(0), &asker.vm).await;
        greets(id, &asker.vm);
        self.stage.whole.controllers[leader].again();
    }

    /// web-1's QEMU is killed; KubeVirt starts the VM again.
    async fn dies(&self, id: &str) {
        let member = self.member(0);
        self.step("The QEMU of web-1 is killed");
        let begun = Instant::now();
        let before = self.stage.kill(member);
        let instance = self.stage.whole.cluster.until_other(&member.name, &before.instance).await;
        self.stage.boot(member, instance);
        println!(
            "  KubeVirt has started another, and its agent answers  (after {:.1} s)",
            begun.elapsed().as_secs_f32()
        );
        let vm = member.run().unwrap().vm;
        self.attach(id, &vm, member, &vm).await;
        greets(id, &vm);
    }

    /// Leaves it all up until a signal comes.
    async fn stays(&self) {
        self.step("All of it stays up until Ctrl-C. In another terminal:");
        let whole = &self.stage.whole;
        let config = whole.cluster.turn.plane().folder.path().join("test.conf");
        println!("  kubectl --kubeconfig {} get guests,vm,vmi,pvc -A", config.display());
        for lab in whole.nodes.values() {
            println!("  {}", line(&lab.ctl_command(&["ls"])));
        }
        let leader = &whole.controllers[whole.leader().await];
        println!("  {}", line(&leader.ctl_command(&["volumes", "ls"])));
        for member in &self.stage.vms {
            let console = member.run().unwrap().vm.file("console.sock");
            println!("  socat -,rawer,escape=0x1d UNIX-CONNECT:{}", console.display());
        }
        println!("      (the consoles of the guests, root shells; Ctrl-] leaves them)");
        std::future::pending::<()>().await;
    }

    /// A volume of Harvester's driver, which has plugged it into web-2 and mounted it there, goes on as one of guestlet's.
    async fn adopts(&self) {
        self.step("A volume that Harvester's CSI driver has plugged into web-2 and mounted there is given to guestlet");
        let (asker, member) = (self.member(0).run().unwrap(), self.member(1));
        let (user, cluster) = (member.run().unwrap(), &self.stage.whole.cluster);
        cluster.harvester_claim(ADOPTED, 64, "dev").await;
        cluster.harvester_plugs(&member.name, ADOPTED).await;
        cluster.is_in(&member.name, ADOPTED, "Ready").await;
        let shown = format!("drive-ua-{ADOPTED}");
        block_in_place(|| {
            // udev's links for a disk without serial number are made of that text, as Harvester's node plugin looks for it.
            let file = format!("/dev/disk/by-id/scsi-0QEMU_QEMU_HARDDISK_{shown}");
            user.vm.run(&format!("udevadm settle; until [ -e {file} ]; do sleep 0.1; done")).unwrap();
            let target = target(ADOPTED);
            let mount = format!("mkdir -p {target} && mkfs.ext4 -q {file} && mount {file} {target}");
            user.vm.run(&format!("{mount} && echo hello > {target}/greeting && sync")).unwrap();
            let refused = Csi::reachable(&asker.vm).attach(ADOPTED, &member.uid).unwrap_err();
            println!("  ControllerPublish → {}", refused.message());
            assert!(refused.message().contains("is not assigned to guestlet"), "{refused:?}");
        });
        cluster.give(ADOPTED).await;
        let context = block_in_place(|| {
            let context = again("adopted volume", || Csi::reachable(&asker.vm).attach(ADOPTED, &member.uid));
            println!("  # kubectl label pvc …; ControllerPublish → {context:?}");
            assert_eq!(context["guestlet.io/serial"], shown);
            // Whoever has it mounted is not robbed of it, whoever has mounted it.
            let refused = Csi::reachable(&asker.vm).detach(ADOPTED, &member.uid).unwrap_err();
            println!("  ControllerUnpublish → {}", refused.message());
            assert!(refused.message().contains("in use"), "{refused:?}");
            let csi = Csi::reachable(&user.vm);
            // The pod of Harvester's driver ends, and the next one on this node is guestlet's.
            csi.unpublish(ADOPTED).unwrap();
            csi.make_folders(ADOPTED).unwrap();
            again("staged volume", || csi.stage(ADOPTED, context.clone()));
            again("mounted volume", || csi.publish(ADOPTED, context.clone()));
            greets(ADOPTED, &user.vm);
            // As it is while the cluster has not been told what the disk is known by.
            csi.unpublish(ADOPTED).unwrap();
            csi.unstage(ADOPTED).unwrap();
            again("staged volume", || csi.stage(ADOPTED, std::collections::HashMap::new()));
            csi.unstage(ADOPTED).unwrap();
            again("detached volume", || Csi::reachable(&asker.vm).detach(ADOPTED, &member.uid));
            context
        });
        println!("  the pods end, ControllerUnpublish → released and unplugged");
        assert_eq!(self.stage.ready(member).await, [""; 0]);
        self.attach(ADOPTED, &asker.vm, self.member(0), &asker.vm).await;
        greets(ADOPTED, &asker.vm);
        let plugged = block_in_place(|| self.stage.whole.domains.plugged());
        assert!(
            plugged.iter().all(|(_, texts)| !texts.contains(&context["guestlet.io/serial"])),
            "{plugged:?}"
        );
        self.ends(ADOPTED).await;
    }

    async fn ends(&self, id: &str) {
        self.step("The pod and its volume go");
        let (member, api) = (self.member(0), &self.stage.whole.cluster.api);
        let vm = member.run().unwrap().vm;
        block_in_place(|| {
            let csi = Csi::reachable(&vm);
            csi.unpublish(id).unwrap();
            csi.unstage(id).unwrap();
            again("detached volume", || csi.detach(id, &member.uid));
            again("removed volume", || csi.delete(id));
        });
        println!("  NodeUnpublish, NodeUnstage, ControllerUnpublish, DeleteVolume → gone");
        let is_empty = async |path: &str| {
            let what = format!("{path} is empty");
            crate::patience::until(&what, async || api.list(path).await.is_empty().then_some(())).await;
        };
        is_empty(CLAIMS).await;
        is_empty(&Kind::Attachment.all()).await;
        println!("  # kubectl get pvc,volumeattachments → none");
        assert!(
            block_in_place(|| self.stage.whole.domains.plugged())
                .iter()
                .all(|(_, serials)| serials.is_empty())
        );
    }
}

fn greets(id: &str, vm: &Vm) {
    let greeting = block_in_place(|| vm.run(&format!("cat {}/greeting", target(id)))).unwrap();
    println!("  the file that was written on it says {:?}", greeting.trim());
    assert_eq!(greeting.trim(), "hello");
}

/// A command as it is typed.
fn line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

fn show(words: &str) {
    for line in words.lines() {
        println!("    {line}");
    }
}
