//! What QEMU's run states and events mean for a guest. Pure.

use crate::wire::proto::v1::PowerState;

/// What an event changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    /// The VM is in this state now.
    Power(PowerState),
    /// The guest was reset.
    Reset,
    /// The guest has suspended itself to memory: the VM is paused now, and not because somebody has paused it.
    Suspended,
    /// The guest has suspended itself to a disk: the end of the VM comes next.
    SuspendedToDisk,
    /// Nothing.
    Nothing,
}

/// The meaning of the `status` that `query-status` returns (QAPI `RunState`).
pub fn of_status(status: &str) -> PowerState {
    match status {
        "running" => PowerState::Running,
        "shutdown" => PowerState::Off,
        // In all the others (paused, suspended, prelaunch, inmigrate, io-error, …) the VM exists and its
        // processors stand still.
        _ => PowerState::Paused,
    }
}

/// Whether a `status` is that of a guest that has suspended itself to memory.
pub fn is_suspended(status: &str) -> bool {
    status == "suspended"
}

/// The meaning of an event, seen in the state `now`.
pub fn of_event(now: PowerState, event: &str) -> Meaning {
    match event {
        "RESET" => Meaning::Reset,
        // With -no-shutdown QEMU stays, and stops the processors of a guest that has shut down.
        "STOP" if now != PowerState::Off => Meaning::Power(PowerState::Paused),
        "SUSPEND" if now != PowerState::Off => Meaning::Suspended,
        "SUSPEND_DISK" => Meaning::SuspendedToDisk,
        "RESUME" | "WAKEUP" => Meaning::Power(PowerState::Running),
        "SHUTDOWN" => Meaning::Power(PowerState::Off),
        // POWERDOWN only says that the guest was asked to shut down.
        _ => Meaning::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events() {
        use Meaning::{Nothing, Power, Reset, Suspended, SuspendedToDisk};
        use PowerState::{Off, Paused, Running};
        let cases = [
            (Running, "STOP", Power(Paused)),
            (Paused, "RESUME", Power(Running)),
            (Running, "RESET", Reset),
            (Running, "POWERDOWN", Nothing),
            (Running, "SHUTDOWN", Power(Off)),
            (Off, "STOP", Nothing),
            (Off, "RESUME", Power(Running)),
            (Running, "SUSPEND", Suspended),
            (Paused, "SUSPEND", Suspended),
            (Off, "SUSPEND", Nothing),
            (Running, "SUSPEND_DISK", SuspendedToDisk),
            (Paused, "WAKEUP", Power(Running)),
            (Running, "DEVICE_DELETED", Nothing),
        ];
        for (now, event, meaning) in cases {
            assert_eq!(of_event(now, event), meaning, "{now:?} {event}");
        }
    }

    #[test]
    fn statuses() {
        let cases = [
            ("running", PowerState::Running),
            ("paused", PowerState::Paused),
            ("inmigrate", PowerState::Paused),
            ("shutdown", PowerState::Off),
        ];
        assert_eq!((of_status("suspended"), is_suspended("suspended")), (PowerState::Paused, true));
        for (status, power) in cases {
            assert_eq!(of_status(status), power, "{status}");
            assert!(!is_suspended(status), "{status}");
        }
    }
}
