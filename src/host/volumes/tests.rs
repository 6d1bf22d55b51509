//! Tests of the keeper over a backend in memory. Its decisions need neither QEMU nor files.

use tokio_util::sync::CancellationToken;

use super::super::backends::memory::Memory;
use super::super::backends::volumes::Place;
use super::super::backends::{Change, Ids, Vm};
use super::super::fleet::Fleet;
use super::*;

mod as_is;

const MIB: i64 = 1 << 20;

struct Bench {
    keeper: Keeper,
    memory: Memory,
    _scope: Scope,
}

fn place(name: &str) -> Place {
    Place { uuid: format!("uuid-of-{name}"), vm: name.to_owned() }
}

fn vm(name: &str) -> Vm {
    let ids = Ids { lasting: place(name).uuid, ..Ids::default() };
    Vm { ids, cluster: "dev".into(), max_volumes: 2, ..Vm::at(name, "/nowhere") }
}

impl Bench {
    /// Builds a keeper with the VMs `a` and `b`.
    async fn new() -> Self {
        let (memory, scope) = (Memory::default(), Scope::new());
        for name in ["a", "b"] {
            memory.start(&place(name));
        }
        let half = Arc::new(Half::new("host".into()));
        let (fleet, changes, handle) = Fleet::new(Arc::clone(&half));
        for name in ["a", "b"] {
            changes.send(Change::Present(vm(name).into())).await.unwrap();
        }
        changes.send(Change::Synced).await.unwrap();
        scope.children().spawn(async move {
            let _changes = changes;
            fleet.run(CancellationToken::new()).await;
        });
        let policies = watch::channel(Policies::default()).1;
        let keeper = Keeper::new(Arc::new(memory.clone()), handle, policies, half);
        Self { keeper, memory, _scope: scope }
    }

    async fn create(&self, name: &str) -> Result<Volume, Problem> {
        let range = Range::new(20 * MIB, 0).unwrap();
        let wanted = Wanted { name: name.into(), class: None, range, claim: String::new(), is_share: false };
        self.keeper.create(&Asker::Host, "dev", wanted).await
    }

    async fn publish(&self, id: &str, node: &str) -> Result<(), Problem> {
        self.keeper.publish(&Asker::Host, id, node, false).await.map(drop)
    }

    async fn unpublish(&self, id: &str, forced: bool) -> Result<(), Problem> {
        self.keeper.unpublish(&Asker::Host, id, None, forced).await
    }

    async fn remove(&self, id: &str) -> Result<(), Problem> {
        self.keeper.remove(&Asker::Host, id).await
    }

    #[track_caller]
    fn plugged(&self, expected: &[(&str, &str)]) {
        let truth = self.memory.truth();
        let truth: Vec<_> = truth.iter().map(|(vm, id)| (vm.as_str(), id.as_str())).collect();
        assert_eq!(truth, expected);
    }
}

#[track_caller]
fn is(outcome: Result<(), Problem>, kind: Kind) {
    let problem = outcome.unwrap_err();
    assert_eq!(problem.kind, kind, "{problem}");
}

// The agents of these VMs never connect. With the paused clock, waiting for them takes no time.
#[tokio::test(start_paused = true)]
async fn a_volume_goes_from_one_vm_to_another() {
    let bench = Bench::new().await;
    let id = bench.create("v").await.unwrap().id;
    assert_eq!(bench.create("v").await.unwrap().id, id, "a name is one volume");
    for _ in 0..2 {
        bench.publish(&id, "a").await.unwrap();
        bench.plugged(&[("a", &id)]);
    }
    is(bench.publish(&id, "b").await, Kind::Precondition);
    is(bench.publish(&id, "c").await, Kind::NotFound);
    is(bench.remove(&id).await, Kind::Precondition);
    let larger = Range::new(40 * MIB, 0).unwrap();
    assert_eq!(bench.keeper.expand(&Asker::Host, &id, larger).await.unwrap(), 40 << 20);
    bench.plugged(&[("a", &id)]);
    for _ in 0..2 {
        bench.unpublish(&id, false).await.unwrap();
        bench.plugged(&[]);
    }
    bench.publish(&id, &place("b").uuid).await.unwrap();
    bench.plugged(&[("b", &id)]);
    // The VM ends without having been asked for the volume.
    bench.memory.end("b");
    bench.memory.start(&place("b"));
    bench.publish(&id, "a").await.unwrap();
    bench.plugged(&[("a", &id)]);
    bench.unpublish(&id, false).await.unwrap();
    for _ in 0..2 {
        bench.remove(&id).await.unwrap();
    }
    assert_eq!(bench.keeper.list(&Asker::Host, "", 0).await.unwrap().0, []);
}

// These VMs have no agents, so nothing in them uses a volume that has just been plugged.
#[tokio::test(start_paused = true)]
async fn what_somebody_else_has_plugged_at_the_same_moment_is_unplugged_again() {
    let bench = Bench::new().await;
    let id = bench.create("v").await.unwrap().id;
    let is_published = async || bench.keeper.get(&Asker::Host, &id).await.unwrap().published.is_some();
    bench.memory.contest(&id, true);
    is(bench.publish(&id, "a").await, Kind::Unavailable);
    bench.plugged(&[]);
    assert!(!is_published().await);
    bench.memory.contest(&id, false);
    bench.publish(&id, "a").await.unwrap();
    bench.plugged(&[("a", &id)]);
    // The same happens when repair plugs it again.
    bench.memory.end("a");
    bench.memory.start(&place("a"));
    bench.memory.contest(&id, true);
    let repairing = bench.keeper.clone().repair(CancellationToken::new());
    tokio::time::timeout(Duration::from_secs(120), repairing).await.unwrap_err();
    bench.plugged(&[]);
    assert!(!is_published().await);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_free_while_nobody_can_say_so() {
    let bench = Bench::new().await;
    let id = bench.create("v").await.unwrap().id;
    bench.publish(&id, "a").await.unwrap();
    bench.memory.be_silent("a");
    is(bench.publish(&id, "b").await, Kind::Unavailable);
    is(bench.unpublish(&id, false).await, Kind::Unavailable);
    is(bench.remove(&id).await, Kind::Unavailable);
    let larger = Range::new(40 * MIB, 0).unwrap();
    is(bench.keeper.expand(&Asker::Host, &id, larger).await.map(drop), Kind::Unavailable);
    bench.plugged(&[("a", &id)]);
    // A person wrongly vouches that no VM has it.
    bench.unpublish(&id, true).await.unwrap();
    is(bench.publish(&id, "b").await, Kind::Unavailable);
    is(bench.remove(&id).await, Kind::Unavailable);
    bench.plugged(&[("a", &id)]);
    bench.memory.end("a");
    bench.publish(&id, "b").await.unwrap();
    bench.plugged(&[("b", &id)]);
}

#[tokio::test(start_paused = true)]
async fn a_vm_has_no_more_volumes_than_it_may() {
    let bench = Bench::new().await;
    let mut ids = Vec::new();
    for name in ["u", "v", "w"] {
        ids.push(bench.create(name).await.unwrap().id);
    }
    // Concurrent requests do not exceed the limit either.
    let (u, v, w) =
        tokio::join!(bench.publish(&ids[0], "a"), bench.publish(&ids[1], "a"), bench.publish(&ids[2], "a"));
    let outcomes = [u, v, w];
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 2, "{outcomes:?}");
    let refused = outcomes.iter().position(Result::is_err).unwrap();
    let problem = outcomes[refused].clone().unwrap_err();
    assert!(
        problem.to_string().contains("has 2 volumes, and may have at most 2; see max-volumes"),
        "{problem}"
    );
    is(bench.publish(&ids[refused], "a").await, Kind::Exhausted);
    // A volume that the VM has may be published to it again, and the refused one can go elsewhere.
    let has = ids.iter().enumerate().find(|(at, _)| *at != refused).unwrap().1;
    bench.publish(has, "a").await.unwrap();
    bench.publish(&ids[refused], "b").await.unwrap();
    bench.unpublish(&ids[refused], false).await.unwrap();
    bench.unpublish(has, false).await.unwrap();
    bench.publish(&ids[refused], "a").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_cluster_has_no_more_bytes_than_there_are() {
    let bench = Bench::new().await;
    let create = |name: &str, size: i64| {
        let range = Range::new(size, 0).unwrap();
        let wanted = Wanted { name: name.into(), class: None, range, claim: String::new(), is_share: false };
        bench.keeper.create(&Asker::Host, "dev", wanted)
    };
    // The backend would have space, since less than half of it is written, but the cluster exceeds its limit.
    bench.memory.is_thin();
    let id = create("v", 1000 * MIB).await.unwrap().id;
    let problem = create("w", 100 * MIB).await.unwrap_err();
    assert_eq!(problem.kind, Kind::Exhausted);
    assert!(problem.to_string().contains("without max-bytes the limit is"), "{problem}");
    let larger = Range::new(1100 * MIB, 0).unwrap();
    is(bench.keeper.expand(&Asker::Host, &id, larger).await.map(drop), Kind::Exhausted);
    create("w", 20 * MIB).await.unwrap();
    let room = bench.keeper.capacity(&Asker::Host, "dev", None).await.unwrap();
    assert_eq!(room.free, 4 << 20);
    // The limit applies to each cluster by itself.
    assert_eq!(bench.keeper.capacity(&Asker::Host, "prod", None).await.unwrap().free, 1 << 30);
}

#[tokio::test(start_paused = true)]
async fn a_share_is_given_to_many_nodes_and_removed_when_none_has_it() {
    let bench = Bench::new().await;
    let range = Range::new(20 * MIB, 0).unwrap();
    let wanted = Wanted { name: "s".into(), class: None, range, claim: String::new(), is_share: true };
    let id = bench.keeper.create(&Asker::Host, "dev", wanted.clone()).await.unwrap().id;
    let disk = bench.keeper.create(&Asker::Host, "dev", Wanted { is_share: false, ..wanted }).await;
    is(disk.map(drop), Kind::Exists);
    for node in ["a", "b", "a"] {
        let given = bench.keeper.publish(&Asker::Host, &id, node, false).await.unwrap();
        assert!(matches!(given, Given::Share(export) if export.path == format!("/{id}")));
    }
    bench.plugged(&[]);
    is(bench.keeper.publish(&Asker::Host, &id, "a", true).await.map(drop), Kind::Exists);
    is(bench.publish(&id, "c").await, Kind::NotFound);
    is(bench.remove(&id).await, Kind::Precondition);
    let sharers = async || {
        let volume = bench.keeper.get(&Asker::Host, &id).await.unwrap();
        volume.sharers.unwrap().into_iter().map(|sharer| sharer.node).collect::<Vec<_>>()
    };
    bench.keeper.find_share(&Asker::Host, &id, "a").await.unwrap();
    for _ in 0..2 {
        bench.keeper.unpublish(&Asker::Host, &id, Some("a"), false).await.unwrap();
        assert_eq!(sharers().await, ["b"]);
    }
    // The agent of a node that has lost the share does not get it back by asking.
    is(bench.keeper.find_share(&Asker::Host, &id, "a").await.map(drop), Kind::NotFound);
    assert_eq!(sharers().await, ["b"]);
    let export = bench.keeper.find_share(&Asker::Host, &id, "b").await.unwrap();
    assert_eq!(export.path, format!("/{id}"));
    let larger = Range::new(40 * MIB, 0).unwrap();
    assert_eq!(bench.keeper.expand(&Asker::Host, &id, larger).await.unwrap(), 40 << 20);
    bench.unpublish(&id, false).await.unwrap();
    assert!(sharers().await.is_empty());
    bench.remove(&id).await.unwrap();
}

/// Space reserved for a volume is released when the volume is created, or its creation fails.
#[tokio::test(start_paused = true)]
async fn room_is_set_aside_only_while_a_volume_is_made_or_made_larger() {
    let bench = Bench::new().await;
    let mut random = fastrand::Rng::with_seed(16);
    let mut sizes = BTreeMap::new();
    for step in 0..400 {
        let name = format!("v{}", random.u8(..6));
        let size = u64::from(random.u16(1..400)) << 20;
        let range = Range::new(i64::try_from(size).unwrap(), 0).unwrap();
        let id = bench.memory.named("dev", &name).await.unwrap().map(|volume| volume.id);
        match (random.u8(..4), id) {
            (0, Some(id)) => {
                bench.remove(&id).await.unwrap();
                sizes.remove(&name);
            }
            (1, Some(id)) => {
                // Volumes never shrink, and there may not be enough space.
                if let Ok(size) = bench.keeper.expand(&Asker::Host, &id, range).await {
                    sizes.insert(name, size);
                }
            }
            (_, None) => {
                let wanted = |name: &str| Wanted {
                    name: name.to_owned(),
                    class: None,
                    range,
                    claim: String::new(),
                    is_share: false,
                };
                // A second one is created concurrently: both may fit, or one, or none.
                let other = format!("w{step}");
                let create = |name: &str| bench.keeper.create(&Asker::Host, "dev", wanted(name));
                let made = tokio::join!(create(&name), create(&other));
                for (name, made) in [(name, made.0), (other, made.1)] {
                    if let Ok(volume) = made {
                        sizes.insert(name, volume.size);
                    }
                }
                while sizes.len() > 6 {
                    let (first, _) = sizes.pop_first().unwrap();
                    let id = bench.memory.named("dev", &first).await.unwrap().unwrap().id;
                    bench.remove(&id).await.unwrap();
                }
            }
            _ => {}
        }
        assert_eq!(bench.keeper.0.reserved.lock().await.of("dev"), []);
        let all: u64 = sizes.values().sum();
        let room = bench.keeper.capacity(&Asker::Host, "dev", None).await.unwrap();
        assert_eq!(room.free, (1 << 30) - all, "step {step}: {sizes:?}");
        let usage = bench.memory.usage("dev", "memory", &[]).await.unwrap();
        assert_eq!((usage.all.volumes, usage.all.bytes), (u64::try_from(sizes.len()).unwrap(), all));
    }
}
