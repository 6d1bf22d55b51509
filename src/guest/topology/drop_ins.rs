//! Files from which a kubelet has the labels of its Node: it sets them when it registers the Node, and again whenever
//! it starts. So they say what the host half told, from before the first join on.
//!
//! What an earlier boot left is taken away until the topology of this one is known, as the guest may run on another
//! host: a Node without a label gets it later, one with a wrong label may have pods placed by it.
//!
//! kubelet's own settings are somebody else's file: that there may be labels of ours in it is noted, and where it is not,
//! nobody opens it to take some out.
//!
//! To add a kind: its variant and its lines in [`Kind`]; text that it reads is made and merged by pure functions.

mod kubelet_arguments;
mod rancher;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use crate::guest::topology::{Labels, ZoneChange};
use crate::labels;
use crate::sys::files;
use crate::sys::root::Root;

/// Who reads labels from a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// RKE2, in a folder of drop-ins.
    Rke2,
    /// k3s, in a folder of drop-ins.
    K3s,
    /// kubelet as kubeadm runs it, in the variable `KUBELET_EXTRA_ARGS`.
    Kubeadm,
}

/// Says that there may be labels of ours in kubelet's own settings.
const NOTE: &str = "/var/lib/guestlet/kubelet-labels";

/// What became of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The file.
    pub path: PathBuf,
    /// The labels in it that are ours.
    pub labels: Labels,
    /// Why it is not as it should be.
    pub problem: Option<String>,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Rke2, Self::K3s, Self::Kubeadm];

    /// The kind of this name in the settings.
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
                // Debian's place, and Red Hat's.
                let places = ["/etc/default/kubelet", "/etc/sysconfig/kubelet"].map(|path| root.path(path));
                let there = places.iter().find(|path| path.exists());
                let has_folder = |path: &&PathBuf| path.parent().is_some_and(std::path::Path::exists);
                let place = there.or_else(|| places.iter().find(has_folder)).unwrap_or(&places[0]);
                place.clone()
            }
        }
    }

    /// The labels in the text of its file that are ours.
    fn ours(self, text: &str) -> Labels {
        match self {
            Self::Rke2 | Self::K3s => rancher::labels(text),
            Self::Kubeadm => kubelet_arguments::labels(text),
        }
    }

    /// The text with these labels as ours, or none if there is to be no file.
    fn text(self, before: &str, labels: &Labels) -> Result<Option<String>, String> {
        match self {
            Self::Rke2 | Self::K3s => Ok(rancher::text(labels)),
            Self::Kubeadm => kubelet_arguments::merged(before, labels),
        }
    }
}

/// What the file is to say: what the Node is to have, but where the settings keep a zone that it has already.
fn wanted(node_labels: Option<&Labels>, before: &Labels, zone_change: ZoneChange) -> Labels {
    let mut wanted = node_labels.cloned().unwrap_or_default();
    if zone_change != ZoneChange::Update {
        let kept = before.iter().filter(|(key, _)| matches!(key.as_str(), labels::REGION | labels::ZONE));
        wanted.extend(kept.map(|(key, value)| (key.clone(), value.clone())));
    }
    wanted
}

/// Has the file of `kind` say these labels; none, as long as they are not known, keeps nothing of an earlier boot.
/// Blocks.
pub fn keep(root: &Root, kind: Kind, node_labels: Option<&Labels>, zone_change: ZoneChange) -> Outcome {
    let path = kind.path(root);
    let outcome = |labels, problem| Outcome { path: path.clone(), labels, problem };
    let before = match files::text(&path) {
        Ok(before) => before,
        Err(error) => return outcome(Labels::new(), Some(format!("cannot be read: {error}"))),
    };
    let present = before.as_deref().map(|text| kind.ours(text)).unwrap_or_default();
    let wanted = wanted(node_labels, &present, zone_change);
    let noted = |done: io::Result<()>| done.map_err(|error| format!("cannot be noted: {error}"));
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

/// Takes what earlier settings have left out of the files of `kinds`, which are not kept any more. Blocks.
pub fn clean(root: &Root, kinds: &[Kind]) -> Vec<Outcome> {
    // What cannot be found out counts as noted.
    let may_have = |kind: &Kind| *kind != Kind::Kubeadm || root.path(NOTE).try_exists().unwrap_or(true);
    remove(root, &kinds.iter().copied().filter(may_have).collect::<Vec<_>>())
}

/// Takes all that is ours out of the files of `kinds`. Blocks.
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
            // The next boot does not know yet where it is.
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
        // It cannot be read.
        std::fs::create_dir_all(&path).unwrap();
        let problems = |outcomes: Vec<Outcome>| outcomes.iter().filter(|it| it.problem.is_some()).count();
        assert_eq!(problems(clean(&root, &Kind::ALL)), 0);
        assert_eq!(problems(remove(&root, &Kind::ALL)), 1);
        // Ours are taken out, also by who does not know the settings that put them there.
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
