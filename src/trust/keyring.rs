//! What a guest knows of keys: those that it was given, and its own. The files and the firmware are asked again for each
//! connection, so that whoever edits a file need not restart anything.
//!
//! ```text
//!  hosts.d/*.pub ─┐                         ┌─ none, ever ─────────▶ plain
//!  rotated.pub  ──┼─▶ texts ──▶ anchors ────┤
//!  the platform ──┘  (a wrong one counts    └─ one, now or before ─▶ keyed, with a key of this guest's own
//!                     as it was before)
//! ```
//!
//! That there was a key once is remembered by the guest's own key, in `folder`: from then on nobody gets in without one, until
//! [`Keyring::forget`], for root in the guest. The key belongs to one machine: a copy of the disk that wakes up in another one
//! makes itself a new key before anybody is let in.

use std::collections::HashMap;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Mutex as AsyncMutex, watch};

use crate::sys::{blocking, error_chain, files};
use crate::trust::anchors::{self, Anchor};
use crate::trust::guest::{Clock, Keys, Standing};
use crate::trust::key::{Key, KeyError, PublicKey};
use crate::trust::peer::Keyed;
use crate::trust::{Fingerprint, Peer};

/// Bytes of a file with keys.
const MAX_FILE: u64 = 64 * 1024;
/// Files with keys that are read.
const MOST_FILES: usize = 256;
/// How long reading may take; with more, a disk hangs, and what was known before counts.
const PATIENCE: Duration = Duration::from_secs(2);
/// The guest's own key, and the machine that it belongs to.
const KEY: &str = "guest.key";
const MACHINE: &str = "guest.machine";
/// A key that takes the place of the guest's own as soon as a host half has used it.
const NEXT: &str = "guest.key.next";
/// The keys that host halves have put in the place of theirs, and the names of those that they have given up.
const ROTATED: &str = "rotated.pub";
const RETIRED: &str = "retired";
/// What stands before the name of the key whose place one has taken.
const IN_PLACE_OF: &str = "in place of ";

/// Something that gives keys, by its name for people: their lines, or why it cannot be read.
pub type Text = (String, Result<String, String>);

/// Where keys come from.
pub struct Sources {
    /// The directory of the files that root in the guest, or cloud-init, writes.
    pub hosts: PathBuf,
    /// The directory that the agent owns, on a disk of the guest.
    pub folder: PathBuf,
    /// What the platform gives besides. May block.
    pub platform: Box<dyn Fn() -> Vec<Text> + Send + Sync>,
    /// What tells this machine from others. May block.
    pub machine: Box<dyn Fn() -> Machine + Send + Sync>,
    /// Whether the guest's disks can be written to: not while they are frozen.
    pub is_writable: Box<dyn Fn() -> bool + Send + Sync>,
    /// What the clock is worth.
    pub clock: fn() -> Clock,
    /// Peers without a key may come in even beside keys.
    pub plain: bool,
}

impl std::fmt::Debug for Sources {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { hosts, folder, .. } = self;
        formatter
            .debug_struct("Sources")
            .field("hosts", hosts)
            .field("folder", folder)
            .finish_non_exhaustive()
    }
}

/// What tells a machine from its copies; what is not known is empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Machine {
    /// The SMBIOS system UUID.
    pub dmi: String,
    /// machine-id(5).
    pub id: String,
    /// Changes with each copy of the VM's memory or disk, where the hypervisor provides that (vmgenid).
    pub generation: String,
}

impl Machine {
    fn text(&self) -> String {
        format!("dmi {}\nmachine-id {}\nvmgenid {}\n", self.dmi, self.id, self.generation)
    }

    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let mut value = |name: &str| Some(lines.next()?.strip_prefix(name)?.trim().to_owned());
        Some(Self { dmi: value("dmi")?, id: value("machine-id")?, generation: value("vmgenid")? })
    }

    /// Whether nothing speaks against both being the same. A driver that is loaded late, or not at all, does not.
    fn may_be(&self, other: &Self) -> bool {
        let fits = |one: &str, other: &str| one.is_empty() || other.is_empty() || one == other;
        fits(&self.dmi, &other.dmi) && fits(&self.id, &other.id) && fits(&self.generation, &other.generation)
    }

    /// What is known of it, and of this what was not.
    fn with(&self, other: Self) -> Self {
        let known = |one: &str, other: String| if one.is_empty() { other } else { one.to_owned() };
        Self {
            dmi: known(&self.dmi, other.dmi),
            id: known(&self.id, other.id),
            generation: known(&self.generation, other.generation),
        }
    }
}

/// The keys; clones share them.
#[derive(Debug, Clone)]
pub struct Keyring(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    sources: Sources,
    /// Whoever has it reads, one at a time: a disk that hangs keeps one thread, whoever comes.
    good: Arc<AsyncMutex<Good>>,
    /// What was read last.
    standing: Mutex<Option<Standing>>,
    /// Who may stay now.
    welcome: watch::Sender<Welcome>,
    /// The guest was given a key, now or before.
    is_keyed: Arc<AtomicBool>,
}

/// Who may stay.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Welcome {
    /// Host halves with one of these keys, or of these CAs.
    anchors: Arc<[Anchor]>,
    /// Only those.
    keyed_only: bool,
    /// How often this machine has turned out to be another one than the key was made on: nobody stays whom the other one had
    /// let in.
    machines: u64,
}

/// What was last right.
#[derive(Debug, Default)]
struct Good {
    /// Of each text.
    texts: HashMap<String, Vec<Anchor>>,
    /// Of all together.
    merged: Vec<Anchor>,
    /// What is wrong, as last told.
    problems: Vec<String>,
}

/// What people see of a keyring.
#[derive(Debug, Clone, Default)]
pub struct Listing {
    /// The guest's own key; `None` if it has none.
    pub own: Option<PublicKey>,
    /// The keys that it was given.
    pub anchors: Vec<Anchor>,
    /// What is wrong, in words.
    pub problems: Vec<String>,
    /// It was given a key, now or before: nobody is let in without one.
    pub is_keyed: bool,
}

impl Keyring {
    /// A keyring of these sources. Reads nothing yet.
    pub fn new(sources: Sources) -> Self {
        let welcome = watch::Sender::default();
        Self(Arc::new(Shared {
            sources,
            good: Arc::default(),
            standing: Mutex::default(),
            welcome,
            is_keyed: Arc::default(),
        }))
    }

    /// One that is never given a key, for guests that are simulated.
    pub fn empty() -> Self {
        Self::new(Sources {
            hosts: PathBuf::new(),
            folder: PathBuf::new(),
            platform: Box::new(Vec::new),
            machine: Box::new(Machine::default),
            is_writable: Box::new(|| false),
            clock: || Clock::Unset,
            plain: false,
        })
    }

    /// How a new connection is to be begun. If the sources do not answer in time, they count as they did before.
    pub async fn standing(&self) -> Standing {
        if let Ok(standing) = tokio::time::timeout(PATIENCE, self.read()).await {
            return standing;
        }
        let before = self.last().clone();
        before.unwrap_or_else(|| {
            Standing::Unusable("the files of the keys cannot be read: their disk does not answer".to_owned())
        })
    }

    /// Reads everything, makes the guest's own key if it is needed, and says what is wrong. There is no deadline.
    pub async fn read(&self) -> Standing {
        let mut good = Arc::clone(&self.0.good).lock_owned().await;
        let keyring = self.clone();
        blocking::run(move || keyring.read_now(&mut good)).await
    }

    fn read_now(&self, good: &mut Good) -> Standing {
        let Sources { clock, plain, .. } = &self.0.sources;
        let gathered = gather(&self.0.sources, good);
        for problem in gathered.problems.iter().filter(|problem| !good.problems.contains(problem)) {
            tracing::error!("a key is not taken: {problem}");
        }
        good.problems = gathered.problems;
        let anchors: Arc<[Anchor]> = gathered.anchors.into();
        let mut machines = self.0.welcome.borrow().machines;
        let standing = match own_key(&self.0.sources, gathered.is_there) {
            Ok(None) => Standing::Plain,
            Ok(Some((key, is_moved))) => {
                machines += u64::from(is_moved);
                let anchors = Arc::clone(&anchors);
                Standing::Keyed(Keys { key: Arc::new(key), anchors, clock: clock(), plain: *plain })
            }
            Err(error) => Standing::Unusable(format!(
                "this guest was given keys, and cannot use its own: {}",
                error_chain::words(&error)
            )),
        };
        let is_keyed = !matches!(standing, Standing::Plain);
        self.0.is_keyed.store(is_keyed, Ordering::Relaxed);
        let keyed_only = is_keyed && !plain;
        let welcome = Welcome { anchors, keyed_only, machines };
        self.0.welcome.send_if_modified(|before| {
            let changed = *before != welcome;
            *before = welcome;
            changed
        });
        *self.last() = Some(standing.clone());
        standing
    }

    /// The key that is to take the place of this guest's own, made if there is none. Blocks.
    ///
    /// # Errors
    /// If it cannot be kept.
    pub fn prepare_next(&self) -> Result<PublicKey, KeyError> {
        let path = self.0.sources.folder.join(NEXT);
        if let Some(key) = Key::load(&path)? {
            return Ok(key.public());
        }
        self.check_writable(&path)?;
        let key = Key::generate()?;
        key.save(&path)?;
        Ok(key.public())
    }

    /// Has the next key take the place of this guest's own, for the connections from now on. Success if it has already. Blocks.
    ///
    /// # Errors
    /// If there is no such key, or it cannot be kept.
    pub fn use_next(&self, which: Fingerprint) -> Result<PublicKey, KeyError> {
        let (path, own) = (self.0.sources.folder.join(NEXT), self.0.sources.folder.join(KEY));
        let is_it = |key: &Key| key.public().fingerprint() == which;
        if let Some(key) = Key::load(&own)?.filter(is_it) {
            return Ok(key.public());
        }
        self.check_writable(&own)?;
        let key = Key::load(&path)?.filter(is_it).ok_or(KeyError::NoSuchKey(which))?;
        key.save(&own)?;
        files::remove(&path);
        tracing::info!("this guest has a new key: {which}");
        Ok(key.public())
    }

    /// Lets in a further key of the host half that came in as `peer`, with the roles of the one that it has. Blocks.
    ///
    /// # Errors
    /// If it did not come in with a key that the guest was given itself, or the key cannot be kept.
    pub fn add_host(&self, peer: &Keyed, next: PublicKey) -> Result<(), KeyError> {
        if peer.fingerprint != peer.anchor {
            return Err(KeyError::NotReplaceable);
        }
        let path = self.0.sources.folder.join(ROTATED);
        let io =
            |what| move |source| KeyError::Io { what, path: self.0.sources.folder.join(ROTATED), source };
        self.check_writable(&path)?;
        let mut text = files::text(&path).map_err(io("read"))?.unwrap_or_default();
        let is_there = anchors::parse(ROTATED, &text).unwrap_or_default();
        if is_there.iter().any(|anchor| anchor.public_key == *next.spki()) {
            return Ok(());
        }
        text += &anchors::line(next.spki(), false, &peer.roles, &format!("{IN_PLACE_OF}{}", peer.anchor));
        text.push('\n');
        files::replace_synced(&path, text.as_bytes()).map_err(io("write"))?;
        tracing::info!("audit: {} will be followed by {}", peer.anchor, next.fingerprint());
        Ok(())
    }

    /// Has the key of the host half count no more whose place that of `peer` has taken. Blocks.
    ///
    /// # Errors
    /// If it has not taken that one's place, or this cannot be kept.
    pub fn retire_host(&self, peer: &Keyed, before: Fingerprint) -> Result<(), KeyError> {
        let folder = &self.0.sources.folder;
        let io = |what, name: &str| {
            let path = folder.join(name);
            move |source| KeyError::Io { what, path, source }
        };
        let text = files::text(&folder.join(ROTATED)).map_err(io("read", ROTATED))?.unwrap_or_default();
        let follows = |anchor: &Anchor| {
            anchor.fingerprint == peer.anchor && anchor.comment == format!("{IN_PLACE_OF}{before}")
        };
        if !anchors::parse(ROTATED, &text).unwrap_or_default().iter().any(follows) {
            return Err(KeyError::NotReplaceable);
        }
        let path = folder.join(RETIRED);
        let mut retired = files::text(&path).map_err(io("read", RETIRED))?.unwrap_or_default();
        if !retired.lines().any(|line| line == before.to_string()) {
            self.check_writable(&path)?;
            retired.extend([before.to_string().as_str(), "\n"]);
            files::replace_synced(&path, retired.as_bytes()).map_err(io("write", RETIRED))?;
            tracing::info!("audit: {before} is followed by {}, and counts no more", peer.anchor);
        }
        Ok(())
    }

    fn check_writable(&self, path: &Path) -> Result<(), KeyError> {
        if (self.0.sources.is_writable)() {
            return Ok(());
        }
        let source = io::Error::other("file systems are frozen now");
        Err(KeyError::Io { what: "write", path: path.to_owned(), source })
    }

    /// What people see. Blocks; changes nothing.
    pub fn list(&self) -> Listing {
        let gathered = gather(&self.0.sources, &mut Good::default());
        let mut problems = gathered.problems;
        let own = Key::load(&self.0.sources.folder.join(KEY)).unwrap_or_else(|error| {
            problems.push(error_chain::words(&error));
            None
        });
        let is_keyed = gathered.is_there || self.0.sources.folder.join(KEY).exists();
        Listing { own: own.map(|key| key.public()), anchors: gathered.anchors, problems, is_keyed }
    }

    /// Forgets the guest's own key, that there ever was one, and what host halves have put in the place of theirs. Blocks.
    ///
    /// # Errors
    /// If a file cannot be removed.
    pub fn forget(&self) -> io::Result<()> {
        // The key last: it is what remembers.
        for name in [NEXT, MACHINE, ROTATED, RETIRED, KEY] {
            let path = self.0.sources.folder.join(name);
            files::remove_synced(&path).or_else(|error| match error.kind() {
                io::ErrorKind::NotFound => Ok(()),
                _ => Err(error),
            })?;
        }
        Ok(())
    }

    /// Notices that this machine has become another one: a copy of it that goes on from its memory.
    pub async fn tick(&self) {
        if self.0.is_keyed.load(Ordering::Relaxed) {
            drop(self.standing().await);
        }
    }

    /// Whether the guest was given a key, as of the last reading; set before anybody is let in because of that.
    pub fn is_keyed(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.0.is_keyed)
    }

    /// Completes when `peer` would not be let in any more, or not with the roles that it has.
    pub async fn lost(&self, peer: &Peer) {
        let machines = self.0.welcome.borrow().machines;
        let may_stay = |welcome: &Welcome| match peer {
            _ if welcome.machines != machines => false,
            Peer::Plain => !welcome.keyed_only,
            Peer::Keyed(peer) => {
                let lets_in =
                    |anchor: &Anchor| anchor.fingerprint == peer.anchor && anchor.roles == peer.roles;
                welcome.anchors.iter().any(lets_in)
            }
        };
        let mut welcome = self.0.welcome.subscribe();
        // The sender is part of this keyring.
        let _ = welcome.wait_for(|welcome| !may_stay(welcome)).await;
    }

    /// The directory of the files that root writes.
    pub fn hosts(&self) -> &Path {
        &self.0.sources.hosts
    }

    fn last(&self) -> MutexGuard<'_, Option<Standing>> {
        // It is replaced as a whole.
        self.0.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the sources say together.
#[derive(Debug, Default)]
struct Gathered {
    anchors: Vec<Anchor>,
    problems: Vec<String>,
    /// There is something that gives keys, right or wrong: whoever put it there wants no plain peers.
    is_there: bool,
}

fn gather(sources: &Sources, good: &mut Good) -> Gathered {
    let mut found = Gathered::default();
    let mut texts = hosts_files(&sources.hosts);
    texts.extend(file(&sources.folder.join(ROTATED)));
    texts.extend((sources.platform)());
    let mut now = HashMap::new();
    for (place, text) in texts {
        found.is_there = true;
        let parsed = match &text {
            Ok(text) => anchors::parse(&place, text).map_err(|error| error.to_string()),
            Err(problem) => Err(format!("{place}: {problem}")),
        };
        match parsed {
            Ok(anchors) => drop(now.insert(place, anchors)),
            Err(problem) => {
                // Whoever has spoilt a file has not taken away what it said.
                if let Some(before) = good.texts.remove(&place) {
                    now.insert(place, before);
                }
                found.problems.push(problem);
            }
        }
    }
    let mut places: Vec<_> = now.iter().collect();
    places.sort_by(|one, other| one.0.cmp(other.0));
    match anchors::merge(places.into_iter().map(|(_, anchors)| anchors.clone())) {
        Ok(anchors) => good.merged = anchors,
        // Which of them is meant cannot be told.
        Err(error) => found.problems.push(error.to_string()),
    }
    good.texts = now;
    found.anchors.clone_from(&good.merged);
    match files::text(&sources.folder.join(RETIRED)) {
        Ok(retired) => {
            let retired = retired.unwrap_or_default();
            let counts =
                |anchor: &Anchor| !retired.lines().any(|line| line == anchor.fingerprint.to_string());
            found.anchors.retain(counts);
        }
        // Which keys count cannot be told.
        Err(error) => {
            found.anchors.clear();
            found.problems.push(format!("{}: {error}", sources.folder.join(RETIRED).display()));
        }
    }
    found
}

/// The texts of `*.pub`, in the order of their names.
fn hosts_files(folder: &Path) -> Vec<Text> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Vec::new(),
        Err(error) => {
            return vec![(folder.display().to_string(), Err(format!("it cannot be listed: {error}")))];
        }
    };
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let mut paths: Vec<_> = paths.filter(|path| path.extension().is_some_and(|end| end == "pub")).collect();
    paths.sort_unstable();
    paths.truncate(MOST_FILES);
    paths.iter().filter_map(|path| file(path)).collect()
}

/// The text of one file; `None` if there is none.
fn file(path: &Path) -> Option<Text> {
    let text = match files::read_at_most(path, MAX_FILE) {
        Ok(None) if path.is_symlink() => Err("it is a link to nothing".to_owned()),
        Ok(None) => return None,
        Ok(Some(_)) if !is_ours(path) => {
            Err("others than root can write to it; chown root, and chmod go-w".to_owned())
        }
        Ok(Some(bytes)) => String::from_utf8(bytes).map_err(|_| "it is not UTF-8".to_owned()),
        Err(error) => Err(format!("it cannot be read: {error}")),
    };
    Some((path.display().to_string(), text))
}

/// Whether only root and the process's own user can write to a file.
fn is_ours(path: &Path) -> bool {
    let own = nix::unistd::geteuid().as_raw();
    std::fs::metadata(path).is_ok_and(|found| found.mode() & 0o022 == 0 && [0, own].contains(&found.uid()))
}

/// The guest's own key: the one that it has, or a new one if it has none and needs one, or has that of another machine.
/// With it comes whether it was made because this is another machine.
fn own_key(sources: &Sources, is_needed: bool) -> Result<Option<(Key, bool)>, KeyError> {
    let folder = &sources.folder;
    let (path, beside) = (folder.join(KEY), folder.join(MACHINE));
    let found = Key::load(&path)?;
    if found.is_none() && !is_needed {
        return Ok(None);
    }
    let machine = (sources.machine)();
    let of = files::read(&beside).and_then(|bytes| Machine::parse(&String::from_utf8_lossy(&bytes)));
    let write = |source| KeyError::Io { what: "write", path: beside.clone(), source };
    let is_moved = found.is_some();
    if let Some(key) = found {
        if let Some(of) = of.filter(|of| of.may_be(&machine)) {
            let known = of.with(machine);
            if known != of && (sources.is_writable)() {
                files::replace_synced(&beside, known.text().as_bytes()).map_err(write)?;
            }
            return Ok(Some((key, false)));
        }
        tracing::warn!(
            "this machine is not the one that its key was made on, so that it makes itself a new one"
        );
    }
    if !(sources.is_writable)() {
        return Err(write(io::Error::other("file systems are frozen now")));
    }
    DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(write)?;
    let key = Key::generate()?;
    files::remove(&folder.join(NEXT));
    // The key first: without the other file it counts as that of another machine, and is replaced.
    files::remove_synced(&beside).map_err(write)?;
    key.save(&path)?;
    files::replace_synced(&beside, machine.text().as_bytes()).map_err(write)?;
    tracing::info!("this guest has a new key: {}", key.public().fingerprint());
    Ok(Some((key, is_moved)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(dmi: &str, id: &str, generation: &str) -> Machine {
        Machine { dmi: dmi.to_owned(), id: id.to_owned(), generation: generation.to_owned() }
    }

    #[test]
    fn a_machine_is_another_one_only_where_something_known_differs() {
        let known = machine("a", "b", "c");
        for (other, same) in [
            (machine("a", "b", "c"), true),
            (machine("a", "b", ""), true),
            (machine("", "", ""), true),
            (machine("a", "b", "x"), false),
            (machine("a", "x", "c"), false),
            (machine("x", "b", "c"), false),
        ] {
            assert_eq!((known.may_be(&other), other.may_be(&known)), (same, same), "{other:?}");
        }
        assert_eq!(machine("a", "", "").with(machine("x", "b", "")), machine("a", "b", ""));
        assert_eq!(Machine::parse(&known.text()), Some(known));
        for damaged in ["", "dmi a\n", "dmi a\nvmgenid c\nmachine-id b\n"] {
            assert_eq!(Machine::parse(damaged), None, "{damaged:?}");
        }
    }

    /// A keyring in `folder` whose machine is what the cell says.
    fn keyring(folder: &Path, now: &Arc<Mutex<Machine>>, is_writable: bool) -> Keyring {
        let now = Arc::clone(now);
        Keyring::new(Sources {
            hosts: folder.join("hosts.d"),
            folder: folder.join("own"),
            platform: Box::new(Vec::new),
            machine: Box::new(move || now.lock().unwrap().clone()),
            is_writable: Box::new(move || is_writable),
            clock: || Clock::Unset,
            plain: false,
        })
    }

    #[allow(clippy::disallowed_methods)]
    fn give(folder: &Path, name: &str, text: &str) {
        std::fs::create_dir_all(folder.join("hosts.d")).unwrap();
        std::fs::write(folder.join("hosts.d").join(name), text).unwrap();
    }

    fn line() -> String {
        format!("{}\n", Key::generate().unwrap().public())
    }

    #[tokio::test]
    async fn whoever_was_let_in_before_a_machine_became_another_one_does_not_stay() {
        let folder = tempfile::tempdir().unwrap();
        give(folder.path(), "a.pub", &line());
        let now = Arc::new(Mutex::new(machine("a", "b", "")));
        let keyring = keyring(folder.path(), &now, true);
        let Standing::Keyed(keys) = keyring.read().await else { panic!("no keys") };
        let anchor = keys.anchors[0].fingerprint;
        let peer = Peer::Keyed(crate::trust::peer::Keyed {
            fingerprint: anchor,
            anchor,
            names: Vec::new(),
            roles: Vec::new(),
        });
        let mut lost = Box::pin(keyring.lost(&peer));
        // What becomes known only later is no change.
        *now.lock().unwrap() = machine("a", "b", "c");
        keyring.tick().await;
        assert!(tokio::time::timeout(Duration::from_millis(50), &mut lost).await.is_err());
        *now.lock().unwrap() = machine("a", "b", "d");
        keyring.tick().await;
        lost.await;
        let Standing::Keyed(after) = keyring.read().await else { panic!("no keys") };
        assert_ne!(after.key.public(), keys.key.public());
    }

    #[tokio::test]
    async fn while_nothing_can_be_written_a_guest_that_needs_a_key_lets_nobody_in() {
        let folder = tempfile::tempdir().unwrap();
        give(folder.path(), "a.pub", &line());
        let now = Arc::default();
        let frozen = keyring(folder.path(), &now, false);
        assert!(matches!(frozen.read().await, Standing::Unusable(_)));
        assert!(!folder.path().join("own").exists());
        let thawed = keyring(folder.path(), &now, true);
        assert!(matches!(thawed.read().await, Standing::Keyed(_)));
        // One that is there is used.
        assert!(matches!(frozen.read().await, Standing::Keyed(_)));
    }

    #[tokio::test]
    async fn texts_that_disagree_leave_what_was_before() {
        let folder = tempfile::tempdir().unwrap();
        let line = line();
        give(folder.path(), "a.pub", &line);
        let keyring = keyring(folder.path(), &Arc::default(), true);
        let Standing::Keyed(before) = keyring.read().await else { panic!("no keys") };
        give(folder.path(), "b.pub", &line.replace('\n', " ca\n"));
        let Standing::Keyed(after) = keyring.read().await else { panic!("no keys") };
        assert_eq!(after.anchors, before.anchors);
        assert_eq!(keyring.list().problems.len(), 1);
        // Who begins with that has none of them.
        let fresh = super::tests::keyring(folder.path(), &Arc::default(), true);
        let Standing::Keyed(fresh) = fresh.read().await else { panic!("no keys") };
        assert!(fresh.anchors.is_empty());
    }
}
