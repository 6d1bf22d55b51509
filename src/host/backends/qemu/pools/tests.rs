//! What is on disk, whatever ends the program and whenever.

use std::collections::BTreeMap;
use std::path::Path;

use proptest::prelude::*;
use tokio::sync::watch;

use super::super::super::disks::Format;
use super::super::super::volumes::{NewVolume, Published, VolumeError};
use super::store::Store;
use super::{Allocation, Pool, identity};

fn pool(path: &Path, name: &str, format: Format, allocation: Allocation) -> Pool {
    Pool { name: name.into(), path: path.join(name), format, allocation, bus: None, is_default: false }
}

fn pools(path: &Path) -> Vec<Pool> {
    vec![
        pool(path, "fast", Format::Raw, Allocation::Thin),
        pool(path, "full", Format::Raw, Allocation::Full),
        pool(path, "qcow", Format::Qcow2, Allocation::Thin),
    ]
}

fn store(path: &Path) -> Store {
    Store::new(watch::channel(pools(path)).1)
}

fn new(name: &str, class: &str, size: u64) -> NewVolume {
    NewVolume { name: name.into(), cluster: "dev".into(), class: class.into(), size, claim: String::new() }
}

fn published(vm: u8) -> Published {
    Published {
        uuid: format!("uuid-{vm}"),
        vm: format!("vm-{vm}"),
        node: vm.to_string(),
        read_only: false,
        leaving: false,
    }
}

/// The files of all pools.
fn files(path: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for pool in ["fast", "full", "qcow"] {
        let entries = std::fs::read_dir(path.join(pool)).unwrap();
        names.extend(
            entries
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .filter(|name| !name.starts_with('.')),
        );
    }
    names.sort();
    names
}

/// What a test knows of a volume: its size and VM, or those that it may have.
#[derive(Debug, Clone, Default)]
struct Known {
    sizes: Vec<u64>,
    vms: Vec<Option<Published>>,
    /// It may be gone.
    doubtful: bool,
}

#[derive(Debug, Clone)]
enum Act {
    Create(usize),
    Remove(usize),
    Grow(usize, u64),
    Publish(usize, u8),
    Forget(usize),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let at = 0..6_usize;
    let act = prop_oneof![
        (0..3_usize).prop_map(Act::Create),
        (0..3_usize).prop_map(Act::Create),
        at.clone().prop_map(Act::Remove),
        (at.clone(), 1..4_u64).prop_map(|(at, more)| Act::Grow(at, more << 16)),
        (at.clone(), 0..3_u8).prop_map(|(at, vm)| Act::Publish(at, vm)),
        at.prop_map(Act::Forget),
    ];
    proptest::collection::vec(act, 1..12)
}

/// Does what it can until it is killed. What was said to be done is known for certain, what was not is one or the other.
fn act(store: &Store, acts: &[Act], known: &mut BTreeMap<String, Known>) {
    for (number, act) in acts.iter().enumerate() {
        let pick = |at: &usize| known.keys().nth(*at).cloned();
        match act {
            Act::Create(class) => {
                let class = ["fast", "full", "qcow"][*class];
                if let Ok(made) = store.create(new(&format!("v{number}"), class, 1 << 16)) {
                    let certain = Known { sizes: vec![made.size], vms: vec![None], doubtful: false };
                    known.insert(made.id, certain);
                }
            }
            Act::Remove(at) => {
                let Some(id) = pick(at) else { continue };
                match store.remove(&id) {
                    Ok(()) => drop(known.remove(&id)),
                    Err(_) => known.get_mut(&id).unwrap().doubtful = true,
                }
            }
            Act::Grow(at, more) => {
                let Some(id) = pick(at) else { continue };
                let entry = known.get_mut(&id).unwrap();
                let size = entry.sizes[0] + more;
                let grown = store.grow(&id, size);
                if let Ok(grown) = &grown {
                    grown.folder.lengthen(grown.serial(), &grown.record).unwrap();
                }
                entry.sizes = if grown.is_ok() { vec![size] } else { vec![entry.sizes[0], size] };
            }
            Act::Publish(at, vm) => publish(store, known, pick(at), Some(published(*vm))),
            Act::Forget(at) => publish(store, known, pick(at), None),
        }
        if known.values().any(|known| known.doubtful || known.sizes.len() > 1 || known.vms.len() > 1) {
            return;
        }
    }
}

fn publish(store: &Store, known: &mut BTreeMap<String, Known>, id: Option<String>, vm: Option<Published>) {
    let Some(id) = id else { return };
    let entry = known.get_mut(&id).unwrap();
    entry.vms = match store.publish(&id, vm.clone()) {
        Ok(()) => vec![vm],
        Err(_) => vec![entry.vms[0].clone(), vm],
    };
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn whenever_it_is_killed_there_are_whole_volumes_and_nothing_else(
        acts in acts(), steps in 0..60_usize, loading in 0..8_usize,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let mut known = BTreeMap::new();
        act(&store(folder.path()).killed_after(steps), &acts, &mut known);
        // Killed again while it cleans up.
        store(folder.path()).killed_after(loading).list();
        let store = store(folder.path());
        let found = store.list();
        let mut expected = Vec::new();
        for volume in &found {
            prop_assert_eq!(&volume.problem, &None);
            let entry = store.entry(&volume.id).unwrap();
            let ending = entry.record.format().name();
            expected.extend([format!("{}.json", entry.serial()), format!("{}.{ending}", entry.serial())]);
            // One that nobody was told of was finished just before the end.
            let Some(known) = known.get(&volume.id) else { continue };
            prop_assert!(known.sizes.contains(&volume.size), "{:?} {:?}", volume, known);
            prop_assert!(known.vms.contains(&volume.published), "{:?} {:?}", volume, known);
        }
        expected.sort();
        prop_assert_eq!(files(folder.path()), expected);
        for (id, known) in known {
            prop_assert!(known.doubtful || found.iter().any(|volume| volume.id == id), "{} is lost", id);
        }
    }
}

#[test]
fn a_full_pool_says_so_and_keeps_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let free = store.capacity("full").unwrap();
    assert_eq!(free.largest, free.free);
    let error = store.create(new("v", "full", free.free + (1 << 30))).unwrap_err();
    assert!(matches!(&error, VolumeError::Full(words) if words.contains("no room for")), "{error}");
    assert_eq!((store.list().len(), files(folder.path())), (0, vec![]));
    // A file system that takes no such file.
    let error = store.create(new("v", "fast", 1 << 62)).unwrap_err();
    assert!(matches!(error, VolumeError::Full(_)), "{error}");
    assert_eq!((store.list().len(), files(folder.path())), (0, vec![]));
}

#[test]
fn pools_come_and_go_with_the_settings() {
    let folder = tempfile::tempdir().unwrap();
    let all = pools(folder.path());
    let (settings, followed) = watch::channel(all[..1].to_vec());
    let store = Store::new(followed);
    let id = store.create(new("v", "fast", 512)).unwrap().id;
    assert!(matches!(store.create(new("w", "full", 512)), Err(VolumeError::NoClass(_))));
    settings.send_replace(all.clone());
    store.create(new("w", "full", 512)).unwrap();
    // Under another name the volumes are the same ones.
    settings.send_replace(vec![Pool { name: "quick".into(), ..all[0].clone() }]);
    let [volume] = store.list().try_into().unwrap();
    assert_eq!(volume.id, id);
    assert!(matches!(store.get("full.aaaaaaaaaaaaaaaaaaaa"), Err(VolumeError::Unavailable(_))));
    settings.send_replace(Vec::new());
    assert_eq!(store.list(), []);
    assert!(matches!(store.get(&id), Err(VolumeError::Unavailable(_))));
    settings.send_replace(all);
    assert_eq!(store.list().len(), 2);
    assert!(store.get(&id).unwrap().is_some());
}

#[test]
fn a_pool_is_of_one_program() {
    let folder = tempfile::tempdir().unwrap();
    let (one, other) = (store(folder.path()), store(folder.path()));
    let id = one.create(new("v", "fast", 512)).unwrap().id;
    assert_eq!(other.list(), []);
    let error = other.create(new("v", "fast", 512)).unwrap_err().to_string();
    assert!(error.contains("another guestlet-host uses this folder"), "{error}");
    assert!(matches!(other.get(&id), Err(VolumeError::Unavailable(_))));
    drop(one);
    assert_eq!(other.list().len(), 1);
}

#[test]
fn a_record_that_is_of_another_volume_is_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let id = store(folder.path()).create(new("v", "fast", 512)).unwrap().id;
    let (_, serial) = identity::parse(&id).unwrap();
    let path = folder.path().join("fast");
    std::fs::rename(path.join(format!("{serial}.json")), path.join("aaaaaaaaaaaaaaaaaaaa.json")).unwrap();
    let store = store(folder.path());
    assert_eq!(store.list(), []);
    let error = store.get("fast.aaaaaaaaaaaaaaaaaaaa").unwrap_err().to_string();
    assert!(error.contains("it is of another volume"), "{error}");
    assert_eq!(files(folder.path()).len(), 2, "nothing is thrown away");
}
