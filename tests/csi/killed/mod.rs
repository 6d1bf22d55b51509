//! The agent is killed at each step: before and after each system call by which it changes something while kubelet asks for
//! one thing. The next agent is asked for the same, as kubelet does, and completes it. [`rules`] has the same of what a
//! rule wants, for which nobody has to ask again, and [`release`] of a disk that the host half asks back.
//!
//! Between the two, and at the end, what the kernel mounts and what is on the disk is looked at without an agent: nothing
//! is mounted twice, no other disk is written to, and nothing is lost of what was written.
//!
//! `make test` takes some steps at random, `make soak` all of them.

mod release;
mod rules;
mod tracer;

use std::fs::OpenOptions;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use guestlet::wire::proto::csi::VolumeCapability;
use nix::libc;
use tonic::{Code, Status};

use self::tracer::Traced;
use crate::agent::launch::guestlet;
use crate::disk::{Disk, Machine};
use crate::kubelet::{Volume, mount};
use crate::lab::{Lab, ext4_grows, is_outside, run, until, wait};
use crate::random::{Random, seed};
use crate::soak::steps;
use crate::volumes::mounted;

const FORMATS: &str = "/var/lib/guestlet/formats";

/// What kubelet asks for in a volume's life, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verb {
    /// For the first time, with a format.
    Stage,
    Publish,
    Expand,
    Unpublish,
    Unstage,
    /// With what was written before.
    StageAgain,
}

const ALL: [Verb; 6] =
    [Verb::Stage, Verb::Publish, Verb::Expand, Verb::Unpublish, Verb::Unstage, Verb::StageAgain];

/// A disk, its volume, and the pod that has it.
struct Life {
    disk: Disk,
    volume: Volume,
    pod: PathBuf,
    access: VolumeCapability,
    mebibytes: u64,
    grows: bool,
}

impl Life {
    /// One in which the agent is killed while it does this.
    fn new(machine: &Machine, lab: &Lab, number: usize, killed: Verb) -> Self {
        // Not each machine lets ext4 grow while it is mounted.
        let is_ext4 = number.is_multiple_of(2) && (killed != Verb::Expand || ext4_grows());
        let (kind, mebibytes) = if is_ext4 { ("ext4", 64) } else { ("xfs", 320) };
        let disk = machine.plugged(&format!("life-{number}"), mebibytes);
        let volume = Volume::new(lab, &format!("pvc-{number}"), &disk.serial);
        let pod = volume.target(lab, "pod");
        Self { disk, volume, pod, access: mount(kind, &[]), mebibytes, grows: !is_ext4 || ext4_grows() }
    }

    /// One call. Its connection may end in the middle of it.
    async fn call(&self, verb: Verb) -> Result<(), Status> {
        let (volume, pod, access) = (self.volume.clone(), self.pod.clone(), self.access.clone());
        let grown = (2 * self.mebibytes) << 20;
        let call = tokio::spawn(async move {
            match verb {
                Verb::Stage | Verb::StageAgain => volume.stage(&access).await,
                Verb::Publish => volume.publish(&pod, &access, false).await,
                Verb::Expand => volume.expand(&pod, grown, 0).await.map(drop),
                Verb::Unpublish => volume.unpublish(&pod).await,
                Verb::Unstage => volume.unstage().await,
            }
        });
        call.await.unwrap_or_else(|error| Err(Status::unavailable(error.to_string())))
    }

    /// How often the volume is mounted where it is staged, and where the pod has it.
    fn mounts(&self) -> (usize, usize) {
        (mounted(&self.volume.staging), mounted(&self.pod))
    }

    /// What has to be so when a call has succeeded.
    fn check(&self, verb: Verb) {
        let wanted = match verb {
            Verb::Stage | Verb::StageAgain | Verb::Unpublish => (1, 0),
            Verb::Publish | Verb::Expand => (1, 1),
            Verb::Unstage => (0, 0),
        };
        assert_eq!(self.mounts(), wanted, "after {verb:?}");
        let read = |folder: &PathBuf| std::fs::read_to_string(folder.join("kept")).unwrap();
        match verb {
            Verb::Stage => {
                assert_no_notes();
                keep(&self.volume.staging, &self.volume.id);
            }
            Verb::Publish | Verb::Expand => assert_eq!(read(&self.pod), self.volume.id),
            Verb::StageAgain | Verb::Unpublish => assert_eq!(read(&self.volume.staging), self.volume.id),
            Verb::Unstage => check_disk(&self.disk, &self.volume.id),
        }
        if verb == Verb::Expand {
            let total = bytes_of(&self.pod);
            assert!(total > (self.mebibytes * 3 / 2) << 20, "{total}");
        }
    }
}

/// Whether a disk that nobody uses is sound, in the words of the programs that made it, and holds what was written.
fn check_disk(disk: &Disk, written: &str) {
    let device = disk.device();
    // A file system is mounted nowhere some time before the kernel has written all of it.
    let is_free = || OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(&device).is_ok();
    until("the kernel lets the disk go", is_free);
    let kind = run(&format!("blkid -p -s TYPE -o value {device}"));
    match kind.as_str() {
        "ext4" => run(&format!("e2fsck -fn {device} 2>&1")),
        _ => run(&format!("xfs_repair -n {device} 2>&1")),
    };
    // The kernel reads it at a place that nobody else knows.
    let place = tempfile::tempdir().unwrap();
    let place = place.path().display();
    let kept = run(&format!("mount -o ro {device} {place}; cat {place}/kept; umount {place}"));
    assert_eq!(kept, written);
}

/// Writes what is to be kept, so that it is on the disk.
fn keep(place: &Path, text: &str) {
    std::fs::write(place.join("kept"), text).unwrap();
    run(&format!("sync -f {}", place.display()));
}

/// Bytes of the file system that is mounted there.
fn bytes_of(place: &Path) -> u64 {
    let size = run(&format!("stat -f -c '%b %S' {}", place.display()));
    let (blocks, bytes) = size.split_once(' ').unwrap();
    blocks.parse::<u64>().unwrap() * bytes.parse::<u64>().unwrap()
}

/// What is made is not made again.
fn assert_no_notes() {
    let notes = std::fs::read_dir(FORMATS).map_or(0, Iterator::count);
    assert_eq!(notes, 0, "notes of a format that is done");
}

/// At which steps of one thing the agent is killed: not at all at first, to see how many there are.
struct Moments<'r> {
    random: &'r mut Random,
    /// How many are tried at most.
    most: usize,
    tried: usize,
    steps: Option<usize>,
}

impl<'r> Moments<'r> {
    fn new(random: &'r mut Random) -> Self {
        Self { random, most: steps(1, usize::MAX), tried: 0, steps: None }
    }

    /// The next one; 0 for none.
    fn next(&mut self) -> Option<usize> {
        let Some(steps) = self.steps else { return Some(0) };
        self.tried += 1;
        let next = if self.most < steps {
            1 + self.random.below(steps.try_into().unwrap()) as usize
        } else {
            self.tried
        };
        (self.tried <= self.most.min(steps)).then_some(next)
    }

    /// How many steps there were.
    fn had(&mut self, seen: usize, what: &str) {
        if self.steps.is_none() {
            eprintln!("{what}: {seen} steps");
            assert!(seen > 0, "{what} changes nothing");
            self.steps = Some(seen);
        }
    }
}

/// An agent that is watched.
struct Agents {
    lab: Lab,
    traced: Option<Traced>,
}

impl Agents {
    /// An agent that `start` has not started yet.
    fn of(mut lab: Lab) -> Self {
        lab.kill();
        Self { lab, traced: None }
    }

    /// The next one, after the one before it was killed.
    fn start(&mut self) {
        self.traced = None;
        self.lab.start();
        let settings = self.lab.path("agent.toml");
        until("it answers", || {
            // A program that the killed one had just begun to start has what that one listened on for a moment longer, so
            // that the next one ends, and is started again.
            if self.lab.agent.try_wait().unwrap().is_some() {
                self.lab.start();
            }
            let asked = guestlet().args(["status", "--settings"]).arg(&settings).output().unwrap();
            asked.status.success()
        });
        self.traced = Some(Traced::new(self.lab.agent.id()));
    }

    /// The last one is nobody's but the lab's.
    fn end(mut self) {
        self.traced = None;
        self.lab.start();
    }

    /// Has a call done, by an agent that is killed at a step, and by the next one. How many steps there were.
    async fn do_it(&mut self, life: &Life, verb: Verb, kill_at: Option<usize>) -> usize {
        let traced = self.traced.as_ref().unwrap();
        traced.arm(kill_at);
        let mut done = life.call(verb).await;
        let seen = traced.disarm();
        if kill_at.is_some_and(|at| at <= seen) {
            until("the agent ends", || self.traced.as_ref().unwrap().has_ended());
            let (staged, published) = life.mounts();
            assert!(staged <= 1 && published <= 1, "killed in {verb:?}: {staged}, {published}");
            self.start();
            done = life.call(verb).await;
        }
        // Programs that the killed one had begun may be at work still.
        while let Err(status) = &done {
            let passes = [Code::Unavailable, Code::Aborted, Code::DeadlineExceeded].contains(&status.code());
            assert!(passes, "{verb:?}, killed at {kill_at:?} of {seen}: {status:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
            done = life.call(verb).await;
        }
        life.check(verb);
        seen
    }

    /// A volume's life, with a kill at one step of it. How many steps that call had.
    async fn live(&mut self, life: &Life, killed: Verb, kill_at: Option<usize>) -> usize {
        let mut seen = 0;
        for verb in ALL.into_iter().filter(|verb| *verb != Verb::Expand || life.grows) {
            if verb == Verb::Expand {
                life.disk.resize(2 * life.mebibytes);
            }
            let at = kill_at.filter(|_| verb == killed);
            let steps = self.do_it(life, verb, at).await;
            if verb == killed {
                seen = steps;
            }
        }
        self.do_it(life, Verb::Unstage, None).await;
        seen
    }
}

#[test]
fn an_agent_that_is_killed_at_any_step_has_lost_nothing_and_the_next_one_completes_it() {
    if is_outside() {
        return;
    }
    let machine = Machine::new();
    let mut random = Random(seed());
    wait(async {
        let lab = Lab::unknown("");
        std::fs::create_dir_all(lab.root()).unwrap();
        // Blank, and nobody's.
        let other = machine.plugged("other", 64);
        let mut agents = Agents::of(lab);
        let mut lives = 0;
        for verb in ALL {
            let mut moments = Moments::new(&mut random);
            while let Some(at) = moments.next() {
                let kill_at = Some(at).filter(|at| *at > 0);
                let life = Life::new(&machine, &agents.lab, lives, verb);
                if agents.traced.is_none() {
                    agents.start();
                }
                let seen = agents.live(&life, verb, kill_at).await;
                moments.had(seen, &format!("{verb:?}"));
                lives += 1;
                assert_eq!(std::fs::metadata(&other.file).unwrap().blocks(), 0, "the other disk");
            }
        }
        eprintln!("{lives} lives");
        agents.end();
    });
}
