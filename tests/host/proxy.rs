//! What lies between the host half and a simulated guest, from unix socket to unix socket, and fails as networks
//! and hypervisors do.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use guestlet::supervise::Scope;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{oneshot, watch};

/// What happens to the bytes of every stream, in both directions unless something else is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// Each piece comes this much later.
    Delay(Duration),
    /// Both ends of a stream are closed after so many more bytes of the guest.
    Cut(usize),
    /// Nothing comes through, not even the end of the stream.
    HalfOpen,
    /// They come one by one, with this in between.
    Drip(Duration),
}

/// Runs until it is dropped; then all streams through it end.
pub struct Proxy {
    path: PathBuf,
    fault: watch::Sender<Fault>,
    counts: Arc<Counts>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Counts {
    /// Streams that the host half has open.
    open: AtomicUsize,
    /// Streams that were cut.
    cut: AtomicUsize,
}

impl Proxy {
    /// Takes streams at `path`, and leads them to `guest`.
    pub fn start(path: &Path, guest: &Path) -> Self {
        let listener = std::os::unix::net::UnixListener::bind(path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let guest = guest.to_owned();
        let (fault, faults) = watch::channel(Fault::None);
        let counts = Arc::<Counts>::default();
        let (stop, stopped) = oneshot::channel();
        let counting = Arc::clone(&counts);
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let listener = UnixListener::from_std(listener).unwrap();
                let streams = Scope::new();
                let accepting = async {
                    loop {
                        let host = listener.accept().await.unwrap().0;
                        let lead = lead(host, guest.clone(), faults.clone(), Arc::clone(&counting));
                        streams.children().spawn(lead);
                    }
                };
                tokio::select! {
                    () = accepting => {}
                    _ = stopped => {}
                }
            });
        });
        Self { path: path.to_owned(), fault, counts, stop: Some(stop), thread: Some(thread) }
    }

    /// From now on this happens, to streams that are open too.
    pub fn set(&self, fault: Fault) {
        self.fault.send_replace(fault);
    }

    /// Streams that the host half has open.
    pub fn open(&self) -> usize {
        self.counts.open.load(Ordering::SeqCst)
    }

    /// Streams that were cut.
    pub fn cut(&self) -> usize {
        self.counts.cut.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        drop(std::fs::remove_file(&self.path));
        drop(self.stop.take());
        drop(self.thread.take().unwrap().join());
    }
}

/// Counts a stream for as long as the host half has it open.
struct Open(Arc<Counts>);

impl Open {
    fn new(counts: Arc<Counts>) -> Self {
        counts.open.fetch_add(1, Ordering::SeqCst);
        Self(counts)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn lead(host: UnixStream, guest: PathBuf, faults: watch::Receiver<Fault>, counts: Arc<Counts>) {
    let open = Open::new(Arc::clone(&counts));
    let Ok(guest) = UnixStream::connect(guest).await else { return };
    let ((from_host, to_host), (from_guest, to_guest)) = (host.into_split(), guest.into_split());
    let end = tokio::select! {
        end = carry(from_host, to_guest, faults.clone(), Some(open)) => end,
        end = carry(from_guest, to_host, faults.clone(), None) => end,
    };
    if end == End::Cut {
        counts.cut.fetch_add(1, Ordering::SeqCst);
    }
}

/// How the bytes of one direction ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Closed,
    Cut,
}

/// Leads one direction to its end: the host half's, which has the stream `open`, or the guest's.
async fn carry(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut faults: watch::Receiver<Fault>,
    open: Option<Open>,
) -> End {
    let of_guest = open.is_none();
    let mut buffer = [0; 4096];
    let mut since_fault = (Fault::None, 0);
    loop {
        let length = match from.read(&mut buffer).await {
            Ok(0) | Err(_) => break,
            Ok(length) => length,
        };
        let bytes = &buffer[..length];
        let fault = *faults.borrow_and_update();
        if since_fault.0 != fault {
            since_fault = (fault, 0);
        }
        let written = match fault {
            Fault::None => to.write_all(bytes).await,
            Fault::Delay(time) => {
                tokio::time::sleep(time).await;
                to.write_all(bytes).await
            }
            Fault::Cut(after) if of_guest && since_fault.1 + length >= after => {
                drop(to.write_all(&bytes[..after - since_fault.1]).await);
                return End::Cut;
            }
            Fault::Cut(_) => {
                since_fault.1 += length;
                to.write_all(bytes).await
            }
            Fault::HalfOpen => Ok(()),
            Fault::Drip(time) => drip(bytes, &mut to, &faults, time).await,
        };
        if written.is_err() {
            break;
        }
    }
    drop(open);
    // While the stream is half-open, nobody learns that the other one has gone.
    drop(faults.wait_for(|fault| *fault != Fault::HalfOpen).await);
    End::Closed
}

/// Writes byte by byte, and all the rest once the fault is another one.
async fn drip(
    bytes: &[u8],
    to: &mut OwnedWriteHalf,
    faults: &watch::Receiver<Fault>,
    time: Duration,
) -> std::io::Result<()> {
    for (at, byte) in bytes.iter().enumerate() {
        if faults.has_changed().unwrap_or(true) {
            return to.write_all(&bytes[at..]).await;
        }
        to.write_all(&[*byte]).await?;
        if time.is_zero() {
            tokio::task::yield_now().await;
        } else {
            tokio::time::sleep(time).await;
        }
    }
    Ok(())
}
