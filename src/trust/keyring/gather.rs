//! Collection of the keys from files and from the platform.

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::{MAX_FILE, ROTATED, Sources, Text, replaced};
use crate::sys::files;
use crate::trust::anchors::{self, Anchor, Problem};

/// Files with keys that are read.
const MOST_FILES: usize = 256;

/// Last valid contents of the sources.
#[derive(Debug, Default)]
pub(super) struct Good {
    /// Keys of each source, by its place.
    pub(super) texts: HashMap<String, Vec<Anchor>>,
    /// Keys of all sources together.
    pub(super) merged: Vec<Anchor>,
    /// Problems that were logged last.
    pub(super) problems: Vec<String>,
    /// Time of the last failure to save the guest's own key, and its reason.
    pub(super) unkept: Option<(Instant, String)>,
}

/// Combined contents of the sources.
#[derive(Debug, Default)]
pub(super) struct Gathered {
    pub(super) anchors: Vec<Anchor>,
    pub(super) problems: Vec<String>,
    /// True if there is any source of keys, valid or not: its existence shows that plain peers are not wanted.
    pub(super) is_there: bool,
}

pub(super) fn gather(sources: &Sources, good: &mut Good) -> Gathered {
    let mut found = Gathered::default();
    let mut texts = hosts_files(&sources.hosts);
    texts.extend((sources.platform)());
    let mut now = HashMap::new();
    for (place, text) in texts {
        found.is_there = true;
        let parsed = match &text {
            Ok(text) => anchors::parse(&place, text),
            Err(problem) => {
                found.problems.push(format!("{place}: {problem}"));
                // An unreadable directory does not mean that its files were removed.
                let below = format!("{place}/");
                let lost: Vec<_> = good
                    .texts
                    .keys()
                    .filter(|one| **one == place || one.starts_with(&below))
                    .cloned()
                    .collect();
                for place in lost {
                    keep(&mut now, good, place);
                }
                continue;
            }
        };
        match parsed {
            Ok(anchors) => drop(now.insert(place, anchors)),
            // All keys in the file were removed, while the file itself was left.
            Err(error) if error.problem == Problem::Empty => {
                found.problems.push(error.to_string());
                now.insert(place, Vec::new());
            }
            Err(error) => {
                found.problems.push(error.to_string());
                keep(&mut now, good, place);
            }
        }
    }
    let mut places: Vec<_> = now.iter().collect();
    places.sort_by(|one, other| one.0.cmp(other.0));
    match anchors::merge(places.into_iter().map(|(_, anchors)| anchors.clone())) {
        Ok(anchors) => good.merged = anchors,
        Err(error) => {
            // The intended one of the conflicting lines is unknown. The previous keys stay valid, unless they were
            // removed.
            let is_there =
                |anchor: &Anchor| now.values().flatten().any(|other| other.public_key == anchor.public_key);
            good.merged.retain(is_there);
            found.problems.push(error.to_string());
        }
    }
    good.texts = now;
    found.is_there |= sources.folder.join(ROTATED).is_file();
    match replaced::Replaced::read(&sources.folder) {
        Ok(replaced) => found.anchors = replaced.apply(&good.merged),
        // The accepted keys are unknown.
        Err(problem) => {
            found.problems.push(problem);
            found.is_there = true;
        }
    }
    found
}

/// Keeps the last valid keys of a source that is now invalid: a damaged file does not revoke its keys.
fn keep(now: &mut HashMap<String, Vec<Anchor>>, good: &mut Good, place: String) {
    if let Some(before) = good.texts.remove(&place) {
        now.insert(place, before);
    }
}

/// The texts of `*.pub`, in the order of their names.
fn hosts_files(folder: &Path) -> Vec<Text> {
    let wrong = |problem: String| (folder.display().to_string(), Err(problem));
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let problem = |link: PathBuf| wrong(format!("{} is a dangling symbolic link", link.display()));
            return files::dangling(folder).map(problem).into_iter().collect();
        }
        Err(error) => return vec![wrong(format!("it cannot be listed: {error}"))],
    };
    let (mut paths, mut texts) = (Vec::new(), Vec::new());
    for entry in entries {
        match entry {
            Ok(entry) => paths.push(entry.path()),
            // The entries that could not be listed may contain further keys.
            Err(error) => {
                texts.push(wrong(format!("it cannot be listed: {error}")));
                break;
            }
        }
    }
    paths.retain(|path| path.extension().is_some_and(|end| end == "pub"));
    paths.sort_unstable();
    if paths.len() > MOST_FILES {
        let problem =
            format!("there are {} files, and only the first {MOST_FILES} of them are used", paths.len());
        texts.push((folder.join("*.pub").display().to_string(), Err(problem)));
        paths.truncate(MOST_FILES);
    }
    texts.extend(paths.iter().filter_map(|path| file(path)));
    texts
}

/// Returns the text of a file; `None` if it does not exist.
fn file(path: &Path) -> Option<Text> {
    let text = match files::read_at_most(path, MAX_FILE) {
        // `None` here: it was removed just now.
        Ok(None) => Err(format!("{} is a dangling symbolic link", files::dangling(path)?.display())),
        Ok(Some(_)) if !is_ours(path) => {
            Err("users other than root can write to it; chown root, and chmod go-w".to_owned())
        }
        Ok(Some(bytes)) => String::from_utf8(bytes).map_err(|_| "it is not UTF-8".to_owned()),
        Err(error) => Err(format!("it cannot be read: {error}")),
    };
    Some((path.display().to_string(), text))
}

/// Returns whether only root and the user of this process can write to a file.
fn is_ours(path: &Path) -> bool {
    let own = nix::unistd::geteuid().as_raw();
    std::fs::metadata(path).is_ok_and(|found| found.mode() & 0o022 == 0 && [0, own].contains(&found.uid()))
}
