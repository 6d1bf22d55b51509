//! What many disks cost the agent: `cargo bench --bench disks`. The tree is made of what was captured of one disk.

#![allow(
    clippy::disallowed_methods,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::unwrap_used
)]

#[path = "../tests/fixtures/lay_out.rs"]
mod lay_out;

use std::io;
use std::time::{Duration, Instant};

use guestlet::guest::Guest;
use guestlet::guest::monitor::disks::{News, follow};
use guestlet::sys::root::Root;
use guestlet::sys::uevents::Heard;

const CAPTURED: &str = include_str!("../tests/fixtures/debian12-disks.tree");
const DISKS: usize = 256;
const ROUNDS: usize = 40;

/// A kernel that says nothing: all disks are there when the agent starts.
struct Silence;

impl News for Silence {
    async fn next(&mut self) -> io::Result<Heard> {
        std::future::pending().await
    }

    fn at_hand(&mut self) -> io::Result<Option<Heard>> {
        Ok(None)
    }
}

fn main() {
    let folder = tempfile::tempdir().unwrap();
    let captured: Vec<_> = CAPTURED.lines().filter(|line| line.contains("sdb")).collect();
    for number in 0..DISKS {
        let (target, unit) = (number / 8, number % 8);
        let tree = captured
            .iter()
            .map(|line| {
                line.replace("0:0:0:3", &format!("0:0:{target}:{unit}"))
                    .replace("target0:0:0/", &format!("target0:0:{target}/"))
                    .replace("sdb", &format!("sd{number:03}-"))
                    .replace("data-one", &format!("data-{number:03}"))
                    .replace("\"8:", &format!("\"{}:", 300 + number))
                    .replace("/8:", &format!("/{}:", 300 + number))
            })
            .filter(|line| !line.contains("/proc/") && !line.contains("dm-0"))
            .collect::<Vec<_>>()
            .join("\n");
        lay_out::lay_out(&tree, folder.path());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let before = memory();
    let mut times = Vec::new();
    let mut kept = None;
    for _ in 0..ROUNDS {
        let guest = Guest { root: Root::at(folder.path()), ..Guest::default() };
        let took = runtime.block_on(scan(&guest));
        if kept.is_none() {
            println!("the first look at {DISKS} disks: {took:.1?}, {} KiB resident more", memory() - before);
            kept = Some(guest);
        } else {
            times.push(took);
        }
    }
    times.sort();
    println!(
        "a look at {DISKS} disks: p50 {:.1?}, p90 {:.1?}",
        times[times.len() / 2],
        times[times.len() * 9 / 10]
    );
}

/// How long it takes until all disks are known.
async fn scan(guest: &Guest) -> Duration {
    let begun = Instant::now();
    let mut changes = guest.disks.changes();
    tokio::select! {
        ended = follow(guest, Silence) => panic!("{ended:?}"),
        () = async {
            while guest.disks.all().len() < DISKS {
                changes.changed().await.unwrap();
            }
        } => begun.elapsed(),
    }
}

/// KiB that this process has resident.
fn memory() -> i64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}
