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
use tokio_util::sync::CancellationToken;

use crate::csi::registration;
use crate::csi::relay::{Relay, Way};
use crate::csi::route::Both;
use crate::csi::{Identity, Settings, identity, node, serve};
use crate::guest::Guest;
use crate::supervise::Scope;
use crate::sys::folder_news::FolderNews;
use crate::sys::mountinfo::MountList;
use crate::sys::{blocking, error_chain};
use crate::transport::{http2, unix};

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
    #[error("cannot make the folder {}", .0.display())]
    Folder(PathBuf, #[source] io::Error),
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
    let node = node::Service::new(guest.clone(), &settings, known.clone());
    let about =
        |ready| identity::Service::new(&settings.driver, !settings.topology.is_empty(), ready).into_server();
    let (is_known, is_there) = (known.clone(), Arc::clone(&way));
    let services = Services {
        node: Both(about(Arc::new(move || is_known.borrow().is_some())), node.clone().into_server()),
        controller: Both(about(Arc::new(move || is_there().is_ok())), Relay::new(way).into_server()),
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
                Err(silent) => (None, Err(silent)),
            };
            if let Err(error) = &put_up {
                let words = error_chain::words(error);
                if words != complaint {
                    tracing::warn!("kubelet is not served: {words}");
                }
                complaint = words;
            } else {
                complaint.clear();
            }
            if let Err(Error::NoRoot(_)) = put_up {
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
                tracing::info!("the sockets for kubelet are gone; making them again");
            }
        }
    }

    /// Makes what is missing, and watches it.
    async fn prepare(
        &self,
        listeners: &mut Listeners,
        identity: Option<Identity>,
    ) -> io::Result<(Option<News>, Result<(), Error>)> {
        let begun = tokio::time::timeout(PATIENCE, async {
            if let Err(error) = self.make_folders().await {
                tracing::debug!("{}", error_chain::words(&error));
            }
            let folders = self.folders();
            self.beside(move || News::begin(&folders)).await
        });
        let news = match begun.await.unwrap_or_else(|_| Err(self.silent())) {
            Ok(begun) => begun?,
            Err(error) => return Ok((None, Err(error))),
        };
        let put_up = tokio::time::timeout(PATIENCE, self.put_up(listeners, identity)).await;
        Ok((Some(news), put_up.unwrap_or_else(|_| Err(self.silent()))))
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
                Ok(Some(news)) => news?.changed().await?,
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

    /// The folders that are watched, but for those above them: kubelet's, then those of the sockets.
    fn folders(&self) -> Vec<PathBuf> {
        let folder = |path: &Path| path.parent().unwrap_or(Path::new("/")).to_owned();
        let Settings { kubelet_root, node_socket, controller_socket, .. } = &self.settings;
        let sockets = [Some(node_socket), Some(&self.registration), controller_socket.as_ref()];
        let mut folders = vec![kubelet_root.clone()];
        folders.extend(sockets.into_iter().flatten().map(|path| folder(path)));
        folders
    }

    /// Makes the folders of the sockets, as far as they are not there.
    async fn make_folders(&self) -> Result<(), Error> {
        let Settings { kubelet_root, make_root, .. } = &self.settings;
        let (root, must_be) = (kubelet_root.clone(), !make_root);
        let folders = self.folders().split_off(1);
        let made = self.beside(move || {
            if must_be && !root.is_dir() {
                return Err(Error::NoRoot(root));
            }
            for folder in folders {
                let made = std::fs::DirBuilder::new().recursive(true).mode(0o750).create(&folder);
                made.map_err(|error| Error::Folder(folder, error))?;
            }
            Ok(())
        });
        made.await?
    }

    async fn put_up(&self, listeners: &mut Listeners, identity: Option<Identity>) -> Result<(), Error> {
        self.make_folders().await?;
        self.check(&mut listeners.node, true).await?;
        if listeners.node.is_none() {
            listeners.node = Some(self.bind(&self.settings.node_socket).await?);
        }
        if let Some(path) = &self.settings.controller_socket {
            self.check(&mut listeners.controller, true).await?;
            if listeners.controller.is_none() {
                listeners.controller = Some(self.bind(path).await?);
            }
        }
        // kubelet asks who this is when the socket appears, and never again.
        let same = listeners.about == identity;
        self.check(&mut listeners.registration, same).await?;
        listeners.about.clone_from(&identity);
        if let Some(identity) = &identity
            && listeners.registration.is_none()
        {
            listeners.registration = Some(self.bind(&self.registration).await?);
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
                serve::clients(&listener, service.clone(), self.clients.children(), self.ending.clone())
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
    fn begin(folders: &[PathBuf]) -> io::Result<Self> {
        folders.iter().map(|folder| FolderNews::begin(folder)).collect::<io::Result<_>>().map(Self)
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

/// What tells when the uppermost of a folder and those above it that is not there comes; nothing if all are. Blocks.
fn missing(folder: &Path) -> Option<io::Result<FolderNews>> {
    loop {
        let missing = folder.ancestors().take_while(|above| !above.is_dir()).last()?;
        let news = FolderNews::begin(missing);
        // It may have come before it was watched.
        if news.is_err() || !missing.is_dir() {
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
            let mut news = missing(&folder).expect(part).unwrap();
            std::fs::create_dir(above.path().join(part)).unwrap();
            tokio::time::timeout(Duration::from_secs(10), news.changed()).await.unwrap().unwrap();
        }
        assert!(missing(&folder).is_none());
    }
}
