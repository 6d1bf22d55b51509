//! What a rule wants of a disk, by agents that are killed at each step of it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::{Agents, Moments, assert_no_notes, bytes_of, check_disk, keep};
use crate::agent::PATIENCE;
use crate::disk::{Disk, Machine};
use crate::lab::{Lab, is_outside, run, wait};
use crate::random::{Random, seed};
use crate::volumes::mounted;

const MEBIBYTES: u64 = 320;
/// For so long the agent changes nothing when it is done.
const QUIET: Duration = Duration::from_millis(200);

/// What happens to a rule and its disk, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    /// Both are there, and the disk is blank.
    Come,
    Grow,
    /// The rule goes.
    Go,
    /// The rule is there again, and what was written before.
    ComeAgain,
}

const ALL: [Act; 4] = [Act::Come, Act::Grow, Act::Go, Act::ComeAgain];

struct Ruled<'l> {
    lab: &'l Lab,
    disk: Disk,
    place: PathBuf,
}

impl Ruled<'_> {
    fn write_rule(&self) {
        let rule = format!(
            "[[disk]]\nmatch = {{ serial = '{}' }}\nmount-point = '{}'\nfile-system = 'xfs'\n\
             format-if-blank = true\ngrow = true\n",
            self.disk.serial,
            self.place.display()
        );
        let new = self.lab.path("rules.new");
        std::fs::write(&new, rule).unwrap();
        std::fs::rename(new, self.lab.path("disks.d/rules.toml")).unwrap();
    }

    fn begin(&self, act: Act) {
        match act {
            Act::Come => {
                self.write_rule();
                self.disk.plug();
            }
            Act::Grow => self.disk.resize(2 * MEBIBYTES),
            Act::Go => std::fs::remove_file(self.lab.path("disks.d/rules.toml")).unwrap(),
            Act::ComeAgain => self.write_rule(),
        }
    }

    fn is_done(&self, act: Act) -> bool {
        match act {
            Act::Come | Act::ComeAgain => mounted(&self.place) > 0,
            Act::Grow => bytes_of(&self.place) > (MEBIBYTES * 3 / 2) << 20,
            Act::Go => mounted(&self.place) == 0,
        }
    }

    /// What has to be so when it is done.
    fn check(&self, act: Act) {
        assert_eq!(mounted(&self.place), usize::from(act != Act::Go), "after {act:?}");
        assert_no_notes();
        let written = &self.disk.serial;
        match act {
            Act::Come => keep(&self.place, written),
            Act::Grow | Act::ComeAgain => {
                assert_eq!(std::fs::read_to_string(self.place.join("kept")).unwrap(), *written);
            }
            Act::Go => check_disk(&self.disk, written),
        }
    }
}

/// Waits until the agent is done, or was killed; whether it is done.
fn wait_for_end(agents: &Agents, is_done: impl Fn() -> bool) -> bool {
    let traced = agents.traced.as_ref().unwrap();
    let end = Instant::now() + PATIENCE;
    let (mut seen, mut since) = (0, Instant::now());
    while !traced.has_ended() {
        assert!(Instant::now() < end, "never done: {}", agents.lab.log());
        let now = traced.seen();
        if now != seen || !is_done() {
            (seen, since) = (now, Instant::now());
        } else if since.elapsed() > QUIET {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

/// One disk's life, with a kill at one step of one act. How many steps that had.
fn live(agents: &mut Agents, machine: &Machine, number: usize, killed: Act, kill_at: Option<usize>) -> usize {
    let place = agents.lab.path("places").join(number.to_string());
    let disk = machine.disk(&format!("rule-{number}"), MEBIBYTES);
    if agents.traced.is_none() {
        agents.start();
    }
    let mut steps = 0;
    let mut life = Some((disk, place));
    for act in ALL.into_iter().chain([Act::Go]) {
        let (disk, place) = life.take().unwrap();
        let is_killed = act == killed && steps == 0;
        agents.traced.as_ref().unwrap().arm(kill_at.filter(|_| is_killed));
        let ruled = Ruled { lab: &agents.lab, disk, place };
        ruled.begin(act);
        let is_done = wait_for_end(agents, || ruled.is_done(act));
        let seen = agents.traced.as_ref().unwrap().disarm();
        steps = if is_killed { seen } else { steps };
        let Ruled { disk, place, .. } = ruled;
        if !is_done {
            assert!(mounted(&place) <= 1, "killed in {act:?}");
            agents.start();
        }
        let ruled = Ruled { lab: &agents.lab, disk, place };
        assert!(is_done || wait_for_end(agents, || ruled.is_done(act)));
        ruled.check(act);
        life = Some((ruled.disk, ruled.place));
    }
    steps
}

#[test]
fn what_a_rule_wants_is_done_by_the_next_agent_at_whatever_step_one_is_killed() {
    if is_outside() {
        return;
    }
    let machine = Machine::new();
    let mut random = Random(seed());
    wait(async {
        let lab = Lab::unknown("");
        run(&format!("mkdir -p {0}/disks.d {0}/places {0}/kubelet", lab.folder.path().display()));
        let mut agents = Agents::of(lab);
        let mut lives = 0;
        for act in ALL {
            let mut moments = Moments::new(&mut random);
            while let Some(at) = moments.next() {
                let kill_at = Some(at).filter(|at| *at > 0);
                let seen = live(&mut agents, &machine, lives, act, kill_at);
                moments.had(seen, &format!("{act:?}"));
                lives += 1;
            }
        }
        eprintln!("{lives} lives");
        agents.end();
    });
}
