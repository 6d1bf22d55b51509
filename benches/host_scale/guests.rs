//! Simulated guests: the agent's own service on unix sockets.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use guestlet::guest::Guest;
use guestlet::guest::events::{Hub, TICK};
use guestlet::rpc;
use guestlet::rpc::callback::Surroundings;
use guestlet::rpc::guest::Service;
use guestlet::rpc::holder::Holder;
use guestlet::rpc::introduced::Introduced;
use guestlet::sys::root::Root;
use guestlet::transport::http2;
use guestlet::transport::listen::Incoming;
use guestlet::trust::anchors;
use guestlet::trust::guest::{Clock, Greeted, Keys, Standing, greet};
use guestlet::trust::key::{Key, PublicKey};
use guestlet::trust::keyring::Keyring;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::host::until;

/// Guests on a thread of their own, until it is dropped.
pub struct Guests {
    /// What each of them tells.
    pub hubs: Vec<Arc<Hub>>,
    /// Another number closes every stream.
    pub epoch: watch::Sender<u64>,
    _stop: std::sync::mpsc::Sender<()>,
}

impl Guests {
    /// Those with these numbers, whose sockets are in `folder`. With the key of a host half each has one of its own, and lets
    /// in nobody else.
    pub fn start(folder: &Path, numbers: std::ops::Range<usize>, host: Option<PublicKey>) -> Self {
        Self::with(folder, numbers, host, false)
    }

    /// The same behind hybrid vsock, without keys.
    pub fn hybrid(folder: &Path, numbers: std::ops::Range<usize>) -> Self {
        Self::with(folder, numbers, None, true)
    }

    fn with(
        folder: &Path,
        numbers: std::ops::Range<usize>,
        host: Option<PublicKey>,
        is_hybrid: bool,
    ) -> Self {
        let (epoch, epochs) = watch::channel(0);
        let guests: Vec<_> = numbers
            .map(|number| {
                let hub = Arc::new(Hub::new(format!("run-{number}")));
                let root = Root::at(folder.join("root"));
                let standing = host.map_or(Standing::Plain, knows);
                (Guest { root, events: hub, ..Guest::default() }, standing, folder.join(number.to_string()))
            })
            .collect();
        let hubs = guests.iter().map(|(guest, ..)| Arc::clone(&guest.events)).collect();
        let (stop, stopped) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.spawn(async move {
                for (guest, standing, socket) in guests {
                    tokio::spawn(be_held(guest, standing, socket, is_hybrid, epochs.clone()));
                }
            });
            runtime.block_on(async {
                while matches!(stopped.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty)) {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            });
        });
        Self { hubs, epoch, _stop: stop }
    }
}

/// A guest with a key of its own that was given this one.
pub fn knows(host: PublicKey) -> Standing {
    let anchors = anchors::parse("given", &host.to_string()).unwrap().into();
    Standing::Keyed(Keys {
        key: Arc::new(Key::generate().unwrap()),
        anchors,
        clock: Clock::Unset,
        plain: false,
    })
}

/// Waits until all know that they are in this zone.
pub fn until_zone(guests: [&Guests; 2], zone: &str) {
    let mut left: Vec<_> = guests.iter().flat_map(|guests| &guests.hubs).collect();
    until("all guests know their zone", || {
        let knows = |hub: &Hub| hub.state().1.topology.as_ref().is_some_and(|known| known.zone == zone);
        left.retain(|hub| !knows(hub));
        left.is_empty()
    });
}

/// Lets in a host half that first says to which port it wants to go, as hybrid vsock has it.
async fn open(stream: &mut UnixStream) -> Option<()> {
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        line.push(stream.read_u8().await.ok()?);
    }
    stream.write_all(b"OK 1024\n").await.ok()
}

/// Serves sessions of the host half.
async fn be_held(
    guest: Guest,
    standing: Standing,
    socket: PathBuf,
    is_hybrid: bool,
    epochs: watch::Receiver<u64>,
) {
    let listener = UnixListener::bind(socket).unwrap();
    let capabilities = ["events", "topology", "callback"].map(str::to_owned).to_vec();
    // No disk ever changes.
    let (_changes, changes) = watch::channel(0);
    let surroundings = Surroundings { changes, known: Arc::new(|_| {}) };
    let service = {
        let keys = rpc::keys::Keys::new(Keyring::empty(), || Ok(None));
        Service::new(guest.clone(), capabilities, Holder::default(), surroundings, keys)
    };
    let mut ticks = tokio::time::interval(TICK);
    loop {
        let mut epoch = epochs.clone();
        epoch.mark_unchanged();
        tokio::select! {
            _ = ticks.tick() => guest.events.tick(),
            stream = listener.accept() => {
                let (mut stream, service, standing) = (stream.unwrap().0, service.clone(), standing.clone());
                tokio::spawn(async move {
                    if is_hybrid && open(&mut stream).await.is_none() {
                        return;
                    }
                    tokio::select! {
                        () = serve(stream, service, standing) => {}
                        _ = epoch.changed() => {}
                    }
                });
            }
        }
    }
}

/// As the agent does.
async fn serve(stream: UnixStream, service: Service, standing: Standing) {
    let incoming = Incoming { stream: Box::new(stream), plain_refusal: None };
    // A host half asks for keys first, and then without.
    let Ok(Greeted { stream, peer, binding }) = greet(incoming, standing).await else { return };
    let service = Introduced::new(service.into_server(), Arc::new(peer), binding);
    drop(http2::serve(stream, service, CancellationToken::new()).await);
}
