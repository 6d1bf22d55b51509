//! Check of each file against the rules, and the audit record at the end of the call.

use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::copies::Guard;
use crate::guest::freeze::Freezer;
use crate::policy::audit::{Noted, Record};
use crate::policy::{Asked, Asker, Decision, Detail, Role};
use crate::rpc::guard::Gate;
use crate::sys::{beneath, open};

/// Command whose settings in `[qga]` apply to copies as well: if it is forbidden, so are they.
const AS_COMMAND: &str = "guest-file-open";
/// Interval of the check whether file systems are still frozen.
const LOOK: Duration = Duration::from_millis(100);

/// Check of the files of one call against the rules, which leaves an audit record when the call has ended.
pub struct Check {
    gate: Gate,
    asker: Asker,
    freezer: Freezer,
    verb: &'static str,
    role: Role,
    /// Contents of the record at the end.
    noted: Arc<Noted>,
    begun: Instant,
    files: Cell<u64>,
    bytes: Cell<u64>,
    denied: Cell<u64>,
}

impl Check {
    pub fn new(
        gate: Gate,
        asker: Asker,
        freezer: Freezer,
        verb: &'static str,
        role: Role,
        first: &Noted,
    ) -> Self {
        let noted = Noted { subject: first.subject.clone(), ..Noted::default() };
        let (noted, begun) = (Arc::new(noted), Instant::now());
        let [files, bytes, denied] = [0; 3].map(Cell::new);
        Self { gate, asker, freezer, verb, role, noted, begun, files, bytes, denied }
    }
}

impl Guard for Check {
    fn may(&self, found: &OwnedFd, name: Option<&[u8]>, writes: bool) -> Result<(), String> {
        let place = open::place(found).map_err(|error| format!("cannot tell where it is: {error}"))?;
        let path = name.map_or_else(|| place.path.clone(), |name| place.path.join(beneath::name(name)));
        let role = if writes { Role::FilesWrite } else { Role::FilesRead };
        let detail = Detail::File { path: &path, is_here: place.is_here, writes };
        let asked = Asked { detail, ..Asked::new(self.asker.who(), self.asker.caller(), self.verb, role) };
        let rules = self.gate.rules();
        let words = match rules.bounds.forbid(&Asked { verb: AS_COMMAND, ..asked }) {
            Some(bound) => bound.to_string(),
            None => match rules.granted(&asked) {
                Decision::Allowed(_) => return Ok(()),
                Decision::WouldDeny(why) => {
                    let _ = self.noted.would_deny.set(why.to_string());
                    return Ok(());
                }
                Decision::Denied(why) => why.to_string(),
            },
        };
        let _ = self.noted.denied.set(words.clone());
        self.denied.set(self.denied.get() + 1);
        Err(words)
    }

    fn wait(&self) {
        // No freeze lasts for ever.
        while self.freezer.restricts() {
            std::thread::sleep(LOOK);
        }
    }

    fn copied(&self, bytes: u64) {
        self.files.set(self.files.get() + 1);
        self.bytes.set(self.bytes.get() + bytes);
    }
}

impl Drop for Check {
    fn drop(&mut self) {
        let [files, bytes, denied] = [&self.files, &self.bytes, &self.denied].map(Cell::get);
        let mut result = format!("ended after {files} files with {bytes} bytes");
        if denied > 0 {
            result = format!("{result}; {denied} were denied");
        }
        self.gate.audit().record(&Record {
            id: self.asker.id(),
            who: self.asker.who(),
            caller: self.asker.caller(),
            role: self.role,
            verb: self.verb,
            noted: &self.noted,
            result: &result,
            took: self.begun.elapsed(),
        });
    }
}
