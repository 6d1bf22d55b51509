//! Dials the agent of a VM from inside the network namespace of its launcher.
//!
//! ```text
//!  pod's UID ──/proc/*/cgroup──▶ process ──its namespace, on a thread of its own──▶ ns_mode there
//!    ──local──▶ CID 3, else status.VSOCKCID ──▶ socket, bind, connect ──the process is still the same one──▶ stream
//! ```
//!
//! Where contexts are confined to namespaces every guest has CID 3, and where they are not, entering does no harm: no guest
//! is known by its CID. That the process is the launcher's its control group says, which kubelet has named.

use std::any::Any;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use super::processes::Processes;
use super::seen::{Facts, Vsock};
use crate::sys::root::Root;
use crate::transport::BoxStream;
use crate::transport::dial::{Dial, Dialing, Error, Source, Target, VsockDial};

/// The guest's context identifier where the namespace has its own.
const LOCAL_CID: u32 = 3;
/// How the vsock of the reader's network namespace is; missing where kernels know of no such thing.
const MODE: &str = "/proc/sys/net/vsock/ns_mode";

/// Nobody has asked for vsock.
const UNWANTED: &str = "the VM has no vsock device: enable KubeVirt's feature gate VSOCK, set \
                        spec.template.spec.domain.devices.autoattachVSOCK to true in the VirtualMachine, and restart the VM";
/// It was asked for, and is not there.
const MISSING: &str = "the VM asks for a vsock device and KubeVirt gave it none (no status.VSOCKCID): enable KubeVirt's feature \
                       gate VSOCK, and restart the VM";

/// Dials the agent of one VirtualMachineInstance.
#[derive(Debug, Clone)]
pub struct Launcher {
    /// The UID of that.
    instance: String,
    way: Way,
    /// The port of the agent.
    port: u32,
    processes: Arc<Processes>,
}

/// How its agent is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Way {
    /// A hybrid vsock, as the settings say.
    Hybrid(PathBuf),
    /// From inside one of these pods.
    Pods { uids: Vec<String>, cid: u32 },
    /// Not at all, and why.
    None(String),
}

impl Launcher {
    /// A dialer of the VM with these facts on this node. If there is a folder of `sockets`, its agent is behind the one with
    /// the UID of the VirtualMachineInstance in its name.
    pub fn new(
        facts: &Facts,
        node: &str,
        sockets: Option<&PathBuf>,
        port: u32,
        processes: Arc<Processes>,
    ) -> Self {
        let on_node = facts.pods.iter().filter(|(_, on)| on == node);
        let way = match (sockets, &facts.vsock) {
            (Some(sockets), _) => Way::Hybrid(sockets.join(format!("{}.sock", facts.uid))),
            (None, Vsock::Cid(cid)) => {
                Way::Pods { uids: on_node.map(|(uid, _)| uid.clone()).collect(), cid: *cid }
            }
            (None, Vsock::Unwanted) => Way::None(UNWANTED.to_owned()),
            (None, Vsock::Missing) => Way::None(MISSING.to_owned()),
            (None, Vsock::Unreadable(problem)) => Way::None(problem.clone()),
        };
        Self { instance: facts.uid.clone(), way, port, processes }
    }

    async fn reach(&self, source: Source) -> Result<BoxStream, Error> {
        match &self.way {
            Way::Hybrid(path) => Target::Hybrid { path: path.clone(), port: self.port }.dial(source).await,
            Way::Pods { uids, cid } => self.enter(uids, *cid, source).await,
            Way::None(why) => Err(Error::NoWay(why.clone())),
        }
    }

    async fn enter(&self, pods: &[String], cid: u32, source: Source) -> Result<BoxStream, Error> {
        for pod in pods {
            let Some(process) = self.processes.of_pod(pod).await? else { continue };
            let port = self.port;
            let begin = move |root: &Root| VsockDial::begin(seen_cid(root, cid), port, source);
            return self.processes.inside(process, begin).await??.finish().await;
        }
        Err(Error::NotYet(match pods {
            [] => "the VM's VirtualMachineInstance names no launcher pod on this node".to_owned(),
            pods => format!("no process on this node is one of the VM's launcher pod {}", pods.join(" or ")),
        }))
    }
}

/// The guest's context identifier as it is seen in this thread's network namespace.
fn seen_cid(root: &Root, cid: u32) -> u32 {
    if root.line(MODE) == "local" { LOCAL_CID } else { cid }
}

impl fmt::Display for Launcher {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.way {
            Way::Hybrid(path) => write!(formatter, "hybrid:{}:{}", path.display(), self.port),
            Way::Pods { uids, cid } => {
                write!(formatter, "vsock {cid}:{} in pod {}", self.port, uids.join(" or "))
            }
            Way::None(_) => formatter.write_str("no vsock"),
        }
    }
}

impl Dial for Launcher {
    fn dial(&self, source: Source) -> Dialing<'_> {
        Box::pin(self.reach(source))
    }

    fn is_same(&self, other: &dyn Dial) -> bool {
        (other as &dyn Any).downcast_ref::<Self>().is_some_and(|other| {
            (&self.instance, &self.way, self.port) == (&other.instance, &other.way, other.port)
        })
    }
}
