//! A pool with a hanging file system, next to pools that work.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::super::access::{Access, Patience};
use super::*;

/// Time limit of a call.
const CALL: Duration = Duration::from_millis(400);
const PATIENCE: Patience = Patience {
    opening: Duration::from_millis(200),
    again: Duration::from_millis(10),
    check: Duration::from_millis(10),
};

/// Creates pools of which `fast` hangs while this lock is held.
fn access(path: &Path, hangs: &Arc<Mutex<()>>) -> Access {
    let pools = pools(path).into_iter().map(|pool| Pool { patience: CALL, ..pool }).collect();
    let mut store = of(pools);
    store.steps = vec![(path.join("fast"), Steps::hanging(Arc::clone(hangs)))];
    Access::with(store, PATIENCE)
}

/// Thread that keeps the file system hanging.
struct Hanging {
    holds: std::sync::mpsc::Sender<()>,
    holder: tokio::task::JoinHandle<()>,
}

impl Hanging {
    fn begin(hangs: &Arc<Mutex<()>>) -> Self {
        let (holds, held) = std::sync::mpsc::channel();
        let (tells, told) = std::sync::mpsc::channel();
        let hangs = Arc::clone(hangs);
        let holder = tokio::task::spawn_blocking(move || {
            let _held = hangs.lock().unwrap();
            tells.send(()).unwrap();
            held.recv().unwrap_err();
        });
        told.recv().unwrap();
        Self { holds, holder }
    }

    async fn end(self) {
        drop(self.holds);
        self.holder.await.unwrap();
    }
}

async fn create(access: &Access, name: &str, class: &str) -> Result<String, VolumeError> {
    let wanted = new(name, class, 512);
    Ok(access.in_class(class, move |store| store.create(wanted)).await?.id)
}

async fn remove(access: &Access, id: &str) -> Result<(), VolumeError> {
    let wanted = id.to_owned();
    access.in_pool_of(id, move |store| store.remove(&wanted)).await
}

async fn list(access: &Access) -> Vec<Volume> {
    access.known(|index| index.part(None, "", usize::MAX)).await
}

/// Checks that all operations on the other pools succeed without delay.
async fn others_go_on(access: &Access) {
    let began = Instant::now();
    let id = create(access, "other", "full").await.unwrap();
    assert!(access.get(&id).await.unwrap().is_some());
    assert!(list(access).await.iter().any(|volume| volume.id == id && volume.problem.is_none()));
    access.in_class("full", |store| store.capacity("full")).await.unwrap();
    remove(access, &id).await.unwrap();
    assert!(access.get(&id).await.unwrap().is_none());
    assert!(began.elapsed() < CALL, "{:?}", began.elapsed());
}

/// Waits until a call succeeds.
async fn until<T>(mut call: impl AsyncFnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(done) = call().await {
            return done;
        }
        assert!(began.elapsed() < Duration::from_secs(20));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_hangs_stops_only_itself() {
    let folder = tempfile::tempdir().unwrap();
    let hangs = Arc::default();
    let access = access(folder.path(), &hangs);
    let id = create(&access, "v", "fast").await.unwrap();
    let hanging = Hanging::begin(&hangs);
    others_go_on(&access).await;
    let words = ["the pool fast (", "its file system has not answered for"];
    says(create(&access, "w", "fast").await, VolumeError::Unavailable, &words);
    let began = Instant::now();
    for _ in 0..100 {
        says(create(&access, "w", "fast").await, VolumeError::Unavailable, &words);
        says(remove(&access, &id).await, VolumeError::Unavailable, &words);
    }
    assert!(began.elapsed() < CALL, "nobody waits for it any more");
    // The count includes the threads of other tests.
    assert!(blocking_threads() < 64, "{}", blocking_threads());
    others_go_on(&access).await;
    // The volumes that were known before the hang stay known.
    let found = access.get(&id).await.unwrap().unwrap();
    assert_eq!(found.name, "v");
    assert!(found.problem.unwrap().contains("has not answered for"));
    assert!(list(&access).await.iter().any(|volume| volume.id == id && volume.problem.is_some()));
    hanging.end().await;
    until(async || remove(&access, &id).await.ok()).await;
    // A call that was given up may have been completed later.
    until(async || match list(&access).await.into_iter().find(|volume| volume.name == "w") {
        Some(volume) => Some(volume.id),
        None => create(&access, "w", "fast").await.ok(),
    })
    .await;
    assert_eq!(list(&access).await.iter().filter(|volume| volume.name == "w").count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_hangs_from_the_beginning_is_there_when_it_answers() {
    let folder = tempfile::tempdir().unwrap();
    let hangs = Arc::default();
    let id = create(&access(folder.path(), &hangs), "v", "fast").await.unwrap();
    let hanging = Hanging::begin(&hangs);
    let access = access(folder.path(), &hangs);
    // The first call waits for a moment, in case the pool is merely slow.
    assert_eq!(list(&access).await, []);
    others_go_on(&access).await;
    let unavailable = |outcome| says(outcome, VolumeError::Unavailable, &["the pool fast ("]);
    unavailable(access.get(&id).await.map(drop));
    unavailable(create(&access, "v", "fast").await.map(drop));
    others_go_on(&access).await;
    hanging.end().await;
    let found = until(async || access.get(&id).await.ok().flatten()).await;
    assert_eq!((found.name.as_str(), found.problem), ("v", None));
    says(
        create(&access, "v", "fast").await,
        VolumeError::Unavailable,
        &["was found only just now; repeat the call"],
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_cannot_be_opened_and_is_slow_to_say_so_stops_only_itself() {
    let folder = tempfile::tempdir().unwrap();
    #[allow(clippy::disallowed_methods, reason = "a test lays out what is there")]
    std::fs::write(folder.path().join("fast"), "no directory").unwrap();
    let hangs = Arc::default();
    let mut store = of(pools(folder.path()));
    store.steps = vec![(folder.path().join("fast"), Steps::hanging(Arc::clone(&hangs)))];
    // Calls that wait for this pool wait longer than calls to the others may take.
    let access = Access::with(store, Patience { opening: 10 * CALL, ..PATIENCE });
    says(create(&access, "v", "fast").await, VolumeError::Unavailable, &["the pool fast ("]);
    let hanging = Hanging::begin(&hangs);
    tokio::time::sleep(PATIENCE.again).await;
    for _ in 0..3 {
        others_go_on(&access).await;
    }
    // A call that may concern the hanging pool waits.
    let began = Instant::now();
    says(create(&access, "v", "fast").await, VolumeError::Unavailable, &["has not answered for"]);
    assert!(began.elapsed() > CALL, "{:?}", began.elapsed());
    hanging.end().await;
}

/// Counts the threads of this process: those of the test program, and those for blocking work.
fn blocking_threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}
