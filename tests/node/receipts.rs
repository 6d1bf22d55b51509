//! Receipts of freezes, from a guest through its node and the controller to the snapshots of the host cluster. Nothing is frozen: the
//! guest only says so.

use std::time::Duration;

use guestlet::guest::freeze::{Freezer, Settings};
use guestlet::receipt::envelope::{Check, Verdict, open};
use guestlet::receipt::judge::judge;
use guestlet::receipt::{Disk, End, Moment, Receipt, Times, Volume};
use guestlet::wire::proto::v1::event::Kind;
use guestlet::wire::proto::v1::{Frozen, Thawed};
use nix::time::{ClockId, clock_gettime};
use serde_json::Value;

use crate::cluster::wait;
use crate::patience::until;
use crate::snapshot_kinds::{OF_CLAIMS, OF_VMS, ask, cut, install, machine, now, owners};
use crate::whole::{Vm, Whole};

/// Now, by the clock that receipts have.
fn moment() -> Moment {
    let now = Duration::from(clock_gettime(ClockId::CLOCK_BOOTTIME).unwrap());
    Moment { boottime_ms: now.as_millis().try_into().unwrap(), time: String::new() }
}

struct Bench {
    whole: Whole,
    vm: Vm,
    freezer: Freezer,
    _folder: tempfile::TempDir,
}

impl Bench {
    /// A VM with a claim, whose guest keeps receipts.
    async fn start() -> Self {
        let mut whole = Whole::start(1).await;
        install(&whole.cluster.api).await;
        whole.cluster.claim("web-data", 64).await;
        let vm = whole.vm("web").await;
        whole.cluster.plug("web", "web-data").await;
        whole.cluster.is_in("web", "web-data", "Ready").await;
        let folder = tempfile::tempdir().unwrap();
        let settings = Settings {
            receipts: Some(folder.path().join("receipts")),
            folder: folder.path().to_owned(),
            ..Settings::default()
        };
        let freezer = Freezer::new(settings);
        let nothing = vm.guest.machine().laid_out();
        let guest = guestlet::guest::Guest { freezer: freezer.clone(), ..nothing };
        vm.guest.machine().lock().laid_out = Some(guest);
        // From the next session on.
        let instance = whole.cluster.instance("web").await.unwrap();
        let node = whole.nodes.get_mut(instance["status"]["nodeName"].as_str().unwrap()).unwrap();
        node.kill();
        node.again();
        node.until_vm("default/web", |vm| vm["session"] == "connected" && vm["callback"] == "open");
        Self { whole, vm, freezer, _folder: folder }
    }

    fn begins(&self) -> Receipt {
        let frozen = Frozen { file_systems: 1, holder: "a QGA client".into(), deadline_seconds: 120 };
        let volume = Volume {
            mount_point: "/data".to_owned(),
            disks: vec![Disk { file: "/dev/sda".to_owned(), serial: "web-data".to_owned() }],
            ..Volume::default()
        };
        let receipt = Receipt {
            id: format!("{:032x}", now()),
            times: Times { asked: Some(moment()), frozen: Some(moment()), ..Times::default() },
            volumes: vec![volume],
            ..Receipt::default()
        };
        self.vm.guest.happen(Kind::Frozen(frozen));
        receipt
    }

    fn ends(&self, mut receipt: Receipt) -> String {
        receipt.times.thaw_asked = Some(moment());
        receipt.times.thawed = Some(moment());
        receipt.end = End { how: "asked".to_owned(), problem: String::new() };
        judge(&mut receipt);
        let clerk = self.freezer.clerk().unwrap();
        clerk.take(&receipt);
        clerk.work();
        self.vm.guest.happen(Kind::Thawed(Thawed {
            holder: "a QGA client".into(),
            end: "asked".into(),
            receipt: receipt.id.clone(),
            level: receipt.level.word().into(),
            ..Thawed::default()
        }));
        receipt.id
    }

    /// Makes the snapshot of the claim.
    async fn asks(&self, name: &str, of: &str) -> Value {
        ask(&self.whole.cluster.api, name, "web-data", owners(of)).await
    }

    /// The annotations of a snapshot, once it is judged by this receipt.
    async fn says(&self, path: &str, name: &str, receipt: &str) -> Value {
        let path = format!("{path}/{name}");
        until(&format!("{path} says what it is worth\n{}", self.whole.logs()), async || {
            let annotations = self.whole.cluster.api.get(&path).await?["metadata"]["annotations"].clone();
            (annotations["guestlet.io/receipt"] == receipt).then_some(annotations)
        })
        .await
    }
}

/// A snapshot during the freeze, and one after it, as Harvester may have it.
#[test]
fn snapshots_of_a_vm_say_what_they_are_worth_by_the_receipt_of_its_guest() {
    wait(async {
        let bench = Bench::start().await;
        let api = &bench.whole.cluster.api;
        let receipt = bench.begins();
        // Longer than answers take on a busy machine, before the cut and after it.
        tokio::time::sleep(Duration::from_secs(2)).await;
        let during = bench.asks("during", "good").await;
        cut(api, &during, now()).await;
        machine(api, "good", &bench.vm.uid, &["web-data"], &["root"]).await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        let id = bench.ends(receipt);
        for (path, name) in [(OF_CLAIMS, "during"), (OF_VMS, "good")] {
            let says = bench.says(path, name, &id).await;
            assert_eq!(says["guestlet.io/receipt-level"], "filesystem", "{says:#}");
            let envelope = says["guestlet.io/receipt-envelope"].as_str().unwrap();
            let opened = open(envelope.as_bytes(), Some(&id), |_, _, _| Check::Bad);
            assert_eq!(opened.verdict, Verdict::Unsigned);
        }

        let receipt = bench.begins();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let after = bench.asks("after", "late").await;
        let id = bench.ends(receipt);
        tokio::time::sleep(Duration::from_millis(200)).await;
        cut(api, &after, now()).await;
        machine(api, "late", &bench.vm.uid, &["web-data"], &["root"]).await;
        for (path, name) in [(OF_CLAIMS, "after"), (OF_VMS, "late")] {
            let says = bench.says(path, name, &id).await;
            assert_eq!(says["guestlet.io/receipt-level"], "crash", "{says:#}");
            let why = says["guestlet.io/receipt-why"].as_str().unwrap();
            assert!(why.contains("is not proved to lie between"), "{why}");
        }
        let before = api.get(&format!("{OF_CLAIMS}/during")).await.unwrap();
        assert_eq!(
            before["metadata"]["annotations"]["guestlet.io/receipt-level"], "filesystem",
            "{before:#}"
        );
    });
}

/// What nobody has heard of when it began is not proved.
#[test]
fn a_freeze_that_a_node_has_not_seen_begin_proves_nothing() {
    wait(async {
        let bench = Bench::start().await;
        let api = &bench.whole.cluster.api;
        let mut receipt = bench.begins();
        receipt.id = format!("{:032x}", 1);
        // One of the same VM that was over meanwhile, as far as the node knows.
        bench.vm.guest.happen(Kind::Thawed(Thawed { end: "asked".into(), ..Thawed::default() }));
        tokio::time::sleep(Duration::from_secs(2)).await;
        let during = bench.asks("during", "vm").await;
        cut(api, &during, now()).await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        let id = bench.ends(receipt);
        let says = bench.says(OF_CLAIMS, "during", &id).await;
        assert_eq!(says["guestlet.io/receipt-level"], "crash", "{says:#}");
        let why = says["guestlet.io/receipt-why"].as_str().unwrap();
        assert!(why.contains("did not learn of the freeze when it began"), "{why}");
    });
}
