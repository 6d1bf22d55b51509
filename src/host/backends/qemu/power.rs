//! Meaning of QEMU's run states and events for a guest. Pure.

use crate::wire::proto::v1::PowerState;

/// Effect of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    /// New power state of the VM.
    Power(PowerState),
    /// The guest was reset.
    Reset,
    /// The guest has suspended itself to memory: the VM is paused, but was not paused by an administrator.
    Suspended,
    /// The guest has suspended itself to disk: the VM ends next.
    SuspendedToDisk,
    /// No effect.
    Nothing,
}

/// Returns the meaning of the `status` in the result of `query-status` (QAPI `RunState`).
pub fn of_status(status: &str) -> PowerState {
    match status {
        "running" => PowerState::Running,
        "shutdown" => PowerState::Off,
        // In all other states (paused, suspended, prelaunch, inmigrate, io-error, …) the VM exists, but its CPUs are
        // stopped.
        _ => PowerState::Paused,
    }
}

/// Reports whether a `status` means that the guest has suspended itself to memory.
pub fn is_suspended(status: &str) -> bool {
    status == "suspended"
}

/// Returns the meaning of an event that arrives in the state `now`.
pub fn of_event(now: PowerState, event: &str) -> Meaning {
    match event {
        "RESET" => Meaning::Reset,
        // With -no-shutdown, QEMU keeps running and stops the CPUs of a guest that has shut down.
        "STOP" if now != PowerState::Off => Meaning::Power(PowerState::Paused),
        "SUSPEND" if now != PowerState::Off => Meaning::Suspended,
        "SUSPEND_DISK" => Meaning::SuspendedToDisk,
        "RESUME" | "WAKEUP" => Meaning::Power(PowerState::Running),
        "SHUTDOWN" => Meaning::Power(PowerState::Off),
        // POWERDOWN only means that the guest was asked to shut down.
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
