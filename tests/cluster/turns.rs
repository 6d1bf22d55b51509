//! The control planes of a test program. A test has one to itself, and leaves it to the next; one is started only where none is free.
//!
//! They listen at loopback addresses of their own, on the ports that are usual, and end with this process: programs that are started
//! with `setpriv --pdeathsig` end with the thread that started them, which is one that never ends.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::pin::Pin;
use std::process::{Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError, mpsc};

use tokio::sync::{Semaphore, SemaphorePermit, oneshot};

use crate::plane::{ControlPlane, Site};

/// How many there are at once.
const MOST: usize = 4;
/// The second bytes of their addresses.
const NETWORKS: std::ops::Range<u8> = 64..128;

type Wish = oneshot::Sender<ControlPlane>;

/// Makes a control plane what tests of a program begin with.
type Ready = fn(&mut ControlPlane) -> Pin<Box<dyn Future<Output = ()> + '_>>;

/// Those of a test program.
pub struct Turns {
    permits: Semaphore,
    free: Mutex<Vec<ControlPlane>>,
    starter: OnceLock<Mutex<mpsc::Sender<Wish>>>,
    ready: Ready,
}

/// A control plane that is a test's for as long as it has this.
pub struct Turn {
    plane: Option<ControlPlane>,
    /// No test had it before.
    #[allow(dead_code, reason = "each test program uses a part of it")]
    pub is_new: bool,
    turns: &'static Turns,
    _permit: SemaphorePermit<'static>,
}

impl Turns {
    /// None yet; what is started is made ready by this.
    pub const fn new(ready: Ready) -> Self {
        Self {
            permits: Semaphore::const_new(MOST),
            free: Mutex::new(Vec::new()),
            starter: OnceLock::new(),
            ready,
        }
    }

    /// Waits for one, in which there may be what another test has left.
    pub async fn take(&'static self) -> Turn {
        let permit = self.permits.acquire().await.unwrap();
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let is_new = free.is_none();
        let plane = match free {
            Some(plane) => plane,
            None => self.start().await,
        };
        Turn { plane: Some(plane), is_new, turns: self, _permit: permit }
    }

    /// Has a thread that lasts start one.
    async fn start(&'static self) -> ControlPlane {
        let starter = self.starter.get_or_init(|| {
            let (wishes, to_do) = mpsc::channel::<Wish>();
            std::thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                for (network, wish) in NETWORKS.zip(to_do) {
                    let started = async {
                        let mut plane = begin(network).await;
                        (self.ready)(&mut plane).await;
                        plane
                    };
                    let _ = wish.send(runtime.block_on(started));
                }
            });
            Mutex::new(wishes)
        });
        let (wish, granted) = oneshot::channel();
        starter.lock().unwrap_or_else(PoisonError::into_inner).send(wish).unwrap();
        granted.await.expect("a control plane starts")
    }
}

impl Turn {
    pub fn plane(&self) -> &ControlPlane {
        self.plane.as_ref().expect("it is taken away at the end only")
    }

    /// Kills the API server, as hard as can be. The plane is no other test's afterwards.
    #[allow(dead_code, reason = "each test program uses a part of it")]
    pub fn kill_api_server(&mut self) {
        self.plane.as_mut().expect("it is taken away at the end only").api_server.kill();
    }

    /// Starts the API server again.
    #[allow(dead_code, reason = "each test program uses a part of it")]
    pub fn start_api_server(&mut self) {
        self.plane.as_mut().expect("it is taken away at the end only").api_server.again();
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let Some(mut plane) = self.plane.take() else { return };
        // What a failed test has left may not be what sweeping takes away; and its logs are shown.
        if !std::thread::panicking() && plane.api_server.starts() == 1 && plane.api_server.runs() {
            self.turns.free.lock().unwrap_or_else(PoisonError::into_inner).push(plane);
        }
    }
}

async fn begin(network: u8) -> ControlPlane {
    let [.., high, low] = std::process::id().to_be_bytes();
    let address = IpAddr::V4(Ipv4Addr::new(127, network, high, low.max(1)));
    let site = Site { address, by: &["setpriv", "--pdeathsig", "KILL", "--"] };
    let plane = ControlPlane::servers(site).await;
    remove_in_the_end(plane.folder.path());
    plane
}

/// Has a folder removed when this process has ended, however it does: nobody drops what is free.
#[allow(clippy::zombie_processes, reason = "it ends after this process")]
fn remove_in_the_end(folder: &Path) {
    let script = r#"cat; until rm -rf -- "$1"; do sleep 0.1; done"#;
    let mut remover = Command::new("sh")
        .args(["-c", script, "sh"])
        .arg(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // It waits until nobody has the other end.
    std::mem::forget(remover.stdin.take());
}
