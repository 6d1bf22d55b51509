//! Errors of requests to a cluster, with advice about each.

use kube::config::KubeconfigError;

use super::pods::{Place, SYSTEM};

/// Reasons why a request to a cluster failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No configuration names a cluster.
    #[error(
        "no cluster is configured: name a kubeconfig with --kubeconfig or KUBECONFIG, or run this in a pod \
         with a service account"
    )]
    NoKubeconfig,
    /// The kubeconfig cannot be used.
    #[error("cannot use the kubeconfig {0}: {1}")]
    Kubeconfig(String, Box<KubeconfigError>),
    /// The user or TLS settings of the kubeconfig cannot be used.
    #[error("cannot use the credentials for the API server {0}: {1}")]
    Credentials(String, String),
    /// A credential plugin would have to be run.
    #[error("{0} has credentials that another program creates")]
    NeedsProgram(String),
    /// The API server cannot be reached.
    #[error("cannot reach the API server {url}: {why}; check its URL, and the network to it")]
    Unreachable {
        /// URL of the API server.
        url: String,
        /// Reason, for people.
        why: String,
    },
    /// The API server did not answer in time.
    #[error("the API server {0} does not answer in time")]
    Late(String),
    /// The API server does not accept the credentials.
    #[error(
        "the API server {0} does not accept these credentials; log in again, or name another context with --context"
    )]
    Unauthorized(String),
    /// The user lacks a permission.
    #[error("{message}; the verb {verb} on {resource} in {place} is needed: {role}")]
    Forbidden {
        /// Message of the API server.
        message: String,
        /// Required verb.
        verb: &'static str,
        /// Resource that the verb is required on.
        resource: &'static str,
        /// Namespace of the resource.
        place: String,
        /// Role with this permission.
        role: &'static str,
    },
    /// The cluster does not have the kind Guest.
    #[error(
        "this cluster has no guests.guestlet.io, so guestlet is not installed in it; install it with: kubectl apply -k packaging/kubernetes/host"
    )]
    NoKind,
    /// The Guest does not exist.
    #[error("there is no Guest {name:?}{}", similar_words(.similar))]
    UnknownGuest {
        /// Namespace and name of the guest.
        name: String,
        /// Similar names of existing guests.
        similar: Vec<String>,
    },
    /// No node has reported yet that the guest runs there.
    #[error(
        "the Guest {0:?} does not show which node it runs on: guestlet-host has not written its status yet"
    )]
    NoHost(String),
    /// The host half has no session with the guest.
    #[error("{message}; its Guest shows {session}{reason}; see guestctl doctor for what to do")]
    NoSession {
        /// Message of the host half.
        message: String,
        /// State of the session.
        session: String,
        /// Reason of that state, with a separator before it; may be empty.
        reason: String,
    },
    /// The node has no host half.
    #[error(
        "no pod of guestlet-node runs on the node {node}{}; see: kubectl -n {SYSTEM} get pods -o wide -l app.kubernetes.io/name=guestlet-node",
        reason_words(.why)
    )]
    NoPod {
        /// Name of the node.
        node: String,
        /// Reason why the node is needed, if the request is about one guest.
        why: String,
    },
    /// No node has a host half.
    #[error(
        "no pod of guestlet-node runs on any node; see: kubectl -n {SYSTEM} get daemonset guestlet-node, and whether nodes have the label kubevirt.io/schedulable"
    )]
    NoPods,
    /// A pod is not running.
    #[error("the pod {pod} on the node {node} {state}; see: kubectl -n {SYSTEM} describe pod {pod}")]
    NotRunning {
        /// Name of the pod.
        pod: String,
        /// Node of the pod.
        node: String,
        /// State of the pod, such as `is starting (ContainerCreating)`.
        state: String,
    },
    /// No controller holds the Lease.
    #[error(
        "no controller leads (Lease guestlet-controller in {SYSTEM}); see: kubectl -n {SYSTEM} get pods -l app.kubernetes.io/name=guestlet-controller"
    )]
    NoLeader,
    /// The program in the pod could not be started.
    #[error("cannot run guestctl in the pod {pod} on the node {node}: {message}")]
    NotStarted {
        /// Name of the pod.
        pod: String,
        /// Node of the pod.
        node: String,
        /// Message of kubelet or of the container runtime.
        message: String,
    },
    /// The program in the pod failed.
    #[error("in the pod {pod} on the node {node}: {message}")]
    Inside {
        /// Name of the pod.
        pod: String,
        /// Node of the pod.
        node: String,
        /// Message of the program.
        message: String,
        /// Exit code of the program.
        code: i32,
    },
    /// Some nodes did not answer, which was reported.
    #[error("{0} of the nodes could not be reached, so something may be missing")]
    Incomplete(usize),
    /// The verb needs a named node.
    #[error("{0} is for one node: name it with --node")]
    NeedsNode(&'static str),
    /// The API server gave another error.
    #[error("cannot {what}: the API server says: {message}")]
    Refused {
        /// Operation that was refused.
        what: &'static str,
        /// Message of the API server.
        message: String,
    },
}

impl Error {
    /// Returns the error for a guestctl in a pod that could not be started.
    pub(super) fn not_started(place: &Place, message: String) -> Self {
        Self::NotStarted { pod: place.pod.clone(), node: place.node.clone(), message }
    }

    /// Returns whether a retry may succeed later: pods are replaced, connections break, and guests move.
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

    /// Returns whether the program in a pod that relayed the connection has ended.
    pub fn is_of_connection(&self) -> bool {
        matches!(self, Self::NotStarted { .. } | Self::Inside { .. })
    }

    /// Returns the exit code of guestctl, with the same meaning as on a node: 3 if no host half can be reached, 4
    /// for an unknown VM.
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

/// Returns the innermost cause. The errors around it repeat it.
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
