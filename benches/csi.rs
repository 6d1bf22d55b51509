//! How long kubelet waits for a volume whose disk is there, and what the agent needs for many: `cargo bench --bench csi`.
//! For root; disks are files behind loop devices.

#![allow(
    clippy::disallowed_methods,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::unwrap_used
)]

#[allow(dead_code, reason = "shared with the tests of QGA")]
#[path = "../tests/qga/agent.rs"]
mod agent;
#[allow(dead_code, reason = "shared with the tests of CSI")]
#[path = "../tests/csi/disk.rs"]
mod disk;
#[allow(dead_code, reason = "shared with the tests of the API")]
#[path = "../tests/api/host.rs"]
mod host;
#[allow(dead_code, reason = "shared with the tests of CSI")]
#[path = "../tests/csi/kubelet.rs"]
mod kubelet;
#[allow(dead_code, reason = "shared with the tests of CSI")]
#[path = "../tests/csi/lab.rs"]
mod lab;
#[allow(dead_code, reason = "shared with the tests of QGA")]
#[path = "../tests/qga/namespace.rs"]
mod namespace;
#[allow(dead_code, reason = "shared with the tests of CSI")]
#[path = "../tests/csi/scripted.rs"]
mod scripted;

use std::time::{Duration, Instant};

use disk::Machine;
use kubelet::{Volume, controller, mount};
use lab::{Lab, run, until, wait};
use scripted::{Scripted, named};

const INSIDE: &str = "GUESTLET_BENCH_INSIDE";
const ROUNDS: usize = 40;
const MANY: usize = 200;
const CALLS: usize = 2_000;

fn main() {
    if std::env::var_os(INSIDE).is_none() {
        let status = std::process::Command::new("unshare")
            .arg("--mount")
            .arg(std::env::current_exe().unwrap())
            .env(INSIDE, "1")
            .status();
        assert!(status.unwrap().success(), "this is for root");
        return;
    }
    run("mount -t tmpfs lab /var/lib");
    let machine = Machine::new();
    wait(async {
        let lab = Lab::new().await;
        println!("at first: {}", memory(&lab));
        one(&lab, &machine).await;
        println!("after {ROUNDS} rounds: {}", memory(&lab));
        many(&lab, &machine).await;
        drop(lab);
        relay().await;
    });
}

/// Calls of a sidecar, passed on to a host half that answers at once.
async fn relay() {
    let mut lab = Lab::unknown("enabled = true");
    Scripted::default().answer_for(&mut lab).await;
    until("the sidecars are served", || lab.controller().exists());
    let mut client = controller(&lab.controller()).await;
    while client.create_volume(named("pvc-1")).await.is_err() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut times = Vec::with_capacity(CALLS);
    for _ in 0..CALLS {
        let begun = Instant::now();
        client.create_volume(named("pvc-1")).await.unwrap();
        times.push(begun.elapsed());
    }
    times.sort();
    println!(
        "relay of a Controller call, there and back: p50 {:.0?}, p99 {:.0?}",
        times[CALLS / 2],
        times[CALLS * 99 / 100]
    );
}

async fn one(lab: &Lab, machine: &Machine) {
    let disk = machine.plugged("one", 64);
    let volume = Volume::new(lab, "pvc-one", &disk.serial);
    let (pod, wanted) = (volume.target(lab, "pod"), mount("ext4", &[]));
    let mut times: [Vec<Duration>; 5] = Default::default();
    for round in 0..=ROUNDS {
        let mut round_of = [Duration::ZERO; 5];
        let begun = Instant::now();
        volume.stage(&wanted).await.unwrap();
        round_of[0] = begun.elapsed();
        volume.publish(&pod, &wanted, false).await.unwrap();
        round_of[1] = begun.elapsed().checked_sub(round_of[0]).unwrap();
        volume.unpublish(&pod).await.unwrap();
        volume.unstage().await.unwrap();
        // The programs and the mounts by themselves.
        let (device, at) = (disk.device(), volume.staging.display().to_string());
        for (place, script) in [
            (2, format!("blkid -p -o export -- {device}")),
            (3, format!("e2fsck -p {device}")),
            (4, format!("mount -t ext4 {device} {at}")),
        ] {
            let mut words = script.split(' ');
            let begun = Instant::now();
            std::process::Command::new(words.next().unwrap()).args(words).output().unwrap();
            round_of[place] = begun.elapsed();
        }
        run(&format!("umount {at}"));
        // The first one formats it.
        if round > 0 {
            times.iter_mut().zip(round_of).for_each(|(times, time)| times.push(time));
        }
    }
    let names = ["NodeStage", "NodePublish", "blkid by itself", "e2fsck by itself", "mount(8) by itself"];
    for (name, mut times) in names.into_iter().zip(times) {
        times.sort();
        println!("{name}: p50 {:.1?}, p90 {:.1?}", times[ROUNDS / 2], times[ROUNDS * 9 / 10]);
    }
}

async fn many(lab: &Lab, machine: &Machine) {
    let wanted = mount("ext4", &[]);
    let disks: Vec<_> = (0..MANY).map(|number| machine.disk(&format!("many-{number}"), 16)).collect();
    for disk in &disks {
        run(&format!("mkfs.ext4 -q {}", disk.device()));
        disk.plug();
    }
    let volumes: Vec<_> =
        disks.iter().map(|disk| Volume::new(lab, &format!("pvc-{}", disk.serial), &disk.serial)).collect();
    let begun = Instant::now();
    for some in volumes.chunks(8) {
        let staged = some.iter().map(|volume| async {
            volume.stage(&wanted).await.unwrap();
            volume.publish(&volume.target(lab, "pod"), &wanted, false).await.unwrap();
        });
        futures_util::future::join_all(staged).await;
    }
    println!("{MANY} volumes, 8 at a time, in {:.1?}: {}", begun.elapsed(), memory(lab));
    for volume in &volumes {
        volume.stats(&volume.staging).await.unwrap();
    }
    println!("after each was asked how full it is: {}", memory(lab));
    for volume in &volumes {
        volume.unpublish(&volume.target(lab, "pod")).await.unwrap();
        volume.unstage().await.unwrap();
    }
    println!("after all are gone: {}", memory(lab));
}

/// What the agent has resident now, and had at most.
fn memory(lab: &Lab) -> String {
    let status = std::fs::read_to_string(format!("/proc/{}/status", lab.agent.id())).unwrap();
    let line = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).unwrap().trim().to_owned();
    format!("{} resident, {} at most", line("VmRSS:"), line("VmHWM:"))
}
