//! `guestlet thaw`: ends a freeze from within the guest, also in place of an agent that is gone.
//!
//! ```text
//! guestlet thaw                 people: asks the agent; without one, does what the agent would
//! guestlet thaw --if-crashed    the service manager, when the agent has ended: does nothing if the agent has thawed
//! guestlet thaw --guard …       the agent itself: waits beside a freeze for the agent to be gone, or to hang
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

/// How long a guardian waits for the last thread of an agent that ends, before it thaws once more.
const AGAIN: Duration = Duration::from_millis(100);

/// What `guestlet thaw` is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Thaw {
    /// Whoever holds the freeze.
    Now,
    /// Only if the agent is gone.
    IfCrashed,
    /// As a guardian.
    Guard {
        /// The agent.
        process: u32,
        /// Where the agent's marker is.
        folder: PathBuf,
        /// How long the agent may take.
        longest: Duration,
        /// How long a hook may take.
        hook_deadline: Duration,
    },
}

/// Reads the words after `thaw`, but for the settings' file, which is given back beside it.
///
/// # Errors
/// If they are none of the above.
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

/// Waits for the word of the agent with the number `process`, and thaws if it does not come.
///
/// # Errors
/// If something is still frozen.
pub fn guard(process: u32, folder: &Path, longest: Duration, hook_deadline: Duration) -> anyhow::Result<()> {
    stay()?;
    // Beside it: the disk that the program is on may hang, and the agent has to be heard meanwhile.
    if let Err(error) = thread("code", memory::bring_code) {
        tracing::debug!("cannot load the program's code into memory: {error}");
    }
    let end = match listen(process, longest)? {
        Word::Dismissed => return Ok(()),
        Word::Gone => End::Crash,
        Word::Ending => {
            // A thread of the agent may hang in a frozen write, which a thaw ends; or in a freeze, which succeeds after
            // that thaw. So it goes on until the last thread has ended.
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

/// Thaws what an agent that is gone has left frozen; the words say what was done.
///
/// # Errors
/// If something is still frozen.
pub fn if_crashed(folder: &Path, hook_deadline: Duration) -> anyhow::Result<Option<String>> {
    told(recover(&Guest::default(), folder, Whose::Gone, hook_deadline, End::Crash))
}

/// Asks the agent at `socket` to thaw; without one, does it.
///
/// # Errors
/// If something is still frozen, or is not as it should be.
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

/// How long a hook may take where the settings cannot be read.
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
