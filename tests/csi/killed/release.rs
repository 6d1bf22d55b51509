//! A disk that the host half asks back while a rule has it mounted, by agents that are killed at each step of that.

use std::path::Path;
use std::time::Duration;

use super::{Agents, Moments, check_disk, keep};
use crate::disk::Machine;
use crate::lab::{Lab, is_outside, run, until, wait};
use crate::random::{Random, seed};
use crate::volumes::mounted;

const MEBIBYTES: u64 = 64;

fn write_rule(lab: &Lab, serial: &str, place: &Path) {
    let rule = format!(
        "[[disk]]\nmatch = {{ serial = '{serial}' }}\nmount-point = '{}'\nfile-system = 'ext4'\nformat-if-blank = true\n",
        place.display()
    );
    let new = lab.path("rules.new");
    std::fs::write(&new, rule).unwrap();
    std::fs::rename(new, lab.path("disks.d/rules.toml")).unwrap();
}

/// A disk from its mount to its release, with a kill at one step of that. How many steps it had.
async fn live(agents: &mut Agents, machine: &Machine, number: usize, kill_at: Option<usize>) -> usize {
    let place = agents.lab.path("places").join(number.to_string());
    let disk = machine.disk(&format!("asked-{number}"), MEBIBYTES);
    write_rule(&agents.lab, &disk.serial, &place);
    disk.plug();
    agents.start();
    until("it is mounted", || mounted(&place) == 1);
    keep(&place, &disk.serial);
    agents.lab.introduce().await;
    let traced = agents.traced.as_ref().unwrap();
    traced.arm(kill_at);
    let mut released = agents.lab.release(&disk.serial).await;
    let seen = traced.disarm();
    if kill_at.is_some_and(|at| at <= seen) {
        until("the agent ends", || agents.traced.as_ref().unwrap().has_ended());
        assert!(mounted(&place) <= 1, "killed at {kill_at:?}");
        agents.start();
        agents.lab.introduce().await;
        // The host half does not know how it ended.
        released = agents.lab.release(&disk.serial).await;
    }
    while let Err(status) = released {
        let passes =
            [tonic::Code::Unavailable, tonic::Code::Aborted, tonic::Code::NotFound].contains(&status.code());
        assert!(passes, "killed at {kill_at:?} of {seen}: {status:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
        released = agents.lab.release(&disk.serial).await;
    }
    // The rule is there still, and so is the disk.
    assert_eq!(mounted(&place), 0, "killed at {kill_at:?} of {seen}");
    check_disk(&disk, &disk.serial);
    assert_eq!(mounted(&place), 0, "killed at {kill_at:?} of {seen}");
    seen
}

#[test]
fn a_disk_is_released_by_the_next_agent_at_whatever_step_one_is_killed() {
    if is_outside() {
        return;
    }
    let machine = Machine::new();
    let mut random = Random(seed());
    wait(async {
        let lab = Lab::unknown("");
        run(&format!("mkdir -p {0}/disks.d {0}/places {0}/kubelet", lab.folder.path().display()));
        let mut agents = Agents::of(lab);
        let mut moments = Moments::new(&mut random);
        let mut lives = 0;
        while let Some(at) = moments.next() {
            let seen = live(&mut agents, &machine, lives, Some(at).filter(|at| *at > 0)).await;
            moments.had(seen, "release");
            lives += 1;
        }
        agents.end();
    });
}
