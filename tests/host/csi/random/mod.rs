//! Random operations of two clusters on two hosts, with real QEMUs, while everything is killed, stopped, shut down and
//! taken out of the settings, and a pool of each host hangs and goes on. After each step it is looked from outside at what
//! QEMU has open: never two writers, never an image without a name that is open, never a volume that is lost, never a
//! success that is none. While a pool hangs the others do what is asked of them.
//!
//! `GUESTLET_STEPS` says how many steps, `GUESTLET_SEED` repeats a run.

#![allow(clippy::print_stdout, reason = "a run that fails is read step by step")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use tonic::Status;

use super::machine::Machine;
use super::mirror::Mirror;
use super::{Asking, serial};
use crate::guest::{Door, Guest, Manner, info};
use crate::lab::{Lab, text, uuid};
use crate::namespace::is_outside;
use crate::random::{Random, seed};
use crate::soak::steps;

mod checked;
mod hanging;

const MIB: i64 = 1 << 20;
/// Steps in `make test`; many more are in `make soak`.
const FEW: u64 = 150;
const MANY: u64 = 2000;
const VMS: u8 = 6;
const CLASSES: [&str; 3] = ["fast", "qcow", HUNG];
/// The pool that hangs now and then.
const HUNG: &str = "hung";

struct Vm {
    name: String,
    host: usize,
    cluster: &'static str,
    table: String,
    is_listed: bool,
    is_shut_down: bool,
    hangs: bool,
    machine: Option<Machine>,
    /// None while its agent is killed.
    guest: Option<Guest>,
}

impl Vm {
    /// Kills its agent, and starts another one.
    fn restart_agent(&mut self, socket: &Path) {
        // The old one takes its socket with it.
        self.guest = None;
        self.guest = Some(agent(socket, &self.name));
    }

    fn asking(&self) -> Asking {
        Asking(self.guest.as_ref().unwrap().client())
    }

    /// Whether its agent is connected, and so may ask.
    fn may_ask(&self) -> bool {
        self.is_listed && self.machine.is_some() && !self.is_shut_down && !self.hangs
    }

    /// Its QEMU, if that can be asked.
    fn asked(&self) -> Option<&Machine> {
        self.machine.as_ref().filter(|_| !self.hangs)
    }
}

/// A volume that was made.
#[derive(Debug, Clone)]
struct Made {
    id: String,
    host: usize,
    cluster: &'static str,
    bytes: i64,
    /// Where it was published the last time.
    node: Option<usize>,
    /// A removal was begun and failed: whether it is there is not known.
    is_doubtful: bool,
}

/// A volume whose making failed: whether it is there is not known.
struct Begun {
    name: String,
    class: &'static str,
    host: usize,
    cluster: &'static str,
}

struct World {
    /// Of each host, what keeps the pool that hangs; the first to go, so that nothing waits for it in the end.
    mirrors: Vec<Mirror>,
    hosts: Vec<Lab>,
    vms: Vec<Vm>,
    made: BTreeMap<String, Made>,
    begun: Vec<Begun>,
    random: Random,
    names: u32,
    successes: BTreeMap<&'static str, u32>,
}

impl World {
    fn start(seed: u64) -> Self {
        let cluster = |number: u8| if number.is_multiple_of(3) { "prod" } else { "dev" };
        let mut hosts = Vec::new();
        let mut mirrors = Vec::new();
        let mut vms = Vec::new();
        for host in 0..2_usize {
            let mut lab = Lab::new();
            let kinds = ["default = true", "format = 'qcow2'", "answer-seconds = 2"];
            for (name, rest) in CLASSES.into_iter().zip(kinds) {
                let path = text(&lab.path(&format!("pools/{name}")));
                lab = lab.set(&format!("[[pool]]\nname = '{name}'\npath = '{path}'\n{rest}"));
            }
            let (kept, pool) = (lab.path("kept"), lab.path(&format!("pools/{HUNG}")));
            std::fs::create_dir(&kept).unwrap();
            std::fs::create_dir_all(&pool).unwrap();
            mirrors.push(Mirror::mount(&kept, &pool));
            for number in 1..=VMS {
                if usize::from(number - 1) / 3 != host {
                    continue;
                }
                let name = format!("vm{number}");
                let folder = text(&lab.path(""));
                let table = format!(
                    "[[vm]]\nname = '{name}'\nuuid = '{}'\nunix-socket = '{folder}{name}.sock'\n\
                     qmp = '{folder}{name}.qmp'\ncluster = '{}'\n",
                    uuid(number),
                    cluster(number)
                );
                lab = lab.set(&table);
                let guest = Some(agent(&lab.path(&format!("{name}.sock")), &name));
                let machine = Some(Machine::start(&lab.path(&format!("{name}.qmp"))));
                let cluster = cluster(number);
                let (is_listed, is_shut_down, hangs) = (true, false, false);
                vms.push(Vm { name, host, cluster, table, is_listed, is_shut_down, hangs, machine, guest });
            }
            hosts.push(lab.start());
        }
        let random = Random(seed);
        let (made, begun, successes) = (BTreeMap::new(), Vec::new(), BTreeMap::new());
        let world = Self { hosts, mirrors, vms, made, begun, random, names: 0, successes };
        world.settle();
        world
    }

    /// Waits until those that may ask can, which takes a list that was read.
    fn settle(&self) {
        for vm in self.vms.iter().filter(|vm| vm.may_ask()) {
            let is_known = || self.hosts[vm.host].ctl(&["info", &vm.name]).status.success();
            self.hosts[vm.host].until("the list is read", is_known);
            // A QEMU hangs with what it has open.
            let hangs = self.mirrors[vm.host].hangs();
            self.hosts[vm.host].until_vm(&vm.name, |seen| {
                (hangs || matches!(seen["power"].as_str(), Some("running" | "paused")))
                    && seen["callback"] == "open"
            });
        }
    }

    /// The pools of a host, as QEMU is told of them.
    fn pools(&self, host: usize) -> PathBuf {
        self.hosts[host].path("pools").canonicalize().unwrap()
    }

    /// As QEMU is told of it.
    fn image(&self, made: &Made) -> PathBuf {
        let (pool, _) = made.id.split_once('.').unwrap();
        self.pools(made.host).join(pool).join(file_name(&made.id))
    }

    /// Its bytes, where nothing hangs.
    fn kept(&self, made: &Made) -> PathBuf {
        match made.id.split_once('.').unwrap() {
            (HUNG, _) => self.hosts[made.host].path("kept").join(file_name(&made.id)),
            _ => self.image(made),
        }
    }

    /// Whether a VM's QEMU has an image open, as the kernel says also of one that hangs.
    fn has_open(&self, vm: usize, image: &Path) -> bool {
        let machine = self.vms[vm].machine.as_ref();
        machine.is_some_and(|machine| machine.open_below(image).iter().any(|open| open.path == image))
    }

    fn below(&mut self, end: usize) -> usize {
        self.random.below(u32::try_from(end).unwrap()) as usize
    }

    /// One that asks, if there is any.
    fn asker(&mut self) -> Option<usize> {
        let may: Vec<_> = (0..self.vms.len()).filter(|vm| self.vms[*vm].may_ask()).collect();
        (!may.is_empty()).then(|| may[self.below(may.len())])
    }

    /// A volume, most often one that the asker's cluster has on its host.
    fn volume(&mut self, asker: usize) -> Option<Made> {
        let near =
            |made: &&Made| (made.host, made.cluster) == (self.vms[asker].host, self.vms[asker].cluster);
        let near: Vec<_> = self.made.values().filter(near).cloned().collect();
        let all: Vec<_> = self.made.values().cloned().collect();
        let among = if near.is_empty() || self.below(8) == 0 { all } else { near };
        (!among.is_empty()).then(|| among[self.below(among.len())].clone())
    }

    /// A node, most often one that may have the volume.
    fn node(&mut self, volume: &Made) -> usize {
        let may = |vm: &&usize| {
            (self.vms[**vm].host, self.vms[**vm].cluster) == (volume.host, volume.cluster)
                && self.vms[**vm].may_ask()
        };
        let all: Vec<_> = (0..self.vms.len()).collect();
        let near: Vec<_> = all.iter().filter(may).copied().collect();
        let among = if near.is_empty() || self.below(6) == 0 { all } else { near };
        let node = among[self.below(among.len())];
        volume.node.filter(|_| self.below(3) > 0).unwrap_or(node)
    }

    fn asking(&self, asker: usize) -> Asking {
        self.vms[asker].asking()
    }

    fn step(&mut self) -> String {
        let what = self.below(42);
        match what {
            0..30 => {
                let Some(asker) = self.asker() else { return self.disturb(30) };
                self.operate(asker, what)
            }
            what => self.disturb(what),
        }
    }

    fn operate(&mut self, asker: usize, what: usize) -> String {
        let (host, cluster) = (self.vms[asker].host, self.vms[asker].cluster);
        let asking = self.asking(asker);
        let by = self.vms[asker].name.clone();
        if what < 5 || self.made.is_empty() {
            self.names += 1;
            let class = CLASSES[self.below(CLASSES.len())];
            let begun = Begun { name: format!("v{}", self.names), class, host, cluster };
            let made = self.make(&asking, begun);
            return self.said("create", &by, "", made.map(drop));
        }
        let Some(volume) = self.volume(asker) else { return "nothing".to_owned() };
        let id = volume.id.clone();
        let is_ours = (volume.host, volume.cluster) == (host, cluster);
        match what {
            5..15 => {
                let node = self.node(&Made { node: None, ..volume.clone() });
                let name = self.vms[node].name.clone();
                let done = asking.publish(&id, &name).map(drop);
                if done.is_ok() {
                    self.made.get_mut(&id).unwrap().node = Some(node);
                    assert!(is_ours && self.vms[node].host == host, "{by} published {id} to {name}");
                    let image = self.image(&volume);
                    assert!(self.has_open(node, &image), "{name} has not {id} open");
                    let machine = self.vms[node].asked().expect("QEMU has answered");
                    assert!(self.mirrors[host].hangs() || machine.has_node_of(&image), "{name} has not {id}");
                }
                self.said("publish", &by, &format!("{id} {name}"), done)
            }
            15..24 => {
                let node = self.node(&volume);
                let name = self.vms[node].name.clone();
                let done = asking.unpublish(&id, &name);
                assert!(done.is_err() || is_ours, "{by} unpublished {id}");
                assert!(done.is_err() || !self.has_open(node, &self.image(&volume)), "{name} still has {id}");
                self.said("unpublish", &by, &format!("{id} {name}"), done)
            }
            24..28 => {
                let done = asking.delete(&id);
                match &done {
                    Ok(()) => {
                        assert!(is_ours, "{by} removed {id}");
                        assert!(!self.kept(&volume).exists(), "{id} is still there");
                        self.made.remove(&id);
                    }
                    Err(_) if is_ours => self.made.get_mut(&id).unwrap().is_doubtful = true,
                    Err(_) => {}
                }
                self.said("delete", &by, &id, done)
            }
            _ => {
                let bytes = volume.bytes + 2 * MIB;
                let done = asking.expand(&id, bytes);
                if let Ok(bytes) = &done {
                    assert!(is_ours, "{by} made {id} larger");
                    assert!(*bytes >= volume.bytes + 2 * MIB, "{by} made {id} {bytes} bytes large");
                    self.made.get_mut(&id).unwrap().bytes = *bytes;
                }
                self.said("expand", &by, &id, done.map(drop))
            }
        }
    }

    fn said(&mut self, what: &'static str, by: &str, about: &str, outcome: Result<(), Status>) -> String {
        let outcome = match outcome {
            Ok(()) => {
                *self.successes.entry(what).or_default() += 1;
                "done".to_owned()
            }
            Err(status) => format!("{:?}: {}", status.code(), status.message()),
        };
        format!("{by}: {what} {about}: {outcome}")
    }

    fn disturb(&mut self, what: usize) -> String {
        let hung = self.mirrors.iter().position(Mirror::hangs);
        if let Some(host) = hung.filter(|_| self.random.below(3) > 0) {
            return self.hang(host);
        }
        if what >= 40 && hung.is_none() {
            let host = self.below(self.hosts.len());
            return self.hang(host);
        }
        if let Some(vm) = self.vms.iter_mut().find(|vm| vm.hangs) {
            vm.machine.as_ref().unwrap().hang(false);
            vm.hangs = false;
            let name = vm.name.clone();
            self.settle();
            return format!("{name}: goes on");
        }
        let off: Vec<_> = (0..self.vms.len()).filter(|vm| !self.vms[*vm].may_ask()).collect();
        let (at, what) = if off.len() > 2 {
            let at = off[self.below(off.len())];
            (at, if self.vms[at].is_listed { 30 } else { 36 })
        } else {
            (self.below(self.vms.len()), what)
        };
        let host = self.vms[at].host;
        // A QEMU may hang with the pool, and is not asked for anything.
        let what = if self.mirrors[host].hangs() && (33..36).contains(&what) { 38 } else { what };
        let vm = &mut self.vms[at];
        let name = vm.name.clone();
        let done = match what {
            30..33 => {
                vm.is_shut_down = false;
                if let Some(machine) = vm.machine.take() {
                    drop(machine);
                    "killed"
                } else {
                    vm.machine = Some(Machine::start(&self.hosts[host].path(&format!("{name}.qmp"))));
                    "booted"
                }
            }
            33 | 34 => match &vm.machine {
                Some(machine) if !vm.is_shut_down => {
                    machine.shut_down();
                    vm.is_shut_down = true;
                    "shut down"
                }
                _ => "off already",
            },
            35 => match &vm.machine {
                Some(machine) if !vm.is_shut_down => {
                    if self.random.below(3) == 0 {
                        machine.hang(true);
                        vm.hangs = true;
                        "hangs"
                    } else {
                        machine.ask(["stop", "cont"][self.random.below(2) as usize]);
                        "stopped or continued"
                    }
                }
                _ => "off already",
            },
            36 | 37 => {
                let absent = format!("# {name} is not there\n");
                let (from, to) = if vm.is_listed { (&vm.table, &absent) } else { (&absent, &vm.table) };
                self.hosts[host].edit(from, to);
                vm.is_listed = !vm.is_listed;
                let is_listed = vm.is_listed;
                let lab = &self.hosts[host];
                lab.until("the list is read", || {
                    lab.words(&["ls", "-o", "json"]).contains(&format!("\"{name}\"")) == is_listed
                });
                "put in or taken out of the settings"
            }
            39 => {
                vm.restart_agent(&self.hosts[host].path(&format!("{name}.sock")));
                "agent killed"
            }
            _ => {
                self.hosts[host].kill();
                self.hosts[host].again();
                "host half killed"
            }
        };
        self.settle();
        format!("{name}: {done}")
    }

    /// In the end all volumes are there, can be taken away and removed.
    fn end(&mut self) {
        for mirror in &self.mirrors {
            mirror.hang(false);
        }
        for at in 0..self.vms.len() {
            let host = self.vms[at].host;
            let vm = &mut self.vms[at];
            if !vm.is_listed {
                let absent = format!("# {} is not there\n", vm.name);
                self.hosts[host].edit(&absent, &vm.table.clone());
                vm.is_listed = true;
            }
            if vm.hangs {
                vm.machine.as_ref().unwrap().hang(false);
                vm.hangs = false;
            }
            match &vm.machine {
                // The guest of a paused one lets go of nothing.
                Some(machine) if !vm.is_shut_down => drop(machine.ask("cont")),
                _ => {
                    vm.machine = None;
                    vm.machine = Some(Machine::start(&self.hosts[host].path(&format!("{}.qmp", vm.name))));
                    vm.is_shut_down = false;
                }
            }
        }
        self.settle();
        self.repeat();
        for made in self.made.clone().into_values() {
            let of = |vm: &Vm| (vm.host, vm.cluster) == (made.host, made.cluster);
            let asker = self.vms.iter().position(of).unwrap();
            let (vms, host) = (&self.vms, &self.hosts[made.host]);
            let asking = vms[asker].asking();
            host.until("a volume is taken away", || {
                let mut nodes = vms.iter().filter(|vm| vm.host == made.host).map(|vm| vm.name.as_str());
                nodes.all(|node| asking.unpublish(&made.id, node).is_ok())
            });
            if !made.is_doubtful {
                let larger = made.bytes + 2 * MIB;
                host.until("a volume is made larger", || {
                    asking.expand(&made.id, larger).is_ok_and(|bytes| bytes >= larger)
                });
                self.assert_kept(&Made { bytes: larger, ..made.clone() });
            }
            host.until("a volume is removed", || asking.delete(&made.id).is_ok());
            assert!(!self.kept(&made).exists(), "{made:?}");
        }
        for lab in &self.hosts {
            for pool in CLASSES {
                let Ok(entries) = std::fs::read_dir(lab.path(&format!("pools/{pool}"))) else { continue };
                let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
                let left: Vec<_> = names.filter(|name| !name.starts_with('.')).collect();
                assert!(left.is_empty(), "{pool}: {left:?}");
            }
        }
    }
}

/// The agent of a VM, at this socket.
fn agent(socket: &Path, name: &str) -> Guest {
    let number = name.strip_prefix("vm").unwrap().parse().unwrap();
    let mut info = info(&uuid(number), "boot-1");
    info.capabilities.push("disks".to_owned());
    Guest::start(socket, Door::Unix, Manner::Good, info)
}

/// Of an image.
fn file_name(id: &str) -> String {
    format!("{}.{}", serial(id), if id.starts_with("qcow.") { "qcow2" } else { "raw" })
}

#[test]
fn whatever_happens_a_volume_has_one_writer_and_none_is_lost() {
    if is_outside() {
        return;
    }
    let said = std::env::var("GUESTLET_STEPS").ok().map(|said| said.parse().unwrap());
    let steps = said.unwrap_or(steps(FEW, MANY));
    println!("GUESTLET_STEPS={steps}");
    let mut world = World::start(seed());
    for step in 0..steps {
        let what = world.step();
        println!("{step}: {what}");
        world.check();
    }
    world.end();
    println!("{:?}", world.successes);
    // A run in which nothing succeeds shows nothing.
    for what in ["create", "publish", "unpublish"] {
        assert!(world.successes.contains_key(what), "no {what} in {steps} steps");
    }
}
