//! What a guest with databases under load tells of each transaction that one of them has acknowledged.

use std::cell::{RefCell, RefMut};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::PathBuf;

use super::KINDS;
use crate::harness::vm::{SOON, Vm};
use crate::harness::wait_for;

/// Where in the guest acknowledged numbers are written to: the host has them at once, in the file `agent.log`.
pub const TOLD: &str = "/dev/ttyS1";

/// The last number of each database that was acknowledged.
pub type Acknowledged = BTreeMap<String, u64>;

/// An acknowledgment: its number, and when it came, in milliseconds since the guest booted.
#[derive(Clone, Copy)]
struct One {
    number: u64,
    at: u64,
}

/// All acknowledgments of a guest.
pub struct Load {
    log: PathBuf,
    seen: RefCell<Seen>,
}

#[derive(Default)]
struct Seen {
    bytes: u64,
    by_kind: BTreeMap<String, Vec<One>>,
}

impl Load {
    pub fn of(vm: &Vm) -> Self {
        Self { log: vm.file("agent.log"), seen: RefCell::default() }
    }

    /// Reads what has been written since the last time, up to the last complete line.
    fn seen(&self) -> RefMut<'_, Seen> {
        let mut seen = self.seen.borrow_mut();
        let mut log = File::open(&self.log).unwrap();
        log.seek(SeekFrom::Start(seen.bytes)).unwrap();
        let mut new = Vec::new();
        log.read_to_end(&mut new).unwrap();
        new.truncate(new.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1));
        seen.bytes += new.len() as u64;
        for line in String::from_utf8_lossy(&new).lines() {
            let words: Vec<_> = line.split(' ').collect();
            let [kind, number, at] = words[..] else { continue };
            let (Ok(number), Ok(at)) = (number.parse(), at.parse()) else { continue };
            seen.by_kind.entry(kind.to_owned()).or_default().push(One { number, at });
        }
        seen
    }

    pub fn acknowledged(&self) -> Acknowledged {
        let seen = self.seen();
        let last = |(kind, all): (&String, &Vec<One>)| Some((kind.clone(), all.last()?.number));
        seen.by_kind.iter().filter_map(last).collect()
    }

    /// Waits until each database has acknowledged more.
    pub fn goes_on(&self) {
        let before = self.acknowledged();
        wait_for("the load goes on", SOON, || {
            let now = self.acknowledged();
            let more = |kind: &str| now.get(kind).copied() > before.get(kind).map(|one| one + 5);
            KINDS.iter().all(|(kind, ..)| now.contains_key(*kind) && more(kind)).then_some(())
        })
        .unwrap();
    }

    /// The longest time between two acknowledgments of a database, one after another, of which a part was between these moments.
    pub fn longest_gap(&self, kind: &str, from: u64, to: u64) -> u64 {
        let seen = self.seen();
        let pairs = seen.by_kind[kind].windows(2);
        let during = pairs.filter(|pair| pair[0].at < to && pair[1].at > from);
        during.map(|pair| pair[1].at - pair[0].at).max().unwrap_or(0)
    }
}
