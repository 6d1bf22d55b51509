//! Thread of one application: does what the keeper requests, and reports. It may wait for disks and for the
//! application; the keeper does not wait for it.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::process::{ChildStdin, ChildStdout};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use super::commands::{start, tell_thaw, verdict};
use super::discovery::{Candidate, Way};
use super::{Commands, Place, RELEASE};
use crate::applications::messages::{Answer, Directory, MOST_LINE, Request};
use crate::applications::place::directory;
use crate::guest::freeze::marker::Told;
use crate::sys::as_user::Companion;
use crate::sys::mountinfo::{Mount, MountList};
use crate::sys::process_group::{Ended, thread};
use crate::sys::root::Root;
use crate::sys::spawn_manner::Identity;

/// Limit on the lines that the process of an application may write.
const MOST_LINES: usize = 8;

/// Error of a process that ends without an answer.
const ENDED: &str = "its process has ended without an answer";

/// Report to the keeper.
#[derive(Debug, PartialEq, Eq)]
pub enum Report {
    /// The application is held.
    Held {
        /// Version of the server; may be empty.
        version: String,
        /// Positions of the server, such as in its log, when it was held.
        positions: BTreeMap<String, String>,
        /// File systems of its data.
        places: Vec<Place>,
    },
    /// The application was released and its session had lasted until then. Has its positions at that time.
    Released(BTreeMap<String, String>),
    /// The application is not held, or no longer; the reason.
    Failed(String),
}

/// Event that a driver waits for.
#[derive(Debug)]
pub enum Event {
    /// The keeper requests the release.
    Release,
    /// The keeper does not wait for the application any longer.
    GiveUp,
    /// The process has written a line.
    Line(Vec<u8>),
    /// The process writes nothing more.
    Silent,
    /// The command has ended.
    Ended(Ended),
}

/// Holds and releases one application. Reports once that it is held or has failed; after that once that it was
/// released or has failed.
pub fn drive(
    root: &Root,
    one: Candidate,
    until: Instant,
    (sender, events): (&Sender<Event>, &Receiver<Event>),
    report: impl Fn(Report),
) {
    let done = match one.way {
        Err(problem) => Err(problem),
        Ok(Way::Process(identity)) => {
            let words = ["application", &one.name, &one.instance];
            by_process(root, &words, &identity, until, (sender, events), &report)
        }
        Ok(Way::Commands(commands)) => by_commands(root, &commands, until, (sender, events), &report),
    };
    report(done.map_or_else(Report::Failed, Report::Released));
}

fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now())
}

/// Waits for the next event. The error is the reason why none came.
fn next(events: &Receiver<Event>, until: Option<Instant>) -> Result<Event, String> {
    match until {
        // The keeper outlives its drivers, unless the process has ended.
        None => events.recv().map_err(|_| "the freeze has ended".to_owned()),
        Some(until) => events.recv_timeout(left(until)).map_err(|error| match error {
            RecvTimeoutError::Timeout => "it did not answer in time".to_owned(),
            RecvTimeoutError::Disconnected => "the freeze has ended".to_owned(),
        }),
    }
}

fn by_process(
    root: &Root,
    words: &[&str],
    identity: &Identity,
    until: Instant,
    (sender, events): (&Sender<Event>, &Receiver<Event>),
    report: &impl Fn(Report),
) -> Result<BTreeMap<String, String>, String> {
    if left(until).is_zero() {
        return Err("there was no time left for it".to_owned());
    }
    // Killed when this function returns.
    let (_companion, mut input, output) = Companion::start(words, identity)
        .map_err(|error| format!("its process cannot be started as the user {}: {error}", identity.uid))?;
    let reader = sender.clone();
    thread("answers", move || read_lines(output, &reader)).map_err(|error| error.to_string())?;
    match ask(&mut input, Request::Hold(milliseconds(left(until))), events, Some(until))? {
        Answer::Held { version, positions, directories } => {
            let places = places(root, &directories)?;
            report(Report::Held { version, positions, places });
        }
        Answer::Failed(problem) => return Err(problem),
        Answer::Released(_) => return Err(confused()),
    }
    // Any event before the request for the release ends the session.
    match next(events, None)? {
        Event::Release => {}
        Event::Line(line) => return Err(lost(Answer::parse(&line))),
        Event::Silent => return Err("its process has ended while it was held".to_owned()),
        Event::GiveUp | Event::Ended(_) => return Err("the freeze has ended".to_owned()),
    }
    let until = Instant::now() + RELEASE;
    match ask(&mut input, Request::Release(milliseconds(RELEASE)), events, Some(until))? {
        Answer::Released(positions) => Ok(positions),
        Answer::Failed(problem) => Err(problem),
        Answer::Held { .. } => Err(confused()),
    }
}

fn confused() -> String {
    "its process sent an unexpected answer".to_owned()
}

/// Describes output of a process that was not requested.
fn lost(answer: Result<Answer, crate::applications::Problem>) -> String {
    match answer {
        Ok(Answer::Failed(problem)) => format!("its session has ended while it was held: {problem}"),
        Ok(_) => confused(),
        Err(problem) => problem.to_string(),
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn ask(
    input: &mut ChildStdin,
    request: Request,
    events: &Receiver<Event>,
    until: Option<Instant>,
) -> Result<Answer, String> {
    let mut line = serde_json::to_vec(&request).map_err(|error| error.to_string())?;
    line.push(b'\n');
    // The pipe's buffer is larger than all requests together, so this does not block.
    input.write_all(&line).map_err(|error| match error.kind() {
        // The process has ended, which the reader has not reported yet.
        ErrorKind::BrokenPipe => ENDED.to_owned(),
        _ => format!("its process cannot be asked: {error}"),
    })?;
    match next(events, until)? {
        Event::Line(line) => Answer::parse(&line).map_err(|problem| problem.to_string()),
        Event::Silent => Err(ENDED.to_owned()),
        Event::GiveUp => Err("it did not answer in time".to_owned()),
        Event::Release | Event::Ended(_) => Err("the freeze has ended".to_owned()),
    }
}

fn read_lines(output: ChildStdout, events: &Sender<Event>) {
    let mut output = BufReader::new(output);
    for _ in 0..MOST_LINES {
        let mut line = Vec::new();
        let read = (&mut output).take(MOST_LINE as u64).read_until(b'\n', &mut line);
        if read.is_err() || line.pop() != Some(b'\n') || events.send(Event::Line(line)).is_err() {
            break;
        }
    }
    // The driver may have ended already.
    let _ = events.send(Event::Silent);
}

/// Returns the file systems of directories: those that they are on, and those that are mounted below them.
fn places(root: &Root, directories: &[Directory]) -> Result<Vec<Place>, String> {
    let mounts = MountList::open(root).and_then(|list| list.read());
    let mounts = mounts.map_err(|error| format!("cannot read what is mounted: {error}"))?;
    if directories.is_empty() {
        return Err("it is not known where its data are".to_owned());
    }
    let mut places = Vec::new();
    for directory in directories {
        let found = on(directory, &mounts)
            .ok_or_else(|| format!("it is not known which file system {} is on", directory.path.display()))?;
        places.extend(found.into_iter().map(|mount| Place {
            directory: directory.path.display().to_string(),
            device: mount.device,
            mount_point: mount.mount_point.clone(),
        }));
    }
    Ok(places)
}

fn on<'a>(directory: &Directory, mounts: &'a [Mount]) -> Option<Vec<&'a Mount>> {
    let own = mounts.iter().find(|mount| mount.id == directory.mount)?;
    let below =
        mounts.iter().filter(|mount| mount.path != directory.path && mount.path.starts_with(&directory.path));
    Some(std::iter::once(own).chain(below).collect())
}

fn by_commands(
    root: &Root,
    commands: &Commands,
    until: Instant,
    (sender, events): (&Sender<Event>, &Receiver<Event>),
    report: &impl Fn(Report),
) -> Result<BTreeMap<String, String>, String> {
    let held = hold(root, commands, until, (sender, events));
    let waited = held.and_then(|places| {
        report(Report::Held { version: String::new(), positions: BTreeMap::new(), places });
        match next(events, None)? {
            Event::Release => Ok(()),
            _ => Err("the freeze has ended".to_owned()),
        }
    });
    // Runs whatever the result of the freeze command was.
    let thawed = tell_thaw(&Told::from(commands), RELEASE);
    waited.and(thawed).map(|()| BTreeMap::new())
}

fn hold(
    root: &Root,
    commands: &Commands,
    until: Instant,
    (sender, events): (&Sender<Event>, &Receiver<Event>),
) -> Result<Vec<Place>, String> {
    if left(until).is_zero() {
        return Err("there was no time left for it".to_owned());
    }
    let ended = sender.clone();
    let group = start(&commands.freeze, &commands.user, move |end| drop(ended.send(Event::Ended(end))))?;
    match next(events, Some(until)) {
        Ok(Event::Ended(end)) => verdict(&commands.freeze, &end)?,
        Ok(_) => {
            group.kill();
            return Err("it did not end in time, and was killed".to_owned());
        }
        Err(problem) => {
            group.kill();
            return Err(problem);
        }
    }
    let found = commands.data.iter().map(|path| directory(path).map_err(|problem| problem.to_string()));
    places(root, &found.collect::<Result<Vec<_>, _>>()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::mountinfo::parse;

    #[test]
    fn a_process_that_has_ended_is_told_of_as_one_before_its_answers_are_read() {
        let (_, input) = nix::unistd::pipe().unwrap();
        // Its output is not read.
        let (_sender, events) = std::sync::mpsc::channel();
        assert_eq!(ask(&mut input.into(), Request::Release(1), &events, None), Err(ENDED.to_owned()));
    }

    #[test]
    fn the_file_systems_of_a_directory_are_its_own_and_those_below() {
        let mounts = parse(
            b"1 0 254:1 / / rw - ext4 /dev/vda1 rw\n2 1 254:2 / /data rw - xfs /dev/vdb rw\n\
              3 2 254:3 / /data/pg/base rw - ext4 /dev/vdc rw\n4 2 254:4 / /data/pgold rw - ext4 /dev/vdd rw\n",
        );
        let found = |path: &str, mount| {
            let directory = Directory { path: path.into(), mount };
            on(&directory, &mounts).map(|found| found.iter().map(|mount| mount.device.1).collect::<Vec<_>>())
        };
        assert_eq!(found("/data/pg", 2).unwrap(), [2, 3]);
        assert_eq!(found("/data", 2).unwrap(), [2, 3, 4]);
        assert_eq!(found("/data/pg/base", 3).unwrap(), [3]);
        assert_eq!(found("/srv", 1).unwrap(), [1]);
        assert_eq!(found("/srv", 9), None);
    }
}
