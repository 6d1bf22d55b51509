//! The sockets on which kubelet and the sidecars find the driver, for as long as kubelet's folder is there.
//!
//! ```text
//!  waits for kubelet's folder ──it appears──▶ puts up what is missing ──▶ rests, serving
//!       ▲                                         ▲                        │
//!       │                                         ├── a socket is gone ────┤ its folder was wiped, or something
//!       │                                         │                        │ is mounted over it
//!       │                                         ├── who this is changes ─┤ kubelet has to ask again
//!       └── the folder is gone ───────────────────┴── every 30 s after a failure
//! ```
//! Everything is watched before it is looked at, so that no change falls between.

use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::select_all;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::csi::registration;
use crate::csi::relay::{Channel, Relay};
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

/// Why the sockets are not there.
#[derive(Debug, thiserror::Error)]
enum Error {
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

/// Serves kubelet until `shutdown`, and the sidecars, whose calls go over `channel`. What kubelet has asked for by then is
/// done before this ends.
///
/// # Errors
/// If folders cannot be watched.
pub async fn run(
    guest: Guest,
    settings: Settings,
    known: watch::Receiver<Option<Identity>>,
    channel: Channel,
    shutdown: CancellationToken,
) -> io::Result<()> {
    let clients = Scope::new();
    let node = node::Service::new(guest.clone(), &settings, known.clone());
    let about =
        |ready| identity::Service::new(&settings.driver, !settings.topology.is_empty(), ready).into_server();
    let (is_known, way) = (known.clone(), Arc::clone(&channel));
    let services = Services {
        node: Both(about(Arc::new(move || is_known.borrow().is_some())), node.clone().into_server()),
        controller: Both(about(Arc::new(move || way().is_ok())), Relay::new(channel).into_server()),
        registration: registration::Service::new(&settings.driver, &settings.node_socket).into_server(),
    };
    let desk = Desk {
        registration: settings.kubelet_root.join(format!("plugins_registry/{}-reg.sock", settings.driver)),
        mounts: MountList::open(&guest.root)?,
        settings,
        services,
        clients,
        ending: shutdown.clone(),
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
    node: Option<unix::Listener>,
    controller: Option<unix::Listener>,
    registration: Option<unix::Listener>,
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
}

impl<N: http2::Service, C: http2::Service, R: http2::Service> Desk<N, C, R> {
    async fn keep(&self, mut known: watch::Receiver<Option<Identity>>) -> io::Result<()> {
        let mut listeners = Listeners::default();
        let mut complaint = String::new();
        loop {
            if !self.settings.make_root {
                appears(&self.settings.kubelet_root).await?;
            }
            if let Err(error) = self.make_folders().await {
                tracing::debug!("{}", error_chain::words(&error));
            }
            let mut news = News::begin(&self.folders())?;
            let identity = known.borrow_and_update().clone();
            let put_up = self.put_up(&mut listeners, identity).await;
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
            let something = async {
                loop {
                    tokio::select! {
                        changed = news.changed() => break changed,
                        changed = self.mounts.changed() => changed?,
                    }
                    tokio::time::sleep(QUIET).await;
                    if !listeners.are_there() {
                        break Ok(());
                    }
                }
            };
            tokio::select! {
                () = self.serve(&listeners) => {}
                changed = something => changed?,
                () = changed(&mut known) => continue,
                () = tokio::time::sleep(RETRY), if put_up.is_err() => continue,
            }
            // Nobody is accepted for that long.
            tokio::time::sleep(QUIET).await;
            if !listeners.are_there() {
                tracing::info!("the sockets for kubelet are gone; making them again");
            }
        }
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
        blocking::run(move || {
            if must_be && !root.is_dir() {
                return Err(Error::NoRoot(root));
            }
            for folder in folders {
                let made = std::fs::DirBuilder::new().recursive(true).mode(0o750).create(&folder);
                made.map_err(|error| Error::Folder(folder, error))?;
            }
            Ok(())
        })
        .await
    }

    async fn put_up(&self, listeners: &mut Listeners, identity: Option<Identity>) -> Result<(), Error> {
        self.make_folders().await?;
        listeners.node.take_if(|listener| !listener.is_there());
        if listeners.node.is_none() {
            listeners.node = Some(bind(&self.settings.node_socket).await?);
        }
        if let Some(path) = &self.settings.controller_socket {
            listeners.controller.take_if(|listener| !listener.is_there());
            if listeners.controller.is_none() {
                listeners.controller = Some(bind(path).await?);
            }
        }
        // kubelet asks who this is when the socket appears, and never again.
        let same = listeners.about == identity;
        listeners.registration.take_if(|listener| !same || !listener.is_there());
        listeners.about.clone_from(&identity);
        if let Some(identity) = &identity
            && listeners.registration.is_none()
        {
            listeners.registration = Some(bind(&self.registration).await?);
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

    async fn serve_on(&self, listener: Option<&unix::Listener>, service: &impl http2::Service) {
        match listener {
            Some(listener) => {
                serve::clients(listener, service.clone(), self.clients.children(), self.ending.clone()).await;
            }
            None => std::future::pending().await,
        }
    }
}

impl Listeners {
    /// Whether each can be found at its place.
    fn are_there(&self) -> bool {
        [&self.node, &self.controller, &self.registration].into_iter().flatten().all(unix::Listener::is_there)
    }
}

/// Listens at `path`.
async fn bind(path: &Path) -> Result<unix::Listener, unix::Error> {
    let path = path.to_owned();
    blocking::run(move || unix::Listener::bind(&path)).await
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

/// Completes when there is such a folder.
async fn appears(folder: &Path) -> io::Result<()> {
    while let Some(missing) = first_missing(folder) {
        let mut news = FolderNews::begin(missing)?;
        if !missing.is_dir() {
            news.changed().await?;
        }
    }
    Ok(())
}

/// The uppermost of a folder and those above it that is not there.
fn first_missing(folder: &Path) -> Option<&Path> {
    folder.ancestors().take_while(|above| !above.is_dir()).last()
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_folder_that_comes_step_by_step() {
        let above = tempfile::tempdir().unwrap();
        let folder = above.path().join("a/b/c");
        let mut waits = Box::pin(appears(&folder));
        for part in ["a", "a/b", "a/b/c"] {
            assert!(waits.as_mut().now_or_never().is_none(), "{part}");
            std::fs::create_dir(above.path().join(part)).unwrap();
        }
        tokio::time::timeout(Duration::from_secs(10), waits).await.unwrap().unwrap();
        appears(&folder).now_or_never().unwrap().unwrap();
    }
}
