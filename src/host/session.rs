//! Session with the agent of one VM: decides when to dial, and reports the result.
//!
//! ```text
//!                         ┌───────────── wait (backoff) ◀──────────────┐
//!                         ▼                                            │
//!  on, or unknown ──▶ connecting ──AgentReady──▶ connected ──lost──────┤
//!        ▲                │  │                     │  │               │
//!        │                │  └──────refused────────┘  └──reset──▶ connecting, at once
//!        │                │             ▼
//!   runs again            │   refused (30 s, less if it may pass, or until a reset) ──▶ connecting
//!        │               off (from any state)
//!        └───────────── gone
//! ```
//!
//! [`talk`](super::talk) holds the conversation itself. A session is one task. It learns the state of the VM from
//! a watched [`Machine`], and sends [`Report`]s to the fleet.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::backoff::{Backoff, LASTING};
use super::contact::Contact;
use super::conversation::{End, Refusal};
use super::report::{Machine, Notes, Report, Reports};
use super::talk::{Memory, talk};
use super::text;
use super::trust::Trust;
use crate::events::state::Excess;
use crate::wire::proto::v1::PowerState;

/// Delay before a refused guest, or one whose session failed, is dialled again.
pub const REFUSED_WAIT: Duration = Duration::from_secs(30);
/// Session with the guest of one VM.
pub struct Session {
    contact: Contact,
    memory: Memory,
    machine: watch::Receiver<Machine>,
    /// State of the VM that was last acted upon.
    seen: Machine,
    notes: Notes,
    backoff: Backoff,
}

/// Event that makes a session drop its current work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cut {
    Off,
    Reset,
    Excess(Excess),
    /// The VM has started to run. This only cuts a wait short.
    Runs,
}

impl Session {
    /// Creates a session with the guest of `contact`; its reports have the number `session`.
    pub fn new(
        session: u64,
        contact: Contact,
        mut machine: watch::Receiver<Machine>,
        reports: Reports,
    ) -> Self {
        let now = Instant::now();
        let seen = *machine.borrow_and_update();
        let notes = Notes::new(session, reports, now);
        Self { contact, memory: Memory::default(), machine, seen, notes, backoff: Backoff::new(now) }
    }

    /// Keeps the session until the future is dropped, which closes the connection at once.
    #[allow(clippy::manual_async_fn, reason = "an async function has room for its arguments twice")]
    pub fn run(mut self) -> impl Future<Output = ()> + Send {
        // Short-lived futures are boxed, because the session itself is long-lived.
        async move {
            loop {
                Box::pin(self.until_on()).await;
                match self.converse().await {
                    Ok(cut) => Box::pin(self.cut(cut)).await,
                    Err(end) => {
                        let wait = Box::pin(self.ended(end)).await;
                        if let Some(cut) = Box::pin(self.wait(wait)).await {
                            Box::pin(self.cut(cut)).await;
                        }
                    }
                }
            }
        }
    }

    /// Waits while the VM is off.
    async fn until_on(&mut self) {
        self.seen = *self.machine.borrow_and_update();
        if self.seen.power != PowerState::Off {
            return;
        }
        self.notes.send(Report::Gone).await;
        while self.seen.power == PowerState::Off {
            if self.machine.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
            self.seen = *self.machine.borrow_and_update();
        }
        let now = Instant::now();
        self.backoff.restart(now);
        self.notes.starts(now);
        self.notes.send(Report::Connecting(String::new())).await;
    }

    /// Holds a conversation until it ends by itself, or is cut because of the VM.
    async fn converse(&mut self) -> Result<Cut, End> {
        let (mut machine, mut seen) = (self.machine.clone(), self.seen);
        let cut = async {
            loop {
                match next_cut(&mut machine, &mut seen).await {
                    Cut::Runs => {}
                    Cut::Excess(excess) => return Err(Refusal::from(excess).into()),
                    cut => return Ok(cut),
                }
            }
        };
        let ended = tokio::select! {
            biased;
            cut = cut => cut,
            ended = talk(&self.contact, &mut self.memory, &mut self.notes, self.machine.clone()) => match ended {
                Err(end) => Err(end),
            },
        };
        self.seen.excess = self.machine.borrow().excess;
        ended
    }

    /// Handles a conversation that was cut because of the VM.
    async fn cut(&mut self, cut: Cut) {
        let reason = match cut {
            Cut::Off => "the VM is off",
            Cut::Reset => "the guest was reset",
            Cut::Runs => return,
            // The conversation had ended already.
            Cut::Excess(_) => return self.memory.order.forget(),
        };
        self.notes.closed(reason).await;
        if cut == Cut::Reset {
            self.backoff.restart(Instant::now());
            self.notes.send(Report::Connecting(reason.to_owned())).await;
        }
    }

    /// Handles the end of a conversation: reports the reason, and returns how long to wait before the next one.
    async fn ended(&mut self, end: End) -> Duration {
        let reason = text::chain(&end);
        let lasted = self.notes.closed(&reason).await;
        let now = Instant::now();
        if matches!(&end, End::Refused(refusal) if refusal.spoils_the_order()) {
            self.memory.order.forget();
        }
        match end {
            End::Lost(loss) => {
                if lasted.is_some_and(|lasted| lasted >= LASTING) {
                    self.backoff.restart(now);
                }
                if let Some((remedy, is_meant)) = loss.remedy() {
                    let remedy = remedy.to_owned();
                    self.notes.send(Report::NoVsock { reason, remedy, is_meant }).await;
                    // A VM that can be reached later has other properties. To the fleet it is a new one, and gets another
                    // session.
                    return Duration::MAX;
                }
                self.notes.send(Report::Connecting(reason)).await;
                self.backoff.next(now, fastrand::f64())
            }
            End::Refused(refusal) => {
                self.notes.send(Report::Refused(reason)).await;
                if refusal.passes() { self.backoff.next_patient(fastrand::f64()) } else { REFUSED_WAIT }
            }
        }
    }

    async fn wait(&mut self, wait: Duration) -> Option<Cut> {
        tokio::select! {
            biased;
            cut = next_cut(&mut self.machine, &mut self.seen) => Some(cut),
            () = trust_changed(self.contact.trust.as_deref()) => None,
            () = tokio::time::sleep(wait) => None,
        }
    }
}

/// Completes when an administrator has changed trusted keys, after which a refused guest may be accepted.
async fn trust_changed(trust: Option<&Trust>) {
    match trust {
        Some(trust) => trust.changed().await,
        None => std::future::pending().await,
    }
}

/// Returns the next change of the VM that the session has to react to, compared with what it has `seen`.
async fn next_cut(machine: &mut watch::Receiver<Machine>, seen: &mut Machine) -> Cut {
    loop {
        if machine.changed().await.is_err() {
            // The fleet has dropped this VM and ends this task.
            std::future::pending::<()>().await;
        }
        let (before, now) = (*seen, *machine.borrow_and_update());
        *seen = now;
        if now.power == PowerState::Off {
            return Cut::Off;
        }
        if now.resets != before.resets {
            return Cut::Reset;
        }
        if let Some((_, excess)) = now.excess.filter(|_| now.excess != before.excess) {
            return Cut::Excess(excess);
        }
        if now.power == PowerState::Running && before.power != PowerState::Running {
            return Cut::Runs;
        }
    }
}
