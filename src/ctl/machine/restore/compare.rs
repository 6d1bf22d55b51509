//! Comparison of a clone's databases with those of the guest: they have to be the same ones, at the position
//! of the receipt or later.
//!
//! A position counts only if nothing but the data of the snapshot determines it. A server that starts writes
//! to its own log, so that its present position there does not show what was lost before. To compare one more
//! kind of database: its arm in [`reached`].

use std::collections::BTreeMap;

use super::Unproved;
use crate::receipt::{Application, Level, Receipt};

/// Size of a page of PostgreSQL's WAL in bytes.
const LOG_PAGE: u32 = 8192;

/// Compares all file systems and applications of a receipt with those of the clone's receipt. Returns one
/// line for each comparison.
///
/// # Errors
/// Fails at the first one that is missing, is a different one, or has less data.
pub fn all(receipt: &Receipt, clone: &Receipt) -> Result<Vec<String>, Unproved> {
    if receipt.applications.is_empty() || receipt.left_out > 0 {
        return Err(Unproved::for_good("the receipt does not list all applications and file systems"));
    }
    if clone.guest.boot_id.is_empty() || clone.guest.boot_id == receipt.guest.boot_id {
        return Err(Unproved::for_good("the receipt that the clone shows is not its own"));
    }
    let volumes = volumes(receipt, clone)?;
    let applications = receipt.applications.iter().map(|one| compare(one, clone));
    std::iter::once(Ok(volumes)).chain(applications).collect()
}

/// Checks that the clone has the file systems that were frozen, so that it has all disks of the snapshot, and
/// they are of this guest.
fn volumes(receipt: &Receipt, clone: &Receipt) -> Result<String, Unproved> {
    let mut found = Vec::new();
    for one in &receipt.volumes {
        let mut here = clone.volumes.iter();
        // The clone may list another mount point of the same file system.
        let is_it = if one.uuid.is_empty() {
            here.any(|here| (&here.mount_point, &here.kind) == (&one.mount_point, &one.kind))
        } else {
            here.any(|here| here.uuid == one.uuid)
        };
        if !is_it {
            let (place, uuid) = (&one.mount_point, &one.uuid);
            let uuid = if uuid.is_empty() { String::new() } else { format!(" (UUID {uuid})") };
            return Err(Unproved::yet(format!(
                "the file system at {place}{uuid} is not mounted in the clone"
            )));
        }
        found.push(&*one.mount_point);
    }
    if found.is_empty() {
        return Err(Unproved::for_good("the receipt lists no file systems"));
    }
    Ok(format!("file systems: {}", found.join(", ")))
}

fn compare(one: &Application, clone: &Receipt) -> Result<String, Unproved> {
    let Application { name, instance, .. } = one;
    let about = |words: String| format!("{name} ({instance}): {words}");
    let here = clone.applications.iter().find(|here| here.name == *name && alike(here, one));
    let here = here.ok_or_else(|| Unproved::yet(about("it is not found in the clone".to_owned())))?;
    if here.level != Level::Application {
        return Err(Unproved::yet(about(format!("it cannot be queried in the clone: {}", here.problem))));
    }
    let (then, now) = (evidence(one), evidence(here));
    reached(name, &then, &now).map(about).map_err(|words| Unproved::for_good(about(words)))
}

/// Compares the names of applications. The name of an etcd that was found by its unit contains its process
/// ID.
fn alike(one: &Application, other: &Application) -> bool {
    let is_process = |one: &Application| one.instance.starts_with("process:");
    one.instance == other.instance || (is_process(one) && is_process(other))
}

type Evidence<'a> = BTreeMap<&'a str, &'a str>;

fn evidence(one: &Application) -> Evidence<'_> {
    one.evidence.iter().map(|(name, value)| (&**name, &**value)).collect()
}

fn reached(name: &str, then: &Evidence<'_>, now: &Evidence<'_>) -> Result<String, String> {
    let text = |evidence: &Evidence<'_>, key: &str, whose: &str| {
        let found = evidence.get(key).filter(|text| !text.is_empty()).map(|text| (*text).to_owned());
        found.ok_or_else(|| format!("{whose} does not report its {key}"))
    };
    let same = |key: &str| match (text(then, key, "the receipt")?, text(now, key, "the clone")?) {
        (then, now) if then == now => Ok(()),
        (then, now) => Err(format!("it is a different one: its {key} was {then}, and is {now}")),
    };
    let at_least = |key: &str, key_now: &str, is_reached: fn(&str, &str) -> Option<bool>| {
        let (then, now) = (text(then, key, "the receipt")?, text(now, key_now, "the clone")?);
        match is_reached(&then, &now) {
            Some(true) => Ok(format!("{key_now} {now}, {key} {then} by the receipt")),
            Some(false) => Err(format!("its {key} was {then}, and its {key_now} is only {now}")),
            None => Err(format!("its {key} {then} cannot be compared with {key_now} {now}")),
        }
    };
    let says = |key: &str| then.get(key).is_some_and(|text| !text.is_empty());
    match name {
        "postgresql" => {
            same("system-identifier")?;
            at_least("timeline", "timeline", numbers)?;
            at_least("lsn", "recovered-to", log_positions)
        }
        // MariaDB derives its own identifier from the hardware address of a network card, so it differs in the
        // clone.
        "mysql" if says("gtid-binlog") => {
            same("server-id")?;
            at_least("gtid-binlog", "gtid-binlog", transactions)
        }
        "mysql" if says("gtid") => {
            same("server")?;
            at_least("gtid", "gtid", sets)
        }
        "mysql" => {
            Err("its position has no GTID, and nothing else shows what a copy of it contains".to_owned())
        }
        "etcd" => {
            same("cluster")?;
            same("member")?;
            at_least("revision", "revision", numbers)
        }
        _ => Err("it has no position that could be compared".to_owned()),
    }
}

fn numbers(then: &str, now: &str) -> Option<bool> {
    Some(now.parse::<u64>().ok()? >= then.parse::<u64>().ok()?)
}

/// Compares WAL positions, such as `1/7A0B2C38`. At the end of a page the server may have written a part of a
/// record, which recovery leaves out.
fn log_positions(then: &str, now: &str) -> Option<bool> {
    let parse = |text: &str| {
        let (high, low) = text.split_once('/')?;
        Some((u32::from_str_radix(high, 16).ok()?, u32::from_str_radix(low, 16).ok()?))
    };
    let (then, now) = (parse(then)?, parse(now)?);
    if now < then && then.1 % LOG_PAGE == 0 { None } else { Some(now >= then) }
}

/// Compares MariaDB's positions, such as `0-1-100,7-2-5`: the last transaction of each domain, with its
/// server.
fn transactions(then: &str, now: &str) -> Option<bool> {
    let parse = |text: &str| {
        let entries = text.split(',').map(|entry| {
            let mut parts = entry.trim().splitn(3, '-').map(str::parse::<u64>);
            let (domain, _server) = (parts.next()?.ok()?, parts.next()?.ok()?);
            Some((domain, parts.next()?.ok()?))
        });
        entries.collect::<Option<BTreeMap<_, _>>>()
    };
    let (then, now) = (parse(then)?, parse(now)?);
    Some(then.iter().all(|(domain, number)| now.get(domain).is_some_and(|here| here >= number)))
}

/// Compares MySQL's positions, such as `3e11fa47-71ca-11e1-9e33-c80aa9429562:1-5:7,…:1-9`: all transactions
/// of each server.
fn sets(then: &str, now: &str) -> Option<bool> {
    let interval = |text: &str| {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        Some((first.parse::<u64>().ok()?, last.parse::<u64>().ok()?))
    };
    let parse = |text: &str| {
        let entries = text.split(',').map(|entry| {
            let (server, intervals) = entry.trim().split_once(':')?;
            let intervals = intervals.split(':').map(interval);
            Some((server.to_owned(), intervals.collect::<Option<Vec<_>>>()?))
        });
        entries.collect::<Option<BTreeMap<_, _>>>()
    };
    let (then, now) = (parse(then)?, parse(now)?);
    let is_in = |one: &(u64, u64), all: &[(u64, u64)]| all.iter().any(|all| all.0 <= one.0 && one.1 <= all.1);
    let has = |(server, intervals): (&String, &Vec<_>)| {
        now.get(server).is_some_and(|all| intervals.iter().all(|one| is_in(one, all)))
    };
    Some(then.iter().all(has))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::receipt::{Machine, Volume};

    fn with(name: &str, evidence: &[(&str, &str)]) -> Receipt {
        let evidence =
            evidence.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let one = Application {
            name: name.to_owned(),
            instance: "i".to_owned(),
            level: Level::Application,
            problem: String::new(),
            evidence,
        };
        let volume = Volume { mount_point: "/".to_owned(), uuid: "u".to_owned(), ..Volume::default() };
        Receipt { applications: vec![one], volumes: vec![volume], ..Receipt::default() }
    }

    fn compared(then: &Receipt, now: &Receipt) -> Result<Vec<String>, Unproved> {
        let guest = Machine { boot_id: "the clone's".to_owned(), ..Machine::default() };
        all(then, &Receipt { guest, ..now.clone() })
    }

    fn postgres(key: &str, lsn: &str) -> Receipt {
        with("postgresql", &[("system-identifier", "7"), ("timeline", "1"), (key, lsn)])
    }

    #[test]
    fn a_clone_has_at_least_what_the_receipt_says() {
        let then = postgres("lsn", "0/FF");
        let words = compared(&then, &postgres("recovered-to", "1/0")).unwrap().join("; ");
        assert_eq!(words, "file systems: /; postgresql (i): recovered-to 1/0, lsn 0/FF by the receipt");
        let other = with("postgresql", &[("system-identifier", "8"), ("recovered-to", "1/0")]);
        for (now, why) in [
            (postgres("recovered-to", "0/FE"), "is only 0/FE"),
            (postgres("recovered-to", "0"), "cannot be compared"),
            // The present position is beyond the recovered one, and proves nothing.
            (postgres("lsn", "1/0"), "does not report its recovered-to"),
            (other, "it is a different one"),
        ] {
            let unproved = compared(&then, &now).unwrap_err();
            assert!(unproved.words.contains(why) && unproved.is_final, "{unproved:?}");
        }
        let mut down = postgres("recovered-to", "1/0");
        down.applications[0].level = Level::FileSystem;
        assert!(!compared(&then, &down).unwrap_err().is_final);
        down.applications.clear();
        let unproved = compared(&then, &down).unwrap_err();
        assert!(unproved.words.contains("not found") && !unproved.is_final, "{unproved:?}");

        let maria = |gtid| with("mysql", &[("server-id", "1"), ("gtid-binlog", gtid)]);
        assert!(compared(&maria("0-1-9,3-2-4"), &maria("3-2-4,0-7-12,5-1-1")).is_ok());
        assert!(compared(&maria("0-1-9,3-2-4"), &maria("0-7-12")).is_err());
        let mysql = |gtid| with("mysql", &[("server", "u"), ("gtid", gtid)]);
        assert!(compared(&mysql("a:1-5:7,b:3"), &mysql("b:1-4,a:1-8")).is_ok());
        for less in ["a:1-5,b:3", "a:1-8", "a:1-4:6-7,b:3", "a"] {
            assert!(compared(&mysql("a:1-5:7,b:3"), &mysql(less)).is_err(), "{less}");
        }
        let etcd = |revision| with("etcd", &[("cluster", "c"), ("member", "m"), ("revision", revision)]);
        assert!(compared(&etcd("9"), &etcd("10")).is_ok());
        assert!(compared(&etcd("10"), &etcd("9")).is_err());
        // An application without a position, or one that is not listed, proves nothing.
        for nothing in
            [with("shop", &[]), with("mysql", &[("server", "u"), ("lsn", "9")]), Receipt::default()]
        {
            assert!(compared(&nothing, &nothing).unwrap_err().is_final);
        }
        let cut = Receipt { left_out: 1, ..etcd("9") };
        assert!(compared(&cut, &etcd("9")).is_err());
    }

    #[test]
    fn a_part_of_a_record_proves_nothing() {
        assert_eq!(log_positions("0/2000", "0/1FF8"), None);
        assert_eq!(log_positions("0/2000", "0/2000"), Some(true));
        assert_eq!(log_positions("0/2008", "0/2000"), Some(false));
    }

    #[test]
    fn a_clone_has_the_file_systems_of_the_guest_and_a_receipt_of_its_own() {
        let (then, mut now) = (postgres("lsn", "0/1"), postgres("recovered-to", "0/1"));
        assert!(all(&then, &now).unwrap_err().words.contains("is not its own"));
        now.volumes[0].mount_point = "/elsewhere".to_owned();
        assert!(compared(&then, &now).is_ok());
        now.volumes[0].uuid = "another".to_owned();
        let unproved = compared(&then, &now).unwrap_err();
        assert!(
            unproved.words.contains("at / (UUID u) is not mounted") && !unproved.is_final,
            "{unproved:?}"
        );
    }

    proptest! {
        #[test]
        fn positions_are_ordered_or_not_comparable(then in "\\PC{0,20}", now in "[0-9A-F/,:-]{0,20}") {
            for compare in [numbers, log_positions, transactions, sets] {
                let _ = (compare(&then, &now), compare(&now, &then));
                prop_assert_ne!(compare(&now, &now), Some(false));
            }
        }
    }
}
