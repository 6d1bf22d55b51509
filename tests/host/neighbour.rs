//! A good guest beside the one that a test is about: nothing that another guest does may harm it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use guestlet::ctl::client;
use guestlet::wire::proto::v1::pong::Outcome;
use guestlet::wire::proto::v1::{GuestInfo, PingVirtualMachineRequest};
use serde_json::Value;

use crate::guest::{Door, Guest, Manner, info};
use crate::lab::{DEADLINE, Lab, uuid};

/// A VM that is pinged all the time.
pub struct Pings {
    enough: Arc<AtomicBool>,
    times: Arc<Mutex<Vec<Duration>>>,
    pinging: Option<JoinHandle<usize>>,
}

impl Pings {
    /// Begins; the VM has a session.
    pub fn start(lab: &Lab, name: &str) -> Self {
        let (enough, times) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let (socket, name) = (lab.socket(), name.to_owned());
        let (stop, seen) = (Arc::clone(&enough), Arc::clone(&times));
        let pinging = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let pinging = client::with(socket, async |daemon| {
                let request = PingVirtualMachineRequest { name, count: 10_000, interval_milliseconds: 20 };
                let mut pongs = daemon.admin().ping_virtual_machine(request).await.unwrap().into_inner();
                let mut answered = 0;
                while let Some(pong) = pongs.message().await.unwrap() {
                    let Some(Outcome::Nanoseconds(time)) = pong.outcome else { panic!("{pong:?}") };
                    seen.lock().unwrap().push(Duration::from_nanos(time));
                    answered += 1;
                    if stop.load(Ordering::SeqCst) {
                        break;
                    }
                }
                Ok(answered)
            });
            runtime.block_on(pinging).unwrap()
        });
        Self { enough, times, pinging: Some(pinging) }
    }

    /// The time that 99 of 100 pings take at most, of so many from now on.
    pub fn p99(&self, count: usize) -> Duration {
        self.percentiles([99], count)[0]
    }

    /// The times that so many of 100 pings take at most, of so many from now on.
    pub fn percentiles<const N: usize>(&self, of_100: [usize; N], count: usize) -> [Duration; N] {
        self.times.lock().unwrap().clear();
        let end = Instant::now() + DEADLINE;
        loop {
            let mut times = self.times.lock().unwrap().clone();
            if times.len() >= count {
                times.sort();
                return of_100.map(|of_100| times[(times.len() * of_100).div_ceil(100) - 1]);
            }
            assert!(Instant::now() < end, "{} of {count} pings were answered", times.len());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Every one was answered.
    fn assert_answered(mut self) {
        self.enough.store(true, Ordering::SeqCst);
        assert!(self.pinging.take().unwrap().join().unwrap() > 0);
    }
}

impl Drop for Pings {
    fn drop(&mut self) {
        self.enough.store(true, Ordering::SeqCst);
        // In a test that has failed already, how the pings ended says nothing more.
        drop(self.pinging.take().map(JoinHandle::join));
    }
}

/// The guest `good`, number 2, which is pinged all the time.
pub struct Neighbour {
    guest: Guest,
    before: Value,
    pings: Pings,
}

impl Neighbour {
    /// Starts it, in a lab whose settings name it.
    pub fn start(lab: &Lab) -> Self {
        // Its own silence is not the subject: a machine with other work to do may hold up its heart.
        let info = GuestInfo { heartbeat_interval_seconds: 10, ..info(&uuid(2), "boot-1") };
        let guest = Guest::start(&lab.path("good.sock"), Door::Unix, Manner::Good, info);
        let before = lab.until_vm("good", |vm| vm["callback"] == "open");
        Self { guest, before, pings: Pings::start(lab, "good") }
    }

    /// Its session is the one that it had, every ping was answered, and it still asks and is answered.
    pub fn assert_unharmed(self, lab: &Lab) {
        let (now, answers) = (lab.info("good"), self.guest.answers());
        lab.until("it is heard of", || lab.info("good")["last_heard"] != now["last_heard"]);
        lab.until("it is answered", || self.guest.answers() > answers);
        let after = lab.info("good");
        for key in ["since", "sessions", "callback"] {
            assert_eq!(after[key], self.before[key], "{key}");
        }
        assert_eq!(self.guest.open(), 1);
        self.pings.assert_answered();
    }
}

/// A pause between two looks at something that must stay as it is.
pub const LOOK: Duration = Duration::from_millis(300);
