//! Consistency of the stored state, however and whenever the program ends.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use proptest::prelude::*;
use tokio::sync::watch;

use super::super::super::disks::Format;
use super::super::super::volumes::{NewVolume, Published, Volume, VolumeError};
use super::register::Register;
use super::steps::Steps;
use super::store::Store;
use super::{Allocation, PATIENCE, Pool};

mod counted;
mod hanging;
mod places;
mod records;

fn pool(path: &Path, name: &str, format: Format, allocation: Allocation) -> Pool {
    let (bus, is_default, patience) = (None, false, PATIENCE);
    Pool { name: name.into(), path: path.join(name), format, allocation, bus, is_default, patience }
}

fn pools(path: &Path) -> Vec<Pool> {
    vec![
        pool(path, "fast", Format::Raw, Allocation::Thin),
        pool(path, "full", Format::Raw, Allocation::Full),
        pool(path, "qcow", Format::Qcow2, Allocation::Thin),
    ]
}

fn of(pools: Vec<Pool>) -> Store {
    let register = register(pools.first().and_then(|pool| pool.path.parent()).unwrap());
    Store::new(watch::channel(pools).1, register)
}

/// Returns the register of the pools in this directory.
fn register(path: &Path) -> Register {
    Register::new(path.to_owned())
}

fn store(path: &Path) -> Store {
    opened(of(pools(path)))
}

/// Creates a store whose program is killed after this number of steps.
fn killed_after(path: &Path, steps: usize) -> Store {
    let mut store = of(pools(path));
    store.steps = vec![(path.to_owned(), Steps::killed_after(steps))];
    opened(store)
}

fn paths(store: &Store) -> Vec<PathBuf> {
    store.index().slots.iter().map(|slot| slot.pool.path.clone()).collect()
}

/// Opens the pools of a store, as far as possible, and checks them.
fn opened(store: Store) -> Store {
    open(&store);
    store
}

fn open(store: &Store) {
    for path in paths(store) {
        store.open(&path);
        let mut after = store.check(&path, None);
        while after.is_some() {
            after = store.check(&path, after);
        }
    }
}

fn serial(id: &str) -> &str {
    super::identity::parse(id).unwrap().serial
}

/// Returns the only volume.
#[track_caller]
fn only(store: &Store) -> Volume {
    let [volume] = store.list().try_into().unwrap();
    volume
}

/// Asserts that an error is of this kind and contains all of these texts.
#[track_caller]
fn says<T: std::fmt::Debug>(
    outcome: Result<T, VolumeError>,
    kind: fn(String) -> VolumeError,
    words: &[&str],
) {
    let error = outcome.unwrap_err();
    assert_eq!(std::mem::discriminant(&error), std::mem::discriminant(&kind(String::new())), "{error:?}");
    let text = error.to_string();
    assert!(words.iter().all(|words| text.contains(words)), "{text}");
}

fn new(name: &str, class: &str, size: u64) -> NewVolume {
    NewVolume {
        name: name.into(),
        cluster: "dev".into(),
        class: class.into(),
        size,
        claim: String::new(),
        is_share: false,
    }
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

/// Lists the files of all pools.
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

/// Expected state of a volume: its size and VM, or the values that are possible after an interruption.
#[derive(Debug, Clone, Default)]
struct Known {
    sizes: Vec<u64>,
    vms: Vec<Option<Published>>,
    /// True if the volume may have been removed.
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

/// Performs the operations until it is killed. A completed operation is certain to have taken effect; an
/// interrupted one may or may not have.
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
                if grown.is_ok() {
                    store.lengthen(&id).unwrap();
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
        acts in acts(), steps in 0..70_usize, loading in 0..12_usize,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let mut known = BTreeMap::new();
        act(&killed_after(folder.path(), steps), &acts, &mut known);
        // Kill it again while it cleans up.
        drop(killed_after(folder.path(), loading));
        let store = store(folder.path());
        let found = store.list();
        let mut expected = Vec::new();
        for volume in &found {
            prop_assert_eq!(&volume.problem, &None);
            let entry = store.entry(&volume.id).unwrap();
            let ending = entry.record.format().name();
            expected.extend([format!("{}.json", entry.serial()), format!("{}.{ending}", entry.serial())]);
            // A volume whose creation was completed but not reported before the kill.
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
    assert!(matches!(&error, VolumeError::Full(words) if words.contains("has no space for")), "{error}");
    assert_eq!((store.list().len(), files(folder.path())), (0, vec![]));
    // The file system does not support a file of this size.
    let error = store.create(new("v", "fast", 1 << 62)).unwrap_err();
    assert!(matches!(error, VolumeError::Full(_)), "{error}");
    assert_eq!((store.list().len(), files(folder.path())), (0, vec![]));
}

#[test]
fn pools_come_and_go_with_the_settings() {
    let folder = tempfile::tempdir().unwrap();
    let all = pools(folder.path());
    let (settings, followed) = watch::channel(all[..1].to_vec());
    let store = opened(Store::new(followed, register(folder.path())));
    let id = store.create(new("v", "fast", 512)).unwrap().id;
    assert!(matches!(store.create(new("w", "full", 512)), Err(VolumeError::NoClass(_))));
    settings.send_replace(all.clone());
    says(store.create(new("w", "full", 512)), VolumeError::Unavailable, &["it is being opened"]);
    open(&store);
    store.create(new("w", "full", 512)).unwrap();
    // The volumes stay the same when the pool is renamed.
    settings.send_replace(vec![Pool { name: "quick".into(), ..all[0].clone() }]);
    assert_eq!(only(&store).id, id);
    assert!(store.get(&id).unwrap().is_some());
    settings.send_replace(Vec::new());
    assert_eq!(store.list(), []);
    says(store.get(&id), VolumeError::Elsewhere, &["belongs to the pool fast (", "which is not on the host"]);
    settings.send_replace(all);
    says(store.get(&id), VolumeError::Unavailable, &["it is being opened", "may be in it"]);
    open(&store);
    assert_eq!(store.list().len(), 2);
    assert!(store.get(&id).unwrap().is_some());
}

#[test]
fn a_pool_is_of_one_program() {
    let folder = tempfile::tempdir().unwrap();
    let one = store(folder.path());
    let other = store(folder.path());
    let id = one.create(new("v", "fast", 512)).unwrap().id;
    assert_eq!(other.list(), []);
    let words = ["another guestlet-host uses this directory"];
    says(other.create(new("v", "fast", 512)), VolumeError::Unavailable, &words);
    says(other.get(&id), VolumeError::Unavailable, &words);
    drop(one);
    open(&other);
    assert_eq!(only(&other).id, id);
}

#[test]
fn nothing_is_synced_that_need_not_be() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let first = store.entry(&store.create(new("first", "fast", 512)).unwrap().id).unwrap();
    let count = |what: &dyn Fn()| {
        let before = first.folder.syncs();
        what();
        first.folder.syncs() - before
    };
    let id = std::cell::OnceCell::new();
    let create = count(&|| id.set(store.create(new("v", "fast", 512)).unwrap().id).unwrap());
    let id = id.get().unwrap();
    let vm = |leaving: bool| Some(Published { leaving, ..published(1) });
    let publish = count(&|| store.publish(id, vm(false)).unwrap());
    let repeat = count(&|| store.publish(id, vm(false)).unwrap());
    let leaving = count(&|| store.publish(id, vm(true)).unwrap());
    let forget = count(&|| store.publish(id, None).unwrap());
    let grow = count(&|| {
        store.grow(id, 1024).unwrap();
        store.lengthen(id).unwrap();
    });
    let remove = count(&|| store.remove(id).unwrap());
    // The numbers that docs/csi.md states.
    assert_eq!([create, publish, repeat, leaving, forget, grow, remove], [3, 2, 0, 1, 2, 3, 3]);
}
