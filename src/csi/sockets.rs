//! The sockets on which kubelet and the sidecars find the driver, for as long as kubelet's folder is there.
//!
//! ```text
//!  waits for kubelet's folder ──it appears──▶ puts up what is missing ──▶ rests, serving
//!       ▲                                         ▲                        │
//!       │                                         ├── a socket is gone ────┤ its folder was wiped, or something
//!       │                                         │                        │ is mounted over it
//!       │                                         ├── who this is changes ─┤ kubelet has to ask again
//!       └── the folder is gone ───────────────────┴── after a failure: with every change, and every 30 s
//! ```
//! Everything is watched before it is looked at, so that no change falls between. What is in kubelet's folder may be on a file
//! system that hangs: nothing of it is asked on the event loop, and what is served already is served on.

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

/// Who wipes a folder does it in many steps.
const QUIET: Duration = Duration::from_millis(50);
/// When something that could not be put up is tried again, if nothing changes before.
const RETRY: Duration = Duration::from_secs(30);

/// How long kubelet's file system may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why the sockets are not there.
#[derive(Debug, thiserror::Error)]
enum Error {
    /// What they are on does not answer; it is waited for.
    #[error("the file system of {} does not answer", .0.display())]
    Silent(PathBuf),
    /// kubelet's folder is gone.
    #[error("{} is gone", .0.display())]
    NoRoot(PathBuf),
    /// A folder of a socket cannot be made.
    #[error("cannot make the directory {}", .0.display())]
    Folder(PathBuf, #[source] io::Error),
    /// A link leads to somewhere else.
    #[error("{} is a symbolic link to {}, outside kubelet's directory; remove the link", .0.display(), .1.display())]
    Outside(PathBuf, PathBuf),
    /// The folder where kubelet looks for drivers is a link.
    #[error("{} is a symbolic link, and kubelet finds no driver behind it when it starts; make it a directory", .0.display())]
    Link(PathBuf),
    /// A socket cannot be listened on.
    #[error(transparent)]
    Socket(#[from] unix::Error),
}

/// Serves kubelet until `shutdown`, and the sidecars, whose calls go that `way`. What kubelet has asked for by then is
/// done before this ends.
///
/// # Errors
/// If folders cannot be watched.
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
    // What is not ready is what the liveness probe of the sidecars goes by.
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

/// What listens.
#[derive(Default)]
struct Listeners {
    node: Option<Socket>,
    controller: Option<Socket>,
    registration: Option<Socket>,
    /// Whom the registration is about.
    about: Option<Identity>,
}

/// What is served on each.
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
    /// Of what may wait for kubelet's file system one thing is done at a time: no more threads hang there than one.
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
            // Nobody is accepted for that long.
            tokio::time::sleep(QUIET).await;
            if self.are_there(&listeners).await.is_ok_and(|there| !there) {
                tracing::info!("the sockets for kubelet are gone; creating them again");
            }
        }
    }

    /// Makes what is missing, and watches it.
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

    /// Completes when one of them cannot be found any more, or, if not `all` could be put up, when anything has changed.
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
            // What does not answer may be there.
            if !all || self.are_there(listeners).await.is_ok_and(|there| !there) {
                return Ok(());
            }
        }
    }

    /// Does what may wait for kubelet's file system, beside the event loop, and after whatever still waits for it.
    async fn beside<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, Error> {
        let turn = Arc::clone(&self.turn);
        let done = tokio::time::timeout(PATIENCE, async move {
            // Never closed.
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

    /// Completes when there is kubelet's folder, or when that cannot be found out in time.
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

    /// Whether each can be found at its place.
    async fn are_there(&self, listeners: &Listeners) -> Result<bool, Error> {
        let Listeners { node, controller, registration, .. } = listeners;
        let all = [node, controller, registration].into_iter().flatten();
        let all: Vec<_> = all.filter_map(Socket::listener).collect();
        self.beside(move || all.iter().all(|listener| listener.is_there())).await
    }

    /// Takes down a socket that cannot be found at its place, or that is not `wanted` any more.
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

    /// Where the sockets are to be.
    fn sockets(&self) -> impl Iterator<Item = &Path> {
        let Settings { node_socket, controller_socket, .. } = &self.settings;
        [Some(node_socket), Some(&self.registration), controller_socket.as_ref()]
            .into_iter()
            .flatten()
            .map(PathBuf::as_path)
    }

    /// The folders that are watched, but for those above them: kubelet's, then those of the sockets.
    fn folders(&self) -> Vec<PathBuf> {
        let mut folders = vec![self.settings.kubelet_root.clone()];
        folders.extend(self.sockets().map(|socket| above(socket).to_owned()));
        folders
    }

    /// Makes the folder of a socket, if it is not there.
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

    /// Has a socket listened on at `path`.
    async fn renew(&self, socket: &mut Option<Socket>, path: &Path) -> Result<(), Error> {
        self.check(socket, true).await?;
        if socket.is_none() {
            self.make_folder(path).await?;
            *socket = Some(self.bind(path).await?);
        }
        Ok(())
    }

    /// Puts up what is missing. What one of them fails for is no reason not to put up the others.
    async fn put_up(&self, listeners: &mut Listeners, identity: Option<Identity>) -> Result<(), Vec<Error>> {
        let mut errors = Vec::new();
        errors.extend(self.renew(&mut listeners.node, &self.settings.node_socket).await.err());
        if let Some(path) = &self.settings.controller_socket {
            errors.extend(self.renew(&mut listeners.controller, path).await.err());
        }
        // kubelet is sent there.
        if listeners.node.is_some() {
            errors.extend(self.register(listeners, identity).await.err());
        }
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }

    /// Has kubelet told of the driver, and again if this is somebody else by now.
    async fn register(&self, listeners: &mut Listeners, identity: Option<Identity>) -> Result<(), Error> {
        // kubelet asks who this is when the socket appears, and never again.
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

/// A socket that is listened on. Its file is removed beside the event loop.
struct Socket(Option<Arc<unix::Listener>>);

impl Socket {
    fn listener(&self) -> Option<Arc<unix::Listener>> {
        self.0.clone()
    }

    /// Listens no more. Blocks.
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

/// What happens in the folders of the sockets.
struct News(Vec<FolderNews>);

impl News {
    fn begin(folders: &[PathBuf]) -> Self {
        Self(folders.iter().map(|folder| FolderNews::begin(folder)).collect())
    }

    async fn changed(&mut self) -> io::Result<()> {
        select_all(self.0.iter_mut().map(|news| Box::pin(news.changed()))).await.0
    }
}

/// Completes when something else is known.
async fn changed(known: &mut watch::Receiver<Option<Identity>>) {
    if known.changed().await.is_err() {
        // Nobody will say any more.
        std::future::pending::<()>().await;
    }
}

/// The folder of a file.
fn above(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("/"))
}

/// Makes a folder, and those above it. If it is named as one below `root`, no link may lead out of that. Blocks.
fn make_below(root: &Path, folder: &Path) -> Result<(), Error> {
    let refused = |error| Error::Folder(folder.to_owned(), error);
    let there = folder.ancestors().find(|above| above.symlink_metadata().is_ok());
    // Before anything is made there.
    if let Some(there) = there.filter(|there| there.starts_with(root)) {
        let (real, root) = (there.canonicalize().map_err(refused)?, root.canonicalize().map_err(refused)?);
        if !real.starts_with(root) {
            return Err(Error::Outside(there.to_owned(), real));
        }
    }
    std::fs::DirBuilder::new().recursive(true).mode(0o750).create(folder).map_err(refused)
}

/// What tells when the uppermost of a folder and those above it that is not there comes; nothing if all are. Blocks.
fn missing(folder: &Path) -> Option<FolderNews> {
    loop {
        let missing = folder.ancestors().take_while(|above| !above.is_dir()).last()?;
        let news = FolderNews::begin(missing);
        // It may have come before it was watched.
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
