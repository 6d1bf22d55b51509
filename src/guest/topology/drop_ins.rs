//! Files from which a kubelet takes the labels of its Node: it sets them when it registers the Node, and again
//! whenever it starts. So the files are kept up to date with what the host half reports, even before the guest
//! joins a cluster.
//!
//! Labels of an earlier boot are removed until the topology of this boot is known, because the guest may now run
//! on another host. A Node without a label gets it later, but with a wrong label pods may be scheduled by it.
//!
//! kubelet's own settings file belongs to somebody else. A note records that it may contain labels of guestlet;
//! without that note the file is not opened to remove any.
//!
//! To add a kind: its variant and its lines in [`Kind`]; the text of its file is made and merged by pure
//! functions.

mod kubelet_arguments;
mod rancher;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use crate::guest::topology::{Labels, ZoneChange};
use crate::labels;
use crate::sys::files;
use crate::sys::root::Root;

/// Kind of Kubernetes node, which determines the file with its labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// RKE2, which reads a directory of drop-ins.
    Rke2,
    /// k3s, which reads a directory of drop-ins.
    K3s,
    /// kubelet as kubeadm runs it, in the variable `KUBELET_EXTRA_ARGS`.
    Kubeadm,
}

/// Note that kubelet's own settings file may contain labels of guestlet.
const NOTE: &str = "/var/lib/guestlet/kubelet-labels";

/// Result of updating a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Path of the file.
    pub path: PathBuf,
    /// Labels of guestlet in the file.
    pub labels: Labels,
    /// Reason why the file is not up to date; `None` if it is.
    pub problem: Option<String>,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Rke2, Self::K3s, Self::Kubeadm];

    /// Returns the kind with this name in the settings.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "rke2" => Some(Self::Rke2),
            "k3s" => Some(Self::K3s),
            "kubeadm" => Some(Self::Kubeadm),
            _ => None,
        }
    }

    fn path(self, root: &Root) -> PathBuf {
        match self {
            Self::Rke2 => root.path("/etc/rancher/rke2/config.yaml.d/90-guestlet.yaml"),
            Self::K3s => root.path("/etc/rancher/k3s/config.yaml.d/90-guestlet.yaml"),
            Self::Kubeadm => {
                // The paths on Debian and on Red Hat.
                let places = ["/etc/default/kubelet", "/etc/sysconfig/kubelet"].map(|path| root.path(path));
                let there = places.iter().find(|path| path.exists());
                let has_folder = |path: &&PathBuf| path.parent().is_some_and(std::path::Path::exists);
                let place = there.or_else(|| places.iter().find(has_folder)).unwrap_or(&places[0]);
                place.clone()
            }
        }
    }

    /// Returns the labels of guestlet in the text of a file of this kind.
    fn ours(self, text: &str) -> Labels {
        match self {
            Self::Rke2 | Self::K3s => rancher::labels(text),
            Self::Kubeadm => kubelet_arguments::labels(text),
        }
    }

    /// Returns the text with these labels of guestlet, or `None` if the file should not exist.
    fn text(self, before: &str, labels: &Labels) -> Result<Option<String>, String> {
        match self {
            Self::Rke2 | Self::K3s => Ok(rancher::text(labels)),
            Self::Kubeadm => kubelet_arguments::merged(before, labels),
        }
    }
}

/// Returns the labels that the file should contain: those of the Node, except that zone and region in the file are
/// kept if the settings say so.
fn wanted(node_labels: Option<&Labels>, before: &Labels, zone_change: ZoneChange) -> Labels {
    let mut wanted = node_labels.cloned().unwrap_or_default();
    if zone_change != ZoneChange::Update {
        let kept = before.iter().filter(|(key, _)| matches!(key.as_str(), labels::REGION | labels::ZONE));
        wanted.extend(kept.map(|(key, value)| (key.clone(), value.clone())));
    }
    wanted
}

/// Updates the file of `kind` to contain these labels. `None` means that they are not known yet: labels of an
/// earlier boot are then removed, except a zone and region that `zone_change` keeps. Blocks.
pub fn keep(root: &Root, kind: Kind, node_labels: Option<&Labels>, zone_change: ZoneChange) -> Outcome {
    let path = kind.path(root);
    let outcome = |labels, problem| Outcome { path: path.clone(), labels, problem };
    let before = match files::text(&path) {
        Ok(before) => before,
        Err(error) => return outcome(Labels::new(), Some(format!("cannot be read: {error}"))),
    };
    let present = before.as_deref().map(|text| kind.ours(text)).unwrap_or_default();
    let wanted = wanted(node_labels, &present, zone_change);
    let noted = |done: io::Result<()>| done.map_err(|error| format!("cannot be recorded: {error}"));
    let put = (if wanted.is_empty() { Ok(()) } else { noted(note(root, kind)) })
        .and_then(|()| put(kind, &path, before.as_deref(), &wanted))
        .and_then(|()| if wanted.is_empty() { noted(forget(root, kind)) } else { Ok(()) });
    match put {
        Ok(()) => outcome(wanted, None),
        Err(problem) => outcome(present, Some(problem)),
    }
}

fn put(kind: Kind, path: &std::path::Path, before: Option<&str>, wanted: &Labels) -> Result<(), String> {
    let written = |error: io::Error| format!("cannot be written: {error}");
    match (before, kind.text(before.unwrap_or_default(), wanted)?) {
        (None | Some(""), None) => Ok(()),
        (Some(before), Some(text)) if before == text => Ok(()),
        (Some(_), None) => files::remove_synced(path).map_err(written),
        (_, Some(text)) => {
            if let Some(folder) = path.parent() {
                std::fs::create_dir_all(folder).map_err(written)?;
            }
            files::replace_like(path, text.as_bytes()).map_err(written)
        }
    }
}

fn note(root: &Root, kind: Kind) -> io::Result<()> {
    let path = root.path(NOTE);
    if kind != Kind::Kubeadm || path.try_exists()? {
        return Ok(());
    }
    path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
    files::replace_synced(&path, b"")
}

fn forget(root: &Root, kind: Kind) -> io::Result<()> {
    let path = root.path(NOTE);
    if kind == Kind::Kubeadm && path.try_exists()? { files::remove_synced(&path) } else { Ok(()) }
}

/// Removes the labels that earlier settings have left in the files of `kinds`, which are no longer kept up to
/// date. Blocks.
pub fn clean(root: &Root, kinds: &[Kind]) -> Vec<Outcome> {
    // If the note cannot be checked, it counts as present.
    let may_have = |kind: &Kind| *kind != Kind::Kubeadm || root.path(NOTE).try_exists().unwrap_or(true);
    remove(root, &kinds.iter().copied().filter(may_have).collect::<Vec<_>>())
}

/// Removes all labels of guestlet from the files of `kinds`. Blocks.
pub fn remove(root: &Root, kinds: &[Kind]) -> Vec<Outcome> {
    let nothing = BTreeMap::new();
    kinds.iter().map(|kind| keep(root, *kind, Some(&nothing), ZoneChange::Update)).collect()
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;

    fn zone(zone: &str) -> Labels {
        [(labels::ZONE.to_owned(), zone.to_owned())].into()
    }

    fn read(path: &std::path::Path) -> Option<String> {
        std::fs::read_to_string(path).ok()
    }

    #[test]
    fn files_come_change_and_go() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        std::fs::create_dir_all(root.path("/etc/sysconfig")).unwrap();
        for kind in Kind::ALL {
            let path = kind.path(&root);
            assert_eq!(keep(&root, kind, None, ZoneChange::Update).problem, None);
            assert!(!path.exists(), "nothing is known");
            let outcome = keep(&root, kind, Some(&zone("a")), ZoneChange::Update);
            assert_eq!((outcome.problem, outcome.labels), (None, zone("a")));
            assert!(read(&path).unwrap().contains("topology.kubernetes.io/zone=a"));
            keep(&root, kind, Some(&zone("b")), ZoneChange::Update);
            assert!(read(&path).unwrap().contains("topology.kubernetes.io/zone=b"));
            // After the next boot the topology is not known yet.
            keep(&root, kind, None, ZoneChange::Update);
            assert!(!path.exists(), "{}", path.display());
            keep(&root, kind, Some(&zone("c")), ZoneChange::Keep);
            let kept = keep(&root, kind, Some(&zone("d")), ZoneChange::Report);
            assert_eq!(kept.labels, zone("c"));
            assert_eq!(keep(&root, kind, None, ZoneChange::Keep).labels, zone("c"));
            assert!(read(&path).unwrap().contains("zone=c"));
        }
        let removed = remove(&root, &Kind::ALL);
        assert!(removed.iter().all(|outcome| outcome.problem.is_none() && outcome.labels.is_empty()));
        assert!(Kind::ALL.iter().all(|kind| !kind.path(&root).exists()));
    }

    #[test]
    fn settings_of_kubelet_that_never_had_labels_of_ours_are_not_opened() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        let path = root.path("/etc/default/kubelet");
        // A directory in its place: the file cannot be read.
        std::fs::create_dir_all(&path).unwrap();
        let problems = |outcomes: Vec<Outcome>| outcomes.iter().filter(|it| it.problem.is_some()).count();
        assert_eq!(problems(clean(&root, &Kind::ALL)), 0);
        assert_eq!(problems(remove(&root, &Kind::ALL)), 1);
        // Labels of guestlet are removed even without the settings by which they were written.
        std::fs::remove_dir(&path).unwrap();
        std::fs::write(&path, "KUBELET_EXTRA_ARGS=--v=2\n").unwrap();
        assert_eq!(keep(&root, Kind::Kubeadm, Some(&zone("a")), ZoneChange::Update).problem, None);
        assert!(root.path(NOTE).exists());
        assert_eq!(problems(clean(&root, &Kind::ALL)), 0);
        assert_eq!(read(&path).unwrap(), "KUBELET_EXTRA_ARGS=\"--v=2\"\n");
        assert!(!root.path(NOTE).exists());
    }

    #[test]
    fn a_file_of_somebody_else_keeps_its_mode() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        let path = root.path("/etc/default/kubelet");
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, "KUBELET_EXTRA_ARGS=--v=2\n").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        keep(&root, Kind::Kubeadm, Some(&zone("a")), ZoneChange::Update);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        remove(&root, &[Kind::Kubeadm]);
        remove(&root, &[Kind::Kubeadm]);
        assert_eq!(read(&path).unwrap(), "KUBELET_EXTRA_ARGS=\"--v=2\"\n");
    }
}
