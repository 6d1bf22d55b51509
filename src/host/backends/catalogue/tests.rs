//! Compares the index with walks over everything that was put into it.

use proptest::prelude::*;

use super::*;

const CLUSTERS: [&str; 3] = ["", "dev", "dev-2"];
const NAMES: [&str; 4] = ["", "a", "a1", "b"];
const CLASSES: [&str; 2] = ["fast", "slow"];
const VMS: [&str; 3] = ["u", "u1", "v"];

fn entry() -> impl Strategy<Value = Entry> {
    let holder = prop_oneof![Just(None), (0..VMS.len()).prop_map(Some)];
    let size = prop_oneof![0..100_u64, Just(u64::MAX)];
    let parts = (0..12_u8, 0..CLUSTERS.len(), 0..NAMES.len(), 0..CLASSES.len(), size, holder, any::<bool>());
    parts.prop_map(|(id, cluster, name, class, size, holder, is_listed)| Entry {
        id: format!("pool.{id:02}").into(),
        cluster: CLUSTERS[cluster].into(),
        name: NAMES[name].into(),
        class: CLASSES[class].into(),
        size,
        holder: holder.map(|at| VMS[at].into()),
        is_listed,
    })
}

#[derive(Debug, Clone)]
enum Act {
    Put(Entry),
    Remove(u8),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![3 => entry().prop_map(Act::Put), 1 => (0..12_u8).prop_map(Act::Remove)];
    proptest::collection::vec(act, 0..40)
}

fn coming() -> impl Strategy<Value = Vec<Coming>> {
    // Only one operation at a time works on a name.
    let all = proptest::collection::btree_map(0..NAMES.len(), (0..CLASSES.len(), 0..150_u64), 0..3);
    all.prop_map(|all| {
        let one = |(name, (class, size)): (usize, (usize, u64))| Coming {
            name: NAMES[name].to_owned(),
            class: CLASSES[class].to_owned(),
            size,
        };
        all.into_iter().map(one).collect()
    })
}

/// Computes the usage of a cluster by a walk over all entries.
fn walked(all: &BTreeMap<String, Entry>, cluster: &str, class: Option<&str>, coming: &[Coming]) -> Usage {
    let counts = |of: &str| class.is_none_or(|class| class == of);
    let its: Vec<_> = all
        .values()
        .filter(|entry| entry.is_listed && &*entry.cluster == cluster && counts(&entry.class))
        .collect();
    let (mut volumes, mut bytes) = (its.len(), its.iter().map(|entry| u128::from(entry.size)).sum::<u128>());
    for one in coming.iter().filter(|one| counts(&one.class)) {
        let there = its.iter().filter(|entry| *entry.name == one.name).map(|entry| entry.size).max();
        volumes += usize::from(there.is_none());
        bytes += u128::from(one.size.saturating_sub(there.unwrap_or(0)));
    }
    Usage { volumes: volumes.try_into().unwrap(), bytes: bytes.try_into().unwrap_or(u64::MAX) }
}

proptest! {
    #[test]
    fn it_finds_and_counts_what_a_walk_over_all_does(acts in acts(), coming in coming(), after in 0..13_u8) {
        let (mut all, mut parts) = (BTreeMap::new(), [Catalogue::default(), Catalogue::default()]);
        // Split the volumes into two pools, one of which has those with even numbers.
        let part = |id: &str| usize::from(id.as_bytes().last().unwrap() % 2);
        for act in acts {
            match act {
                Act::Put(entry) => {
                    parts[part(&entry.id)].put(entry.clone());
                    all.insert(entry.id.to_string(), entry);
                }
                Act::Remove(number) => {
                    let id = format!("pool.{number:02}");
                    parts[part(&id)].remove(&id);
                    all.remove(&id);
                }
            }
            for (number, catalogue) in parts.iter().enumerate() {
                let its = all.values().filter(|entry| part(&entry.id) == number).cloned();
                prop_assert_eq!(catalogue, &its.collect::<Catalogue>());
            }
        }
        let after = format!("pool.{after:02}");
        for cluster in CLUSTERS {
            for class in CLASSES {
                let found = usages(&parts.iter(), cluster, class, &coming);
                prop_assert_eq!(found.all, walked(&all, cluster, None, &coming));
                prop_assert_eq!(found.in_class, walked(&all, cluster, Some(class), &coming));
            }
            for (number, catalogue) in parts.iter().enumerate() {
                let its = || all.values().filter(|entry| part(&entry.id) == number);
                let listed = || its().filter(|entry| entry.is_listed);
                let ids = |of: Option<&str>| -> Vec<&str> {
                    let comes = |entry: &&Entry| of.is_none_or(|of| *entry.cluster == *of) && *entry.id > *after;
                    listed().filter(comes).map(|entry| &*entry.id).collect()
                };
                for of in [None, Some(cluster)] {
                    prop_assert_eq!(catalogue.after(of, &after).collect::<Vec<_>>(), ids(of));
                }
                for name in NAMES {
                    let named: Vec<_> = its().filter(|one| &*one.cluster == cluster && &*one.name == name).collect();
                    prop_assert_eq!(catalogue.named(cluster, name).collect::<Vec<_>>(), named);
                }
                for uuid in VMS {
                    let held = listed().filter(|entry| entry.holder.as_deref() == Some(uuid));
                    let held: Vec<_> = held.map(|entry| &*entry.id).collect();
                    prop_assert_eq!(catalogue.of_vm(uuid).collect::<Vec<_>>(), held);
                }
            }
        }
    }
}
