//! Moves receipts from the tray to the cabinet, on a thread of its own, and never while file systems are frozen.
//! What cannot be written now, as on a full disk, is retried with the agent's ticks.

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use super::cabinet::{self, Entry};
use super::tray;
use crate::receipt::envelope::{Signature, seal};
use crate::receipt::{MOST_BYTES, Receipt};
use crate::sys::process_group::thread;

/// Limit on the receipts that are kept in memory because not even the tray can be written.
const MOST_HELD: usize = 64;

/// Function that signs receipts; returns none where the guest has no key. May block.
pub type Sign = dyn Fn(&[u8]) -> Option<Signature> + Send + Sync;

/// Handle of the clerk; clones share it.
#[derive(Clone)]
pub struct Clerk(Arc<Shared>);

struct Shared {
    /// Directory that contains the tray.
    folder: PathBuf,
    /// Directory of the cabinet.
    directory: PathBuf,
    sign: OnceLock<Box<Sign>>,
    desk: Mutex<Desk>,
    changed: Condvar,
}

#[derive(Default)]
#[allow(clippy::struct_excessive_bools, reason = "they are independent of each other")]
struct Desk {
    /// Receipts that could not be written to the tray.
    held: VecDeque<Receipt>,
    /// True while a thread is at work.
    works: bool,
    /// True while the thread is writing.
    writes: bool,
    /// True if more work has arrived.
    more: bool,
    /// True while file systems are frozen, or about to be: nothing may be written.
    quiet: bool,
    /// Problem of the last attempt; logged once.
    problem: Option<String>,
}

impl std::fmt::Debug for Clerk {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Clerk").field("directory", &self.0.directory).finish_non_exhaustive()
    }
}

impl Clerk {
    /// Creates the clerk for the tray in `folder` and the cabinet `directory`.
    pub fn new(folder: &Path, directory: &Path) -> Self {
        Self(Arc::new(Shared {
            folder: folder.to_owned(),
            directory: directory.to_owned(),
            sign: OnceLock::new(),
            desk: Mutex::default(),
            changed: Condvar::new(),
        }))
    }

    /// Returns the directory where receipts are kept.
    pub fn directory(&self) -> &Path {
        &self.0.directory
    }

    /// Sets the function that signs receipts; only the first call counts.
    pub fn sign_with(&self, sign: Box<Sign>) {
        let _ = self.0.sign.set(sign);
    }

    /// Lists all receipts, oldest first: those that are filed, then those that wait to be filed.
    ///
    /// # Errors
    /// If the cabinet cannot be read.
    pub fn list(&self) -> io::Result<Vec<Entry>> {
        let mut all = cabinet::list(&self.0.directory)?;
        let held: Vec<_> = self.desk().held.iter().map(|held| held.id.clone()).collect();
        let waiting = tray::ids(&self.0.folder).into_iter().chain(held);
        let now = cabinet::seconds(SystemTime::now());
        let waiting: Vec<_> = waiting.filter(|id| all.iter().all(|entry| entry.id != *id)).collect();
        all.extend(waiting.into_iter().map(|id| Entry { filed: now, id }));
        Ok(all)
    }

    /// Returns the envelope of the receipt with this ID, or none if it does not exist. A file that is too large is
    /// returned one byte longer than a receipt can be.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn get(&self, id: &str) -> io::Result<Option<Vec<u8>>> {
        if let Some(entry) = cabinet::list(&self.0.directory)?.into_iter().find(|entry| entry.id == id)
            && let Some(envelope) = cabinet::read(&self.0.directory, &entry)?
        {
            return Ok(Some(envelope));
        }
        let held = self.desk().held.iter().find(|held| held.id == id).cloned();
        let is_waiting = || tray::ids(&self.0.folder).iter().any(|waiting| waiting == id);
        let waiting = held.or_else(|| tray::get(&self.0.folder, id).filter(|_| is_waiting()));
        Ok(waiting.map(|receipt| self.seal(receipt).into_bytes()))
    }

    fn seal(&self, receipt: Receipt) -> String {
        seal(receipt, |message| self.0.sign.get()?(message))
    }

    fn desk(&self) -> MutexGuard<'_, Desk> {
        // No operation under the lock leaves the desk inconsistent if it panics.
        self.0.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a receipt. When this returns, it is in the tray or, if that cannot be written, in memory.
    pub fn take(&self, receipt: &Receipt) {
        let Err(error) = tray::put(&self.0.folder, receipt) else { return };
        tracing::warn!("the receipt {} is kept in memory: {}: {error}", receipt.id, self.0.folder.display());
        let mut desk = self.desk();
        if desk.held.len() == MOST_HELD {
            desk.held.pop_front();
        }
        desk.held.push_back(receipt.clone());
    }

    /// Starts to file the receipts that wait, unless file systems are frozen.
    pub fn work(&self) {
        let mut desk = self.desk();
        desk.more = true;
        if desk.works || desk.quiet {
            return;
        }
        desk.works = true;
        drop(desk);
        let clerk = self.clone();
        if let Err(error) = thread("receipts", move || clerk.file_all()) {
            tracing::warn!("receipts are not written now: {error}");
            self.desk().works = false;
        }
    }

    /// Retries what failed before.
    pub fn tick(&self) {
        let is_due = {
            let desk = self.desk();
            !desk.works && !desk.quiet && (desk.more || desk.problem.is_some() || !desk.held.is_empty())
        };
        if is_due {
            self.work();
        }
    }

    /// Forbids writing from now on; waits at most `longest` for a write in progress.
    pub fn be_quiet(&self, longest: Duration) {
        let mut desk = self.desk();
        desk.quiet = true;
        let waited = self.0.changed.wait_timeout_while(desk, longest, |desk| desk.writes);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Allows writing again, as nothing is frozen any longer.
    pub fn go_on(&self) {
        self.desk().quiet = false;
    }

    /// Waits at most `longest` until the thread has finished.
    pub fn wait(&self, longest: Duration) {
        let desk = self.desk();
        let waited = self.0.changed.wait_timeout_while(desk, longest, |desk| desk.works);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn file_all(&self) {
        loop {
            self.desk().more = false;
            let result = self.file_waiting();
            let mut desk = self.desk();
            match result {
                Ok(()) => desk.problem = None,
                Err(problem) => {
                    if desk.problem.as_ref() != Some(&problem) {
                        tracing::warn!("{problem}; retrying");
                    }
                    desk.problem = Some(problem);
                }
            }
            if !desk.more || desk.quiet {
                desk.works = false;
                self.0.changed.notify_all();
                return;
            }
        }
    }

    /// Returns false if nothing may be written.
    fn begin_writing(&self) -> bool {
        let mut desk = self.desk();
        desk.writes = !desk.quiet;
        desk.more |= desk.quiet;
        desk.writes
    }

    fn end_writing(&self) {
        self.desk().writes = false;
        self.0.changed.notify_all();
    }

    fn file_waiting(&self) -> Result<(), String> {
        for id in tray::ids(&self.0.folder) {
            let Some(receipt) = tray::get(&self.0.folder, &id) else { continue };
            if !self.file(receipt)? {
                return Ok(());
            }
            tray::remove(&self.0.folder, &id);
        }
        loop {
            let Some(receipt) = self.desk().held.front().cloned() else { break };
            let id = receipt.id.clone();
            if !self.file(receipt)? {
                return Ok(());
            }
            self.desk().held.retain(|held| held.id != id);
        }
        Ok(())
    }

    /// Files one receipt. Returns false if nothing may be written now.
    fn file(&self, receipt: Receipt) -> Result<bool, String> {
        let id = receipt.id.clone();
        // Covers the signature as well: the guest's key may have to be created, which writes a file.
        if !self.begin_writing() {
            return Ok(false);
        }
        let envelope = self.seal(receipt);
        debug_assert!(envelope.len() <= MOST_BYTES, "cut to it");
        let (now, directory) = (SystemTime::now(), &self.0.directory);
        let filed =
            cabinet::file(directory, &id, &envelope, now).and_then(|()| cabinet::prune(directory, now));
        self.end_writing();
        match filed {
            Ok(()) => Ok(true),
            Err(error) => Err(format!("cannot write the receipt {id} to {}: {error}", directory.display())),
        }
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;
    use crate::receipt::envelope::{Check, open};

    const LONG: Duration = Duration::from_secs(30);

    fn receipt(number: u32) -> Receipt {
        Receipt { id: format!("{number:032x}"), ..Receipt::default() }
    }

    fn filed(directory: &Path) -> usize {
        cabinet::list(directory).unwrap().len()
    }

    #[test]
    fn what_is_taken_is_filed_and_signed() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("kept");
        let clerk = Clerk::new(folder.path(), &directory);
        clerk.sign_with(Box::new(|_| Some(Signature { key: "k".to_owned(), bytes: vec![1] })));
        clerk.take(&receipt(1));
        clerk.work();
        clerk.wait(LONG);
        let entries = cabinet::list(&directory).unwrap();
        let bytes = cabinet::read(&directory, &entries[0]).unwrap().unwrap();
        let opened = open(&bytes, Some(&receipt(1).id), |key, _, bytes| {
            assert_eq!((key, bytes), ("k", &[1][..]));
            Check::Good("fingerprint".to_owned())
        });
        assert_eq!(opened.verdict.word(), "signed");
        assert!(tray::ids(folder.path()).is_empty());
    }

    #[test]
    fn nothing_is_written_while_it_is_to_be_quiet() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("kept");
        let clerk = Clerk::new(folder.path(), &directory);
        clerk.be_quiet(LONG);
        clerk.take(&receipt(1));
        clerk.work();
        clerk.tick();
        clerk.wait(LONG);
        assert_eq!((filed(&directory), tray::ids(folder.path()).len()), (0, 1));
        clerk.go_on();
        clerk.tick();
        clerk.wait(LONG);
        assert_eq!((filed(&directory), tray::ids(folder.path()).len()), (1, 0));
    }

    #[test]
    fn what_cannot_be_written_is_kept_and_written_later() {
        let folder = tempfile::tempdir().unwrap();
        // Neither the tray nor the cabinet can be created where a file has the name.
        let (no_tray, directory) = (folder.path().join("file"), folder.path().join("kept"));
        std::fs::write(&no_tray, "").unwrap();
        std::fs::write(&directory, "").unwrap();
        let clerk = Clerk::new(&no_tray, &directory);
        for number in 0..70 {
            clerk.take(&receipt(number));
        }
        clerk.work();
        clerk.wait(LONG);
        assert!(clerk.desk().problem.as_ref().unwrap().contains("cannot write the receipt"));
        assert_eq!(clerk.desk().held.len(), MOST_HELD);
        std::fs::remove_file(&directory).unwrap();
        clerk.tick();
        clerk.wait(LONG);
        assert_eq!((filed(&directory), clerk.desk().held.len()), (MOST_HELD, 0));
        assert_eq!(clerk.desk().problem, None);
    }
}
