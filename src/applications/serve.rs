//! Process of an application: carries out the requests that the agent sends on standard input, one per line.

use std::io::{self, BufRead as _, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::messages::{Answer, MOST_LINE, Request};
use super::place::directory;
use super::{Application, KINDS, MOST_DIRECTORIES, Problem};
use crate::sys::process_group::{stay, thread};

/// Maximum length of a request in bytes.
const MOST_REQUEST: u64 = 256;

/// Serves the application `kind` at `target` until the agent needs it no longer, or has ended.
///
/// # Errors
/// If the kind is unknown, or answers cannot be sent to the agent.
pub fn serve(kind: &str, target: &str) -> anyhow::Result<()> {
    let Some((_, make)) = KINDS.iter().find(|(name, _)| *name == kind) else {
        bail!("there is no application {kind:?}");
    };
    // When the service is stopped, the service manager signals the whole control group. The agent, and the hold with
    // it, must last until the thaw.
    stay()?;
    // A thread of its own, so that this process ends with the agent whatever it waits for.
    thread("agent", end_with_the_agent)?;
    let mut application = make(target);
    let Some(Request::Hold(milliseconds)) = request()? else { return Ok(()) };
    let held = hold(&mut *application, until(milliseconds));
    let is_held = held.is_ok();
    tell(&held.unwrap_or_else(|problem| Answer::Failed(problem.to_string())))?;
    if !is_held {
        return Ok(());
    }
    if let Err(problem) = watch(&mut *application)? {
        tell(&Answer::Failed(problem.to_string()))?;
        // The agent knows now. Wait for its next request, but there is nothing left to release.
        let _ = request()?;
        return Ok(());
    }
    let Some(Request::Release(milliseconds)) = request()? else { return Ok(()) };
    let released = application.release(until(milliseconds));
    tell(&released.map_or_else(|problem| Answer::Failed(problem.to_string()), Answer::released))
}

fn until(milliseconds: u64) -> Instant {
    // At most an hour, which no setting exceeds.
    Instant::now() + Duration::from_millis(milliseconds.min(3_600_000))
}

/// Ends this process, and with it the session with the database, at the end of standard input.
fn end_with_the_agent() {
    let input = io::stdin();
    loop {
        // Without requested events, poll(2) reports only that the other end was closed.
        let mut files = [PollFd::new(input.as_fd(), PollFlags::empty())];
        match poll(&mut files, PollTimeout::NONE) {
            Err(Errno::EINTR) => {}
            Ok(_) | Err(_) => std::process::exit(0),
        }
    }
}

/// Reads the next request; `None` at the end of the input.
fn request() -> anyhow::Result<Option<Request>> {
    let mut line = Vec::new();
    io::stdin().lock().take(MOST_REQUEST).read_until(b'\n', &mut line)?;
    if line.is_empty() {
        return Ok(None);
    }
    serde_json::from_slice(&line).map(Some).context("the agent sent an unexpected request")
}

fn tell(answer: &Answer) -> anyhow::Result<()> {
    let mut line = serde_json::to_vec(answer)?;
    if line.len() >= MOST_LINE {
        line = serde_json::to_vec(&Answer::Failed("what it reports about itself is too long".to_owned()))?;
    }
    line.push(b'\n');
    let mut output = io::stdout().lock();
    output.write_all(&line)?;
    output.flush()?;
    Ok(())
}

fn hold(application: &mut dyn Application, until: Instant) -> Result<Answer, Problem> {
    let mut held = application.hold(until)?;
    let paths = std::mem::take(&mut held.directories);
    if paths.len() > MOST_DIRECTORIES {
        return Err(Problem::new(format_args!("its data are in more than {MOST_DIRECTORIES} directories")));
    }
    let directories = paths.iter().map(|path| directory(path)).collect::<Result<_, _>>()?;
    Ok(Answer::held(held, directories))
}

/// Waits until the agent sends a request, or the session ends, which is a problem.
fn watch(application: &mut dyn Application) -> anyhow::Result<Result<(), Problem>> {
    let input = io::stdin();
    loop {
        let mut files = [
            PollFd::new(input.as_fd(), PollFlags::POLLIN),
            PollFd::new(application.session(), PollFlags::POLLIN),
        ];
        match poll(&mut files, PollTimeout::NONE) {
            Ok(_) => {}
            Err(Errno::EINTR) => continue,
            Err(error) => return Err(error.into()),
        }
        let [asked, session] = files.map(|file| file.any() == Some(true));
        if session && let Err(problem) = application.check() {
            return Ok(Err(problem));
        }
        if asked {
            return Ok(Ok(()));
        }
    }
}
