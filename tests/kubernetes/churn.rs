//! Volumes come and go in the VMs of two nodes while node roles, controllers, the API server and VMs are killed at random. A guest
//! writes to each which round it is in, and what was written before is there. QEMU is asked who has what, and at the end the API
//! is, which then knows of nothing.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::task::block_in_place;
use tonic::{Code, Status};

use crate::cluster::NAMESPACE;
use crate::harness::csi::Csi;
use crate::harness::wait_for;
use crate::machines::{Guest, Machines};
use crate::model::objects::{Kind, items};
use crate::patience::until;
use crate::random::{Random, seed};
use crate::soak::steps;
use crate::stage::{Member, Stage};

/// The sidecars are in the real ones.
const VMS: [(&str, Guest); 5] = [
    ("one", Guest::Real),
    ("two", Guest::Real),
    ("three", Guest::Fast),
    ("four", Guest::Fast),
    ("five", Guest::Fast),
];
const VOLUMES: u32 = 6;
const MIB: i64 = 1 << 20;
/// How long a call may have to be repeated: several times what a killed VM takes to boot, one after the other.
const STUCK: Duration = Duration::from_secs(300);

pub async fn run() {
    let mut random = Random(seed());
    let mut stage = Stage::start(&VMS).await;
    let rounds = steps(2, 34);
    let begun = Instant::now();
    let mut workers: Vec<JoinHandle<Took>> = (0..VOLUMES)
        .map(|number| {
            let worker = Worker {
                number,
                members: stage.vms.clone(),
                machines: Arc::clone(&stage.whole.domains),
                random: Random(random.0 ^ u64::from(number) << 40),
                took: Took::default(),
            };
            std::thread::spawn(move || worker.work(rounds))
        })
        .collect();
    let mut killed = BTreeMap::new();
    let mut took = Took::default();
    while !workers.is_empty() {
        for what in disturb(&mut stage, &mut random).await {
            *killed.entry(what).or_insert(0) += 1;
        }
        let conflicts = stage.whole.cluster.model.journal();
        assert!(conflicts.conflicts().is_empty(), "{:?}", conflicts.conflicts());
        let pause = Duration::from_millis(random.below(3000).into());
        tokio::time::sleep(pause).await;
        let (ended, others) = workers.into_iter().partition::<Vec<_>, _>(JoinHandle::is_finished);
        workers = others;
        for worker in ended {
            took.add(worker.join().expect("a volume is lost or stuck, as was said"));
        }
    }
    nothing_is_left(&stage).await;
    let total = begun.elapsed().as_secs();
    println!("{} publishes and as many unpublishes in {total} s; killed: {killed:?}", took.publishes);
    println!("the longest publish took {:?}, the longest unpublish {:?}", took.publish, took.unpublish);
    for (answer, count) in took.answers {
        println!("{count:>5} × {answer}");
    }
}

/// What came of a worker's calls.
#[derive(Default)]
struct Took {
    publishes: u32,
    /// The longest.
    publish: Duration,
    unpublish: Duration,
    answers: BTreeMap<String, u32>,
}

impl Took {
    fn add(&mut self, other: Self) {
        self.publishes += other.publishes;
        self.publish = self.publish.max(other.publish);
        self.unpublish = self.unpublish.max(other.unpublish);
        for (answer, count) in other.answers {
            *self.answers.entry(answer).or_default() += count;
        }
    }
}

/// Who has one volume come and go.
struct Worker {
    number: u32,
    members: Vec<Arc<Member>>,
    machines: Arc<Machines>,
    random: Random,
    took: Took,
}

impl Worker {
    fn work(mut self, rounds: u32) -> Took {
        let name = format!("pvc-5f3c0000-0000-4000-8000-{:012}", self.number);
        let id = self.again("made", |csi| csi.create(&name, 8 * MIB));
        for round in 1..=rounds {
            let at = self.random.below(u32::try_from(VMS.len()).unwrap()) as usize;
            let member = Arc::clone(&self.members[at]);
            let begun = Instant::now();
            let context = self.again("published", |csi| csi.attach(&id, &member.uid));
            self.took.publish = self.took.publish.max(begun.elapsed());
            let serial = &context["guestlet.io/serial"];
            visit(&member, serial, round);
            self.is_in(serial, &[&member.name]);
            let begun = Instant::now();
            self.again("unpublished", |csi| csi.detach(&id, &member.uid));
            self.took.unpublish = self.took.unpublish.max(begun.elapsed());
            self.is_in(serial, &[]);
            self.took.publishes += 1;
        }
        self.again("removed", |csi| csi.delete(&id));
        self.took
    }

    /// Has a sidecar ask until it is done, as sidecars do.
    fn again<T>(&mut self, what: &str, call: impl Fn(Csi<'_>) -> Result<T, Status>) -> T {
        let end = Instant::now() + STUCK;
        loop {
            // Whichever has the lease of the sidecars.
            let asker = self.members[self.random.below(2) as usize].run();
            let answer = asker.map(|run| call(Csi::reachable(&run.vm)));
            match answer {
                Some(Ok(answer)) => return answer,
                Some(Err(status)) => {
                    let words = format!("{:?}: {}", status.code(), status.message());
                    assert!(Instant::now() < end, "the volume {} is not {what}: {words}", self.number);
                    // The volume and the VM exist all the time.
                    assert_ne!(status.code(), Code::NotFound, "{words}");
                    // What only the host cluster may know.
                    for secret in ["serviceaccount", "(Connect)", "forbidden", "ApiError"] {
                        assert!(!words.contains(secret), "{words}");
                    }
                    *self.took.answers.entry(words).or_default() += 1;
                }
                None => assert!(Instant::now() < end, "the VMs of the sidecars do not run"),
            }
            std::thread::sleep(Duration::from_millis(300));
        }
    }

    /// The disk is in these machines, as QEMU itself says. One that was killed has none until it is started again.
    fn is_in(&self, serial: &String, expected: &[&str]) {
        let plugged = self.machines.plugged();
        let having = plugged.iter().filter(|(_, serials)| serials.contains(serial));
        let names: Vec<_> = having.map(|(vm, _)| vm.as_str()).collect();
        assert!(names == expected || names.is_empty(), "{serial} is in {names:?}, and not in {expected:?}");
    }
}

/// Has a guest read what the round before has written to the disk, and write this one's number. A VM that is killed meanwhile
/// is asked again when it runs again: it has its volumes then.
fn visit(member: &Member, serial: &str, round: u32) {
    let find = format!(
        "for disk in /sys/block/sd*; do grep -q {serial} $disk/device/vpd_pg80 && echo {{${{disk##*/}}}}; done"
    );
    let mut last = String::new();
    let before = if round == 1 { String::new() } else { (round - 1).to_string() };
    let mut has_tried = false;
    let visited = wait_for("visit to the disk", STUCK, || {
        let vm = member.run()?.vm;
        let mut run = |command: &str| vm.run(command).map_err(|error| last = format!("{error:#}")).ok();
        let found = run(&find)?;
        let Some(disk) = said(&found) else {
            last = format!("the guest has no such disk: {found:?}");
            return None;
        };
        let words = run(&format!("echo {{$(head -c 8 /dev/{disk} | tr -d '\\000 ')}}"))?;
        let read = said(&words)?;
        let is_there = read == before || has_tried && read == round.to_string();
        assert!(is_there, "{} has lost {serial}: it says {read:?}, and not {before:?}", member.name);
        has_tried = true;
        run(&format!("printf '%-512s' {round} | dd of=/dev/{disk} bs=512 conv=fsync 2> /dev/null"))?;
        Some(())
    });
    visited.unwrap_or_else(|error| panic!("{}: {error}: {last}", member.name));
}

/// What a command has said in braces: the guest's kernel speaks on the same console.
fn said(output: &str) -> Option<&str> {
    Some(output.split_once('{')?.1.split_once('}')?.0)
}

/// Kills something, or two things at once, and lets it come back; what it was.
async fn disturb(stage: &mut Stage, random: &mut Random) -> Vec<&'static str> {
    let mut killed = Vec::new();
    let has_server = random.below(3) > 0;
    if !has_server {
        killed.push("API server");
        stage.whole.cluster.turn.kill_api_server();
    }
    let pause = Duration::from_millis(random.below(2000).into());
    let kind = random.below(if has_server { 4 } else { 3 });
    let at = random.below(2) as usize;
    match kind {
        0 | 1 => {
            killed.push(["node role", "controller"][kind as usize]);
            stage.program(kind == 0, at).kill();
            tokio::time::sleep(pause).await;
            stage.program(kind == 0, at).begin();
        }
        2 => tokio::time::sleep(pause).await,
        _ => {
            killed.push("VM");
            let member = Arc::clone(&stage.vms[random.below(5) as usize]);
            let before = stage.kill(&member);
            let instance = stage.whole.cluster.until_other(&member.name, &before.instance).await;
            stage.boot(&member, instance);
        }
    }
    if !has_server {
        stage.whole.cluster.turn.start_api_server();
        let api = &stage.whole.cluster.api;
        until("the API server is ready", async || api.is_ready().await.then_some(())).await;
    }
    if kind < 2 {
        block_in_place(|| stage.program(kind == 0, at).until_answers());
    }
    killed
}

/// No claim, attachment or disk, and nothing of a volume in the spec of a VM.
async fn nothing_is_left(stage: &Stage) {
    let cluster = &stage.whole.cluster;
    for path in [Kind::Claim.within(NAMESPACE), Kind::Attachment.all()] {
        let what = format!("{path} is empty");
        until(&what, async || cluster.api.list(&path).await.is_empty().then_some(())).await;
    }
    until("no attachment pod is left", async || cluster.attachers().await.is_empty().then_some(())).await;
    for vm in cluster.api.list(&Kind::Vm.within(NAMESPACE)).await {
        let volumes: Vec<_> = items(&vm["spec"]["template"]["spec"]["volumes"]).collect();
        assert_eq!(volumes.len(), 1, "{volumes:?}");
    }
    let plugged = block_in_place(|| stage.whole.domains.plugged());
    assert!(plugged.iter().all(|(_, serials)| serials.is_empty()), "{plugged:?}");
    let journal = cluster.model.journal();
    assert!(journal.conflicts().is_empty(), "{:?}", journal.conflicts());
}
