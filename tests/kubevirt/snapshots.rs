//! Snapshots of the host cluster say what they are worth by the receipts of guests, and nothing better than that.

use std::sync::Arc;
use std::time::Duration;

use guestlet::host::backends::Problems;
use guestlet::host::backends::kubevirt::api::Cluster;
use guestlet::host::backends::kubevirt::objects::Instance;
use guestlet::host::backends::kubevirt::snapshots::{
    Attached, ENVELOPE, Freeze, LEVEL, RECEIPT, Snapshots, WHY,
};
use guestlet::host::half::Half;
use guestlet::receipt::envelope::seal;
use guestlet::receipt::{Disk, Level, Moment, Receipt, Times, Volume};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::api::Api;
use crate::lab::wait;
use crate::model::objects::text;
use crate::patience::until;
use crate::plane::ControlPlane;
use crate::pool;
use crate::role;
use crate::snapshot_kinds::{
    CLAIMS, OF_CLAIMS, OF_VMS, SECOND, ask, cut, install, machine, now, owners, remove,
};
use crate::turns::Turn;

/// The UID of the VM.
const VM: &str = "6f1c0a52-5c0f-4a8e-9d1b-0d7a2f3b4c01";

struct Bench {
    turn: Turn,
    api: Api,
    problems: watch::Receiver<Problems>,
    snapshots: Snapshots,
}

/// Those that say it, asking as the controller.
async fn snapshots(plane: &ControlPlane) -> (Snapshots, watch::Receiver<Problems>) {
    let (problems, told) = watch::channel(Problems::new());
    let cluster = Cluster::new(role::client(plane).await, problems, Arc::new(Half::new("host".to_owned())));
    (Snapshots::new(cluster), told)
}

/// A freeze that was over just now, in which everything was frozen for ten seconds.
fn freeze(id: u32, level: Level) -> Freeze {
    let at = |boottime_ms| Some(Moment { boottime_ms, time: String::new() });
    let volume = |mount_point: &str, serial: &str| Volume {
        mount_point: mount_point.to_owned(),
        disks: vec![Disk { file: "/dev/vda".to_owned(), serial: serial.to_owned() }],
        level: level.min(Level::FileSystem),
        ..Volume::default()
    };
    let receipt = Receipt {
        id: format!("{id:032x}"),
        level,
        reasons: vec!["no application took part".to_owned()],
        times: Times {
            asked: at(1000),
            frozen: at(2000),
            thaw_asked: at(12_000),
            thawed: at(12_500),
            ..Times::default()
        },
        volumes: vec![volume("/", ""), volume("/data", "web-data")],
        ..Receipt::default()
    };
    let ended = now();
    Freeze {
        envelope: seal(receipt.clone(), |_| None),
        receipt,
        window: Some((ended - 11 * SECOND, ended - SECOND)),
        problem: String::new(),
        ended,
    }
}

/// The VM `web`, with a root disk without a serial number, and one for data.
fn instance() -> Instance {
    serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {
            "domain": {"devices": {"disks": [{"name": "root"}, {"name": "data", "serial": "web-data"}]}},
            "volumes": [
                {"name": "root", "dataVolume": {"name": "web-root"}},
                {"name": "data", "persistentVolumeClaim": {"claimName": "web-data"}},
            ],
        },
    }))
    .unwrap()
}

impl Bench {
    async fn start() -> Self {
        // It would make each test's future large.
        Box::pin(Self::begin()).await
    }

    async fn begin() -> Self {
        let turn = pool::take().await;
        let api = Api::read(turn.plane().folder.path(), "test");
        role::install(&api).await;
        install(&api).await;
        let (snapshots, problems) = snapshots(turn.plane()).await;
        let bench = Self { turn, api, problems, snapshots };
        for name in ["web-root", "web-data", "theirs"] {
            bench.claim(name).await;
        }
        until("the role counts", async || bench.attach(&freeze(0, Level::Crash)).await).await;
        bench
    }

    async fn claim(&self, name: &str) {
        let claim = json!({
            "metadata": {"name": name},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
        });
        self.api.create(CLAIMS, &claim).await;
    }

    /// Makes the snapshot of a claim, of that of a VM if one is named.
    async fn asks(&self, name: &str, claim: &str, of: Option<&str>) -> Value {
        ask(&self.api, name, claim, of.map_or(Value::Null, owners)).await
    }

    /// Has the snapshot of a claim cut at this moment.
    async fn cuts(&self, snapshot: &Value, at: i64) {
        cut(&self.api, snapshot, at).await;
    }

    /// Makes the snapshot of a VM, of which these volumes are in it.
    async fn machine(&self, name: &str, uid: &str, included: &[&str], excluded: &[&str]) {
        machine(&self.api, name, uid, included, excluded).await;
    }

    async fn attach(&self, freeze: &Freeze) -> Option<Attached> {
        let outcome = self.snapshots.attach(&instance(), VM, freeze).await;
        outcome.inspect_err(|error| eprintln!("{error}")).ok()
    }

    /// What a snapshot says: the receipt, the level, and why not more.
    async fn says(&self, path: &str, name: &str) -> (String, String, String) {
        let snapshot = self.api.get(&format!("{path}/{name}")).await.unwrap();
        let say = |key| text(&snapshot["metadata"]["annotations"][key]).to_owned();
        (say(RECEIPT), say(LEVEL), say(WHY))
    }
}

#[test]
fn snapshots_say_what_they_are_worth_once_they_are_cut() {
    wait(async {
        let bench = Bench::start().await;
        let root = bench.asks("root", "web-root", Some("vm")).await;
        let data = bench.asks("data", "web-data", Some("vm")).await;
        let theirs = bench.asks("theirs", "theirs", None).await;
        let good = freeze(1, Level::FileSystem);
        let nothing = Attached { attached: 0, pending: true };
        assert_eq!(bench.attach(&good).await, Some(nothing), "none is cut yet");
        let inside = good.ended - 5 * SECOND - 250_000;
        for snapshot in [&root, &data, &theirs] {
            bench.cuts(snapshot, inside).await;
        }
        bench.machine("vm", VM, &["root", "data"], &[]).await;
        bench.machine("other", &VM.replace('6', "7"), &["root"], &[]).await;
        let all = Attached { attached: 3, pending: false };
        assert_eq!(bench.attach(&good).await, Some(all));
        let words = (good.receipt.id.clone(), "filesystem".to_owned(), "no application took part".to_owned());
        for (path, name) in [(OF_CLAIMS, "root"), (OF_CLAIMS, "data"), (OF_VMS, "vm")] {
            assert_eq!(bench.says(path, name).await, words, "{name}");
        }
        let written = bench.api.get(&format!("{OF_VMS}/vm")).await.unwrap();
        assert_eq!(text(&written["metadata"]["annotations"][ENVELOPE]), good.envelope);
        let none = (String::new(), String::new(), String::new());
        assert_eq!(bench.says(OF_CLAIMS, "theirs").await, none, "it is of no claim of this VM");
        assert_eq!(bench.says(OF_VMS, "other").await, none, "it is of a VM that had this name before");

        // Again it says the same, and writes nothing; what another receipt says of them is less.
        assert_eq!(bench.attach(&good).await, Some(all));
        let mut late = freeze(2, Level::FileSystem);
        late.window = late.window.map(|(_, until)| (until, until + SECOND));
        assert_eq!(bench.attach(&late).await, Some(all));
        assert_eq!(bench.attach(&freeze(3, Level::Crash)).await, Some(all));
        let same = bench.api.get(&format!("{OF_VMS}/vm")).await.unwrap();
        assert_eq!(same["metadata"]["resourceVersion"], written["metadata"]["resourceVersion"]);
        // More takes the place of less.
        let best = freeze(4, Level::Application);
        assert_eq!(bench.attach(&best).await, Some(all));
        assert_eq!(bench.says(OF_VMS, "vm").await.0, best.receipt.id);
        assert!(bench.problems.borrow().is_empty(), "{:?}", bench.problems.borrow());
    });
}

#[test]
fn whatever_is_not_proved_is_worth_what_it_is_without_a_freeze() {
    wait(async {
        let bench = Bench::start().await;
        let good = freeze(1, Level::Application);
        let whole = bench.asks("late", "web-data", Some("late")).await;
        bench.cuts(&whole, good.ended + SECOND).await;
        bench.machine("late", VM, &["data"], &[]).await;
        bench.machine("partial", VM, &["data"], &["root"]).await;
        bench.machine("unknown", VM, &["data", "root"], &[]).await;
        // A claim that was made anew after its snapshot.
        let before = bench.asks("before", "web-root", None).await;
        bench.cuts(&before, good.ended - 5 * SECOND).await;
        bench.api.delete(&format!("{CLAIMS}/web-root")).await;
        until("the claim is gone", async || {
            bench.api.get(&format!("{CLAIMS}/web-root")).await.is_none().then_some(())
        })
        .await;
        // The API knows it to the second.
        tokio::time::sleep(Duration::from_millis(1100)).await;
        bench.claim("web-root").await;
        assert_eq!(bench.attach(&good).await, Some(Attached { attached: 4, pending: false }));
        for (path, name, words) in [
            (OF_CLAIMS, "late", "is not proved to lie between"),
            (OF_VMS, "late", "is not proved to lie between"),
            (OF_VMS, "partial", "the volume root is not in it"),
            (OF_VMS, "unknown", "the snapshot of its volume data was taken is not known"),
        ] {
            let (receipt, level, why) = bench.says(path, name).await;
            assert_eq!((receipt, level.as_str()), (good.receipt.id.clone(), "crash"), "{name}: {why}");
            assert!(why.contains(words), "{name}: {why}");
        }
        assert_eq!(bench.says(OF_CLAIMS, "before").await.0, "");

        // Known to the second only, and no second of it was in the freeze from its beginning to its end.
        let coarse = bench.asks("coarse", "web-data", None).await;
        let mut short = freeze(2, Level::FileSystem);
        let second = short.ended / SECOND * SECOND - 5 * SECOND;
        bench.cuts(&coarse, second).await;
        short.window = Some((second - SECOND / 2, second + SECOND / 2));
        bench.attach(&short).await.unwrap();
        assert_eq!(bench.says(OF_CLAIMS, "coarse").await.1, "crash");
        let whole = freeze(3, Level::FileSystem);
        bench.attach(&whole).await.unwrap();
        assert_eq!(bench.says(OF_CLAIMS, "coarse").await.1, "filesystem");
    });
}

#[test]
fn what_somebody_else_writes_at_the_same_time_stays() {
    wait(async {
        let bench = Bench::start().await;
        let data = bench.asks("data", "web-data", None).await;
        let good = freeze(1, Level::FileSystem);
        bench.cuts(&data, good.ended - 5 * SECOND).await;
        let path = format!("{OF_CLAIMS}/data");
        let (api, at) = (bench.api.clone(), path.clone());
        let other = tokio::spawn(async move {
            for number in 0..50 {
                let change = json!({"metadata": {"annotations": {"example.com/number": number.to_string()}}});
                api.patch(&at, &change).await.unwrap();
            }
        });
        until("it is said", async || {
            bench.attach(&good).await.filter(|done| !done.pending && done.attached == 1)
        })
        .await;
        other.await.unwrap();
        let annotations = bench.api.get(&path).await.unwrap()["metadata"]["annotations"].clone();
        assert_eq!(
            (text(&annotations[LEVEL]), text(&annotations["example.com/number"])),
            ("filesystem", "49")
        );
    });
}

#[test]
fn a_cluster_without_snapshots_has_nothing_to_say() {
    wait(async {
        let bench = Bench::start().await;
        remove(&bench.api).await;
        let (snapshots, problems) = snapshots(bench.turn.plane()).await;
        for _ in 0..2 {
            let outcome = snapshots.attach(&instance(), VM, &freeze(1, Level::FileSystem)).await;
            assert_eq!(outcome.unwrap(), Attached::default());
        }
        assert!(problems.borrow().is_empty(), "{:?}", problems.borrow());
    });
}

/// Whether the controller can do what it should with its role as it is.
pub async fn is_said(plane: &ControlPlane, api: &Api) -> Result<(), String> {
    install(api).await;
    for name in ["web-root", "web-data"] {
        let claim = json!({
            "metadata": {"name": name},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
        });
        api.ensure(CLAIMS, &claim).await;
    }
    let good = freeze(1, Level::FileSystem);
    let snapshot = ask(api, "data", "web-data", Value::Null).await;
    cut(api, &snapshot, good.ended - 5 * SECOND).await;
    machine(api, "vm", VM, &["root"], &[]).await;
    let (snapshots, _problems) = snapshots(plane).await;
    let done = snapshots.attach(&instance(), VM, &good).await.map_err(|error| error.to_string())?;
    if done.attached == 2 { Ok(()) } else { Err(format!("{done:?}")) }
}
