//! A host cluster of two nodes with VMs of the cluster `default/dev` in it, which are QEMU machines.

use std::os::unix::fs::symlink;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Value, json};
use tokio::task::block_in_place;

use crate::bench::socket;
use crate::cluster::HOSTS;
use crate::harness::csi::Csi;
use crate::harness::vm::Vm;
use crate::lab::Lab;
use crate::machines::{Guest, Machines};
use crate::model::objects::{text, uid};
use crate::whole::Whole;

pub struct Stage {
    pub whole: Whole<Machines>,
    pub vms: Vec<Arc<Member>>,
}

/// A VM, whose machine is another one after each start.
pub struct Member {
    pub name: String,
    pub guest: Guest,
    /// Of its VirtualMachine, which is its node's identifier in its cluster.
    pub uid: String,
    /// Where it runs.
    pub host: &'static str,
    now: Mutex<Option<Run>>,
}

/// A machine of a VM.
#[derive(Clone)]
pub struct Run {
    /// The instance.
    pub instance: Value,
    pub vm: Arc<Vm>,
}

impl Stage {
    /// Two replicas of the controller, a program for each node, and these VMs, in turns on one node and the other.
    pub async fn start(vms: &[(&str, Guest)]) -> Self {
        let machines = Arc::new(block_in_place(Machines::new));
        let mut stage = Self { whole: Whole::with(2, machines).await, vms: Vec::new() };
        for ((name, guest), host) in vms.iter().zip(HOSTS.into_iter().cycle()) {
            stage.add(name, *guest, host).await;
        }
        stage
    }

    async fn add(&mut self, name: &str, guest: Guest, host: &'static str) {
        let cluster = &self.whole.cluster;
        let made = cluster.vm_with(name, |vm| {
            let template = &mut vm["spec"]["template"];
            template["metadata"]["labels"]["guestcluster.harvesterhci.io/name"] = json!("dev");
            template["spec"]["domain"]["firmware"] = json!({ "uuid": Machines::uuid(guest) });
            template["spec"]["nodeSelector"] = json!({ "kubernetes.io/hostname": host });
        });
        let uid = uid(&made.await).to_owned();
        let member = Member { name: name.to_owned(), guest, uid, host, now: Mutex::default() };
        self.vms.push(Arc::new(member));
        let instance = cluster.runs(name).await;
        self.boot(&self.vms[self.vms.len() - 1], instance);
    }

    /// Starts the machine of an instance of a VM, and waits until its node has a session with its agent.
    pub fn boot(&self, member: &Member, instance: Value) {
        block_in_place(|| {
            let vm = self.whole.domains.boot(&member.name, member.guest, &instance);
            symlink(vm.vsock_socket(), socket(self.node_of(member), &instance)).unwrap();
            if member.guest == Guest::Real {
                Csi::of(&vm).unwrap();
            }
            self.until_connected(member);
            *member.now.lock().unwrap_or_else(PoisonError::into_inner) = Some(Run { instance, vm });
        });
    }

    /// Waits until the node of a VM has a session with its agent, which can ask by it.
    pub fn until_connected(&self, member: &Member) {
        let is_open = |vm: &Value| vm["session"] == "connected" && vm["callback"] == "open";
        self.node_of(member).until_vm(&format!("default/{}", member.name), is_open);
    }

    /// Kills a VM's machine; its virt-handler sees that.
    pub fn kill(&self, member: &Member) -> Run {
        let run = member.now.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap();
        let instance = uid(&run.instance);
        block_in_place(|| self.whole.domains.kill(instance));
        self.whole.cluster.model.lose_domain(instance);
        run
    }

    /// The program of the node where a VM is.
    pub fn node_of(&self, member: &Member) -> &Lab {
        &self.whole.nodes[member.host]
    }

    /// The program of a node, or a replica of the controller.
    pub fn program(&mut self, is_node: bool, number: usize) -> &mut Lab {
        if is_node {
            self.whole.nodes.get_mut(HOSTS[number]).unwrap()
        } else {
            &mut self.whole.controllers[number]
        }
    }

    /// What of a VM's volumes its instance says is plugged.
    pub async fn ready(&self, member: &Member) -> Vec<String> {
        let instance = self.whole.cluster.instance(&member.name).await.unwrap_or_default();
        let entries = instance["status"]["volumeStatus"].as_array().cloned().unwrap_or_default();
        let ready = entries.iter().filter(|one| one["phase"] == "Ready" && one["hotplugVolume"].is_object());
        ready.map(|one| text(&one["name"]).to_owned()).collect()
    }
}

impl Member {
    /// Its machine, unless that is being started.
    pub fn run(&self) -> Option<Run> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
