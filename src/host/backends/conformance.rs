//! Tests of the contract of [`Volumes`], which every backend has to pass. To test a backend, implement
//! [`Bench`] for it and call [`check`].

use std::collections::BTreeSet;
use std::time::Duration;

use super::disks::{DiskError, GuestSide, Known};
use super::volumes::{
    Coming, Holder, NewVolume, Place, Published, Usage, Usages, Volume, VolumeError, Volumes,
};

const SIZE: u64 = 16 << 20;
const PATIENCE: Duration = Duration::from_secs(10);

/// Backend under test, with the means to act on it from outside.
pub trait Bench {
    /// Returns the backend under test.
    fn volumes(&self) -> &dyn Volumes;
    /// Returns two VMs that run and have no volumes.
    fn vms(&self) -> [Place; 2];
    /// Returns the number of volumes that are actually plugged into a VM, bypassing the backend's own records.
    fn plugged(&self, vm: &str) -> usize;
    /// Makes the hypervisor of a VM stop answering.
    fn be_silent(&self, vm: &str);
}

/// Guest that releases every disk (true) or none (false).
struct Guest(bool);

#[tonic::async_trait]
impl GuestSide for Guest {
    async fn release(&self, _: &Known) -> Result<(), DiskError> {
        if self.0 { Ok(()) } else { Err(DiskError::NotReleased("it is in use".to_owned())) }
    }

    async fn stays(&self, _: &Known) {}
}

fn willing() -> Box<dyn GuestSide> {
    Box::new(Guest(true))
}

fn published(place: &Place) -> Published {
    let Place { uuid, vm } = place.clone();
    Published { node: vm.clone(), uuid, vm, read_only: false, leaving: false }
}

async fn make(volumes: &dyn Volumes, name: &str) -> Volume {
    let class = volumes.classes()[0].name.clone();
    let (name, cluster, claim) = (name.to_owned(), "dev".to_owned(), "shop/data".to_owned());
    volumes.create(NewVolume { name, cluster, class, size: SIZE, claim, is_share: false }).await.unwrap()
}

async fn kept(volumes: &dyn Volumes, id: &str) -> Volume {
    let kept = volumes.get(id).await.unwrap().unwrap();
    let listed = volumes.list(None).await.unwrap();
    assert!(listed.contains(&kept), "{listed:?}");
    assert!(listed.is_sorted_by_key(|volume| volume.id.clone()), "{listed:?}");
    is_found(volumes, &kept, &listed).await;
    kept
}

/// Checks that each lookup agrees with a walk over all volumes.
async fn is_found(volumes: &dyn Volumes, kept: &Volume, listed: &[Volume]) {
    let Volume { id, name, cluster, class, .. } = kept;
    assert_eq!(volumes.named(cluster, name).await.unwrap().as_ref(), Some(kept));
    assert_eq!(volumes.named(cluster, "no-such-volume").await.unwrap(), None);
    assert_eq!(volumes.named("no-such-cluster", name).await.unwrap(), None);
    let holder = kept.published.as_ref().map_or("no-such-vm", |published| &published.uuid);
    let held = |one: &&Volume| one.published.as_ref().is_some_and(|published| published.uuid == holder);
    let held: BTreeSet<_> = listed.iter().filter(held).map(|volume| volume.id.clone()).collect();
    assert_eq!((held.contains(id), volumes.of_vm(holder).await.unwrap()), (kept.published.is_some(), held));

    let its: Vec<_> = listed.iter().filter(|volume| volume.cluster == *cluster).cloned().collect();
    assert_eq!(volumes.list(Some(cluster)).await.unwrap(), its);
    assert_eq!(volumes.part(None, "", 1).await.unwrap(), &listed[..1]);
    let before = its.iter().position(|volume| volume == kept).unwrap();
    assert_eq!(volumes.part(Some(cluster), id, 1000).await.unwrap(), &its[before + 1..]);
    assert_eq!(volumes.part(Some("no-such-cluster"), "", 1000).await.unwrap(), []);

    let sum = |all: &mut dyn Iterator<Item = &Volume>| {
        all.fold(Usage::default(), |sum, one| Usage { volumes: sum.volumes + 1, bytes: sum.bytes + one.size })
    };
    let (all, in_class) =
        (sum(&mut its.iter()), sum(&mut its.iter().filter(|volume| volume.class == *class)));
    assert_eq!(volumes.usage(cluster, class, &[]).await.unwrap(), Usages { all, in_class });
    let coming = |name: &str, size| Coming { name: name.to_owned(), class: class.clone(), size };
    let coming = [coming(name, kept.size + 512), coming("no-such-volume", 1024)];
    let more = |usage: Usage| Usage { volumes: usage.volumes + 1, bytes: usage.bytes + 1536 };
    let expected = Usages { all: more(all), in_class: more(in_class) };
    assert_eq!(volumes.usage(cluster, class, &coming).await.unwrap(), expected);
    let nothing = volumes.usage("no-such-cluster", class, &[]).await.unwrap();
    assert_eq!(nothing, Usages::default());
}

/// Checks the whole contract. The last check silences the first VM of the bench.
///
/// # Panics
/// If the backend breaks the contract.
pub async fn check(bench: &dyn Bench) {
    let mut seen = BTreeSet::new();
    seen.insert(it_is_made_and_removed(bench).await);
    seen.insert(it_is_with_one_vm_until_that_has_let_go(bench).await);
    seen.insert(what_is_forgotten_is_held_all_the_same(bench).await);
    seen.insert(who_is_silent_keeps_its_volume(bench).await);
    assert_eq!(seen.len(), 4, "no identifier is used twice: {seen:?}");
}

async fn it_is_made_and_removed(bench: &dyn Bench) -> String {
    let volumes = bench.volumes();
    let made = make(volumes, "v").await;
    assert!(made.id.len() <= 128 && made.size >= SIZE && made.published.is_none(), "{made:?}");
    let may_be_in_it = |c: char| c.is_ascii_alphanumeric() || "-.".contains(c);
    assert!(made.id.chars().all(may_be_in_it), "{made:?}");
    assert_eq!((made.name.as_str(), made.cluster.as_str(), made.claim.as_str()), ("v", "dev", "shop/data"));
    assert_eq!(kept(volumes, &made.id).await, made);
    assert_eq!(volumes.holder(&made.id).await.unwrap(), Holder::Off);
    assert!(volumes.capacity(&made.class).await.unwrap().free > 0);

    let classes: Vec<_> = volumes.classes().into_iter().map(|class| class.name).collect();
    // The reported values may be older than the start of the test.
    for room in volumes.rooms() {
        assert!(
            classes.contains(&room.class) && room.bytes.is_none_or(|(size, free)| size >= free),
            "{room:?}"
        );
    }
    let unknown = volumes.capacity("no-such-class").await;
    assert!(matches!(unknown, Err(VolumeError::NoClass(_))), "{unknown:?}");
    let new = NewVolume {
        name: "w".into(),
        cluster: "dev".into(),
        class: "no-such-class".into(),
        size: SIZE,
        claim: String::new(),
        is_share: false,
    };
    let unknown = volumes.create(new).await;
    assert!(matches!(unknown, Err(VolumeError::NoClass(_))), "{unknown:?}");
    assert_eq!(volumes.list(None).await.unwrap(), std::slice::from_ref(&made), "a failure leaves nothing");

    let larger = volumes.grow(&made.id, SIZE * 2, None).await.unwrap();
    assert!(larger >= SIZE * 2);
    assert_eq!(volumes.grow(&made.id, SIZE, None).await.unwrap(), larger, "nothing shrinks");
    assert_eq!(kept(volumes, &made.id).await.size, larger);

    volumes.remove(&made.id).await.unwrap();
    assert_eq!(volumes.get(&made.id).await.unwrap(), None);
    assert_eq!(volumes.list(None).await.unwrap(), []);
    // Removing it again must succeed or report that it is unknown.
    let again = volumes.remove(&made.id).await;
    assert!(matches!(again, Ok(()) | Err(VolumeError::Unknown(_))), "{again:?}");
    let [a, _] = bench.vms();
    let plugged = volumes.plug(&made.id, published(&a), &a.vm).await;
    assert!(matches!(plugged, Err(VolumeError::Unknown(_))), "{plugged:?}");
    assert!(volumes.holder(&made.id).await.is_err() && volumes.grow(&made.id, SIZE, None).await.is_err());
    assert_eq!(bench.plugged(&a.vm), 0);
    made.id
}

async fn it_is_with_one_vm_until_that_has_let_go(bench: &dyn Bench) -> String {
    let (volumes, [a, b]) = (bench.volumes(), bench.vms());
    let id = make(volumes, "v").await.id;
    let plugged = volumes.plug(&id, published(&a), &a.vm).await.unwrap();
    assert_eq!(Some(plugged.disk.text()), volumes.serial(&id).as_deref());
    assert_eq!(volumes.plug(&id, published(&a), &a.vm).await.unwrap(), plugged, "it is there already");
    let is_with_a = async || {
        assert_eq!(kept(volumes, &id).await.published, Some(published(&a)));
        assert_eq!(volumes.holder(&id).await.unwrap(), Holder::On(a.clone()));
        assert_eq!(volumes.plugged(&a.vm).await.unwrap(), BTreeSet::from([id.clone()]));
        assert_eq!(volumes.plugged(&b.vm).await.unwrap(), BTreeSet::new());
        assert_eq!((bench.plugged(&a.vm), bench.plugged(&b.vm)), (1, 0));
    };
    is_with_a().await;
    let removed = volumes.remove(&id).await;
    assert!(matches!(removed, Err(VolumeError::InUse(_))), "{removed:?}");
    is_with_a().await;
    let larger = volumes.grow(&id, SIZE * 2, Some(&a.vm)).await.unwrap();
    assert_eq!(volumes.grow(&id, SIZE, Some(&a.vm)).await.unwrap(), larger, "nothing shrinks");
    let refused = volumes.unplug(&id, &a.vm, PATIENCE, Box::new(Guest(false))).await;
    assert!(matches!(refused, Err(VolumeError::Disk(DiskError::NotReleased(_)))), "{refused:?}");
    is_with_a().await;

    for _ in 0..2 {
        volumes.unplug(&id, &a.vm, PATIENCE, willing()).await.unwrap();
        assert_eq!(kept(volumes, &id).await.published, None);
        assert_eq!(volumes.holder(&id).await.unwrap(), Holder::Off);
        assert_eq!(bench.plugged(&a.vm), 0);
    }
    volumes.plug(&id, published(&b), &b.vm).await.unwrap();
    assert_eq!(volumes.holder(&id).await.unwrap(), Holder::On(b.clone()));
    volumes.unplug(&id, &b.vm, PATIENCE, willing()).await.unwrap();
    volumes.remove(&id).await.unwrap();
    id
}

async fn what_is_forgotten_is_held_all_the_same(bench: &dyn Bench) -> String {
    let (volumes, [a, _]) = (bench.volumes(), bench.vms());
    let id = make(volumes, "v").await.id;
    volumes.plug(&id, published(&a), &a.vm).await.unwrap();
    for _ in 0..2 {
        volumes.forget(&id).await.unwrap();
        assert_eq!(kept(volumes, &id).await.published, None);
    }
    assert_eq!(volumes.holder(&id).await.unwrap(), Holder::On(a.clone()));
    assert_eq!(volumes.plugged(&a.vm).await.unwrap(), BTreeSet::from([id.clone()]));
    let removed = volumes.remove(&id).await;
    assert!(matches!(removed, Err(VolumeError::InUse(_))), "{removed:?}");
    volumes.take_back(&id, &a, PATIENCE, willing()).await.unwrap();
    assert_eq!(kept(volumes, &id).await.published, None);
    assert_eq!(volumes.holder(&id).await.unwrap(), Holder::Off);
    assert_eq!(bench.plugged(&a.vm), 0);
    volumes.remove(&id).await.unwrap();
    id
}

async fn who_is_silent_keeps_its_volume(bench: &dyn Bench) -> String {
    let (volumes, [a, _]) = (bench.volumes(), bench.vms());
    let id = make(volumes, "v").await.id;
    volumes.plug(&id, published(&a), &a.vm).await.unwrap();
    bench.be_silent(&a.vm);
    let holder = volumes.holder(&id).await.unwrap();
    assert!(matches!(&holder, Holder::Unknown(why) if !why.is_empty()), "{holder:?}");
    let unplugged = volumes.unplug(&id, &a.vm, PATIENCE, willing()).await;
    assert!(unplugged.is_err(), "nobody has said that it is gone");
    let removed = volumes.remove(&id).await;
    assert!(matches!(removed, Err(VolumeError::InUse(_))), "{removed:?}");
    assert!(volumes.plugged(&a.vm).await.is_err());
    let record = kept(volumes, &id).await.published.unwrap();
    assert_eq!((record.uuid, bench.plugged(&a.vm)), (a.uuid, 1));
    id
}

mod of_memory {
    use super::super::memory::Memory;
    use super::*;

    struct InMemory(Memory, [Place; 2]);

    impl Bench for InMemory {
        fn volumes(&self) -> &dyn Volumes {
            &self.0
        }

        fn vms(&self) -> [Place; 2] {
            self.1.clone()
        }

        fn plugged(&self, vm: &str) -> usize {
            self.0.truth().iter().filter(|(of, _)| of == vm).count()
        }

        fn be_silent(&self, vm: &str) {
            self.0.be_silent(vm);
        }
    }

    #[tokio::test]
    async fn it_keeps_its_promises() {
        let vms = ["a", "b"].map(|name| Place { uuid: format!("uuid-of-{name}"), vm: name.to_owned() });
        let memory = Memory::default();
        for place in &vms {
            memory.start(place);
        }
        check(&InMemory(memory, vms)).await;
    }
}
