//! Dials the agent of a VM from inside the network namespace of its launcher pod.
//!
//! ```text
//!  pod's UID ──/proc/*/cgroup──▶ process ──its namespace, on a separate thread──▶ ns_mode there
//!    ──local──▶ CID 3, else status.VSOCKCID ──▶ socket, bind, connect ──the process is still the same one──▶ stream
//! ```
//!
//! If vsock addresses are local to network namespaces, every guest has CID 3. If they are not, entering the
//! namespace does no harm: the CID is not used to authenticate a guest. The process is known to belong to the
//! launcher by its control group, which kubelet names.

use std::any::Any;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use super::super::seen::{Facts, Vsock};
use super::no_vsock::{self, NoVsock};
use super::processes::Processes;
use crate::sys::root::Root;
use crate::transport::BoxStream;
use crate::transport::dial::{Dial, Dialing, Error, Source, Target, VsockDial};

/// CID of the guest in a namespace with local vsock addresses.
const LOCAL_CID: u32 = 3;
/// File that shows the vsock mode of the reader's network namespace; missing on kernels without such modes.
const MODE: &str = "/proc/sys/net/vsock/ns_mode";

/// Dialer for the agent of one VirtualMachineInstance.
#[derive(Debug, Clone)]
pub struct Launcher {
    /// UID of the VirtualMachineInstance.
    instance: String,
    way: Way,
    /// Vsock port of the agent.
    port: u32,
    processes: Arc<Processes>,
}

/// Route to the VM's agent.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Way {
    /// Through a hybrid vsock socket, as set in the settings.
    Hybrid(PathBuf),
    /// From inside one of these launcher pods.
    Pods { uids: Vec<String>, cid: u32 },
    /// The VM has no vsock device.
    None(NoVsock),
    /// The route cannot be determined; the text is the reason, with the command to investigate.
    Untold(String),
}

impl Launcher {
    /// Creates a dialer for the VM with these facts on this node. If `sockets` is set, the agent is reached through
    /// the socket in that directory whose name contains the UID of the VirtualMachineInstance.
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
            (None, Vsock::Unwanted) => Way::None(NoVsock::unwanted(facts)),
            (None, Vsock::Missing) => Way::None(NoVsock::missing(facts)),
            (None, Vsock::Unreadable(problem)) => Way::Untold(no_vsock::unreadable(facts, problem)),
        };
        Self { instance: facts.uid.clone(), way, port, processes }
    }

    async fn reach(&self, source: Source) -> Result<BoxStream, Error> {
        match &self.way {
            Way::Hybrid(path) => Target::Hybrid { path: path.clone(), port: self.port }.dial(source).await,
            Way::Pods { uids, cid } => self.enter(uids, *cid, source).await,
            Way::None(NoVsock { why, remedy, is_meant }) => {
                Err(Error::NoWay { why: why.clone(), remedy: remedy.clone(), is_meant: *is_meant })
            }
            Way::Untold(why) => Err(Error::NotYet(why.clone())),
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

/// Returns the guest's CID as seen from this thread's network namespace.
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
            Way::Untold(_) => formatter.write_str("unknown"),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(vsock: Vsock) -> Facts {
        let pods = [("aaaa", "n1"), ("bbbb", "n2")].map(|(pod, node)| (pod.to_owned(), node.to_owned()));
        Facts { uid: "u1".into(), vsock, pods: pods.into(), ..Facts::default() }
    }

    fn launcher(facts: &Facts, sockets: Option<&str>) -> Launcher {
        let processes = Arc::new(Processes::new(Root::at("/nowhere")));
        Launcher::new(facts, "n1", sockets.map(PathBuf::from).as_ref(), 970, processes)
    }

    async fn refusal(launcher: &Launcher) -> Error {
        launcher.dial(Source::Privileged).await.err().unwrap()
    }

    #[tokio::test]
    async fn one_without_vsock_cannot_be_reached_as_long_as_it_is_so() {
        for (vsock, words, meant) in [
            (Vsock::Unwanted, "autoattachVSOCK to true", true),
            (Vsock::Missing, "no status.VSOCKCID", false),
        ] {
            let launcher = launcher(&facts(vsock), None);
            let Error::NoWay { why, is_meant, .. } = refusal(&launcher).await else { panic!("{launcher}") };
            assert!(why.contains(words) && is_meant == meant, "{why}");
            assert_eq!(launcher.to_string(), "no vsock");
        }
        // An unreadable state is not an answer: it may become readable later.
        let odd = launcher(&facts(Vsock::Unreadable("it is odd".into())), None);
        let Error::NotYet(why) = refusal(&odd).await else { panic!("{odd}") };
        assert!(why.starts_with("it is odd; see "), "{why}");
        let there = launcher(&facts(Vsock::Unwanted), Some("/s"));
        assert_eq!(there.to_string(), "hybrid:/s/u1.sock:970");
        assert!(matches!(refusal(&there).await, Error::Missing(_)));
    }

    #[tokio::test]
    async fn only_pods_of_this_node_are_entered_and_only_if_they_are_there() {
        let here = launcher(&facts(Vsock::Cid(7)), None);
        assert_eq!(here.to_string(), "vsock 7:970 in pod aaaa");
        assert!(matches!(refusal(&here).await, Error::Io(_)), "there is no /proc");
        let elsewhere = Facts { pods: vec![("bbbb".into(), "n2".into())], ..facts(Vsock::Cid(7)) };
        let Error::NotYet(why) = refusal(&launcher(&elsewhere, None)).await else { panic!() };
        assert!(why.contains("names no launcher pod on this node"), "{why}");
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("proc")).unwrap();
        let processes = Arc::new(Processes::new(Root::at(root.path())));
        let Error::NotYet(why) = refusal(&Launcher { processes, ..here }).await else { panic!() };
        assert_eq!(why, "no process on this node is one of the VM's launcher pod aaaa");
    }

    #[test]
    #[allow(clippy::disallowed_methods)]
    fn a_namespace_of_its_own_has_its_guest_at_one_address() {
        let root = tempfile::tempdir().unwrap();
        let seen = || seen_cid(&Root::at(root.path()), 4711);
        assert_eq!(seen(), 4711, "kernels before namespaces of vsock");
        std::fs::create_dir_all(root.path().join("proc/sys/net/vsock")).unwrap();
        for (mode, cid) in [("global\n", 4711), ("local\n", 3), ("", 4711), ("unheard-of\n", 4711)] {
            std::fs::write(root.path().join("proc/sys/net/vsock/ns_mode"), mode).unwrap();
            assert_eq!(seen(), cid, "{mode}");
        }
    }

    #[test]
    fn another_machine_is_another_way() {
        let one = launcher(&facts(Vsock::Cid(7)), None);
        assert!(one.is_same(&launcher(&facts(Vsock::Cid(7)), None)));
        for other in [
            Facts { uid: "u2".into(), ..facts(Vsock::Cid(7)) },
            facts(Vsock::Cid(8)),
            Facts { pods: vec![("cccc".into(), "n1".into())], ..facts(Vsock::Cid(7)) },
        ] {
            assert!(!one.is_same(&launcher(&other, None)), "{other:?}");
        }
        // Launcher pods on other nodes make no difference.
        let moving = Facts { pods: vec![("aaaa".into(), "n1".into())], ..facts(Vsock::Cid(7)) };
        assert!(one.is_same(&launcher(&moving, None)));
    }
}
