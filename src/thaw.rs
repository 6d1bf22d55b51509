//! `guestlet thaw`: ends a freeze from within the guest, also in place of an agent that has crashed.
//!
//! ```text
//! guestlet thaw                 run by users: asks the agent to thaw; does it in its place if it is not running
//! guestlet thaw --if-crashed    run by the service manager after the agent: does nothing if the agent has thawed
//! guestlet thaw --guard …       run by the agent itself: waits beside a freeze for the agent to end or to hang
//! ```

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};

use crate::guest::Guest;
use crate::guest::freeze::end::End;
use crate::guest::freeze::recover::{Whose, recover, thaw_left};
use crate::guest::freeze::{Error, Settings};
use crate::status;
use crate::sys::memory;
use crate::sys::process_group::{Word, has_ended_within, listen, stay, thread};

/// Time that a guardian waits for the last thread of an ending agent before it thaws once more.
const AGAIN: Duration = Duration::from_millis(100);

/// Variant of `guestlet thaw` that the command line requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Thaw {
    /// Thaw now, regardless of the holder of the freeze.
    Now,
    /// Thaw only if the agent has ended.
    IfCrashed,
    /// Watch over the freeze of an agent, and thaw in its place if needed.
    Guard {
        /// Process ID of the agent.
        process: u32,
        /// Directory with the agent's marker of the freeze.
        folder: PathBuf,
        /// Time after which a silent agent counts as hanging.
        longest: Duration,
        /// Timeout of one hook.
        hook_deadline: Duration,
    },
}

/// Parses the words after `thaw`. The path of a settings file is returned beside the variant.
///
/// # Errors
/// If a word or a value is invalid.
pub fn parse(words: &mut lexopt::Parser) -> Result<(Thaw, Option<PathBuf>), lexopt::Error> {
    use lexopt::prelude::{Long, ValueExt as _};

    let mut thaw = Thaw::Now;
    let mut file = None;
    while let Some(word) = words.next()? {
        match word {
            Long("if-crashed") => thaw = Thaw::IfCrashed,
            Long("settings") => file = Some(words.value()?.into()),
            Long("guard") => {
                thaw = Thaw::Guard {
                    process: words.value()?.parse()?,
                    folder: words.value()?.into(),
                    longest: Duration::from_secs(words.value()?.parse()?),
                    hook_deadline: Duration::from_secs(words.value()?.parse()?),
                }
            }
            other => return Err(other.unexpected()),
        }
    }
    Ok((thaw, file))
}

/// Waits for a message from the agent with the process ID `process`, and thaws if none arrives in time.
///
/// # Errors
/// If a file system is still frozen.
pub fn guard(process: u32, folder: &Path, longest: Duration, hook_deadline: Duration) -> anyhow::Result<()> {
    stay()?;
    // On a thread of its own: the disk with the program may hang, and the agent must be listened to meanwhile.
    if let Err(error) = thread("code", memory::bring_code) {
        tracing::debug!("cannot load the program's code into memory: {error}");
    }
    let end = match listen(process, longest)? {
        Word::Dismissed => return Ok(()),
        Word::Gone => End::Crash,
        Word::Ending => {
            // A thread of the agent may hang in a write to a frozen file system, which a thaw ends; or in a freeze, which
            // succeeds after that thaw. So thaw repeatedly until the last thread has ended.
            loop {
                thaw_left(&Guest::default(), folder, process)?;
                if has_ended_within(AGAIN) {
                    break End::Crash;
                }
            }
        }
        Word::Silence => End::Hang,
    };
    told(recover(&Guest::default(), folder, Whose::Of(process), hook_deadline, end))?;
    Ok(())
}

/// Thaws the file systems that a crashed agent has left frozen. Returns a description of what was done; none if
/// nothing was.
///
/// # Errors
/// If a file system is still frozen.
pub fn if_crashed(folder: &Path, hook_deadline: Duration) -> anyhow::Result<Option<String>> {
    told(recover(&Guest::default(), folder, Whose::Gone, hook_deadline, End::Crash))
}

/// Requests the thaw from the agent at `socket`; if the agent is not running, thaws in its place.
///
/// # Errors
/// If a file system is still frozen, or the thaw had problems.
pub async fn now(socket: &Path, folder: &Path, hook_deadline: Duration) -> anyhow::Result<String> {
    if let Some(done) = if_crashed(folder, hook_deadline)? {
        return Ok(done);
    }
    let connected = tokio::net::UnixStream::connect(socket).await;
    if connected.is_err() {
        return Ok("nothing is frozen, and the agent is not running".to_owned());
    }
    drop(connected);
    let thawed = status::thaw(socket).await.context("the thaw has failed or is incomplete")?;
    Ok(format!("thawed {thawed} file systems"))
}

/// Returns the default timeout of a hook, for when the settings cannot be read.
pub fn usual_hook_deadline() -> Duration {
    Settings::default().hook_deadline
}

fn told(
    recovered: Result<Option<crate::guest::freeze::recover::Recovered>, Error>,
) -> anyhow::Result<Option<String>> {
    let Some(done) = recovered? else { return Ok(None) };
    if !done.problems.is_empty() {
        bail!("thawed {}; but {}", done.thawed.join(" "), done.problems.join("; "));
    }
    Ok(Some(format!(
        "the agent is not running; thawed {} file systems: {}",
        done.thawed.len(),
        done.thawed.join(" ")
    )))
}
