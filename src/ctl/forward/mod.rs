//! Connections to servers in a guest: `guestctl forward`.
//!
//! ```text
//! clients ──▶ Listeners ──▶ Call ◀──one stream for all──▶ guestlet-host ◀──▶ agent ◀──▶ targets
//! stdin, stdout ─────────────┘ lost: its connections break, and the next client opens another
//! ```

mod call;
mod listen;
mod spec;
mod stdio;

use std::net::IpAddr;
use std::time::{Duration, Instant};

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use serde_json::json;
use tokio::signal::unix::SignalKind;

use super::Error;
use super::door::Door;
use super::print::Printer;
use super::signals::Signals;
use crate::sys::descriptor;
use call::{Call, Carried, Event, Lost, Wanted};
use listen::Listeners;
pub use spec::{Listen, Spec};

/// Connections beyond which clients wait: more than a guest accepts.
const MOST: usize = 2100;
/// Time that a client waits for a call that cannot be opened at present.
const PATIENCE: Duration = Duration::from_secs(10);
/// Warnings in a burst, and the interval between later ones; the others are only counted.
const WARNINGS: u32 = 10;
const BETWEEN_WARNINGS: Duration = Duration::from_secs(1);

/// Options of `guestctl forward`.
#[derive(Debug, Clone)]
pub struct Forward {
    /// Addresses to listen at, and their targets.
    pub specs: Vec<Spec>,
    /// True to use standard input and output instead, with a single target.
    pub stdio: bool,
    /// Address to listen at where a specification has none.
    pub address: IpAddr,
}

/// Forwards until a signal arrives or, with standard input and output, until the connection ends.
///
/// # Errors
/// Fails if it cannot be started, or the connection of standard input and output was lost.
pub async fn run(door: &Door, printer: &mut Printer, name: String, forward: Forward) -> Result<(), Error> {
    descriptor::allow_many();
    if forward.stdio {
        return match forward.specs.as_slice() {
            [spec] if !spec.says_where => stdio::run(door, &name, spec.target.clone()).await,
            _ => Err(Error::Program(
                "--stdio needs exactly one target, without an address to listen on".to_owned(),
            )),
        };
    }
    let kinds = [SignalKind::hangup(), SignalKind::interrupt(), SignalKind::terminate()];
    let signals = Signals::hear(kinds.map(|kind| ((), kind)));
    let mut signals = signals.map_err(|error| Error::Read("signals".to_owned(), error))?;
    let listeners = Listeners::bind(forward.specs, forward.address)?;
    let mut forwarding = Forwarding {
        door,
        name,
        printer,
        listeners,
        leaving: FuturesUnordered::new(),
        is_told: false,
        warnings: Warnings::default(),
    };
    tokio::select! {
        done = forwarding.run() => done,
        () = signals.next() => Ok(()),
    }
}

/// State that outlives a call.
struct Forwarding<'f> {
    door: &'f Door,
    name: String,
    printer: &'f mut Printer,
    listeners: Listeners,
    /// Connections of lost calls, whose clients still receive what had arrived.
    leaving: FuturesUnordered<Carried>,
    /// True once the addresses of the listeners were shown.
    is_told: bool,
    warnings: Warnings,
}

impl Forwarding<'_> {
    /// Makes one call after another, for ever.
    async fn run(&mut self) -> Result<(), Error> {
        // The first call shows whether forwarding is possible at all.
        let mut wanted = None;
        let mut since = Instant::now();
        loop {
            let door = self.door;
            let lost = match door.dial().await {
                Ok(line) => line.over(async |daemon| Ok(self.call(&daemon, &mut wanted).await)).await,
                Err(error) => Err(error),
            };
            let lost = match lost {
                Ok(lost) => lost?,
                Err(error) if !self.is_told => return Err(error),
                Err(error) => Lost::Passing(error.to_string()),
            };
            let words = match lost {
                Lost::Final(error) if !self.is_told => return Err(error),
                Lost::Passing(words) if !self.is_told => return Err(Error::Program(words)),
                Lost::Final(error) => error.to_string(),
                Lost::Passing(words) if wanted.is_some() && since.elapsed() < PATIENCE => {
                    tracing::debug!("no connection to the guest yet: {words}");
                    tokio::time::sleep(door.pause()).await;
                    continue;
                }
                Lost::Passing(words) => words,
            };
            self.warn(&format!("no connection to {}: {words}", self.name));
            if let Some((socket, _)) = wanted.take() {
                socket.abort();
            }
            wanted = Some(self.next_wanted().await);
            since = Instant::now();
        }
    }

    /// Waits for the client that the next call is for.
    async fn next_wanted(&mut self) -> Wanted {
        loop {
            let warning = tokio::select! {
                accepted = self.listeners.next() => match accepted {
                    Ok(wanted) => return wanted,
                    Err(error) => error,
                },
                Some(_) = self.leaving.next(), if !self.leaving.is_empty() => continue,
            };
            self.warn(&no_room(&warning));
        }
    }

    /// Makes one call, for this client and later ones.
    async fn call(&mut self, daemon: &super::Daemon, first: &mut Option<Wanted>) -> Result<Lost, Error> {
        let mut call = match Call::open(daemon, &self.name).await {
            Ok(call) => call,
            Err(lost) => return Ok(lost),
        };
        if !std::mem::replace(&mut self.is_told, true) {
            self.tell()?;
        }
        if let Some(wanted) = first.take() {
            call.connect(wanted);
        }
        loop {
            let may_accept = call.connections() < MOST;
            let warning = tokio::select! {
                event = call.next() => match event {
                    Ok(Event::Ended(_)) => continue,
                    Ok(Event::Refused(target, reason)) => {
                        format!("cannot reach {target} in {}: {reason}", self.name)
                    }
                    Err(lost) => {
                        self.leaving.extend(call.lose());
                        return Ok(lost);
                    }
                },
                accepted = self.listeners.next(), if may_accept => match accepted {
                    Ok(wanted) => {
                        call.connect(wanted);
                        continue;
                    }
                    Err(error) => no_room(&error),
                },
                Some(_) = self.leaving.next(), if !self.leaving.is_empty() => continue,
            };
            self.warn(&warning);
        }
    }

    /// Shows the addresses of the listeners.
    fn tell(&mut self) -> Result<(), Error> {
        for (place, target) in self.listeners.all() {
            let what = match target {
                crate::text::target::Target::Port(port) => format!("port {port}"),
                other => other.to_string(),
            };
            let value = json!({ "listen": place, "target": target.to_string(), "vm": self.name });
            self.printer.line(&value, || format!("Forwarding {place} to {what} of {}", self.name))?;
        }
        Ok(())
    }

    fn warn(&mut self, words: &str) {
        if let Some(words) = self.warnings.admit(words, Instant::now()) {
            self.printer.warn(&words);
        }
    }
}

fn no_room(error: &std::io::Error) -> String {
    format!("no free file descriptor for another connection, so clients wait: {error}")
}

/// Limit of the warnings shown to people, so that they stay readable.
#[derive(Debug, Default)]
struct Warnings {
    /// Number of recent warnings; it is reduced as time passes.
    said: u32,
    since: Option<Instant>,
    more: u64,
}

impl Warnings {
    /// Returns the warning if it may be shown now.
    fn admit(&mut self, words: &str, now: Instant) -> Option<String> {
        let since = *self.since.get_or_insert(now);
        let passed = now.duration_since(since).as_secs() / BETWEEN_WARNINGS.as_secs().max(1);
        if passed > 0 {
            self.said = self.said.saturating_sub(u32::try_from(passed).unwrap_or(u32::MAX));
            self.since = Some(now);
        }
        if self.said >= WARNINGS {
            self.more += 1;
            return None;
        }
        self.said += 1;
        let more = std::mem::take(&mut self.more);
        Some(if more > 0 { format!("{words} (and {more} more warnings before)") } else { words.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_are_few_and_say_how_many_there_were() {
        let (mut warnings, now) = (Warnings::default(), Instant::now());
        for _ in 0..WARNINGS {
            assert_eq!(warnings.admit("a", now).as_deref(), Some("a"));
        }
        for _ in 0..3 {
            assert_eq!(warnings.admit("b", now), None);
        }
        let later = now + BETWEEN_WARNINGS;
        assert_eq!(warnings.admit("c", later).as_deref(), Some("c (and 3 more warnings before)"));
        assert_eq!(warnings.admit("d", later), None);
        for _ in 0..WARNINGS {
            assert!(warnings.admit("e", later + 100 * BETWEEN_WARNINGS).is_some());
        }
    }
}
