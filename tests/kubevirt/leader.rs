//! Replicas of the controller: which of them leads, and when the next one does.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use guestlet::host::backends::Problems;
use guestlet::host::backends::kubevirt::controller::lease::{
    ADDRESS, AUTHORITY, Candidate, Leading, NAME, Notice, TROUBLE, Timing, candidate,
};
use guestlet::host::backends::kubevirt::standing::teller;
use guestlet::host::half::Half;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::api::Api;
use crate::lab::wait;
use crate::patience::until;
use crate::plane::ControlPlane;
use crate::pool;
use crate::role::{self, OWN};
use crate::turns::Turn;

const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/guestlet-system/leases";
/// For as long as a test waits at most, nobody takes the Lease from another.
const FOR_EVER: Timing = Timing {
    lease: Duration::from_secs(3600),
    deadline: Duration::from_secs(1800),
    every: Duration::from_millis(200),
};
const QUICK: Timing = Timing {
    lease: Duration::from_secs(6),
    deadline: Duration::from_secs(3),
    every: Duration::from_millis(200),
};

const SHORT: Timing = Timing {
    lease: Duration::from_secs(1),
    deadline: Duration::from_millis(900),
    every: Duration::from_millis(200),
};

fn path() -> String {
    format!("{LEASES}/{NAME}")
}

fn notice(name: &str) -> Notice {
    Notice { address: format!("{name}:9971"), authority_pem: "pem".to_owned() }
}

/// A control plane where the controller has its roles.
struct Bench {
    turn: Turn,
    api: Api,
}

impl Bench {
    async fn start() -> Self {
        let turn = pool::take().await;
        let api = Api::read(turn.plane().folder.path(), "test");
        role::install(&api).await;
        give_back(&api).await;
        Self { turn, api }
    }

    async fn replica(&self, name: &'static str, timing: Timing) -> Replica {
        Replica::new(role::client(self.turn.plane()).await, name, timing)
    }

    async fn lease(&self) -> Value {
        self.api.get(&path()).await.unwrap_or_default()
    }

    /// Waits until the Lease is another version than this, and still that of `replica`.
    async fn renewed(&self, replica: &Replica, before: &Value) -> Value {
        until("the Lease is renewed", async || {
            let lease = self.lease().await;
            assert_eq!(holder(&lease), replica.identity());
            let renewed = lease["spec"]["renewTime"] != before["spec"]["renewTime"];
            renewed.then_some(lease)
        })
        .await
    }
}

/// Leaves a Lease that nobody has, as the last one that led gives it back.
async fn give_back(api: &Api) {
    api.delete(&path()).await;
    let spec = json!({ "holderIdentity": "", "leaseDurationSeconds": 1 });
    api.create(LEASES, &json!({ "metadata": { "name": NAME }, "spec": spec })).await;
}

fn holder(lease: &Value) -> &str {
    lease["spec"]["holderIdentity"].as_str().unwrap_or_default()
}

fn time(lease: &Value, which: &str) -> Timestamp {
    lease["spec"][which].as_str().unwrap().parse().unwrap()
}

struct Replica {
    name: &'static str,
    candidate: Candidate,
    problems: watch::Receiver<Problems>,
}

impl Replica {
    fn new(client: kube::Client, name: &'static str, timing: Timing) -> Self {
        let (tell, problems) = watch::channel(Problems::new());
        let teller = teller(TROUBLE, tell, Arc::new(Half::new("host".into())));
        Self { name, candidate: candidate(client, OWN, name, timing, teller), problems }
    }

    fn identity(&self) -> &str {
        self.candidate.identity()
    }

    /// Waits until it leads.
    async fn leads(&self) -> Leading {
        let leads = self.candidate.lead(notice(self.name));
        tokio::time::timeout(crate::patience::PATIENCE, leads).await.expect("it leads")
    }

    /// It stands by, and leads when it can.
    fn stands_by(&self) -> JoinHandle<Leading> {
        let (candidate, notice) = (self.candidate.clone(), notice(self.name));
        tokio::spawn(async move { candidate.lead(notice).await })
    }
}

/// It renews until it has lost; why, and when.
fn renews(mut leading: Leading) -> JoinHandle<(String, Instant)> {
    tokio::spawn(async move {
        let reason = leading.lost(|_| ()).await;
        assert_eq!(leading.lost(|_| ()).await, reason, "it stays lost");
        (reason, Instant::now())
    })
}

/// What the controller's roles are for that has to do with who leads; what did not work.
pub async fn is_led(plane: &ControlPlane, api: &Api) -> Result<(), String> {
    api.delete(&path()).await;
    for name in ["a", "b"] {
        let replica = Replica::new(role::client(plane).await, name, SHORT);
        let leads = tokio::time::timeout(Duration::from_secs(4), replica.candidate.lead(notice(name)));
        let leads = leads.await.map_err(|_| format!("{:?}", *replica.problems.borrow()))?;
        leads.release().await;
    }
    Ok(())
}

#[test]
fn when_the_leader_is_killed_the_next_waits_for_as_long_as_the_lease_is_valid() {
    wait(async {
        let bench = Bench::start().await;
        let (a, b) = (bench.replica("a", QUICK).await, bench.replica("b", QUICK).await);
        let killed = renews(a.leads().await);
        let standby = b.stands_by();
        let mut lease = bench.lease().await;
        assert_eq!(lease["spec"]["leaseTransitions"], 1);
        assert_eq!(lease["spec"]["leaseDurationSeconds"], 6);
        assert_eq!(lease["metadata"]["annotations"], json!({ ADDRESS: "a:9971", AUTHORITY: "pem" }));
        assert!(a.identity().starts_with("a_") && b.identity().starts_with("b_"));
        // For longer than it would be valid without.
        let begun = Instant::now();
        while begun.elapsed() < QUICK.lease + QUICK.every {
            lease = bench.renewed(&a, &lease).await;
        }
        assert!(!standby.is_finished() && !killed.is_finished());
        killed.abort();
        let taken = until("the other has it", async || {
            let now = bench.lease().await;
            if holder(&now) == b.identity() {
                return Some(now);
            }
            lease = now;
            None
        })
        .await;
        let waited = time(&taken, "acquireTime").duration_since(time(&lease, "renewTime"));
        assert!(waited.unsigned_abs() >= QUICK.lease, "{waited}");
        assert_eq!(taken["spec"]["leaseTransitions"], 2);
        assert_eq!(taken["metadata"]["annotations"][ADDRESS], "b:9971");
        standby.await.unwrap().release().await;
    });
}

#[test]
fn what_is_released_is_taken_at_once() {
    wait(async {
        let bench = Bench::start().await;
        let (a, b) = (bench.replica("a", FOR_EVER).await, bench.replica("b", FOR_EVER).await);
        let mut leading = a.leads().await;
        // It is polled, dropped and polled again, as a loop over many things does.
        let first = bench.lease().await;
        until("it is renewed three times", async || {
            drop(tokio::time::timeout(Duration::from_millis(1), leading.lost(|_| ())).await);
            let spec = bench.lease().await["spec"].take();
            let since = time(&json!({ "spec": spec }), "renewTime").duration_since(time(&first, "renewTime"));
            (since.unsigned_abs() > FOR_EVER.every * 3).then_some(())
        })
        .await;
        let standby = b.stands_by();
        leading.release().await;
        let mut leading = standby.await.unwrap();
        let lease = bench.lease().await;
        assert_eq!((holder(&lease), &lease["spec"]["leaseTransitions"]), (b.identity(), &json!(2)));

        // Nobody waits: what is left says where nobody is, and keeps the CA.
        drop(tokio::time::timeout(Duration::from_millis(1), leading.lost(|_| ())).await);
        leading.release().await;
        let lease = bench.lease().await;
        assert_eq!((holder(&lease), &lease["spec"]["leaseTransitions"]), ("", &json!(2)));
        assert_eq!(lease["metadata"]["annotations"], json!({ AUTHORITY: "pem" }));
        let _leading = a.leads().await;
        assert_eq!(bench.lease().await["spec"]["leaseTransitions"], 3);
    });
}

#[test]
fn of_two_that_begin_at_once_one_leads() {
    wait(async {
        let bench = Bench::start().await;
        let mut replicas = Vec::new();
        for name in ["a", "b", "c", "d", "e"] {
            replicas.push(bench.replica(name, FOR_EVER).await);
        }
        let all: Vec<_> = replicas.iter().map(Replica::stands_by).collect();
        let lease = until("one leads", async || {
            if all.iter().any(JoinHandle::is_finished) { Some(bench.lease().await) } else { None }
        })
        .await;
        let first = replicas.iter().position(|one| one.identity() == holder(&lease)).unwrap();
        // The others have looked several times.
        tokio::time::sleep(FOR_EVER.every * 5).await;
        let leading: Vec<_> = (0..all.len()).filter(|&at| all[at].is_finished()).collect();
        assert_eq!(leading, [first]);
        assert_eq!(bench.lease().await["spec"]["leaseTransitions"], 1);
    });
}

#[test]
fn a_lease_that_is_edited_is_lost_or_put_right() {
    wait(async {
        let bench = Bench::start().await;
        let (a, b) = (bench.replica("a", FOR_EVER).await, bench.replica("b", FOR_EVER).await);
        let lost = renews(a.leads().await);
        let standby = b.stands_by();
        bench.renewed(&a, &bench.lease().await).await;

        // What the leader says in it is put right, and what others say is kept.
        let edit = json!({ "metadata": {
            "annotations": { ADDRESS: "elsewhere:1", AUTHORITY: null, "example.com/kept": "yes" },
            "labels": { "app": "guestlet" },
        }, "spec": { "leaseDurationSeconds": null, "renewTime": "1999-12-31T23:59:59.000000Z" } });
        bench.api.patch(&path(), &edit).await.unwrap();
        let wanted = json!({ ADDRESS: "a:9971", AUTHORITY: "pem", "example.com/kept": "yes" });
        until("it is put right", async || {
            let lease = bench.lease().await;
            assert_eq!(holder(&lease), a.identity());
            let is_right = lease["metadata"]["annotations"] == wanted
                && lease["metadata"]["labels"]["app"] == "guestlet"
                && lease["spec"]["leaseDurationSeconds"] == 3600;
            is_right.then_some(())
        })
        .await;

        // One that is deleted is made again by whoever leads, and by no other.
        let before = bench.lease().await;
        bench.api.delete(&path()).await;
        let made = until("it is made again", async || bench.api.get(&path()).await).await;
        assert_ne!(made["metadata"]["uid"], before["metadata"]["uid"]);
        bench.renewed(&a, &made).await;
        assert!(!standby.is_finished() && !lost.is_finished());

        // Whose it is, though, is not put right.
        let edit = json!({ "spec": { "holderIdentity": "somebody" } });
        bench.api.patch(&path(), &edit).await.unwrap();
        let (reason, _) = lost.await.unwrap();
        assert!(reason.contains("was lost: somebody holds it"), "{reason}");
        assert_eq!(holder(&bench.lease().await), "somebody");
        assert!(!standby.is_finished());

        // With all of its fields gone, who had it may not know that yet.
        bench.api.patch(&path(), &json!({ "spec": null })).await.unwrap();
        tokio::time::sleep(FOR_EVER.every * 5).await;
        assert!(!standby.is_finished());
        give_back(&bench.api).await;
        let lost = renews(standby.await.unwrap());
        bench.renewed(&b, &bench.lease().await).await;
        bench.api.patch(&path(), &json!({ "spec": { "holderIdentity": null } })).await.unwrap();
        let (reason, _) = lost.await.unwrap();
        assert!(reason.contains("its holder was removed"), "{reason}");
    });
}

/// A candidate that begins finds none, while one that leads has not noticed yet that somebody has deleted it.
#[test]
fn a_lease_that_is_not_there_is_left_to_whoever_had_it_for_as_long_as_it_would_be_valid() {
    wait(async {
        let bench = Bench::start().await;
        bench.api.delete(&path()).await;
        let replica = bench.replica("a", QUICK).await;
        let begun = Instant::now();
        let leading = replica.leads().await;
        assert!(begun.elapsed() >= QUICK.lease, "taken after {:?}", begun.elapsed());
        leading.release().await;
        let begun = Instant::now();
        let leading = bench.replica("b", FOR_EVER).await.leads().await;
        assert!(begun.elapsed() < QUICK.lease, "what is given back is free");
        leading.release().await;
    });
}

#[test]
fn the_clock_of_another_does_not_count() {
    wait(async {
        let bench = Bench::start().await;
        for time in ["1970-01-01T00:00:00.000000Z", "2999-01-01T00:00:00.000000Z"] {
            bench.api.delete(&path()).await;
            let lease = json!({
                "metadata": { "name": NAME },
                "spec": {
                    "holderIdentity": "other", "leaseDurationSeconds": 1, "leaseTransitions": 7,
                    "acquireTime": time, "renewTime": time,
                },
            });
            bench.api.create(LEASES, &lease).await;
            let replica = bench.replica("a", QUICK).await;
            let begun = Instant::now();
            let leading = replica.leads().await;
            assert!(begun.elapsed() >= QUICK.lease, "{time}: taken after {:?}", begun.elapsed());
            let lease = bench.lease().await;
            assert_eq!((holder(&lease), &lease["spec"]["leaseTransitions"]), (replica.identity(), &json!(8)));
            leading.release().await;
        }
    });
}

#[test]
fn a_leader_gives_up_while_the_api_server_is_away() {
    wait(async {
        let mut bench = Bench::start().await;
        let (a, b) = (bench.replica("a", QUICK).await, bench.replica("b", QUICK).await);
        let lost = renews(a.leads().await);
        let standby = b.stands_by();
        bench.renewed(&a, &bench.lease().await).await;
        bench.turn.kill_api_server();
        let (reason, _) = lost.await.unwrap();
        assert!(reason.contains("could not be renewed for 3 s: cannot write the Lease"), "{reason}");
        assert!(!standby.is_finished(), "nobody else can lead yet");
        for replica in [&a, &b] {
            let problems = replica.problems.borrow().clone();
            assert!(problems.contains_key(TROUBLE), "{}: {problems:?}", replica.name);
        }
        bench.turn.start_api_server();
        let leading = standby.await.unwrap();
        assert_eq!(*b.problems.borrow(), Problems::new(), "it is well again");
        leading.release().await;
    });
}

/// A way to the API server that a test can take away: what comes is then read no more, and nothing is said.
struct Way {
    address: SocketAddr,
    is_open: watch::Sender<bool>,
}

impl Way {
    async fn to(server: SocketAddr) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let (address, is_open) = (listener.local_addr().unwrap(), watch::Sender::new(true));
        let open = is_open.subscribe();
        tokio::spawn(async move {
            while let Ok((mut near, _)) = listener.accept().await {
                let mut open = open.clone();
                tokio::spawn(async move {
                    if *open.borrow() {
                        let mut far = TcpStream::connect(server).await.unwrap();
                        tokio::select! {
                            _ = tokio::io::copy_bidirectional(&mut near, &mut far) => return,
                            _ = open.wait_for(|is_open| !is_open) => {}
                        }
                    }
                    // It is held, and says nothing.
                    std::future::pending::<()>().await;
                });
            }
        });
        Self { address, is_open }
    }
}

#[test]
fn a_leader_that_is_cut_off_has_given_up_before_another_leads() {
    wait(async {
        let bench = Bench::start().await;
        let plane = bench.turn.plane();
        let server = SocketAddr::new(plane.address(), 6443);
        let way = Way::to(server).await;
        let client = role::client_with(plane, |config| {
            config.cluster_url = format!("https://{}", way.address).parse().unwrap();
            config.tls_server_name = Some(server.ip().to_string());
        });
        let (a, b) = (Replica::new(client.await, "a", QUICK), bench.replica("b", QUICK).await);
        let lost = renews(a.leads().await);
        let standby = b.stands_by();
        bench.renewed(&a, &bench.lease().await).await;
        way.is_open.send_replace(false);
        let leading = standby.await.unwrap();
        let led = Instant::now();
        let (reason, ended) = lost.await.unwrap();
        assert!(reason.contains("could not be renewed for 3 s: "), "{reason}");
        assert!(ended < led, "two led at once, for {:?}", ended.saturating_duration_since(led));
        leading.release().await;
    });
}
