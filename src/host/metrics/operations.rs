//! Counters and durations of operations on volumes and of calls to hypervisors, by outcome.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::Histogram;

/// Counts by outcome, and durations, of one kind of work.
#[derive(Debug)]
struct One<const OUTCOMES: usize> {
    counts: [AtomicU64; OUTCOMES],
    time: Histogram,
}

impl<const OUTCOMES: usize> Default for One<OUTCOMES> {
    fn default() -> Self {
        Self { counts: std::array::from_fn(|_| AtomicU64::default()), time: Histogram::default() }
    }
}

/// Operation on a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Create the volume.
    Create,
    /// Remove the volume.
    Remove,
    /// Attach the volume to a VM.
    Publish,
    /// Detach the volume from a VM.
    Unpublish,
    /// Expand the volume.
    Expand,
}

const OPERATIONS: [&str; 5] = ["create", "remove", "publish", "unpublish", "expand"];

/// Outcomes of an operation: the names of the gRPC codes that were returned to the caller.
const CODES: [&str; 13] = [
    "OK",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "FAILED_PRECONDITION",
    "OUT_OF_RANGE",
    "RESOURCE_EXHAUSTED",
    "ABORTED",
    "PERMISSION_DENIED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "INTERNAL",
    "UNKNOWN",
];

/// Counters of operations on volumes.
#[derive(Debug, Default)]
pub struct Volumes([One<{ CODES.len() }>; OPERATIONS.len()]);

impl Volumes {
    /// Counts one more operation, which ended with this gRPC code after `time`.
    pub fn ended(&self, operation: Operation, code: tonic::Code, time: Duration) {
        let name = match code {
            tonic::Code::Ok => "OK",
            tonic::Code::InvalidArgument => "INVALID_ARGUMENT",
            tonic::Code::NotFound => "NOT_FOUND",
            tonic::Code::AlreadyExists => "ALREADY_EXISTS",
            tonic::Code::FailedPrecondition => "FAILED_PRECONDITION",
            tonic::Code::OutOfRange => "OUT_OF_RANGE",
            tonic::Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
            tonic::Code::Aborted => "ABORTED",
            tonic::Code::PermissionDenied => "PERMISSION_DENIED",
            tonic::Code::Unavailable => "UNAVAILABLE",
            tonic::Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
            tonic::Code::Internal => "INTERNAL",
            _ => "UNKNOWN",
        };
        let place = CODES.iter().position(|code| *code == name).unwrap_or(CODES.len() - 1);
        let one = &self.0[operation as usize];
        one.counts[place].fetch_add(1, Ordering::Relaxed);
        one.time.observe(time);
    }

    pub(super) fn render(&self, text: &mut String) {
        let name = "guestlet_host_volume_operations_total";
        super::head(text, name, "counter", "Operations on volumes, by the status returned.");
        for (operation, one) in OPERATIONS.iter().zip(&self.0) {
            for (code, count) in CODES.iter().zip(&one.counts) {
                let count = count.load(Ordering::Relaxed);
                if count > 0 || *code == "OK" {
                    let _ = writeln!(text, "{name}{{operation=\"{operation}\",code=\"{code}\"}} {count}");
                }
            }
        }
        let name = "guestlet_host_volume_operation_seconds";
        super::head(text, name, "histogram", "How long operations on volumes took.");
        for (operation, one) in OPERATIONS.iter().zip(&self.0) {
            one.time.render_with(text, name, &format!("operation=\"{operation}\""));
        }
    }
}

/// Outcome of a call to a hypervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The hypervisor answered.
    Done,
    /// The hypervisor returned an error.
    Refused,
    /// The hypervisor did not answer in time.
    Silent,
    /// No connection could be established, or it ended during the call.
    Unreachable,
}

const OUTCOMES: [&str; 4] = ["done", "refused", "silent", "unreachable"];

/// Counters of calls to hypervisors.
#[derive(Debug, Default)]
pub struct Hypervisors(One<{ OUTCOMES.len() }>);

impl Hypervisors {
    /// Counts one more call, which ended with this outcome after `time`.
    pub fn ended(&self, outcome: Outcome, time: Duration) {
        self.0.counts[outcome as usize].fetch_add(1, Ordering::Relaxed);
        self.0.time.observe(time);
    }

    pub(super) fn render(&self, text: &mut String) {
        let name = "guestlet_host_hypervisor_calls_total";
        super::head(text, name, "counter", "Calls to hypervisors, by outcome.");
        for (outcome, count) in OUTCOMES.iter().zip(&self.0.counts) {
            let _ = writeln!(text, "{name}{{outcome=\"{outcome}\"}} {}", count.load(Ordering::Relaxed));
        }
        let name = "guestlet_host_hypervisor_call_seconds";
        super::head(text, name, "histogram", "How long calls to hypervisors took.");
        self.0.time.render(text, name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_told_by_their_outcomes() {
        let (volumes, hypervisors) = (Volumes::default(), Hypervisors::default());
        let time = Duration::from_millis(30);
        volumes.ended(Operation::Publish, tonic::Code::Ok, time);
        volumes.ended(Operation::Publish, tonic::Code::Unavailable, time);
        volumes.ended(Operation::Expand, tonic::Code::DataLoss, time);
        hypervisors.ended(Outcome::Silent, time);
        let mut text = String::new();
        volumes.render(&mut text);
        hypervisors.render(&mut text);
        for line in [
            "guestlet_host_volume_operations_total{operation=\"create\",code=\"OK\"} 0",
            "guestlet_host_volume_operations_total{operation=\"publish\",code=\"OK\"} 1",
            "guestlet_host_volume_operations_total{operation=\"publish\",code=\"UNAVAILABLE\"} 1",
            "guestlet_host_volume_operations_total{operation=\"expand\",code=\"UNKNOWN\"} 1",
            "guestlet_host_volume_operation_seconds_bucket{operation=\"publish\",le=\"0.025\"} 0",
            "guestlet_host_volume_operation_seconds_bucket{operation=\"publish\",le=\"0.05\"} 2",
            "guestlet_host_volume_operation_seconds_count{operation=\"publish\"} 2",
            "guestlet_host_hypervisor_calls_total{outcome=\"done\"} 0",
            "guestlet_host_hypervisor_calls_total{outcome=\"silent\"} 1",
            "guestlet_host_hypervisor_call_seconds_count 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }
}
