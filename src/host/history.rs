//! Newest events of one VM, bounded in number and in bytes. Pure.

use std::collections::VecDeque;
use std::sync::Arc;

use prost_types::Timestamp;

use super::limits::Limits;
use crate::wire::heap::Heap as _;
use crate::wire::proto::v1::VirtualMachineEvent;

/// Bytes that an event takes in addition to its strings.
const OVERHEAD: usize = 256;

/// Newest events, in the order in which they happened.
#[derive(Debug, Default)]
pub struct History {
    events: VecDeque<(usize, Arc<VirtualMachineEvent>)>,
    bytes: usize,
}

impl History {
    /// Appends an event, and removes the oldest ones if a limit is exceeded.
    pub fn push(&mut self, event: Arc<VirtualMachineEvent>, limits: &Limits) {
        let size = event.heap() + OVERHEAD;
        self.bytes += size;
        self.events.push_back((size, event));
        while self.events.len() > limits.events_kept || self.bytes > limits.history_bytes {
            let Some((size, _)) = self.events.pop_front() else { return };
            self.bytes -= size;
        }
    }

    /// Returns the events that happened at `since` or later.
    pub fn since(&self, since: &Timestamp) -> impl Iterator<Item = &Arc<VirtualMachineEvent>> {
        let since = (since.seconds, since.nanos);
        self.events
            .iter()
            .map(|(_, event)| event)
            .filter(move |event| event.time.is_some_and(|time| (time.seconds, time.nanos) >= since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(seconds: i64, name: &str) -> Arc<VirtualMachineEvent> {
        let time = Some(Timestamp { seconds, nanos: 0 });
        Arc::new(VirtualMachineEvent { time, name: name.into(), kind: None })
    }

    fn times(history: &History, since: i64) -> Vec<i64> {
        let since = Timestamp { seconds: since, nanos: 0 };
        history.since(&since).map(|event| event.time.unwrap().seconds).collect()
    }

    #[test]
    fn the_newest_are_kept_within_both_bounds() {
        let limits = Limits { events_kept: 3, history_bytes: 1700, ..Limits::default() };
        let mut history = History::default();
        for seconds in 1..=5 {
            history.push(event(seconds, "a"), &limits);
        }
        assert_eq!(times(&history, 0), [3, 4, 5]);
        assert_eq!(times(&history, 5), [5]);
        history.push(event(6, &"x".repeat(1000)), &limits);
        assert_eq!(times(&history, 0), [5, 6]);
        history.push(event(7, &"x".repeat(5000)), &limits);
        assert_eq!((times(&history, 0), history.bytes), (vec![], 0));
    }
}
