//! The agent is killed at each step: before and after each system call by which it changes something while kubelet asks for
//! one thing. The next agent is asked for the same, as kubelet does, and completes it.
//!
//! Between the two, and at the end, what the kernel mounts and what is on the disk is looked at without an agent: nothing
//! is mounted twice, no other disk is written to, and nothing is lost of what was written.
//!
//! `make test` takes some steps at random, `make soak` all of them.

mod tracer;

use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::Duration;

use guestlet::wire::proto::csi::VolumeCapability;
use tonic::{Code, Status};

use self::tracer::Traced;
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
                // What is made is not made again.
                let notes = std::fs::read_dir(FORMATS).map_or(0, Iterator::count);
                assert_eq!(notes, 0, "notes of a format that is done");
                std::fs::write(self.volume.staging.join("kept"), &self.volume.id).unwrap();
                run(&format!("sync -f {}", self.volume.staging.display()));
            }
            Verb::Publish | Verb::Expand => assert_eq!(read(&self.pod), self.volume.id),
            Verb::StageAgain | Verb::Unpublish => assert_eq!(read(&self.volume.staging), self.volume.id),
            Verb::Unstage => self.check_disk(),
        }
        if verb == Verb::Expand {
            let size = run(&format!("stat -f -c '%b %S' {}", self.pod.display()));
            let (blocks, bytes) = size.split_once(' ').unwrap();
            let total = blocks.parse::<u64>().unwrap() * bytes.parse::<u64>().unwrap();
            assert!(total > (self.mebibytes * 3 / 2) << 20, "{total}");
        }
    }

    /// What is on the disk, in the words of the programs that made it.
    fn check_disk(&self) {
        let device = self.disk.device();
        let kind = run(&format!("blkid -p -s TYPE -o value {device}"));
        match kind.as_str() {
            "ext4" => run(&format!("e2fsck -fn {device} 2>&1")),
            _ => run(&format!("xfs_repair -n {device} 2>&1")),
        };
        // The kernel reads it at a place that nobody else knows.
        let place = tempfile::tempdir().unwrap();
        let place = place.path().display();
        let kept = run(&format!("mount -o ro {device} {place}; cat {place}/kept; umount {place}"));
        assert_eq!(kept, self.volume.id);
    }
}

/// An agent that is watched.
struct Agents {
    lab: Lab,
    traced: Option<Traced>,
}

impl Agents {
    /// The next one, after the one before it was killed.
    fn start(&mut self, life: &Life) {
        self.traced = None;
        self.lab.start();
        let socket = life.volume.socket.clone();
        until("it serves", || std::os::unix::net::UnixStream::connect(&socket).is_ok());
        self.traced = Some(Traced::new(self.lab.agent.id()));
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
            self.start(life);
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
    let some = steps(1, usize::MAX);
    let machine = Machine::new();
    let mut random = Random(seed());
    wait(async {
        let lab = Lab::unknown("");
        std::fs::create_dir_all(lab.root()).unwrap();
        // Blank, and nobody's.
        let other = machine.plugged("other", 64);
        let mut agents = Agents { lab, traced: None };
        agents.lab.kill();
        let mut lives = 0;
        for verb in ALL {
            let mut tried = 0;
            let mut all = usize::MAX;
            let mut at = 0;
            while at < all && tried < some {
                let life = Life::new(&machine, &agents.lab, lives, verb);
                if agents.traced.is_none() {
                    agents.start(&life);
                }
                if all == usize::MAX {
                    // Nobody is killed, to see how many steps there are.
                    all = agents.live(&life, verb, None).await;
                    println!("{verb:?}: {all} steps");
                } else {
                    at = if some < all { 1 + random.below(all.try_into().unwrap()) as usize } else { at + 1 };
                    agents.live(&life, verb, Some(at)).await;
                    tried += 1;
                }
                lives += 1;
                assert_eq!(std::fs::metadata(&other.file).unwrap().blocks(), 0, "the other disk");
            }
            assert!(tried > 0, "{verb:?} changes nothing");
        }
        println!("{lives} lives");
        agents.traced = None;
        agents.lab.start();
    });
}
