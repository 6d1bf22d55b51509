//! A host half that is killed at each step, and records that cannot be used.

use std::collections::BTreeSet;
use std::time::Duration;

use guestlet::wire::proto::v1::load_balancer::State;
use tonic::Code;

use super::{Asking, SMALL, USUAL, started, wanted};
use crate::csi::refused;

/// What all of them have, each once.
fn addresses(asking: &Asking) -> BTreeSet<String> {
    let list = asking.list();
    let all: BTreeSet<_> =
        list.iter().flat_map(|one| one.addresses.iter().map(|held| held.address.clone())).collect();
    assert_eq!(all.len(), list.iter().map(|one| one.addresses.len()).sum::<usize>(), "{list:#?}");
    all
}

/// Killed while it allocates and gives back: each Service is as it was or as it was to be, no address is with two, none leaks.
#[test]
fn killed_at_any_step_it_gives_no_address_away_twice_and_loses_none() {
    let pool =
        "limits.calls-per-second = 1000\n[[address-pool]]\nname = 'p'\nranges = ['192.0.2.1-192.0.2.40']";
    let mut vms = started(&USUAL, pool);
    let mut random = fastrand::Rng::with_seed(20);
    for round in 0..12 {
        let told: Vec<(String, String)> = std::thread::scope(|scope| {
            let workers: Vec<_> = ["a", "b", "c"]
                .map(|vm| {
                    let asking = vms.of(vm);
                    scope.spawn(move || {
                        let mut told = Vec::new();
                        for number in 0..12 {
                            let name = format!("{}-{number}", if vm == "c" { "c" } else { "dev" });
                            if (number + round) % 3 == 0 {
                                let _ = asking.release(&name);
                                continue;
                            }
                            if let Ok(balancer) = asking.ensure(wanted(&name))
                                && let Some(address) = balancer.addresses.first()
                            {
                                told.push((format!("{vm} {name}"), address.address.clone()));
                            }
                        }
                        told
                    })
                })
                .into_iter()
                .collect();
            std::thread::sleep(Duration::from_millis(random.u64(0..120)));
            vms.lab.kill();
            workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
        });
        vms.lab.again();
        vms.until_connected();
        let (dev, prod) = (addresses(&vms.of("a")), addresses(&vms.of("c")));
        assert!(dev.is_disjoint(&prod), "{dev:?} {prod:?}");
        assert_eq!(dev.len() + prod.len(), vms.kept());
        // What was told and not given back since is still so.
        for (who, address) in told.iter().filter(|(who, _)| !who.contains("-0")) {
            let (vm, name) = who.split_once(' ').unwrap();
            let found = vms.of(vm).list().into_iter().find(|one| one.service.as_ref().unwrap().name == name);
            if let Some(found) = found {
                assert_eq!(&found.addresses[0].address, address, "{who} in round {round}");
            }
        }
    }
    // Everything can be given back, and then all addresses can be had.
    for vm in ["a", "c"] {
        let asking = vms.of(vm);
        asking.names().iter().for_each(|name| asking.release(name).unwrap());
    }
    let a = vms.of("a");
    for number in 0..40 {
        assert_eq!(a.ensure(wanted(&format!("all-{number}"))).unwrap().state(), State::Ready, "{number}");
    }
    assert_eq!(a.failure(wanted("one-more")), "PoolExhausted");
}

#[test]
fn a_record_that_cannot_be_used_keeps_its_address() {
    let mut vms = started(&USUAL, SMALL);
    let a = vms.of("a");
    let address = a.address(wanted("web"));
    vms.lab.kill();
    let file = vms.lab.path("balancers").join(&vms.files()[0]);
    let text = std::fs::read_to_string(&file).unwrap();
    // Of a newer program: the address is known.
    std::fs::write(&file, text.replace("\"version\": 1", "\"version\": 9")).unwrap();
    vms.lab.again();
    vms.until_connected();
    let c = vms.of("c");
    let others: Vec<_> = ["1", "2", "3"].map(|name| c.address(wanted(name))).to_vec();
    assert!(!others.contains(&address), "{others:?}");
    assert_eq!(c.failure(wanted("4")), "PoolExhausted");
    c.release("1").unwrap();
    c.release("4").unwrap();
    // Torn: what it holds is not known, so nobody gets anything, and those who have something keep it.
    vms.lab.kill();
    std::fs::write(&file, &text[..text.len() / 2]).unwrap();
    vms.lab.again();
    vms.until_connected();
    let c = vms.of("c");
    assert_eq!(c.failure(wanted("5")), "RecordsUnreadable");
    assert_eq!(c.address(wanted("2")), others[1]);
    assert!(vms.lab.log().contains("restore or remove it"), "{}", vms.lab.log());
    // It is restored.
    vms.lab.kill();
    std::fs::write(&file, text).unwrap();
    vms.lab.again();
    vms.until_connected();
    assert_eq!(vms.of("a").address(wanted("web")), address);
    vms.of("c").until(&vms.lab, "5", |one| one.state() == State::Ready);
}

#[test]
fn where_nothing_can_be_written_nothing_is_promised() {
    let vms = started(&USUAL, "[[address-pool]]\nname = 'p'\nranges = ['192.0.2.1-192.0.2.9']");
    let a = vms.of("a");
    let address = a.address(wanted("web"));
    // Its directory goes read-only for root as well: it is replaced under the program's feet by nothing that can be written.
    let folder = vms.lab.path("balancers");
    let moved = vms.lab.path("balancers.moved");
    std::fs::rename(&folder, &moved).unwrap();
    // It is reached through its descriptor, wherever it is.
    a.ensure(wanted("more")).unwrap();
    assert_eq!(
        std::fs::read_dir(&moved)
            .unwrap()
            .filter(|entry| entry.as_ref().unwrap().path().extension().is_some_and(|end| end == "json"))
            .count(),
        2
    );
    std::fs::remove_dir_all(&moved).unwrap();
    refused(a.ensure(wanted("lost")), Code::Unavailable, "cannot write its load balancers");
    refused(a.release("web"), Code::Unavailable, "cannot write its load balancers");
    assert_eq!(a.address(wanted("web")), address, "what was promised is known");
}
