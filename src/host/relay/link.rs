//! Connection of a node to the controller of its cluster.
//!
//! ```text
//!  Lease ──address, CA──▶ join, if there is no certificate ──▶ connect ──▶ attend
//!    ▲                                                                       │
//!    └──────────── wait (backoff) ◀──ends, or another one leads──────────────┘
//! ```
//!
//! The Lease is read when there is no connection, when an answer takes long, and about every 30 s, because a
//! leader that hangs keeps its connections open.
//!
//! A certificate is renewed at about half of its lifetime, over another connection, as soon as no guest waits for
//! an answer.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use rustls::ClientConfig;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::net::TcpStream;
use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::Instant;
use tokio_rustls::TlsConnector;

use super::attend::Guests;
use super::checks::Polls;
use super::{POLLS, Relay, Waiting, Way};
use crate::host::backends::kubevirt::controller::certificates::SERVER_NAME;
use crate::host::backends::kubevirt::controller::lease;
use crate::host::backends::kubevirt::node::Roster;
use crate::host::backends::kubevirt::node::identity::{self, NodeKey};
use crate::host::backoff::{Backoff, LASTING};
use crate::host::fleet::Handle;
use crate::host::half::Half;
use crate::host::text;
use crate::kubernetes::standing::Teller;
use crate::supervise::Scope;
use crate::sys::root::Root;
use crate::sys::tcp;
use crate::transport::callback;
use crate::transport::http2::{self, ORIGIN};
use crate::wire::proto::v1::controller_client::ControllerClient;
use crate::wire::proto::v1::guests_server::GuestsServer;
use crate::wire::proto::v1::{CallbackBounds, JoinRequest};

/// Timeout of each step of connecting.
const DEADLINE: Duration = Duration::from_secs(10);
/// Number of consecutive short-lived connections after which another certificate is requested.
const REFUSED: u32 = 5;
/// Interval at which the node checks whether the controller is still the leader. It is randomized so that nodes do
/// not all check at once.
const LOOK: Duration = Duration::from_secs(30);
/// Shortest time between two such checks, however many calls wait for answers.
const LOOK_AGAIN: Duration = Duration::from_secs(5);
/// Longest time that the renewal of a certificate waits for a moment in which no guest's call is in progress.
const QUIET: Duration = Duration::from_secs(3600);
/// Limit on the concurrent calls of the controller.
const OPEN_CALLS: u32 = 64;
/// Limit on the bytes of one call of the controller.
const MAX_CALL: u32 = 16 * 1024;
/// Limit on the bytes of the controller's answers. The largest is a page of a list of volumes.
const MAX_ANSWER: usize = 4 << 20;

/// Parameters for finding and joining the controller.
#[derive(Debug)]
pub struct Site {
    /// Client configuration for the API server.
    pub cluster: kube::Config,
    /// The namespace of the Lease.
    pub namespace: String,
    /// File with the token that identifies this node.
    pub token: PathBuf,
    /// Fleet, which has the sessions with guests.
    pub fleet: Handle,
    /// VirtualMachineInstances of this node.
    pub roster: Arc<Roster>,
    /// This run of the host half.
    pub half: Arc<Half>,
    /// Reporter of connection problems.
    pub teller: Teller,
}

/// Connection to the controller, which is kept open.
pub struct Link {
    site: Site,
    way: watch::Sender<Way>,
    doubt: Arc<Notify>,
    asking: Waiting,
    /// Tasks of the relay, such as long polls; they end with the link.
    _tasks: Scope,
}

/// Controller that is the leader.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Leader {
    address: String,
    /// CA certificate of the controller, in PEM.
    authority: String,
}

/// Certificate that the CA of a controller has issued to this node.
struct Known {
    authority: String,
    key: NodeKey,
    certificate: CertificateDer<'static>,
    /// Time at which it is to be renewed.
    renewal: Instant,
    /// Number of consecutive short-lived connections.
    failures: u32,
}

impl Known {
    /// Returns the certificate after a connection has ended; `None` if it seems to be refused, because connections
    /// with it end as soon as they are made.
    fn after(self, has_lasted: bool) -> Option<Self> {
        let failures = if has_lasted { 0 } else { self.failures + 1 };
        (failures < REFUSED).then_some(Self { failures, ..self })
    }
}

impl Link {
    /// Creates a link, which has to be run, and a relay that forwards calls over it.
    pub fn new(site: Site) -> (Self, Relay) {
        let (way, told) = watch::channel(None);
        let doubt = Arc::new(Notify::new());
        let asking = Waiting::default();
        let roster = Arc::clone(&site.roster);
        let tasks = Scope::new();
        let relay = Relay {
            way: told,
            roster,
            doubt: Arc::clone(&doubt),
            asking: asking.clone(),
            polls: Arc::new(Semaphore::new(POLLS)),
            checks: Polls::new(tasks.children()),
        };
        (Self { site, way, doubt, asking, _tasks: tasks }, relay)
    }

    /// Keeps the connection until the future is dropped.
    pub async fn run(self) {
        let client = match kube::Client::try_from(self.site.cluster.clone()) {
            Ok(client) => client,
            Err(error) => return self.tell(&text::chain(&error)),
        };
        let mut backoff = Backoff::new(Instant::now());
        let mut known = None;
        loop {
            let mut made = None;
            let why = self.once(&client, &mut known, &mut made).await;
            self.tell(&why);
            let now = Instant::now();
            // Without a connection, nothing can be concluded about the certificate.
            if let Some(made) = made {
                let has_lasted = now - made >= LASTING;
                if has_lasted {
                    backoff.restart(now);
                }
                known = known.and_then(|known: Known| known.after(has_lasted));
            }
            tokio::time::sleep(backoff.next_patient(fastrand::f64())).await;
        }
    }

    fn tell(&self, why: &str) {
        self.site.teller.failed(why);
        drop(self.way.send_replace(None));
    }

    /// Connects once. Returns why the connection ended, and in `made` the time at which it was established, if it was.
    async fn once(
        &self,
        client: &kube::Client,
        known: &mut Option<Known>,
        made: &mut Option<Instant>,
    ) -> String {
        match self.connected(client, known, made).await {
            Ok(over) => over,
            Err(why) => why,
        }
    }

    async fn connected(
        &self,
        client: &kube::Client,
        known: &mut Option<Known>,
        made: &mut Option<Instant>,
    ) -> Result<String, String> {
        let leader = self.leader(client).await?;
        let fits = |known: &Known| known.authority == leader.authority && Instant::now() < known.renewal;
        let known = match known.take().filter(fits) {
            Some(before) => known.insert(before),
            None => known.insert(self.join(&leader).await?),
        };
        let own = Some((&known.key, &known.certificate));
        let config = identity::client_config(&leader.authority, own).map_err(|error| text::chain(&error))?;
        let (calls, mut connection) = connect(&leader, config).await?;
        *made = Some(Instant::now());
        let controller = ControllerClient::with_origin(calls, http::Uri::from_static(ORIGIN))
            .max_decoding_message_size(MAX_ANSWER);
        let mut attending = Box::pin(self.attend(controller.clone()));
        let doubted = self.until_another_leads(client, &leader);
        let mut doubted = std::pin::pin!(doubted);
        // The leader takes this node's stream before any other call. From now on guests can use the connection.
        drop(self.way.send_replace(Some(controller)));
        self.site.teller.well();
        tracing::info!(controller = leader.address, "connected to the controller");
        Ok(tokio::select! {
            why = &mut attending => why,
            ended = connection.ended() => match ended {
                Ok(()) => "the controller has closed the connection".to_owned(),
                Err(error) => format!("the connection to the controller broke: {}", text::chain(&error)),
            },
            who = &mut doubted => format!("{who} is the leader now"),
            () = self.until_renewed(known.renewal) => "this node's certificate is renewed".to_owned(),
        })
    }

    /// Reads the leader and its address from the Lease.
    async fn leader(&self, client: &kube::Client) -> Result<Leader, String> {
        let leases = Api::<Lease>::namespaced(client.clone(), &self.site.namespace);
        let read = tokio::time::timeout(DEADLINE, leases.get_opt(lease::NAME)).await;
        let read =
            read.map_err(|_| "the API server does not report which controller is the leader".to_owned())?;
        let read = read.map_err(|error| {
            format!("the Lease of the controller cannot be read: {}", text::chain(&error))
        })?;
        let found = read.ok_or_else(|| {
            let namespace = &self.site.namespace;
            format!("there is no Lease {namespace}/{}: no controller has started yet", lease::NAME)
        })?;
        let mut told = found.metadata.annotations.unwrap_or_default();
        let mut say = |key| told.remove(key).filter(|value| !value.is_empty());
        match (say(lease::ADDRESS), say(lease::AUTHORITY)) {
            (Some(address), Some(authority)) => Ok(Leader { address, authority }),
            _ => Err(format!(
                "the Lease {}/{} does not have the controller's address",
                self.site.namespace,
                lease::NAME
            )),
        }
    }

    /// Waits until another controller is the leader. The Lease is read at intervals, and when a call has waited for
    /// long.
    async fn until_another_leads(&self, client: &kube::Client, leader: &Leader) -> String {
        loop {
            tokio::time::sleep(LOOK_AGAIN).await;
            // Without calls in progress here there is no doubt, but the controller may still be waiting for this node.
            let patience = LOOK.mul_f64(0.5 + fastrand::f64());
            drop(tokio::time::timeout(patience, self.doubt.notified()).await);
            match self.leader(client).await {
                Ok(now) if now != *leader => return now.address,
                _ => {}
            }
        }
    }

    /// Waits until the certificate is to be renewed and no call over this connection waits for an answer.
    async fn until_renewed(&self, renewal: Instant) {
        tokio::time::sleep_until(renewal).await;
        // A timeout is accepted: with calls in progress all the time there is no better moment.
        drop(tokio::time::timeout(QUIET, self.asking.nobody()).await);
    }

    /// Requests a certificate from the controller.
    async fn join(&self, leader: &Leader) -> Result<Known, String> {
        let begun = Instant::now();
        let token = token(&self.site.token)?;
        let words = |error: identity::IdentityError| text::chain(&error);
        let key = NodeKey::generate().map_err(words)?;
        let config = identity::client_config(&leader.authority, None).map_err(words)?;
        let (calls, mut connection) = connect(leader, config).await?;
        let mut controller = ControllerClient::with_origin(calls, http::Uri::from_static(ORIGIN));
        let request = JoinRequest { token, certificate_signing_request: key.request().map_err(words)? };
        let joined = tokio::select! {
            joined = tokio::time::timeout(DEADLINE, controller.join(request)) => joined,
            _ = connection.ended() => return Err("the controller has closed the connection".to_owned()),
        };
        let joined = joined.map_err(|_| "the controller does not answer".to_owned())?;
        let joined = joined.map_err(|status| {
            format!(
                "the controller refuses to issue a certificate to this node: {}",
                text::clean_words(status.message())
            )
        })?;
        let certificate = CertificateDer::from(joined.into_inner().certificate);
        let lasting = identity::renew_after(&certificate)
            .ok_or_else(|| "the controller sent something that is not a certificate".to_owned())?;
        Ok(Known {
            authority: leader.authority.clone(),
            key,
            certificate,
            // Randomized, so that nodes that have joined at the same time do not renew at the same time.
            renewal: begun + lasting.mul_f64(0.9 + fastrand::f64() / 10.0),
            failures: 0,
        })
    }

    /// Serves the calls of the controller until the stream ends; returns the reason.
    async fn attend(&self, mut controller: ControllerClient<http2::Client>) -> String {
        let guests = Guests { fleet: self.site.fleet.clone(), roster: Arc::clone(&self.site.roster) };
        let bounds = CallbackBounds {
            host_instance_id: self.site.half.host.instance_id.clone(),
            open_calls: OPEN_CALLS,
            request_bytes: MAX_CALL,
        };
        let served = callback::serve(bounds, GuestsServer::new(guests), async |messages| {
            controller.attend(messages).await.map(tonic::Response::into_inner)
        });
        match served.await {
            Ok(()) => "the controller has ended the stream".to_owned(),
            Err(callback::Ended::Status(status)) => text::clean_words(status.message()),
            Err(callback::Ended::Breach(breach)) => format!("the controller violates the protocol: {breach}"),
        }
    }
}

/// Connects to a controller. The returned connection has to be polled.
async fn connect(
    leader: &Leader,
    config: Arc<ClientConfig>,
) -> Result<(http2::Client, http2::Connection), String> {
    let address = &leader.address;
    let connecting = async {
        let stream = TcpStream::connect(address).await?;
        tcp::notice_silence(&stream)?;
        let name = ServerName::try_from(SERVER_NAME).map_err(std::io::Error::other)?;
        TlsConnector::from(config).connect(name, stream).await
    };
    let stream = tokio::time::timeout(DEADLINE, connecting).await;
    let stream = stream.map_err(|_| format!("the controller at {address} does not answer"))?;
    let stream = stream.map_err(|error| format!("cannot connect to the controller at {address}: {error}"))?;
    let connected = http2::connect(stream).await;
    connected.map_err(|error| format!("cannot connect to the controller at {address}: {error}"))
}

/// Reads the token from its file each time, because it is replaced now and then.
fn token(file: &Path) -> Result<String, String> {
    let read = Root::default().read(&file.to_string_lossy());
    let token = read.map_err(|error| format!("the token {} cannot be read: {error}", file.display()))?;
    Ok(String::from_utf8_lossy(&token).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_is_given_up_when_connections_do_not_last_with_it() {
        let known = || Known {
            authority: String::new(),
            key: NodeKey::generate().unwrap(),
            certificate: CertificateDer::from(Vec::new()),
            renewal: Instant::now(),
            failures: 0,
        };
        let refused = (1..REFUSED).try_fold(known(), |known, _| known.after(false)).unwrap();
        assert!(refused.after(false).is_none());
        // One that lasts says that it was not refused.
        let lasted = (1..REFUSED).try_fold(known(), |known, _| known.after(false)).unwrap().after(true);
        assert!(lasted.unwrap().after(false).is_some());
    }
}
