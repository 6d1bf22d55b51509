//! How a session reaches its guest, and what the guest is told of itself.

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

/// How long a stream may take to come about. The guest's kernel answers, not its agent; while a guest boots, a
/// request may be lost, and this is the time lost with it.
const DIAL_DEADLINE: Duration = Duration::from_secs(2);
/// How long an agent may take to show its key, and to let this host half in.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);

/// One VM, as its session holds it.
#[derive(Debug, Clone)]
pub struct Contact {
    /// The VM.
    pub vm: Arc<Vm>,
    /// This run of the host half.
    pub half: Arc<Half>,
    /// Answers what its guest asks of volumes, where there are any.
    pub volumes: Option<Arc<dyn for_guests::Volumes>>,
    /// Answers what its guest asks of its cluster, where anybody does.
    pub cloud: Option<Arc<dyn for_guests::Cloud>>,
    /// Where the VM runs.
    pub topology: watch::Receiver<Told>,
    /// The keys of guests; without them, all speak plain.
    pub trust: Option<Arc<Trust>>,
    /// Its connections are for what people have asked for, of whatever size.
    is_for_streams: bool,
    /// What the guest speaks with its session, if it has one.
    pub speech: Speech,
}

/// A connection with an agent.
pub struct Reached {
    /// Carries the guestlet API.
    pub stream: BoxStream,
    /// Whether the guest was cut off because it sent too much.
    pub gate: Gate,
    /// Who is at its other end.
    pub guest: Proved,
}

/// Who a guest has proved to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Proved {
    /// Nobody: there are no keys.
    Nothing,
    /// The one whose key is pinned.
    Known(PublicKey),
    /// One that was never seen. If there is a token, it has to prove that it has it, before its key is pinned.
    First {
        /// The key.
        key: PublicKey,
        /// What the guest was given.
        token: Option<Token>,
        /// The connection's secret.
        binding: [u8; BINDING],
    },
}

impl Proved {
    /// The key of the guest, if it has one.
    pub fn key(&self) -> Option<PublicKey> {
        match self {
            Self::Nothing => None,
            Self::Known(key) | Self::First { key, .. } => Some(*key),
        }
    }
}

/// What a guest speaks, as far as its session knows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Speech {
    /// Not known, or TLS: that is tried first.
    #[default]
    Secured,
    /// It had no keys when it was last asked.
    Plain,
}

impl Contact {
    /// Reaches `vm` as it says.
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

    /// The same, for connections beside the session, which are not cut because much comes on them.
    #[must_use]
    pub fn for_streams(self) -> Self {
        Self { is_for_streams: true, ..self }
    }

    /// The same, whose guest has a session in which it speaks so.
    #[must_use]
    pub fn speaking(self, speech: Speech) -> Self {
        Self { speech, ..self }
    }

    /// The same, whose guest may ask about its cluster.
    #[must_use]
    pub fn with_cloud(self, cloud: Option<Arc<dyn for_guests::Cloud>>) -> Self {
        Self { cloud, ..self }
    }

    /// Dials its agent, and finds out who is there. A guest whose key is pinned is never spoken to without keys, and neither is one for
    /// which a token waits.
    ///
    /// # Errors
    /// If there is no connection, or not with the guest that is expected.
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
        // A guest with keys knows its host half by its key, from whatever port; one without says so, and an older agent closes the
        // connection. There are fewer privileged ports than there may be guests with keys.
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
            // Whoever answers as this guest without keys has not been given the token.
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
            // It may have been given keys since, and could be reached with them.
            *speech = Speech::Secured;
        }
        let (stream, gate) = dialled.map_err(Loss::from)?;
        Ok(Reached { stream, gate, guest: Proved::Nothing })
    }

    /// Dials its agent. The stream is counted; that of a session is cut when the guest sends too much.
    ///
    /// # Errors
    /// If there is none within the deadline.
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

    /// What the guest is told of itself, if that many volumes may be plugged into it. All of it comes from the VM that
    /// was dialled, none from the guest.
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
