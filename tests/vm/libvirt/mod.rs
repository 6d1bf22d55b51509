//! virsh drives a real guest that runs guestlet in place of qemu-ga. One guest is booted for all checks, which
//! go on after one that failed; each failure names the verb of virsh, and shows what libvirt asked the agent and
//! what that answered.
//!
//! [`reports`] holds the verbs that only ask, [`machine`] those that change clock, processors and file systems,
//! [`accounts`] those for users, [`snapshots`] those that take snapshots of a guest with a database, [`power`] those that stop the
//! guest.

mod accounts;
mod machine;
mod power;
mod reports;
mod snapshots;

use std::fmt::Write as _;
use std::time::Instant;

use anyhow::ensure;
use serde_json::{Value, json};

use crate::harness::libvirt::{CARD, Domain};
use crate::harness::turns;
use crate::{images, installed};

/// What is asked of virsh, with the agent's commands that it takes, and whether all was well.
struct Check(&'static str, &'static [&'static str], fn(&Domain) -> anyhow::Result<()>);

/// What is set as the guest's address.
const ADDRESS: &str = "192.0.2.10/24";

#[test]
fn virsh_drives_a_guest() {
    // libvirt waits 5 s for an agent, and the guest has two processors.
    let _alone = turns::alone();
    let domain = Domain::start("virsh", images(), installed(), machine::with_a_string).unwrap();
    domain.wait_agent().unwrap();
    domain.run("mkdir /data && mount /dev/sda /data && useradd --create-home alice").unwrap();
    let card = format!("$(basename $(dirname $(grep -l {CARD} /sys/class/net/*/address)))");
    domain.run(&format!("ip link set {card} up && ip address replace {ADDRESS} dev {card}")).unwrap();

    let mut failed = String::new();
    run(&domain, &[reports::CHECKS, machine::CHECKS, accounts::CHECKS, snapshots::CHECKS], &mut failed);
    run(&domain, &[&[Check("(the words of libvirt)", &[], nothing_was_out_of_step)]], &mut failed);
    run(&domain, &[power::CHECKS], &mut failed);
    assert!(failed.is_empty(), "\n{failed}");
}

fn run(domain: &Domain, checks: &[&[Check]], failed: &mut String) {
    let info = domain.agent("guest-info", &json!({})).unwrap();
    let known =
        |name: &&str| info["supported_commands"].as_array().unwrap().iter().any(|one| one["name"] == **name);
    for Check(verb, commands, check) in checks.iter().copied().flatten() {
        if let Some(command) = commands.iter().find(|name| !known(name)) {
            println!("  FAILED virsh {verb}");
            writeln!(failed, "── virsh {verb}: the agent has no {command}").unwrap();
            continue;
        }
        let (started, before) = (Instant::now(), domain.exchanges().len());
        match check(domain) {
            Ok(()) => println!("  {:4.1} s virsh {verb}", started.elapsed().as_secs_f32()),
            Err(error) => {
                println!("  FAILED virsh {verb}");
                writeln!(failed, "── virsh {verb}: {error:#}").unwrap();
                let exchanges = domain.exchanges();
                for exchange in exchanges.get(before..).unwrap_or_default() {
                    writeln!(failed, "   asked    {}", exchange.asked).unwrap();
                    exchange.answered.iter().for_each(|line| writeln!(failed, "   answered {line}").unwrap());
                }
            }
        }
    }
}

/// libvirt complains when an answer is no JSON, has neither a result nor an error, lacks what it needs, comes
/// unasked or late.
fn nothing_was_out_of_step(domain: &Domain) -> anyhow::Result<()> {
    for exchange in domain.exchanges() {
        ensure!(exchange.answered.len() == 1, "not one answer: {exchange:?}");
        let answer: Value = serde_json::from_str(&exchange.answered[0])?;
        ensure!(answer.get("return").is_some() != answer.get("error").is_some(), "{exchange:?}");
    }
    let log = domain.log();
    let mut words = log.lines().filter(|line| line.contains("qemuAgent"));
    let wrong = words.find(|line| {
        let complaint = line.contains(": error :") || line.contains(": warning :");
        // That the agent answered with an error is said here as well.
        (complaint && !line.contains("guest agent command failed"))
            || ["gnoring", "garbage", "unexpected", "Unknown"].iter().any(|word| line.contains(word))
    });
    ensure!(wrong.is_none(), "{wrong:?}");
    Ok(())
}
