use std::collections::BTreeMap;

use proptest::prelude::*;

use super::super::settings::tests::pool;
use super::super::wanted::{Wanted, tests::request};
use super::*;

fn service(name: &str, uid: &str) -> Service {
    Service { namespace: "shop".into(), name: name.into(), uid: uid.into() }
}

fn record(id: &str, name: &str, addresses: &[&str]) -> Record {
    let held = |text: &&str| Held { address: text.parse().unwrap(), pool: "lan".into() };
    let met = Some(Wanted::read(request(name, id)).unwrap().1);
    let mut record = Record::new(id.into(), "dev".into(), service(name, id));
    (record.addresses, record.met) = (addresses.iter().map(held).collect(), met);
    record
}

fn released(mut record: Record, at: u64) -> Record {
    (record.stage, record.released, record.met) = (Stage::Released, Some(at), None);
    record
}

fn pick(book: &Book, pool: &Pool, name: &str) -> Result<String, Lack> {
    book.pick(pool, Family::Ipv4, "dev", &service(name, "new"), Instant::now())
        .map(|held| held.address.to_string())
}

#[test]
fn addresses_are_given_away_in_turn_and_a_name_gets_its_own_again() {
    let lan = pool("lan", &["192.0.2.1-192.0.2.2", "192.0.2.8-192.0.2.9"]);
    let mut book = Book::default();
    for (id, name, expected) in [("a", "a", "192.0.2.1"), ("b", "b", "192.0.2.2"), ("c", "c", "192.0.2.8")] {
        assert_eq!(pick(&book, &lan, name).as_deref(), Ok(expected));
        book.put(record(id, name, &[expected]));
    }
    book.put(released(record("b", "b", &["192.0.2.2"]), 20));
    book.put(released(record("a", "a", &["192.0.2.1"]), 10));
    assert_eq!(pick(&book, &lan, "b").as_deref(), Ok("192.0.2.2"), "it had it");
    assert_eq!(pick(&book, &lan, "x").as_deref(), Ok("192.0.2.9"), "nobody had it");
    book.put(record("d", "d", &["192.0.2.9"]));
    assert_eq!(pick(&book, &lan, "x").as_deref(), Ok("192.0.2.1"), "it was given back first");
    book.put(record("e", "e", &["192.0.2.1"]));
    book.put(record("f", "f", &["192.0.2.2"]));
    assert_eq!(pick(&book, &lan, "x"), Err(Lack::Exhausted));
    let mut forgettable = book.forgettable("dev");
    forgettable.sort();
    assert_eq!(forgettable, ["a", "b"], "their addresses are others' by now");
    assert_eq!(book.taken(&lan, Family::Ipv4), 4);
}

#[test]
fn a_name_of_another_cluster_is_another_name() {
    let lan = pool("lan", &["192.0.2.1-192.0.2.2"]);
    let mut book = Book::default();
    book.put(released(record("a", "web", &["192.0.2.2"]), 10));
    let other = book.pick(&lan, Family::Ipv4, "prod", &service("web", "new"), Instant::now()).unwrap();
    assert_eq!(other.address.to_string(), "192.0.2.1");
}

#[test]
fn what_a_record_holds_that_cannot_be_used_is_nobodys() {
    let lan = pool("lan", &["192.0.2.1-192.0.2.2"]);
    let damaged = |addresses: Option<Vec<IpAddr>>| {
        BTreeMap::from([("x".to_owned(), Damaged { problem: "it is new".into(), addresses })])
    };
    let first = "192.0.2.1".parse().unwrap();
    let book = Book::new(Vec::new(), damaged(Some(vec![first])));
    assert_eq!(pick(&book, &lan, "a").as_deref(), Ok("192.0.2.2"));
    assert!(book.has("x") && !book.is_free(first));
    let book = Book::new(Vec::new(), damaged(None));
    assert_eq!(pick(&book, &lan, "a"), Err(Lack::Blind));
    // Of two records with the same address, the second is not trusted, and its addresses stay taken.
    let twins = vec![record("a", "a", &["192.0.2.1"]), record("b", "b", &["192.0.2.1"])];
    let book = Book::new(twins, BTreeMap::new());
    assert_eq!((book.holder(first), book.damaged().len()), (Some("a"), 1));
}

#[test]
fn what_may_have_been_written_is_given_to_nobody() {
    let lan = pool("lan", &["192.0.2.1"]);
    let mut book = Book::default();
    book.doubt(&record("a", "a", &["192.0.2.1"]));
    assert_eq!(pick(&book, &lan, "b"), Err(Lack::Exhausted));
    book.put(record("a", "a", &[]));
    assert_eq!(pick(&book, &lan, "b").as_deref(), Ok("192.0.2.1"));
}

#[test]
fn no_more_are_remembered_than_there_is_room_for() {
    let mut book = Book::default();
    for number in 0..300_u32 {
        let address = std::net::Ipv4Addr::from(0x0a00_0000 + number).to_string();
        book.put(released(record(&format!("r{number}"), "a", &[&address]), number.into()));
    }
    let forgettable = book.forgettable("dev");
    assert_eq!(forgettable.len(), 300 - MOST_REMEMBERED);
    assert!(forgettable.contains(&"r0".to_owned()) && !forgettable.contains(&"r299".to_owned()));
}

/// Operation on the book.
#[derive(Debug, Clone)]
enum Step {
    /// A Service with this number requests a load balancer.
    Take(u8),
    /// A Service releases its load balancer.
    Give(u8),
    /// The program is restarted.
    Restart,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let one = prop_oneof![
        4 => (0_u8..12).prop_map(Step::Take),
        3 => (0_u8..12).prop_map(Step::Give),
        1 => Just(Step::Restart),
    ];
    prop::collection::vec(one, 0..80)
}

proptest! {
    /// Whatever happens, no address is allocated twice, all are in the pool, and no request is refused while one is
    /// free.
    #[test]
    fn no_address_is_given_away_twice(steps in steps()) {
        let lan = pool("lan", &["10.0.0.250-10.0.1.1", "10.0.2.0/30"]);
        let size = usize::try_from(lan.size(true)).unwrap();
        let mut book = Book::default();
        let mut has: BTreeMap<u8, (String, IpAddr)> = BTreeMap::new();
        let mut had: BTreeMap<u8, IpAddr> = BTreeMap::new();
        for (at, step) in steps.into_iter().enumerate() {
            match step {
                Step::Take(number) if !has.contains_key(&number) => {
                    let name = format!("s{number}");
                    match book.pick(&lan, Family::Ipv4, "dev", &service(&name, "new"), Instant::now()) {
                        Ok(held) => {
                            prop_assert!(lan.has(held.address));
                            prop_assert!(has.values().all(|(_, other)| *other != held.address));
                            if let Some(before) = had.get(&number)
                                && has.values().all(|(_, other)| other != before)
                                && book.had(*before).is_some_and(|record| record.service.name == name)
                            {
                                prop_assert_eq!(held.address, *before);
                            }
                            let id = format!("r{at}");
                            book.put(record(&id, &name, &[&held.address.to_string()]));
                            has.insert(number, (id, held.address));
                            had.insert(number, held.address);
                        }
                        Err(lack) => {
                            prop_assert_eq!(lack, Lack::Exhausted);
                            prop_assert_eq!(has.len(), size);
                        }
                    }
                }
                Step::Give(number) => {
                    if let Some((id, _)) = has.remove(&number) {
                        let record = book.get(&id).unwrap().clone();
                        book.put(released(record, at as u64));
                    }
                }
                Step::Take(_) => {}
                Step::Restart => {
                    let records = book.records.values().cloned().collect();
                    book = Book::new(records, BTreeMap::new());
                    prop_assert!(book.damaged().is_empty());
                }
            }
            prop_assert_eq!(book.taken(&lan, Family::Ipv4), has.len());
            prop_assert_eq!(book.count("dev"), has.len());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_address_rests_before_another_service_gets_it() {
    let lan = pool("lan", &["192.0.2.1-192.0.2.2"]);
    let mut book = Book::new(Vec::new(), BTreeMap::new());
    let (now, minute) = (Instant::now(), std::time::Duration::from_secs(60));
    let lost = Record::new("aa".into(), "dev".into(), service("web", "old"));
    book.rest(&lost, ["192.0.2.1".parse().unwrap()].into_iter(), now + minute, now);
    let pick = |book: &Book, cluster: &str, name: &str, at| {
        book.pick(&lan, Family::Ipv4, cluster, &service(name, "new"), at).map(|held| held.address.to_string())
    };
    assert_eq!(pick(&book, "dev", "other", now).unwrap(), "192.0.2.2");
    assert_eq!(pick(&book, "prod", "web", now).unwrap(), "192.0.2.2", "it is another cluster's");
    assert_eq!(pick(&book, "dev", "web", now).unwrap(), "192.0.2.1", "it was its own");
    assert_eq!(pick(&book, "dev", "other", now + minute).unwrap(), "192.0.2.1");
    // No other address is left.
    let mut other = lost;
    other.addresses = vec![Held { address: "192.0.2.2".parse().unwrap(), pool: "lan".into() }];
    book.put(other);
    assert_eq!(pick(&book, "dev", "other", now).unwrap(), "192.0.2.1");
}
