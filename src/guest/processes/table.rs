//! Table of the results of programs, limited in time, number and memory.

use std::collections::{HashMap, VecDeque};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use crate::guest::processes::MAX_OUTPUT;

/// Time for which the result of a program is kept if no client fetches it.
pub(super) const KEPT_FOR: Duration = Duration::from_secs(600);
/// Maximum number of results that are kept; beyond it the oldest is forgotten.
const MAX_FINISHED: usize = 1024;
/// Bytes of outputs that are kept of all programs, running ones included. Beyond it the oldest result is
/// forgotten; if there is none left, new output is truncated.
const MAX_KEPT: usize = 64 << 20;

/// State of a program.
#[derive(Debug, PartialEq, Eq)]
pub enum State {
    /// The program runs, or its outputs are still read.
    Running,
    /// The program has finished. Its result is returned once only, and has been forgotten by now.
    Finished(Ended),
}

/// Result of a program.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// Exit code, or the signal that killed the program.
    pub status: ExitStatus,
    /// Standard output and standard error.
    pub outputs: [Kept; 2],
}

/// Output of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Output {
    /// Standard output, or both outputs merged.
    Output = 0,
    /// Standard error, where it is kept separately.
    Errors = 1,
}

/// Part of an output that is kept.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// Beginning of the output.
    pub bytes: Vec<u8>,
    /// True if there was more output, or may be more because other processes hold it open.
    pub truncated: bool,
}

struct Process {
    serial: u64,
    outputs: [Kept; 2],
    /// True for each output from which more may come.
    open: [bool; 2],
    status: Option<ExitStatus>,
}

impl Process {
    fn size(&self) -> usize {
        self.outputs.iter().map(|kept| kept.bytes.len()).sum()
    }
}

/// Table of all programs whose result a client may still fetch.
#[derive(Default)]
pub(super) struct Table {
    processes: HashMap<u32, Process>,
    /// PIDs of the programs that have finished, with the time, the oldest first.
    finished: VecDeque<(Instant, u32)>,
    /// Total bytes of all outputs.
    kept: usize,
    serial: u64,
}

impl Table {
    /// Adds a program that was started, and returns its serial number. An old result with the same PID is forgotten.
    pub fn begin(&mut self, pid: u32) -> u64 {
        self.forget(pid);
        self.serial += 1;
        let process =
            Process { serial: self.serial, outputs: Default::default(), open: [false; 2], status: None };
        self.processes.insert(pid, process);
        self.serial
    }

    /// Marks the outputs of a program that are read.
    pub fn opened(&mut self, pid: u32, serial: u64, open: [bool; 2]) {
        if let Some(process) = self.running(pid, serial) {
            process.open = open;
        }
    }

    /// Marks an output as closed: nothing more will come.
    pub fn closed(&mut self, pid: u32, serial: u64, which: Output) {
        if let Some(process) = self.running(pid, serial) {
            process.open[which as usize] = false;
        }
    }

    fn running(&mut self, pid: u32, serial: u64) -> Option<&mut Process> {
        let running = |process: &&mut Process| process.serial == serial && process.status.is_none();
        self.processes.get_mut(&pid).filter(running)
    }

    /// Adds output that a program has written.
    pub fn append(&mut self, pid: u32, serial: u64, which: Output, bytes: &[u8]) {
        let Some(process) = self.running(pid, serial) else { return };
        let wanted = bytes.len().min(MAX_OUTPUT - process.outputs[which as usize].bytes.len());
        while self.kept + wanted > MAX_KEPT && self.forget_oldest() {}
        let Some(process) = self.processes.get_mut(&pid) else { return };
        let kept = &mut process.outputs[which as usize];
        // Once truncated, nothing is added: the kept output must have no gap.
        let taken = if kept.truncated { 0 } else { wanted.min(MAX_KEPT.saturating_sub(self.kept)) };
        let more = (kept.bytes.len() + taken).saturating_sub(kept.bytes.capacity());
        if more > 0 {
            let grown = (kept.bytes.len() * 2).clamp(kept.bytes.len() + taken, MAX_OUTPUT);
            kept.bytes.reserve_exact(grown - kept.bytes.len());
        }
        kept.bytes.extend_from_slice(&bytes[..taken]);
        kept.truncated |= taken < bytes.len();
        self.kept += taken;
    }

    /// Records the end of a program. Its outputs have ended as well, or are no longer waited for.
    pub fn finish(&mut self, pid: u32, serial: u64, status: ExitStatus, now: Instant) {
        let Some(process) = self.processes.get_mut(&pid).filter(|process| process.serial == serial) else {
            return;
        };
        process.status = Some(status);
        for (kept, open) in process.outputs.iter_mut().zip(process.open) {
            kept.bytes.shrink_to_fit();
            kept.truncated |= open;
        }
        self.finished.push_back((now, pid));
        while self.finished.len() > MAX_FINISHED && self.forget_oldest() {}
    }

    /// Returns the bytes of the outputs of a program that has finished; 0 for any other.
    pub fn size(&self, pid: u32) -> usize {
        self.processes.get(&pid).filter(|process| process.status.is_some()).map_or(0, Process::size)
    }

    /// Counts outputs that were taken, and are still in memory, as kept until [`Table::sent`].
    pub fn sending(&mut self, bytes: usize) {
        self.kept += bytes;
    }

    /// Releases the bytes that `sending` has counted.
    pub fn sent(&mut self, bytes: usize) {
        self.kept = self.kept.saturating_sub(bytes);
    }

    /// Returns the state of a program; one that has finished is forgotten.
    pub fn take(&mut self, pid: u32) -> Option<State> {
        match self.processes.get(&pid)?.status {
            None => Some(State::Running),
            Some(status) => {
                let outputs = self.forget(pid)?.outputs;
                Some(State::Finished(Ended { status, outputs }))
            }
        }
    }

    /// Forgets results that are too old. Returns when the next one will be.
    pub fn expire(&mut self, now: Instant) -> Option<Instant> {
        loop {
            let ends = self.finished.front()?.0 + KEPT_FOR;
            if ends > now {
                return Some(ends);
            }
            self.forget_oldest();
        }
    }

    fn forget_oldest(&mut self) -> bool {
        self.finished.front().map(|(_, pid)| *pid).and_then(|pid| self.forget(pid)).is_some()
    }

    fn forget(&mut self, pid: u32) -> Option<Process> {
        let process = self.processes.remove(&pid)?;
        self.kept -= process.size();
        if let Some(place) = self.finished.iter().position(|(_, finished)| *finished == pid) {
            self.finished.remove(place);
        }
        Some(process)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(state: Option<State>) -> Kept {
        match state {
            Some(State::Finished(Ended { outputs: [output, _], .. })) => output,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_result_is_told_once() {
        let mut table = Table::default();
        let serial = table.begin(7);
        assert_eq!(table.take(7), Some(State::Running));
        table.append(7, serial, Output::Output, b"some");
        table.append(7, serial + 1, Output::Output, b"of another");
        table.finish(7, serial, ExitStatus::default(), Instant::now());
        table.append(7, serial, Output::Output, b" late");
        assert_eq!(output(table.take(7)), Kept { bytes: b"some".to_vec(), truncated: false });
        assert_eq!((table.take(7), table.kept, table.finished.len()), (None, 0, 0));
    }

    #[test]
    fn an_output_that_others_hold_open_may_be_cut_off() {
        let mut table = Table::default();
        let serial = table.begin(7);
        table.opened(7, serial, [true, true]);
        table.append(7, serial, Output::Output, b"some");
        table.closed(7, serial, Output::Errors);
        table.finish(7, serial, ExitStatus::default(), Instant::now());
        let Some(State::Finished(ended)) = table.take(7) else { panic!("it has finished") };
        assert_eq!(ended.outputs.map(|kept| kept.truncated), [true, false]);
    }

    #[test]
    fn what_is_being_sent_counts_as_kept() {
        let mut table = Table::default();
        let serial = table.begin(1);
        table.append(1, serial, Output::Output, &vec![1; MAX_OUTPUT]);
        table.finish(1, serial, ExitStatus::default(), Instant::now());
        let size = table.size(1);
        assert_eq!(size, MAX_OUTPUT);
        assert!(table.take(1).is_some());
        table.sending(MAX_KEPT);
        let serial = table.begin(2);
        assert_eq!(table.size(2), 0);
        table.append(2, serial, Output::Output, b"x");
        table.sent(MAX_KEPT);
        table.append(2, serial, Output::Errors, b"y");
        table.finish(2, serial, ExitStatus::default(), Instant::now());
        let Some(State::Finished(ended)) = table.take(2) else { panic!("it has finished") };
        assert_eq!(ended.outputs[0], Kept { bytes: Vec::new(), truncated: true });
        assert_eq!(ended.outputs[1], Kept { bytes: b"y".to_vec(), truncated: false });
    }

    #[test]
    fn old_results_go() {
        let mut table = Table::default();
        let now = Instant::now();
        for pid in 0..3 {
            let serial = table.begin(pid);
            table.finish(pid, serial, ExitStatus::default(), now + Duration::from_secs(pid.into()));
        }
        assert_eq!(table.expire(now), Some(now + KEPT_FOR));
        assert_eq!(
            table.expire(now + KEPT_FOR + Duration::from_secs(1)),
            Some(now + KEPT_FOR + Duration::from_secs(2))
        );
        assert_eq!(table.processes.len(), 1);
        // A result that is fetched leaves nothing to expire.
        assert!(table.take(2).is_some());
        assert_eq!(table.expire(now), None);
    }

    #[test]
    fn the_number_of_results_is_bounded_and_the_oldest_go_first() {
        let mut table = Table::default();
        for pid in 0..2000 {
            let serial = table.begin(pid);
            table.finish(pid, serial, ExitStatus::default(), Instant::now());
        }
        assert_eq!(table.processes.len(), MAX_FINISHED);
        assert_eq!(table.take(975), None);
        assert!(table.take(976).is_some());
    }

    #[test]
    fn the_memory_of_outputs_is_bounded_by_program_and_over_all() {
        let mut table = Table::default();
        let part = vec![1; 1 << 20];
        let fill = |table: &mut Table, pid, mebibytes, finish| {
            let serial = table.begin(pid);
            for _ in 0..mebibytes {
                table.append(pid, serial, Output::Output, &part);
            }
            if finish {
                table.finish(pid, serial, ExitStatus::default(), Instant::now());
            }
            serial
        };
        fill(&mut table, 1, 17, true);
        let kept = output(table.take(1));
        assert_eq!((kept.bytes.len(), kept.truncated), (MAX_OUTPUT, true));
        assert!(kept.bytes.capacity() == MAX_OUTPUT);
        // Five of 16 MiB: the oldest goes.
        for pid in 1..=5 {
            fill(&mut table, pid, 16, true);
        }
        assert_eq!((table.take(1), table.kept), (None, MAX_KEPT));
        // Running programs displace the results of finished ones, until no memory is left.
        let serials: Vec<_> = (11..=15).map(|pid| fill(&mut table, pid, 16, false)).collect();
        assert_eq!((table.take(2), table.take(5), table.kept), (None, None, MAX_KEPT));
        table.finish(15, serials[4], ExitStatus::default(), Instant::now());
        assert_eq!(output(table.take(15)), Kept { bytes: Vec::new(), truncated: true });
    }
}
