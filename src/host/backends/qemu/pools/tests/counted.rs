//! Lookups and counters agree with a walk over all volumes after any sequence of operations.

#![allow(clippy::disallowed_methods, reason = "a test damages what is there")]

use std::collections::BTreeSet;

use super::super::super::super::volumes::{Coming, Usage, Usages};
use super::*;

const CLUSTERS: [&str; 2] = ["dev", "prod"];
const NAMES: [&str; 4] = ["a", "b", "c", "d"];

#[derive(Debug, Clone)]
enum Act {
    Create {
        class: usize,
        cluster: usize,
        name: usize,
    },
    /// Creation that fails for lack of space.
    CreateInVain(usize),
    Remove(usize),
    /// Removal that fails because the image is open.
    RemoveInVain(usize),
    Grow(usize, u64),
    Publish(usize, Option<u8>),
    /// Makes the record unreadable from now on, as a whole or in part.
    Damage(usize, bool),
    /// Makes the damaged records readable again.
    Repair,
    /// Ends the program after this number of further steps, and starts a new one.
    Reload(usize),
    /// Renames a pool.
    Rename(bool),
    /// Removes a pool from the settings and adds it again.
    Leave,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let at = || 0..8_usize;
    let act = prop_oneof![
        4 => (0..3_usize, 0..2_usize, 0..4_usize)
            .prop_map(|(class, cluster, name)| Act::Create { class, cluster, name }),
        // A sparse qcow2 image of any size can be created.
        1 => (0..2_usize).prop_map(Act::CreateInVain),
        2 => at().prop_map(Act::Remove),
        1 => at().prop_map(Act::RemoveInVain),
        2 => (at(), 1..4_u64).prop_map(|(at, more)| Act::Grow(at, more << 16)),
        2 => (at(), proptest::option::of(0..3_u8)).prop_map(|(at, vm)| Act::Publish(at, vm)),
        1 => (at(), any::<bool>()).prop_map(|(at, wholly)| Act::Damage(at, wholly)),
        1 => Just(Act::Repair),
        1 => (0..20_usize).prop_map(Act::Reload),
        1 => any::<bool>().prop_map(Act::Rename),
        1 => Just(Act::Leave),
    ];
    proptest::collection::vec(act, 1..24)
}

/// Pools, with what was done to their directories behind the store's back.
struct Bench {
    folder: tempfile::TempDir,
    settings: watch::Sender<Vec<Pool>>,
    store: Store,
    /// Records as they were before they were damaged.
    kept: BTreeMap<PathBuf, Vec<u8>>,
}

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let settings = watch::Sender::new(pools(folder.path()));
        let store = opened(Store::new(settings.subscribe(), register(folder.path())));
        Self { folder, settings, store, kept: BTreeMap::new() }
    }

    /// Picks one of the usable volumes.
    fn pick(&self, at: usize) -> Option<Volume> {
        let usable: Vec<_> = self.store.list().into_iter().filter(|one| one.problem.is_none()).collect();
        (!usable.is_empty()).then(|| usable[at % usable.len()].clone())
    }

    /// Creates a volume in one of the pools.
    fn create(&self, class: usize, cluster: usize, name: &str, size: u64) -> Result<Volume, VolumeError> {
        let class = self.settings.borrow()[class].name.clone();
        self.store.create(NewVolume { cluster: CLUSTERS[cluster].into(), ..new(name, &class, size) })
    }

    fn act(&mut self, act: &Act) {
        let picked = |at: &usize| self.pick(*at);
        match act {
            // A refusal is fine too: the name is, or may be, taken.
            Act::Create { class, cluster, name } => {
                drop(self.create(*class, *cluster, NAMES[*name], 1 << 16));
            }
            Act::CreateInVain(class) => drop(self.create(*class, 0, "e", 1 << 62).unwrap_err()),
            Act::Remove(at) => {
                if let Some(volume) = picked(at) {
                    self.store.remove(&volume.id).unwrap();
                }
            }
            Act::RemoveInVain(at) => {
                if let Some(volume) = picked(at) {
                    let image = self.store.entry(&volume.id).unwrap().image();
                    let _open = std::fs::OpenOptions::new().append(true).open(image).unwrap();
                    self.store.remove(&volume.id).unwrap_err();
                }
            }
            Act::Grow(at, more) => {
                if let Some(volume) = picked(at) {
                    self.store.grow(&volume.id, volume.size + more).unwrap();
                }
            }
            Act::Publish(at, vm) => {
                if let Some(volume) = picked(at) {
                    self.store.publish(&volume.id, vm.map(published)).unwrap();
                }
            }
            Act::Damage(at, wholly) => {
                if let Some(volume) = picked(at) {
                    let path = self.store.entry(&volume.id).unwrap().folder.record(serial(&volume.id));
                    let bytes = std::fs::read(&path).unwrap();
                    let text = String::from_utf8(bytes.clone()).unwrap();
                    let newer = text.replace("\"version\": 1", "\"version\": 2");
                    std::fs::write(&path, if *wholly { "{" } else { &newer }).unwrap();
                    self.kept.insert(path, bytes);
                    self.reload(None);
                }
            }
            Act::Repair => {
                for (path, bytes) in std::mem::take(&mut self.kept) {
                    if path.exists() {
                        std::fs::write(path, bytes).unwrap();
                    }
                }
                open(&self.store);
            }
            Act::Reload(steps) => self.reload(Some(*steps)),
            Act::Rename(is_quick) => {
                let name = if *is_quick { "quick" } else { "fast" };
                self.settings.send_modify(|all| name.clone_into(&mut all[0].name));
            }
            Act::Leave => {
                let all = self.settings.send_replace(Vec::new());
                assert_eq!(self.store.list(), []);
                self.settings.send_replace(all);
                open(&self.store);
            }
        }
    }

    /// Ends the program, in the middle of an operation if a step is given, and starts a new one.
    fn reload(&mut self, killed_after: Option<usize>) {
        let (settings, path) = (self.settings.subscribe(), self.folder.path().to_owned());
        let again = |steps| {
            let mut store = Store::new(settings.clone(), register(&path));
            store.steps = vec![(path.clone(), steps)];
            store
        };
        if let Some(steps) = killed_after {
            // The first store must be dropped before its directories can be locked again.
            self.store = again(Steps::default());
            self.store = again(Steps::killed_after(steps));
            open(&self.store);
            for name in ["f", "g"] {
                drop(self.create(0, 0, name, 1 << 16).and_then(|made| self.store.remove(&made.id)));
                self.check();
            }
        }
        self.store = again(Steps::default());
        open(&self.store);
    }

    /// Collects all volumes by a walk over the contents of each pool.
    fn walked(&self) -> Vec<Volume> {
        let index = self.store.index();
        let mut all = Vec::new();
        for slot in &index.slots {
            let Some(open) = slot.open() else { continue };
            assert_eq!(open.catalogue(), &open.walk(), "{}", slot.pool.name);
            let ready = open.volumes().values().filter(|known| {
                // The others are being created or removed.
                known.entry.record.stage == super::super::record::Stage::Ready
            });
            all.extend(ready.map(|known| index.show(slot, open, known)));
            let damaged = open.damaged().iter();
            all.extend(damaged.map(|(serial, damaged)| damaged.volume(open.id_of(serial, damaged))));
        }
        all.sort_by(|one, other| one.id.cmp(&other.id));
        all
    }

    fn check(&self) {
        let all = self.walked();
        assert_eq!(self.store.list(), all);
        let index = self.store.index();
        for cluster in CLUSTERS {
            let its: Vec<_> = all.iter().filter(|volume| volume.cluster == cluster).cloned().collect();
            let mut paged = Vec::new();
            loop {
                let after = paged.last().map(|volume: &Volume| volume.id.clone()).unwrap_or_default();
                let part = index.part(Some(cluster), &after, 2);
                let is_last = part.len() < 2;
                paged.extend(part);
                if is_last {
                    break;
                }
            }
            assert_eq!(paged, its);
            for name in NAMES {
                let named = its.iter().find(|volume| volume.name == name);
                assert_eq!(index.named(cluster, name).as_ref(), named);
            }
            let usage = |class: Option<&str>| {
                let its = its.iter().filter(|volume| class.is_none_or(|class| volume.class == class));
                let add = |sum: Usage, one: &Volume| Usage {
                    volumes: sum.volumes + 1,
                    bytes: sum.bytes + one.size,
                };
                its.fold(Usage::default(), add)
            };
            for class in ["fast", "quick", "full", "qcow"] {
                let expected = Usages { all: usage(None), in_class: usage(Some(class)) };
                assert_eq!(index.usage(cluster, class, &[]), expected);
                let coming = Coming { name: "h".into(), class: class.into(), size: 7 };
                let more = |usage: Usage| Usage { volumes: usage.volumes + 1, bytes: usage.bytes + 7 };
                let expected = Usages { all: more(usage(None)), in_class: more(usage(Some(class))) };
                assert_eq!(index.usage(cluster, class, &[coming]), expected);
            }
        }
        for vm in 0..3 {
            let uuid = published(vm).uuid;
            let has = |one: &&Volume| one.published.as_ref().is_some_and(|published| published.uuid == uuid);
            let held: BTreeSet<_> = all.iter().filter(has).map(|volume| volume.id.clone()).collect();
            assert_eq!(index.of_vm(&uuid), held);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn whatever_was_done_what_is_counted_is_what_there_is(acts in acts()) {
        let mut bench = Bench::new();
        for act in &acts {
            bench.act(act);
            bench.check();
        }
    }
}

/// A volume with an unusable record keeps its name and its cluster, and is still counted.
#[test]
fn of_a_record_that_cannot_be_used_the_name_and_the_size_count() {
    let mut bench = Bench::new();
    let volume = bench.create(0, 0, "a", 1 << 20).unwrap();
    let before = bench.store.index().usage("dev", "fast", &[]);
    bench.act(&Act::Damage(0, false));
    let index = bench.store.index();
    assert_eq!(index.usage("dev", "fast", &[]), before);
    let named = index.named("dev", "a").unwrap();
    assert!(named.id == volume.id && named.problem.unwrap().contains("its record cannot be used"));
    drop(index);
    says(bench.create(0, 0, "a", 512), VolumeError::Unavailable, &["it may be that of the volume \"a\""]);
}
