//! What guests ask of their cluster: its VMs, and load balancers, with pools in the settings and records on the disk.

use std::collections::HashMap;
use std::path::Path;
use std::time::Instant;

use guestlet::transport::callback::Caller;
use guestlet::transport::http2;
use guestlet::wire::proto::v1::cloud_client::CloudClient;
use guestlet::wire::proto::v1::load_balancer::State;
use guestlet::wire::proto::v1::{self, EnsureLoadBalancerRequest, LoadBalancer, ServiceReference};
use tonic::{Code, Status};

use crate::csi::{refused, wait};
use crate::guest::{Door, Guest, Manner, info};
use crate::lab::{DEADLINE, Lab, text, uuid};

mod balancers;
mod checks;
mod crash;
mod instances;
mod leavings;
mod liars;
mod network;
mod people;
mod wires;

/// A VM's name, its number and its cluster.
type Vm = (&'static str, u8, &'static str);

/// Two VMs of one cluster, and one of another.
const USUAL: [Vm; 3] = [("a", 1, "dev"), ("b", 2, "dev"), ("c", 3, "prod")];
/// Four addresses for everybody.
const SMALL: &str = "[[address-pool]]\nname = 'small'\nranges = ['192.0.2.1-192.0.2.4']";

/// A machine with VMs whose agents are connected.
struct Machines {
    lab: Lab,
    guests: HashMap<String, Guest>,
}

fn start_guest(lab: &Lab, name: &str, number: u8) -> Guest {
    let addresses = [format!("10.77.0.{number}/24"), format!("fd00:77::{number}/64")];
    start_guest_at(lab, name, number, &addresses)
}

/// One that tells these addresses, whatever it has.
fn start_guest_at(lab: &Lab, name: &str, number: u8, addresses: &[String]) -> Guest {
    let mut info = info(&uuid(number), "boot-1");
    info.capabilities.push("health-checks".to_owned());
    let interface = v1::NetworkInterface {
        name: "eth0".into(),
        hardware_address: hardware(number),
        running: true,
        addresses: addresses.to_vec(),
    };
    let state = v1::GuestState {
        interfaces: vec![interface],
        node: Some(v1::Node { name: format!("node-{name}"), ..v1::Node::default() }),
        ..v1::GuestState::default()
    };
    Guest::start_in(&lab.path(&format!("{name}.sock")), Door::Unix, Manner::Good, info, state)
}

/// A daemon with these VMs and settings, and all agents connected.
fn started(vms: &[Vm], settings: &str) -> Machines {
    begun(vms, settings, |_| String::new())
}

/// The same where the host knows the hardware addresses of its VMs.
fn forwarding(vms: &[Vm], settings: &str) -> Machines {
    begun(vms, settings, |number| format!("networks = {{ '{}' = 'nat' }}", hardware(number)))
}

fn hardware(number: u8) -> String {
    format!("52:54:00:00:00:{number:02x}")
}

fn begun(vms: &[Vm], settings: &str, more: impl Fn(u8) -> String) -> Machines {
    let mut lab = Lab::new();
    let records = format!("load-balancers.state-dir = '{}'", text(&lab.path("balancers")));
    lab = lab.set(&records).set(settings);
    let mut guests = HashMap::new();
    for (name, number, cluster) in vms {
        lab = lab.vm(name, *number, &rest(name, cluster, &more(*number)));
        guests.insert((*name).to_owned(), start_guest(&lab, name, *number));
    }
    let machines = Machines { lab: lab.start(), guests };
    machines.until_connected();
    machines
}

fn rest(name: &str, cluster: &str, more: &str) -> String {
    format!("unix-socket = '@{name}.sock'\ncluster = '{cluster}'\n{more}")
}

impl Machines {
    fn until_connected(&self) {
        for name in self.guests.keys() {
            self.lab.until_vm(name, |vm| vm["callback"] == "open");
        }
    }

    fn of(&self, vm: &str) -> Asking {
        Asking(self.guests[vm].client())
    }

    /// Kills the daemon and starts it again.
    fn restart(&mut self) {
        self.lab.kill();
        self.lab.again();
        self.until_connected();
    }

    /// The records on the disk.
    fn files(&self) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.lab.path("balancers")) else { return Vec::new() };
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| Path::new(name).extension().is_some_and(|end| end == "json")).collect()
    }

    /// The records of load balancers that are not given back.
    fn kept(&self) -> usize {
        let is_kept = |name: &String| {
            let text = std::fs::read_to_string(self.lab.path("balancers").join(name)).unwrap();
            text.contains("\"stage\": \"kept\"")
        };
        self.files().iter().filter(|name| is_kept(name)).count()
    }
}

/// A guest's end of the callback, as it was when this was made.
#[derive(Clone)]
struct Asking(Caller);

macro_rules! methods {
    ($($name:ident: $request:ident => $response:ident;)*) => {
        impl Asking {
            $(#[allow(dead_code, reason = "not every test makes every call")]
            fn $name(&self, request: v1::$request) -> Result<v1::$response, Status> {
                let mut client = self.client();
                wait(async move { client.$name(request).await.map(tonic::Response::into_inner) })
            })*
        }
    };
}

each_cloud_call!(methods);

fn service(name: &str) -> ServiceReference {
    ServiceReference { namespace: "shop".into(), name: name.into(), uid: format!("uid-{name}") }
}

fn tcp(port: u32, node_port: u32) -> v1::ServicePort {
    v1::ServicePort { name: format!("p{port}"), protocol: "TCP".into(), port, node_port }
}

/// What a Service of one TCP port asks for.
fn wanted(name: &str) -> EnsureLoadBalancerRequest {
    EnsureLoadBalancerRequest {
        service: Some(service(name)),
        families: vec![v1::IpFamily::Ipv4.into()],
        ports: vec![tcp(80, 30080)],
        announcing: v1::Announcing::KubeVip.into(),
        ..EnsureLoadBalancerRequest::default()
    }
}

impl Asking {
    fn client(&self) -> CloudClient<Caller> {
        CloudClient::with_origin(self.0.clone(), http::Uri::from_static(http2::ORIGIN))
    }

    fn ensure(&self, request: EnsureLoadBalancerRequest) -> Result<LoadBalancer, Status> {
        self.ensure_load_balancer(request).map(|answer| answer.load_balancer.unwrap())
    }

    /// The only address that a Service has.
    fn address(&self, request: EnsureLoadBalancerRequest) -> String {
        let balancer = self.ensure(request).unwrap();
        assert_eq!((balancer.state(), balancer.addresses.len()), (State::Ready, 1), "{balancer:?}");
        balancer.addresses[0].address.clone()
    }

    /// Why a Service does not have what it asks for.
    fn failure(&self, request: EnsureLoadBalancerRequest) -> String {
        let balancer = self.ensure(request).unwrap();
        assert_eq!(balancer.state(), State::Failed, "{balancer:?}");
        assert!(!balancer.message.is_empty());
        balancer.reason
    }

    fn release(&self, name: &str) -> Result<(), Status> {
        let request = v1::ReleaseLoadBalancerRequest { service: Some(service(name)) };
        self.release_load_balancer(request).map(|answer| assert!(answer.released))
    }

    fn list(&self) -> Vec<LoadBalancer> {
        self.list_load_balancers(v1::ListLoadBalancersRequest {}).unwrap().load_balancers
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.list().into_iter().map(|one| one.service.unwrap().name).collect();
        names.sort();
        names
    }

    /// What has become of a Service, as soon as it is as wanted.
    fn until(&self, lab: &Lab, name: &str, wanted: impl Fn(&LoadBalancer) -> bool) -> LoadBalancer {
        let end = Instant::now() + DEADLINE;
        loop {
            let found = self.list().into_iter().find(|one| one.service.as_ref().unwrap().name == name);
            if let Some(found) = found.clone().filter(&wanted) {
                return found;
            }
            assert!(Instant::now() < end, "never: {found:#?}\n{}", lab.log());
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

#[test]
fn without_pools_there_are_no_load_balancers() {
    let vms = started(&USUAL[..1], "");
    refused(vms.of("a").ensure(wanted("web")), Code::Unimplemented, "have no load balancers");
    assert!(!vms.lab.path("balancers").exists());
}
