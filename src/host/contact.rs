//! Contact with the guest of a session: how to reach it, and the identity that the guest is given.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::watch;

use super::backends::Vm;
use super::conversation::{End, Loss, Refusal};
use super::for_guests;
use super::half::Half;
use super::metered::{Gate, Metered};
use super::paced::Paced;
use super::place::Told;
use super::trust::{self, Trust, Verdict};
use crate::transport::BoxStream;
use crate::transport::dial::{self, Source};
use crate::trust::enrollment::Token;
use crate::trust::host::{self as handshake, Failure};
use crate::trust::key::PublicKey;
use crate::trust::tls::BINDING;
use crate::wire::proto::v1::WhoAmIResponse;

/// Timeout for opening a stream. The guest's kernel accepts it, not its agent. A request may be lost while a guest
/// boots, and then this much time is lost with it.
const DIAL_DEADLINE: Duration = Duration::from_secs(2);
/// Timeout for the handshake, in which the agent shows its key and accepts this host half.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);

/// VM as its session sees it: everything that is needed to reach its guest.
#[derive(Debug, Clone)]
pub struct Contact {
    /// VM whose guest is contacted.
    pub vm: Arc<Vm>,
    /// This run of the host half.
    pub half: Arc<Half>,
    /// Handler of the guest's calls about volumes, where there are volumes.
    pub volumes: Option<Arc<dyn for_guests::Volumes>>,
    /// Handler of the guest's calls about its cluster, where there is one.
    pub cloud: Option<Arc<dyn for_guests::Cloud>>,
    /// Topology of the VM: where it runs.
    pub topology: watch::Receiver<Told>,
    /// Keys of guests. Without them, all connections are plain.
    pub trust: Option<Arc<Trust>>,
    /// True for connections that carry streams which users have requested. Their size is not limited.
    is_for_streams: bool,
    /// Speech of the guest in its session, if it has one.
    pub speech: Speech,
}

/// Connection to an agent.
pub struct Reached {
    /// Stream that carries the guestlet API.
    pub stream: BoxStream,
    /// Gate that reports whether the guest was cut off because it sent too much.
    pub gate: Gate,
    /// Identity that the guest has proved.
    pub guest: Proved,
}

/// Identity that a guest has proved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Proved {
    /// No identity, because the connection is plain.
    Nothing,
    /// Guest whose key is pinned.
    Known(PublicKey),
    /// Guest at its first contact. If there is a token, the guest has to prove that it has it before its key is
    /// pinned.
    First {
        /// Public key that it has shown.
        key: PublicKey,
        /// Token that the guest was given, if one was made for it.
        token: Option<Token>,
        /// Secret of the TLS connection, to which the proof of the token is bound.
        binding: [u8; BINDING],
    },
}

impl Proved {
    /// Returns the key of the guest, if it has one.
    pub fn key(&self) -> Option<PublicKey> {
        match self {
            Self::Nothing => None,
            Self::Known(key) | Self::First { key, .. } => Some(*key),
        }
    }
}

/// Speech of a guest, TLS or plain, as far as its session knows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Speech {
    /// TLS, or not known yet: TLS is tried first.
    #[default]
    Secured,
    /// The guest had no keys when it was last contacted.
    Plain,
}

impl Contact {
    /// Creates the contact of `vm`.
    pub fn new(
        vm: Arc<Vm>,
        half: Arc<Half>,
        volumes: Option<Arc<dyn for_guests::Volumes>>,
        topology: watch::Receiver<Told>,
        trust: Option<Arc<Trust>>,
    ) -> Self {
        Self {
            vm,
            half,
            volumes,
            cloud: None,
            topology,
            trust,
            is_for_streams: false,
            speech: Speech::Secured,
        }
    }

    /// Makes this a contact for streams beside the session, which are not cut for the amount of their data.
    #[must_use]
    pub fn for_streams(self) -> Self {
        Self { is_for_streams: true, ..self }
    }

    /// Sets the speech that the guest uses in its session.
    #[must_use]
    pub fn speaking(self, speech: Speech) -> Self {
        Self { speech, ..self }
    }

    /// Sets the handler of the guest's calls about its cluster.
    #[must_use]
    pub fn with_cloud(self, cloud: Option<Arc<dyn for_guests::Cloud>>) -> Self {
        Self { cloud, ..self }
    }

    /// Dials the guest's agent and determines its identity. A guest whose key is pinned, or for which a token waits,
    /// is never contacted without keys.
    ///
    /// # Errors
    /// If there is no connection, or not with the expected guest.
    pub async fn reach(&self, speech: &mut Speech) -> Result<Reached, End> {
        let Some(trust) = &self.trust else { return self.plain(speech).await };
        let trust::Record { pin, token, unreadable, .. } = trust.record(&self.vm.ids.lasting);
        if let Some(problem) = unreadable {
            return Err(Refusal::from(trust::Refusal::from(trust::Error::Unreadable(problem))).into());
        }
        let is_expected_plain = pin.is_none() && token.is_none();
        if is_expected_plain && *speech == Speech::Plain {
            return self.plain(speech).await;
        }
        // A guest with keys recognizes its host half by the key, whatever port it comes from. A guest without keys says
        // so, and an older agent closes the connection. Privileged ports are avoided because there are fewer of them than
        // there may be guests.
        let (stream, gate) = self.dial(Source::Any).await.map_err(Loss::from)?;
        let shown = trust.shown().await;
        let shaken = tokio::time::timeout(HANDSHAKE_DEADLINE, handshake::connect(stream, &shown));
        let failure = match shaken.await {
            Ok(Ok(secured)) => {
                let guest = match trust.judge(&self.vm, secured.key).await.map_err(Refusal::from)? {
                    Verdict::First(token) => {
                        Proved::First { key: secured.key, token, binding: secured.binding }
                    }
                    Verdict::Known | Verdict::Next | Verdict::Previous => Proved::Known(secured.key),
                };
                return Ok(Reached { stream: secured.stream, gate, guest });
            }
            Ok(Err(failure)) => failure,
            Err(_) => return Err(Loss::Unanswered.into()),
        };
        if let Some(excess) = gate.shut() {
            return Err(Refusal::from(excess).into());
        }
        let vm = self.vm.name.clone();
        match (failure, pin) {
            // An agent that answers without keys has not been given the token.
            (Failure::Plain | Failure::Closed, None) if token.is_some() => {
                Err(Refusal::from(trust::Refusal::TokenWaits { vm }).into())
            }
            (Failure::Plain | Failure::Closed, None) => {
                *speech = Speech::Plain;
                self.plain(speech).await
            }
            (Failure::Plain, Some(pin)) => {
                Err(Refusal::from(trust::Refusal::Downgraded { vm, expected: pin.key.fingerprint() }).into())
            }
            (Failure::Unknown, _) => {
                Err(Refusal::from(trust::Refusal::Stranger { vm, own: shown.key.fingerprint() }).into())
            }
            (Failure::Certificate(problem), _) => {
                Err(Refusal::from(trust::Refusal::Certificate(problem)).into())
            }
            (failure, _) => Err(Loss::Handshake(failure).into()),
        }
    }

    async fn plain(&self, speech: &mut Speech) -> Result<Reached, End> {
        let dialled = self.dial(Source::Privileged).await;
        if let Err(dial::Error::NoPortLeft | dial::Error::Unprivileged) = dialled {
            // The guest may have been given keys since. With keys it can be reached without a privileged port.
            *speech = Speech::Secured;
        }
        let (stream, gate) = dialled.map_err(Loss::from)?;
        Ok(Reached { stream, gate, guest: Proved::Nothing })
    }

    /// Dials the guest's agent. The bytes of the stream are counted. The stream of a session is cut if the guest sends
    /// too much.
    ///
    /// # Errors
    /// If no connection is established within the deadline.
    async fn dial(&self, source: Source) -> Result<(BoxStream, Gate), dial::Error> {
        let metrics = &self.half.metrics;
        metrics.dials.fetch_add(1, Ordering::Relaxed);
        let stream = dial::within(&*self.vm.dial, source, DIAL_DEADLINE).await.inspect_err(|_| {
            metrics.dial_failures.fetch_add(1, Ordering::Relaxed);
        })?;
        let half = Arc::clone(&self.half);
        if self.is_for_streams {
            return Ok((Box::new(Paced::new(stream, half)), Gate::default()));
        }
        let (stream, gate) = Metered::new(stream, half, &self.vm.limits);
        Ok((Box::new(stream), gate))
    }

    /// Returns the identity that the guest is given, with the number of volumes that can be attached to it. All of it
    /// comes from the VM that was dialled, and none from the guest.
    pub fn identity(&self, max_volumes: u32) -> WhoAmIResponse {
        WhoAmIResponse {
            host: Some(self.half.host.clone()),
            vm_name: self.vm.name.clone(),
            namespace: String::new(),
            vm_uid: self.vm.ids.lasting.clone(),
            cluster: self.vm.cluster.clone(),
            provider_id: self.vm.ids.provider.clone(),
            max_volumes,
        }
    }
}
