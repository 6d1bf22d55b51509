//! `guestctl shutdown`, `reboot` and `suspend`.
//!
//! An accepted request, or a lost session, does not prove that a guest is down. With `--wait` the command
//! ends only when something else proves it:
//!
//! | wish | shown by |
//! |---|---|
//! | shut down | the hypervisor: QEMU has ended, or says so; on KubeVirt the phase of the VM's instance |
//! | suspend to memory | the hypervisor: the guest has suspended itself (QEMU's event `SUSPEND`, which `STOP` is not) |
//! | suspend to a disk | the hypervisor: the guest has suspended itself (`SUSPEND_DISK`), and the VM is off then |
//! | reboot | the guest, in a new session: it runs another boot than before |
//!
//! The proof may arrive before the guest's answer, which may be a refusal; the answer is then awaited for a
//! short time. A guest that is suspended or off cannot send it.

use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;
use tonic::{Code, Status, Streaming};

use super::{SOON, answer};
use crate::ctl::client::Daemon;
use crate::ctl::print::Printer;
use crate::ctl::watch::{self, Filter};
use crate::ctl::{Error, words};
use crate::wire::proto::v1::virtual_machine_event::Kind;
use crate::wire::proto::v1::{
    GetVirtualMachineRequest, PowerState, ShutdownMode, ShutdownRequest, SuspendToBothRequest,
    SuspendToDiskRequest, SuspendToMemoryRequest, VirtualMachine, VirtualMachineEvent,
};

/// Time for the guest's answer after an event has shown that the request was carried out.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// Requested state of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal {
    /// The VM is off.
    Off,
    /// The system has stopped while the VM stays on. No event shows this.
    Halted,
    /// The guest has booted again.
    Rebooted,
    /// The guest is suspended to memory.
    Suspended,
    /// The guest is suspended to a disk, and the VM is off.
    SuspendedToDisk,
    /// The guest is suspended to memory, and to a disk as well.
    SuspendedToBoth,
}

/// Options of the request.
#[derive(Debug, Clone, Copy)]
pub struct Wish {
    /// Requested state of the guest.
    pub goal: Goal,
    /// True to wait until the goal is observed.
    pub wait: bool,
    /// Longest wait.
    pub within: Duration,
}

/// Result for programs.
#[derive(Debug, Serialize)]
struct Outcome {
    /// True if the guest has accepted the request.
    accepted: bool,
    /// True if the state was awaited and observed.
    seen: bool,
}

/// Meaning of an event for a goal.
#[derive(Debug, PartialEq, Eq)]
enum Shown {
    /// The goal is reached.
    Reached,
    /// The goal was missed, and will not be reached.
    Missed(&'static str),
    /// No information about the goal.
    Nothing,
}

impl Goal {
    /// Returns the name of the operation.
    fn verb(self) -> &'static str {
        match self {
            Self::Off => "shutdown",
            Self::Halted => "halt",
            Self::Rebooted => "reboot",
            Self::Suspended | Self::SuspendedToDisk | Self::SuspendedToBoth => "suspension",
        }
    }

    /// Describes the state in which the goal is reached.
    fn words(self) -> &'static str {
        match self {
            Self::Off => "is off",
            Self::Halted => "is halted",
            Self::Rebooted => "has rebooted",
            Self::Suspended | Self::SuspendedToBoth => "is suspended",
            Self::SuspendedToDisk => "is suspended to its disk, and off",
        }
    }

    /// Returns whether the guest is to suspend itself. Not every hypervisor reports this.
    fn is_suspension(self) -> bool {
        matches!(self, Self::Suspended | Self::SuspendedToDisk | Self::SuspendedToBoth)
    }

    /// Returns whether only the hypervisor can report that the goal is reached.
    fn needs_hypervisor(self) -> bool {
        self != Self::Rebooted
    }

    /// Returns the meaning of an event for this goal. `boot_before` is the boot ID of the guest before the
    /// request; `is_on_disk` is true if it has suspended itself to its disk since.
    fn shown_by(self, event: &VirtualMachineEvent, boot_before: &str, is_on_disk: bool) -> Shown {
        let is_other = |boot: &str| !boot.is_empty() && boot != boot_before;
        match (&event.kind, self) {
            (Some(Kind::SessionOpened(opened)), goal) => {
                let boot = opened.guest.as_ref().map_or("", |guest| &guest.boot_id);
                match goal {
                    _ if !is_other(boot) => Shown::Nothing,
                    Self::Rebooted => Shown::Reached,
                    _ => Shown::Missed("the guest has rebooted instead"),
                }
            }
            (Some(Kind::PowerChanged(changed)), goal) => match (changed.power(), goal) {
                (PowerState::Off, Self::Off) => Shown::Reached,
                (PowerState::Off, Self::SuspendedToDisk) if is_on_disk => Shown::Reached,
                (PowerState::Off, Self::SuspendedToDisk) => Shown::Missed(
                    "the VM is off, but the hypervisor has not reported that the guest suspended itself to \
                     its disk",
                ),
                (PowerState::Off, Self::Suspended | Self::SuspendedToBoth) => {
                    Shown::Missed("the VM is off instead")
                }
                // A VM may also be paused by others, or because its disk cannot be written.
                _ => Shown::Nothing,
            },
            (Some(Kind::GuestSuspended(to)), Self::Suspended | Self::SuspendedToBoth) if !to.to_disk => {
                Shown::Reached
            }
            _ => Shown::Nothing,
        }
    }
}

/// Sends the request to the guest and, if that is requested, waits until the goal is observed.
///
/// # Errors
/// Fails if the guest does not accept the request, or the goal is not observed in time.
pub async fn run(daemon: &Daemon, printer: &mut Printer, name: String, wish: Wish) -> Result<(), Error> {
    let end = Instant::now() + wish.within;
    if !wish.wait {
        ask(daemon, &name, wish.goal, wish.within).await?;
        let words = format!("{name}: the guest has accepted the {}\n", wish.goal.verb());
        return Ok(printer.value(&Outcome { accepted: true, seen: false }, || words)?);
    }
    let before = vm(daemon, &name).await?;
    can_be_seen(&before, wish.goal)?;
    let filter = Filter { name: Some(name.clone()), ..Filter::default() };
    let mut events = watch::open(daemon.admin(), &filter).await?;
    let boot = before.guest.as_ref().map(|guest| guest.boot_id.clone()).unwrap_or_default();
    let mut asking = Box::pin(ask(daemon, &name, wish.goal, wish.within));
    let mut accepted = None;
    let mut is_on_disk = false;
    // Time at which the goal was observed.
    let mut reached = None;
    while reached.is_none() || accepted.is_none() {
        let answered_by = reached.map(|reached| reached + LAST_WORDS);
        tokio::select! {
            asked = &mut asking, if accepted.is_none() => {
                accepted = Some(said(asked)?);
            }
            event = next(&mut events, &name), if reached.is_none() => {
                let event = event?;
                match wish.goal.shown_by(&event, &boot, is_on_disk) {
                    Shown::Reached => reached = Some(Instant::now()),
                    Shown::Missed(why) => return Err(Error::Unmet(format!("{name}: {why}"))),
                    Shown::Nothing => {}
                }
                is_on_disk |= matches!(&event.kind, Some(Kind::GuestSuspended(to)) if to.to_disk);
            }
            () = tokio::time::sleep_until(answered_by.unwrap_or(end)), if answered_by.is_some() => break,
            () = tokio::time::sleep_until(end), if reached.is_none() => {
                return Err(Error::Unmet(known(daemon, &name, wish, accepted).await));
            }
        }
    }
    let words = format!("{name} {}\n", wish.goal.words());
    let accepted = accepted == Some(true);
    Ok(printer.value(&Outcome { accepted, seen: true }, || words)?)
}

async fn vm(daemon: &Daemon, name: &str) -> Result<VirtualMachine, Error> {
    let request = GetVirtualMachineRequest { name: name.to_owned() };
    answer(daemon.admin().get_virtual_machine(request), name, SOON).await
}

/// Checks, before anything is done to the guest, that the goal can be observed.
fn can_be_seen(vm: &VirtualMachine, goal: Goal) -> Result<(), Error> {
    let name = &vm.name;
    if goal == Goal::Halted {
        let words = format!("it cannot be seen whether {name} is halted: leave out --wait");
        return Err(Error::Unmet(words));
    }
    if goal == Goal::Rebooted && vm.guest.as_ref().is_none_or(|guest| guest.boot_id.is_empty()) {
        let words = format!(
            "the guest of {name} does not report its boot ID, so a reboot cannot be seen: leave out --wait"
        );
        return Err(Error::Unmet(words));
    }
    if goal.needs_hypervisor() && vm.power() == PowerState::Unspecified {
        let why = match vm.power_problem.as_str() {
            "" => "give it qmp = \"PATH\" in the settings of guestlet-host".to_owned(),
            problem => problem.to_owned(),
        };
        let words = format!("guestlet-host cannot see whether {name} is running ({why}): leave out --wait");
        return Err(Error::Unmet(words));
    }
    if goal.is_suspension() && !vm.tells_suspension {
        let words = format!(
            "the hypervisor of {name} does not report whether a guest has suspended itself or was stopped \
             in another way: leave out --wait"
        );
        return Err(Error::Unmet(words));
    }
    Ok(())
}

/// Waits for the next event. The stream contains no past events.
async fn next(events: &mut Streaming<VirtualMachineEvent>, name: &str) -> Result<VirtualMachineEvent, Error> {
    let event = events.message().await.map_err(|status| Error::of_call(status, name))?;
    event.ok_or(Error::Closed)
}

/// Returns whether the guest has accepted the request; `false` if the connection was lost before its answer.
fn said(asked: Result<(), Error>) -> Result<bool, Error> {
    match asked {
        Ok(()) => Ok(true),
        Err(Error::Call(status)) if is_lost(&status) => Ok(false),
        Err(Error::Late(_)) => Ok(false),
        Err(error) => Err(error),
    }
}

fn is_lost(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded)
}

/// Describes all that is known of a VM whose goal was not observed in time.
async fn known(daemon: &Daemon, name: &str, wish: Wish, accepted: Option<bool>) -> String {
    let (goal, seconds) = (wish.goal, wish.within.as_secs());
    let accepted = match accepted {
        Some(true) => format!("the guest has accepted the {}", goal.verb()),
        Some(false) => "the session ended before the guest answered".to_owned(),
        None => "the guest has not answered".to_owned(),
    };
    let now = match vm(daemon, name).await {
        Ok(vm) => {
            let (power, session) = (words::power(vm.power()), words::session(vm.session()));
            format!("the hypervisor reports {power}, the session is {session}")
        }
        Err(error) => format!("its present state is not known ({error})"),
    };
    format!("no sign within {seconds} s that {name} {}: {accepted}; {now}", goal.words())
}

async fn ask(daemon: &Daemon, name: &str, goal: Goal, within: Duration) -> Result<(), Error> {
    let mut client = daemon.power();
    let vm = name.to_owned();
    let mode = match goal {
        Goal::Off => ShutdownMode::Powerdown,
        Goal::Halted => ShutdownMode::Halt,
        Goal::Rebooted => ShutdownMode::Reboot,
        Goal::Suspended => {
            let call = client.suspend_to_memory(SuspendToMemoryRequest { name: vm });
            return answer(call, name, within).await.map(drop);
        }
        Goal::SuspendedToDisk => {
            let call = client.suspend_to_disk(SuspendToDiskRequest { name: vm });
            return answer(call, name, within).await.map(drop);
        }
        Goal::SuspendedToBoth => {
            let call = client.suspend_to_both(SuspendToBothRequest { name: vm });
            return answer(call, name, within).await.map(drop);
        }
    };
    let call = client.shutdown(ShutdownRequest { name: vm, mode: mode.into() });
    answer(call, name, within).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::proto::v1::{GuestInfo, GuestSuspended, PowerChanged, SessionClosed, SessionOpened};

    fn event(kind: Kind) -> VirtualMachineEvent {
        VirtualMachineEvent { kind: Some(kind), ..VirtualMachineEvent::default() }
    }

    fn opened(boot: &str) -> VirtualMachineEvent {
        let guest = Some(GuestInfo { boot_id: boot.into(), ..GuestInfo::default() });
        event(Kind::SessionOpened(SessionOpened { guest, ..SessionOpened::default() }))
    }

    fn suspended(to_disk: bool) -> VirtualMachineEvent {
        event(Kind::GuestSuspended(GuestSuspended { to_disk }))
    }

    fn power(power: PowerState) -> VirtualMachineEvent {
        event(Kind::PowerChanged(PowerChanged { power: power.into() }))
    }

    #[test]
    fn only_what_shows_it_ends_the_wait() {
        let lost = || event(Kind::SessionClosed(SessionClosed::default()));
        let missed = Shown::Missed("the guest has rebooted instead");
        let cases = [
            (Goal::Off, lost(), Shown::Nothing),
            (Goal::Off, power(PowerState::Off), Shown::Reached),
            (Goal::Off, power(PowerState::Unspecified), Shown::Nothing),
            (Goal::Off, power(PowerState::Paused), Shown::Nothing),
            (Goal::Off, opened("one"), Shown::Nothing),
            (Goal::Off, opened("two"), missed),
            (Goal::Rebooted, lost(), Shown::Nothing),
            (Goal::Rebooted, power(PowerState::Off), Shown::Nothing),
            (Goal::Rebooted, opened("one"), Shown::Nothing),
            (Goal::Rebooted, opened(""), Shown::Nothing),
            (Goal::Rebooted, opened("two"), Shown::Reached),
            (Goal::Suspended, lost(), Shown::Nothing),
            (Goal::Suspended, power(PowerState::Paused), Shown::Nothing),
            (Goal::Suspended, suspended(false), Shown::Reached),
            (Goal::Suspended, suspended(true), Shown::Nothing),
            (Goal::SuspendedToBoth, suspended(false), Shown::Reached),
            (Goal::Off, suspended(false), Shown::Nothing),
            (Goal::Suspended, power(PowerState::Off), Shown::Missed("the VM is off instead")),
            (Goal::SuspendedToDisk, power(PowerState::Paused), Shown::Nothing),
            (Goal::SuspendedToDisk, suspended(true), Shown::Nothing),
        ];
        for (number, (goal, event, expected)) in cases.into_iter().enumerate() {
            assert_eq!(goal.shown_by(&event, "one", false), expected, "case {number}: {goal:?}");
        }
        let off = |is_on_disk| Goal::SuspendedToDisk.shown_by(&power(PowerState::Off), "one", is_on_disk);
        assert_eq!(off(true), Shown::Reached);
        assert!(matches!(off(false), Shown::Missed(_)));
    }

    #[test]
    fn what_cannot_be_seen_is_not_waited_for() {
        let vm = |power: PowerState| VirtualMachine { power: power.into(), ..VirtualMachine::default() };
        assert!(can_be_seen(&vm(PowerState::Unspecified), Goal::Off).is_err());
        assert!(can_be_seen(&vm(PowerState::Running), Goal::Off).is_ok());
        assert!(can_be_seen(&vm(PowerState::Running), Goal::Halted).is_err());
        assert!(can_be_seen(&vm(PowerState::Running), Goal::Suspended).is_err());
        assert!(can_be_seen(&vm(PowerState::Running), Goal::SuspendedToDisk).is_err());
        let telling = VirtualMachine { tells_suspension: true, ..vm(PowerState::Running) };
        assert!(can_be_seen(&telling, Goal::Suspended).is_ok());
        assert!(can_be_seen(&vm(PowerState::Running), Goal::Rebooted).is_err(), "no boot is known");
    }
}
