//! Sockets on which kubelet and the sidecars find the driver, for as long as kubelet's directory exists.
//!
//! ```text
//!  waits for kubelet's directory ──it appears──▶ puts up what is missing ──▶ rests, serving
//!       ▲                                            ▲                        │
//!       │                                            ├── a socket vanished ───┤ its directory was wiped, or something
//!       │                                            │                        │ is mounted over it
//!       │                                            ├── the identity changes ┤ kubelet has to ask again
//!       └── the directory vanished ──────────────────┴── after a failure: with every change, and every 30 s
//! ```
//! Every watch is set up before the state is examined, so that no change is missed in between. kubelet's
//! directory may be on a file system that hangs: no access to it is made on the event loop, and open
//! connections continue to be served.

use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::select_all;
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::csi::registration;
use crate::csi::{Identity, Settings, identity, node};
use crate::guest::Guest;
use crate::supervise::Scope;
use crate::sys::folder_news::FolderNews;
use crate::sys::mountinfo::MountList;
use crate::sys::{blocking, error_chain};
use crate::transport::relay::{Relay, Way};
use crate::transport::{Both, clients, http2, unix};
use crate::wire::proto::csi::controller_server::SERVICE_NAME as CONTROLLER;

/// A directory is usually wiped in many steps.
const QUIET: Duration = Duration::from_millis(50);
/// Pause before another attempt at what failed, if nothing changes earlier.
const RETRY: Duration = Duration::from_secs(30);

/// Timeout for an operation on kubelet's file system.
const PATIENCE: Duration = Duration::from_secs(10);

/// Reasons why the sockets are not available.
#[derive(Debug, thiserror::Error)]
enum Error {
    /// The file system of the sockets does not answer; the next attempt waits for it.
    #[error("the file system of {} does not answer", .0.display())]
    Silent(PathBuf),
    /// kubelet's directory does not exist.
    #[error("{} no longer exists", .0.display())]
    NoRoot(PathBuf),
    /// The directory of a socket cannot be created.
    #[error("cannot make the directory {}", .0.display())]
    Folder(PathBuf, #[source] io::Error),
    /// A symbolic link leads out of kubelet's directory.
    #[error("{} is a symbolic link to {}, outside kubelet's directory; remove the link", .0.display(), .1.display())]
    Outside(PathBuf, PathBuf),
    /// The directory where kubelet looks for drivers is a symbolic link.
    #[error("{} is a symbolic link, and kubelet finds no driver behind it when it starts; make it a directory", .0.display())]
    Link(PathBuf),
    /// Listening on a socket failed.
    #[error(transparent)]
    Socket(#[from] unix::Error),
}

/// Serves kubelet until `shutdown`, and the sidecars, whose calls are relayed by `way`. Operations that
/// kubelet has requested by then are completed before this returns.
///
/// # Errors
/// Fails if directories cannot be watched.
pub async fn run(
    guest: Guest,
    settings: Settings,
    known: watch::Receiver<Option<Identity>>,
    way: Way,
    shutdown: CancellationToken,
) -> io::Result<()> {
    let clients = Scope::new();
    let node = node::Service::new(guest.clone(), &settings, known.clone(), Arc::clone(&way));
    let about =
        |ready| identity::Service::new(&settings.driver, !settings.topology.is_empty(), ready).into_server();
    let (is_known, is_there, stale_until) = (known.clone(), Arc::clone(&way), settings.stale_until);
    // The liveness probe of the sidecars depends on this readiness.
    let is_current = move || stale_until.is_none_or(|until| Instant::now() >= until);
    let services = Services {
        node: Both(about(Arc::new(move || is_known.borrow().is_some())), node.clone().into_server()),
        controller: Both(
            about(Arc::new(move || is_current() && is_there().is_ok())),
            Relay::new(CONTROLLER, way),
        ),
        registration: registration::Service::new(&settings.driver, &settings.node_socket).into_server(),
    };
    let desk = Desk {
        registration: settings.kubelet_root.join(format!("plugins_registry/{}-reg.sock", settings.driver)),
        mounts: MountList::open(&guest.root)?,
        settings,
        services,
        clients,
        ending: shutdown.clone(),
        turn: Arc::new(Semaphore::new(1)),
    };
    let ended = shutdown.run_until_cancelled(desk.keep(known)).await;
    node.finish().await;
    match ended {
        Some(Err(error)) => Err(error),
        _ => Ok(()),
    }
}

/// Listening sockets.
#[derive(Default)]
struct Listeners {
    node: Option<Socket>,
    controller: Option<Socket>,
    registration: Option<Socket>,
    /// Identity that the registration was made for.
    about: Option<Identity>,
}

/// Services of the three sockets.
struct Services<N, C, R> {
    node: N,
    controller: C,
    registration: R,
}

struct Desk<N, C, R> {
    settings: Settings,
    registration: PathBuf,
    mounts: MountList,
    services: Services<N, C, R>,
    clients: Scope,
    ending: CancellationToken,
    /// Permits one operation at a time that may block on kubelet's file system, so that at most one thread hangs
    /// there.
    turn: Arc<Semaphore>,
}

impl<N: http2::Service, C: http2::Service, R: http2::Service> Desk<N, C, R> {
    async fn keep(&self, mut known: watch::Receiver<Option<Identity>>) -> io::Result<()> {
        let mut listeners = Listeners::default();
        let mut complaint = String::new();
        loop {
            let there = if self.settings.make_root { Ok(()) } else { self.appears().await? };
            let identity = known.borrow_and_update().clone();
            let (news, put_up) = match there {
                Ok(()) => self.prepare(&mut listeners, identity).await?,
                Err(silent) => (None, Err(vec![silent])),
            };
            if let Err(errors) = &put_up {
                let words: Vec<_> = errors.iter().map(|error| error_chain::words(error)).collect();
                let words = words.join("; ");
                if words != complaint {
                    tracing::warn!("kubelet is not served: {words}");
                }
                complaint = words;
            } else {
                complaint.clear();
            }
            if put_up
                .as_ref()
                .is_err_and(|errors| errors.iter().any(|error| matches!(error, Error::NoRoot(_))))
            {
                listeners = Listeners::default();
                continue;
            }
            tokio::select! {
                () = self.serve(&listeners) => {}
                lost = self.lost(&listeners, news, put_up.is_ok()) => lost?,
                () = changed(&mut known) => continue,
                () = tokio::time::sleep(RETRY), if put_up.is_err() => continue,
            }
            // The sockets may be wiped in many steps. No client is accepted during this pause.
            tokio::time::sleep(QUIET).await;
            if self.are_there(&listeners).await.is_ok_and(|there| !there) {
                tracing::info!("the sockets for kubelet are gone; creating them again");
            }
        }
    }

    /// Creates missing directories, and watches them.
    async fn prepare(
        &self,
        listeners: &mut Listeners,
        identity: Option<Identity>,
    ) -> io::Result<(Option<News>, Result<(), Vec<Error>>)> {
        let begun = tokio::time::timeout(PATIENCE, async {
            for socket in self.sockets() {
                if let Err(error) = self.make_folder(socket).await {
                    tracing::debug!("{}", error_chain::words(&error));
                }
            }
            let folders = self.folders();
            self.beside(move || News::begin(&folders)).await
        });
        let news = match begun.await.unwrap_or_else(|_| Err(self.silent())) {
            Ok(begun) => begun,
            Err(error) => return Ok((None, Err(vec![error]))),
        };
        let put_up = tokio::time::timeout(PATIENCE, self.put_up(listeners, identity)).await;
        Ok((Some(news), put_up.unwrap_or_else(|_| Err(vec![self.silent()]))))
    }

    /// Completes when one of the sockets can no longer be found or, if not `all` were put up, when anything has
    /// changed.
    async fn lost(&self, listeners: &Listeners, mut news: Option<News>, all: bool) -> io::Result<()> {
        loop {
            let something = async {
                match &mut news {
                    Some(news) => news.changed().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = something => changed?,
                changed = self.mounts.changed() => changed?,
            }
            tokio::time::sleep(QUIET).await;
            // A file system that does not answer may still have the sockets.
            if !all || self.are_there(listeners).await.is_ok_and(|there| !there) {
                return Ok(());
            }
        }
    }

    /// Runs an operation that may block on kubelet's file system off the event loop, after any other such
    /// operation has ended.
    async fn beside<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, Error> {
        let turn = Arc::clone(&self.turn);
        let done = tokio::time::timeout(PATIENCE, async move {
            // The semaphore is never closed.
            let turn = turn.acquire_owned().await;
            blocking::run(move || {
                let done = work();
                drop(turn);
                done
            })
            .await
        });
        done.await.map_err(|_| self.silent())
    }

    fn silent(&self) -> Error {
        Error::Silent(self.settings.kubelet_root.clone())
    }

    /// Completes when kubelet's directory exists, or when that cannot be determined in time.
    async fn appears(&self) -> io::Result<Result<(), Error>> {
        loop {
            let root = self.settings.kubelet_root.clone();
            match self.beside(move || missing(&root)).await {
                Ok(None) => return Ok(Ok(())),
                Ok(Some(mut news)) => news.changed().await?,
                Err(silent) => return Ok(Err(silent)),
            }
        }
    }

    /// Returns whether every socket can be found at its path.
    async fn are_there(&self, listeners: &Listeners) -> Result<bool, Error> {
        let Listeners { node, controller, registration, .. } = listeners;
        let all = [node, controller, registration].into_iter().flatten();
        let all: Vec<_> = all.filter_map(Socket::listener).collect();
        self.beside(move || all.iter().all(|listener| listener.is_there())).await
    }

    /// Closes a socket that cannot be found at its path, or is no longer `wanted`.
    async fn check(&self, socket: &mut Option<Socket>, wanted: bool) -> Result<(), Error> {
        let Some(listener) = socket.as_ref().and_then(Socket::listener) else { return Ok(()) };
        if !self.beside(move || wanted && listener.is_there()).await? {
            let taken = socket.take();
            self.beside(move || taken.map(Socket::close)).await?;
        }
        Ok(())
    }

    /// Listens at `path`.
    async fn bind(&self, path: &Path) -> Result<Socket, Error> {
        let path = path.to_owned();
        let listener = self.beside(move || unix::Listener::bind(&path)).await??;
        Ok(Socket(Some(Arc::new(listener))))
    }

    /// Returns the paths of all configured sockets.
    fn sockets(&self) -> impl Iterator<Item = &Path> {
        let Settings { node_socket, controller_socket, .. } = &self.settings;
        [Some(node_socket), Some(&self.registration), controller_socket.as_ref()]
            .into_iter()
            .flatten()
            .map(PathBuf::as_path)
    }

    /// Returns the directories that are watched, apart from their parents: kubelet's, then those of the sockets.
    fn folders(&self) -> Vec<PathBuf> {
        let mut folders = vec![self.settings.kubelet_root.clone()];
        folders.extend(self.sockets().map(|socket| above(socket).to_owned()));
        folders
    }

    /// Creates the directory of a socket if it is missing.
    async fn make_folder(&self, socket: &Path) -> Result<(), Error> {
        let Settings { kubelet_root, make_root, .. } = &self.settings;
        let (root, must_be, folder) = (kubelet_root.clone(), !make_root, above(socket).to_owned());
        let is_walked = socket == self.registration;
        let made = self.beside(move || {
            if must_be && !root.is_dir() {
                return Err(Error::NoRoot(root));
            }
            make_below(&root, &folder)?;
            if is_walked && folder.is_symlink() { Err(Error::Link(folder)) } else { Ok(()) }
        });
        made.await?
    }

    /// Ensures that a socket is listening at `path`.
    async fn renew(&self, socket: &mut Option<Socket>, path: &Path) -> Result<(), Error> {
        self.check(socket, true).await?;
        if socket.is_none() {
            self.make_folder(path).await?;
            *socket = Some(self.bind(path).await?);
        }
        Ok(())
    }

    /// Puts up the missing sockets. The failure of one does not prevent the others.
    async fn put_up(&self, listeners: &mut Listeners, identity: Option<Identity>) -> Result<(), Vec<Error>> {
        let mut errors = Vec::new();
        errors.extend(self.renew(&mut listeners.node, &self.settings.node_socket).await.err());
        if let Some(path) = &self.settings.controller_socket {
            errors.extend(self.renew(&mut listeners.controller, path).await.err());
        }
        // The registration directs kubelet to the node's socket.
        if listeners.node.is_some() {
            errors.extend(self.register(listeners, identity).await.err());
        }
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }

    /// Offers the driver to kubelet, and again if the identity of the guest has changed.
    async fn register(&self, listeners: &mut Listeners, identity: Option<Identity>) -> Result<(), Error> {
        // kubelet asks for the identity when the socket appears, and never again.
        let same = listeners.about == identity;
        self.check(&mut listeners.registration, same).await?;
        listeners.about.clone_from(&identity);
        let Some(identity) = identity else { return Ok(()) };
        let was_there = listeners.registration.is_some();
        self.renew(&mut listeners.registration, &self.registration).await?;
        if !was_there {
            let Settings { driver, .. } = &self.settings;
            tracing::info!("kubelet is offered the driver {driver} for the node {}", identity.node_id);
        }
        Ok(())
    }

    async fn serve(&self, listeners: &Listeners) {
        tokio::join!(
            self.serve_on(listeners.node.as_ref(), &self.services.node),
            self.serve_on(listeners.controller.as_ref(), &self.services.controller),
            self.serve_on(listeners.registration.as_ref(), &self.services.registration),
        );
    }

    async fn serve_on(&self, socket: Option<&Socket>, service: &impl http2::Service) {
        match socket.and_then(Socket::listener) {
            Some(listener) => {
                clients::serve(&listener, service.clone(), self.clients.children(), self.ending.clone())
                    .await;
            }
            None => std::future::pending().await,
        }
    }
}

/// Listening socket. Its file is removed off the event loop, because that may block.
struct Socket(Option<Arc<unix::Listener>>);

impl Socket {
    fn listener(&self) -> Option<Arc<unix::Listener>> {
        self.0.clone()
    }

    /// Closes the socket. Blocks.
    fn close(mut self) {
        self.0 = None;
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if let Some(listener) = self.0.take() {
            blocking::let_go(move || drop(listener));
        }
    }
}

/// Watches of the directories of the sockets.
struct News(Vec<FolderNews>);

impl News {
    fn begin(folders: &[PathBuf]) -> Self {
        Self(folders.iter().map(|folder| FolderNews::begin(folder)).collect())
    }

    async fn changed(&mut self) -> io::Result<()> {
        select_all(self.0.iter_mut().map(|news| Box::pin(news.changed()))).await.0
    }
}

/// Completes when the identity has changed.
async fn changed(known: &mut watch::Receiver<Option<Identity>>) {
    if known.changed().await.is_err() {
        // The sender has ended; there will be no further change.
        std::future::pending::<()>().await;
    }
}

/// Returns the directory of a file.
fn above(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("/"))
}

/// Creates a directory and its parents. If its path is below `root`, no symbolic link may lead out of `root`.
/// Blocks.
fn make_below(root: &Path, folder: &Path) -> Result<(), Error> {
    let refused = |error| Error::Folder(folder.to_owned(), error);
    let there = folder.ancestors().find(|above| above.symlink_metadata().is_ok());
    // This is checked before anything is created there.
    if let Some(there) = there.filter(|there| there.starts_with(root)) {
        let (real, root) = (there.canonicalize().map_err(refused)?, root.canonicalize().map_err(refused)?);
        if !real.starts_with(root) {
            return Err(Error::Outside(there.to_owned(), real));
        }
    }
    std::fs::DirBuilder::new().recursive(true).mode(0o750).create(folder).map_err(refused)
}

/// Watches for the uppermost missing directory among a directory and its parents; `None` if all exist.
/// Blocks.
fn missing(folder: &Path) -> Option<FolderNews> {
    loop {
        let missing = folder.ancestors().take_while(|above| !above.is_dir()).last()?;
        let news = FolderNews::begin(missing);
        // It may have been created before the watch.
        if !missing.is_dir() {
            return Some(news);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_folder_that_comes_step_by_step() {
        let above = tempfile::tempdir().unwrap();
        let folder = above.path().join("a/b/c");
        for part in ["a", "a/b", "a/b/c"] {
            let mut news = missing(&folder).expect(part);
            std::fs::create_dir(above.path().join(part)).unwrap();
            tokio::time::timeout(Duration::from_secs(10), news.changed()).await.unwrap().unwrap();
        }
        assert!(missing(&folder).is_none());
    }
}
