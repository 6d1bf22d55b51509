//! Rules by which the kernel forwards, in the language of nft(8). Pure.
//!
//! ```text
//!  a packet that begins a connection, from outside or from this host
//!    address, protocol and port are a service's ──▶ its chain: may this source send? ──▶ to a healthy node, random or by source
//!    no healthy node, or another port of an address of an interface ──▶ refused, so that nobody waits
//!  on its way to the node
//!    the sender is in the node's own subnet, so the answer would not return this way ──▶ the host's address as its source
//!    all others ──▶ the sender's address stays
//! ```
//!
//! Everything is in one table, which is replaced as a whole in one transaction; existing connections continue. No
//! other table is touched.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::IpAddr;

use super::super::wanted::Protocol;
use super::plan::{Forwarded, Owners, Plan};
use crate::addresses::number;

/// Name of the table, which only this program uses.
pub const TABLE: &str = "guestlet";
/// Slots among which the nodes of a service with sticky clients are distributed.
const SLOTS: u32 = 256;
/// Seed of the hash: the same in each run, so that clients keep their nodes when rules are replaced.
const SEED: u32 = 0x6775_6573;

/// Words and suffixes that nft(8) rules use for an address family.
#[derive(Debug, Clone, Copy)]
struct Family {
    is_ipv4: bool,
    suffix: char,
    word: &'static str,
    kind: &'static str,
}

const FAMILIES: [Family; 2] = [
    Family { is_ipv4: true, suffix: '4', word: "ip", kind: "ipv4_addr" },
    Family { is_ipv4: false, suffix: '6', word: "ip6", kind: "ipv6_addr" },
];

/// Returns the nft(8) input that replaces the whole table by the rules of a plan, in one transaction.
pub fn replace(plan: &Plan) -> String {
    let mut text = remove();
    let _ = writeln!(text, "table inet {TABLE} {{");
    for family in FAMILIES {
        sets(&mut text, plan, family);
    }
    for service in &plan.services {
        if !service.targets.is_empty() {
            chain(&mut text, service);
        }
    }
    hooks(&mut text);
    text.push_str("}\n");
    text
}

/// Returns the nft(8) input that removes the table. It first adds the table, so that it also succeeds without one.
pub fn remove() -> String {
    format!("table inet {TABLE}\ndelete table inet {TABLE}\n")
}

fn sets(text: &mut String, plan: &Plan, family: Family) {
    let Family { is_ipv4, suffix, kind, .. } = family;
    let mine = |service: &&Forwarded| service.address.is_ipv4() == is_ipv4;
    let (mut addresses, mut subnets) = (BTreeSet::new(), BTreeMap::new());
    let (mut served, mut unserved) = (BTreeSet::new(), BTreeSet::new());
    for service in plan.services.iter().filter(mine) {
        addresses.insert(service.address.to_string());
        let key = format!("{} . {} . {}", service.address, service.protocol.name(), service.port);
        if service.targets.is_empty() {
            unserved.insert(key);
        } else {
            served.insert(format!("{key} : goto {}", name(service)));
        }
        for (address, subnet) in &service.targets {
            // Nodes may claim the same address with different subnets, and the set must not contain both. The larger one
            // wins: all that this costs is the senders' addresses.
            let known = subnets.entry(*address).or_insert(*subnet);
            if subnet.range().len() > known.range().len() {
                *known = *subnet;
            }
        }
    }
    let hairpins = subnets.iter().map(|(address, subnet)| format!("{subnet} . {address}")).collect();
    let given = plan.given().into_iter().filter(|address| address.is_ipv4() == is_ipv4);
    let given = given.map(|address| address.to_string()).collect();
    let port = format!("{kind} . inet_proto . inet_service");
    set(text, &format!("set addresses{suffix}"), &format!("type {kind};"), &addresses);
    set(text, &format!("set given{suffix}"), &format!("type {kind};"), &given);
    set(text, &format!("set hairpin{suffix}"), &format!("type {kind} . {kind}; flags interval;"), &hairpins);
    set(text, &format!("set unserved{suffix}"), &format!("type {port};"), &unserved);
    set(text, &format!("map services{suffix}"), &format!("type {port} : verdict;"), &served);
}

fn set(text: &mut String, head: &str, kind: &str, elements: &BTreeSet<String>) {
    let _ = write!(text, "  {head} {{ {kind}");
    if !elements.is_empty() {
        let list: Vec<_> = elements.iter().map(String::as_str).collect();
        let _ = write!(text, " elements = {{ {} }}", list.join(", "));
    }
    text.push_str(" }\n");
}

fn name(service: &Forwarded) -> String {
    let family = if service.address.is_ipv4() { '4' } else { '6' };
    format!("lb_{}_{}_{}_{family}", service.id, service.protocol.name(), service.port)
}

fn chain(text: &mut String, service: &Forwarded) {
    let Family { word, is_ipv4, .. } = FAMILIES[usize::from(service.address.is_ipv6())];
    let _ = writeln!(text, "  chain {} {{", name(service));
    if let Some(sources) = &service.sources {
        let mine = sources.iter().filter(|source| source.is_ipv4() == is_ipv4);
        let mine: Vec<_> = mine.map(ToString::to_string).collect();
        if mine.is_empty() {
            text.push_str("    drop\n  }\n");
            return;
        }
        let _ = writeln!(text, "    {word} saddr != {{ {} }} drop", disjoint(service, is_ipv4));
    }
    let protocol = service.protocol.name();
    let there = |(address, _): &(IpAddr, _)| format!("{address} . {}", service.node_port);
    let slots: Vec<_> = if service.sticks {
        let slot = |slot| format!("{slot} : {}", there(&service.targets[chosen(service, slot)]));
        (0..SLOTS).map(slot).collect()
    } else {
        service.targets.iter().enumerate().map(|(at, target)| format!("{at} : {}", there(target))).collect()
    };
    let by = if service.sticks {
        format!("jhash {word} saddr mod {SLOTS} seed {SEED:#x}")
    } else {
        format!("numgen random mod {}", slots.len())
    };
    let _ = writeln!(text, "    meta l4proto {protocol} dnat {word} to {by} map {{ {} }}", slots.join(", "));
    text.push_str("  }\n");
}

/// Parses the load balancer of each address, protocol and port from a table listed by nft(8), as an earlier run
/// wrote it.
pub fn owners(listed: &str) -> Owners {
    let words: Vec<_> = listed.split([' ', '\n', '\t', ',']).filter(|word| !word.is_empty()).collect();
    // For example `192.0.2.1 . udp . 53 : goto lb_<id>_udp_53_4`. Protocol and port are taken from the name of the
    // chain, since nft(8) may print them by other names.
    let owner = |words: &[&str]| {
        let [address, _, _, _, _, _, "goto", chain] = words else { return None };
        let mut parts = chain.strip_prefix("lb_")?.split('_');
        let (id, protocol, port) = (parts.next()?, parts.next()?, parts.next()?);
        let protocol = [Protocol::Tcp, Protocol::Udp].into_iter().find(|one| one.name() == protocol)?;
        Some(((address.parse().ok()?, protocol.number(), port.parse().ok()?), id.to_owned()))
    };
    words.windows(8).filter_map(owner).collect()
}

/// Returns the sources of a family, without those inside others: nft(8) refuses a set with overlapping intervals.
fn disjoint(service: &Forwarded, is_ipv4: bool) -> String {
    let all = service.sources.iter().flatten().filter(|source| source.is_ipv4() == is_ipv4);
    let all: Vec<_> = all.collect();
    let is_within = |one: &&&crate::addresses::Subnet| {
        let (first, last) = (one.range().first(), one.range().last());
        !all.iter().any(|other| other != *one && other.contains(first) && other.contains(last))
    };
    let kept: Vec<_> = all.iter().filter(is_within).map(ToString::to_string).collect();
    kept.join(", ")
}

/// Chooses the node for a slot by rendezvous hashing: the node with the greatest weight. When a node fails, only
/// its own slots move to other nodes.
fn chosen(service: &Forwarded, slot: u32) -> usize {
    let weight = |address: IpAddr| {
        let bytes = number(address).to_be_bytes().into_iter().chain(slot.to_be_bytes());
        // FNV-1a with a final mix, since FNV-1a hardly spreads the last bytes.
        let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        hash ^ (hash >> 33)
    };
    let targets = service.targets.iter().enumerate();
    targets.max_by_key(|(_, (address, _))| weight(*address)).map_or(0, |(at, _)| at)
}

/// Writes the chains that see packets. `input` sees unforwarded packets to an address of the host, and `forward`
/// those to an address that is only routed to it.
fn hooks(text: &mut String) {
    for (hook, head) in [
        ("prerouting", "type nat hook prerouting priority dstnat; policy accept;"),
        ("output", "type nat hook output priority -100; policy accept;"),
    ] {
        let _ = writeln!(text, "  chain {hook} {{ {head}");
        for Family { word, suffix, .. } in FAMILIES {
            let _ = writeln!(text, "    {word} daddr . meta l4proto . th dport vmap @services{suffix}");
        }
        text.push_str("  }\n");
    }
    for hook in ["input", "forward"] {
        let _ = writeln!(text, "  chain {hook} {{ type filter hook {hook} priority filter; policy accept;");
        for Family { word, suffix, .. } in FAMILIES {
            let at = format!("{word} daddr . meta l4proto . th dport @unserved{suffix}");
            refuse(text, &at);
            if hook == "input" {
                // Answers to connections of this host itself are accepted: their ports are not known in advance.
                refuse(
                    text,
                    &format!("ct state new {word} daddr @given{suffix} meta l4proto {{ tcp, udp }}"),
                );
            }
        }
        text.push_str("  }\n");
    }
    text.push_str("  chain postrouting { type nat hook postrouting priority srcnat; policy accept;\n");
    for Family { word, suffix, .. } in FAMILIES {
        let _ = writeln!(
            text,
            "    ct status dnat ct original {word} daddr @addresses{suffix} {word} saddr . {word} daddr @hairpin{suffix} masquerade"
        );
    }
    text.push_str("  }\n");
}

fn refuse(text: &mut String, at: &str) {
    let _ = writeln!(text, "    {at} meta l4proto tcp reject with tcp reset");
    let _ = writeln!(text, "    {at} reject with icmpx port-unreachable");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addresses::Subnet;
    use proptest::prelude::*;

    fn service(address: &str, targets: &[&str]) -> Forwarded {
        let target = |text: &&str| {
            let (address, subnet) = Subnet::parse_interface(text).unwrap();
            (address, subnet)
        };
        Forwarded {
            id: "aa".into(),
            address: address.parse().unwrap(),
            protocol: Protocol::Tcp,
            port: 80,
            node_port: 30080,
            targets: targets.iter().map(target).collect(),
            sources: None,
            sticks: false,
        }
    }

    fn text(services: Vec<Forwarded>) -> String {
        replace(&Plan { services, ..Plan::default() })
    }

    #[track_caller]
    fn has(text: &str, part: &str) {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }

    #[test]
    fn a_service_goes_to_its_nodes() {
        let text = text(vec![
            service("192.0.2.1", &["10.0.0.7/24", "10.0.0.8/24"]),
            service("2001:db8::1", &["fd00::7/64"]),
            Forwarded { port: 81, ..service("192.0.2.1", &[]) },
        ]);
        has(&text, "192.0.2.1 . tcp . 80 : goto lb_aa_tcp_80_4");
        has(&text, "dnat ip to numgen random mod 2 map { 0 : 10.0.0.7 . 30080, 1 : 10.0.0.8 . 30080 }");
        has(&text, "dnat ip6 to numgen random mod 1 map { 0 : fd00::7 . 30080 }");
        has(&text, "elements = { 10.0.0.0/24 . 10.0.0.7, 10.0.0.0/24 . 10.0.0.8 }");
        has(
            &text,
            "set unserved4 { type ipv4_addr . inet_proto . inet_service; elements = { 192.0.2.1 . tcp . 81 } }",
        );
        assert!(!text.contains("lb_aa_tcp_81"), "{text}");
        assert!(text.starts_with("table inet guestlet\ndelete table inet guestlet\ntable inet guestlet {"));
    }

    #[test]
    fn what_an_earlier_run_has_written_is_read() {
        let udp = Forwarded {
            protocol: Protocol::Udp,
            port: 53,
            id: "bb".into(),
            ..service("192.0.2.2", &["10.0.0.7/24"])
        };
        let services =
            vec![service("192.0.2.1", &["10.0.0.7/24"]), service("2001:db8::1", &["fd00::7/64"]), udp];
        let plan = Plan { services, ..Plan::default() };
        assert_eq!((owners(&replace(&plan)), plan.owners().len()), (plan.owners(), 3));
        assert!(owners("").is_empty());
    }

    #[test]
    fn who_may_not_send_is_not_forwarded() {
        let subnets = |texts: &[&str]| Some(texts.iter().map(|text| Subnet::parse(text).unwrap()).collect());
        let some = Forwarded {
            sources: subnets(&["10.0.0.0/8", "10.1.0.0/16", "2001:db8::/32"]),
            ..service("192.0.2.1", &["10.0.0.7/24"])
        };
        let other =
            Forwarded { sources: subnets(&["10.0.0.0/8"]), ..service("2001:db8::1", &["fd00::7/64"]) };
        let text = text(vec![some, other]);
        has(&text, "ip saddr != { 10.0.0.0/8 } drop");
        has(&text, "chain lb_aa_tcp_80_6 {\n    drop\n  }");
    }

    #[test]
    fn what_is_given_to_an_interface_is_nobody_elses() {
        let addresses = ["192.0.2.1".parse().unwrap()].into();
        let interface = super::super::plan::Interface { addresses, ..Default::default() };
        let plan = Plan { interfaces: [("eth0".to_owned(), interface)].into(), ..Plan::default() };
        has(&replace(&plan), "set given4 { type ipv4_addr; elements = { 192.0.2.1 } }");
    }

    proptest! {
        #[test]
        fn when_a_node_fails_the_others_keep_their_clients(count in 2_usize..20, failed in 0_usize..20) {
            let address = |at: usize| format!("10.0.0.{}/24", at + 1);
            let all: Vec<_> = (0..count).map(address).collect();
            let failed = failed % count;
            let targets = |without: Option<usize>| {
                let kept: Vec<_> = all.iter().enumerate().filter(|(at, _)| Some(*at) != without).map(|(_, one)| one.as_str()).collect();
                service("192.0.2.1", &kept)
            };
            let (before, after) = (targets(None), targets(Some(failed)));
            for slot in 0..SLOTS {
                let was = before.targets[chosen(&before, slot)].0;
                let is = after.targets[chosen(&after, slot)].0;
                prop_assert!(was == is || was == before.targets[failed].0);
            }
        }
    }
}
