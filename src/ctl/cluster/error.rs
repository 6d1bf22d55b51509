//! Why a cluster could not be asked, and what to do about it.

use kube::config::KubeconfigError;

use super::pods::{Place, SYSTEM};

/// Why.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nothing says where a cluster is.
    #[error(
        "no cluster is configured: name a kubeconfig with --kubeconfig or KUBECONFIG, or run this in a pod \
         with a service account"
    )]
    NoKubeconfig,
    /// A kubeconfig cannot be used.
    #[error("cannot use the kubeconfig {0}: {1}")]
    Kubeconfig(String, Box<KubeconfigError>),
    /// What the kubeconfig says of the user or of TLS cannot be used.
    #[error("cannot use the credentials for the API server {0}: {1}")]
    Credentials(String, String),
    /// Another program has to be run to know who asks.
    #[error("{0} has credentials that a program has to create")]
    NeedsProgram(String),
    /// Nobody answers there.
    #[error("cannot reach the API server {url}: {why}; check its URL, and the network to it")]
    Unreachable {
        /// Its URL.
        url: String,
        /// Why.
        why: String,
    },
    /// It took too long.
    #[error("the API server {0} does not answer in time")]
    Late(String),
    /// It does not know who asks.
    #[error(
        "the API server {0} does not accept these credentials; log in again, or name another context with --context"
    )]
    Unauthorized(String),
    /// Who asks may not.
    #[error("{message}; the verb {verb} on {resource} in {place} is needed: {role}")]
    Forbidden {
        /// What the API server says.
        message: String,
        /// What would be needed.
        verb: &'static str,
        /// On what.
        resource: &'static str,
        /// Where.
        place: String,
        /// The role that has it.
        role: &'static str,
    },
    /// The cluster has no such kind.
    #[error(
        "this cluster has no guests.guestlet.io, so guestlet is not installed in it; install it with: kubectl apply -k packaging/kubernetes/host"
    )]
    NoKind,
    /// There is no such guest.
    #[error("there is no Guest {name:?}{}", similar_words(.similar))]
    UnknownGuest {
        /// Its namespace and name.
        name: String,
        /// Names that are like it.
        similar: Vec<String>,
    },
    /// Nobody has said yet where it runs.
    #[error(
        "the Guest {0:?} does not show which node it runs on: guestlet-host has not written its status yet"
    )]
    NoHost(String),
    /// There is nobody in the guest to ask.
    #[error("{message}; its Guest shows {session}{reason}; see guestctl doctor for what to do")]
    NoSession {
        /// What the host half says.
        message: String,
        /// The session's state.
        session: String,
        /// Why, with what parts it from that.
        reason: String,
    },
    /// A node has no host half.
    #[error(
        "no pod of guestlet-node runs on the node {node}{}; see: kubectl -n {SYSTEM} get pods -o wide -l app.kubernetes.io/name=guestlet-node",
        reason_words(.why)
    )]
    NoPod {
        /// The node.
        node: String,
        /// What it was looked for, if for one guest.
        why: String,
    },
    /// No node has one.
    #[error(
        "no pod of guestlet-node runs on any node; see: kubectl -n {SYSTEM} get daemonset guestlet-node, and whether nodes have the label kubevirt.io/schedulable"
    )]
    NoPods,
    /// A pod cannot be asked now.
    #[error("the pod {pod} on the node {node} {state}; see: kubectl -n {SYSTEM} describe pod {pod}")]
    NotRunning {
        /// Its name.
        pod: String,
        /// Its node.
        node: String,
        /// How it is, such as `is starting (ContainerCreating)`.
        state: String,
    },
    /// There is no controller to ask.
    #[error(
        "no controller leads (Lease guestlet-controller in {SYSTEM}); see: kubectl -n {SYSTEM} get pods -l app.kubernetes.io/name=guestlet-controller"
    )]
    NoLeader,
    /// The program in the pod was not started.
    #[error("cannot run guestctl in the pod {pod} on the node {node}: {message}")]
    NotStarted {
        /// The pod.
        pod: String,
        /// Its node.
        node: String,
        /// What kubelet or its runtime said.
        message: String,
    },
    /// The program in the pod failed.
    #[error("in the pod {pod} on the node {node}: {message}")]
    Inside {
        /// The pod.
        pod: String,
        /// Its node.
        node: String,
        /// What it said.
        message: String,
        /// Its exit code.
        code: i32,
    },
    /// Some nodes have said nothing, and it was said why.
    #[error("{0} of the nodes could not be reached, so something may be missing")]
    Incomplete(usize),
    /// Some node has to be named.
    #[error("{0} is for one node: name it with --node")]
    NeedsNode(&'static str),
    /// The API server said something else.
    #[error("cannot {what}: the API server says: {message}")]
    Refused {
        /// What was tried.
        what: &'static str,
        /// What it said.
        message: String,
    },
}

impl Error {
    /// Of the guestctl in a pod.
    pub(super) fn not_started(place: &Place, message: String) -> Self {
        Self::NotStarted { pod: place.pod.clone(), node: place.node.clone(), message }
    }

    /// Whether the same may get through later: pods are replaced, connections break, and guests move.
    pub fn may_pass(&self) -> bool {
        matches!(
            self,
            Self::Unreachable { .. }
                | Self::Late(_)
                | Self::NoHost(_)
                | Self::NoPod { .. }
                | Self::NotRunning { .. }
        ) || self.is_of_connection()
    }

    /// What ran in a pod, and passed the connection on, has ended.
    pub fn is_of_connection(&self) -> bool {
        matches!(self, Self::NotStarted { .. } | Self::Inside { .. })
    }

    /// The exit code of guestctl, which means the same as on a node: 3 if no host half can be asked, 4 for an unknown VM.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::NoPod { .. }
            | Self::NoPods
            | Self::NotRunning { .. }
            | Self::NoLeader
            | Self::Inside { code: 3, .. } => 3,
            Self::UnknownGuest { .. } => 4,
            _ => 1,
        }
    }
}

/// The innermost cause. What is around it repeats it.
pub fn cause(error: &(dyn std::error::Error + 'static)) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}

fn similar_words(similar: &[String]) -> String {
    match similar {
        [] => "; guestctl ls --all-namespaces lists all of them".to_owned(),
        [one] => format!("; did you mean {one}?"),
        several => format!("; did you mean one of {}?", several.join(", ")),
    }
}

fn reason_words(why: &str) -> String {
    if why.is_empty() { String::new() } else { format!(", where {why} runs") }
}
