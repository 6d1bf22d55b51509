//! One program and its client, over as many connections as it takes.
//!
//! ```text
//! start ──▶ open ──ended──▶ outputs written ──▶ forget ──▶ exit code
//!             │ lost                 ▲
//!             └──▶ dial, attach ─────┘ (not for longer than the program waits)
//! ```

use std::path::PathBuf;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Code, Status, Streaming};

use super::local::{self, Heard, Outputs, Signals, Written};
use super::replay::Replay;
use crate::ctl::Error;
use crate::ctl::client::{self, Daemon};
use crate::ctl::print::Printer;
use crate::sys::terminal::Raw;
use crate::wire::proto::v1::from_program::Message as Told;
use crate::wire::proto::v1::to_program::Message;
use crate::wire::proto::v1::{
    AttachProgram, DetachProgram, ForgetProgram, FromProgram, ProgramData, ProgramEnded, ProgramStarted,
    ProgramTaken, StartProgram, ToProgram,
};

/// Exit codes: guestctl or the guest has failed; the program was lost.
pub const FAILED: u8 = 125;
pub const LOST: u8 = 255;
/// Metadata of a status: what a shell would exit with; that the guest has said it.
const EXIT_CODE: &str = "guestlet-exit-code";
const SAID: &str = "guestlet-said-by-guest";
/// How long it is tried to connect again, whatever the program does meanwhile.
const LONGEST: Duration = Duration::from_secs(600);
/// How long a client of a program of which it does not know how long it waits tries it.
const USUAL: Duration = Duration::from_secs(25);
/// The pause between two attempts.
const PAUSE: Duration = Duration::from_millis(100);
/// After how long a person is told.
const QUIET: Duration = Duration::from_secs(2);
/// How long the last answer may take.
const FAREWELL: Duration = Duration::from_secs(2);
/// Bytes that wait to be written here: beyond that no more is taken, whatever a guest keeps for this client.
const MAX_WAITING: u64 = 1 << 20;
const SIGPIPE: u32 = 13;
const SIGHUP: u32 = 1;
const SIGTERM: u32 = 15;

/// The client.
#[allow(clippy::struct_excessive_bools, reason = "what has happened so far, in any order")]
pub struct Client {
    socket: PathBuf,
    name: String,
    id: String,
    /// What is asked for first, until it was.
    start: Option<StartProgram>,
    /// It may have been asked for.
    was_sent: bool,
    /// A connection was lost since then.
    was_lost: bool,
    /// How long it is tried to come back.
    patience: Duration,
    started: Option<ProgramStarted>,
    /// The numbers of the bytes that come next, as far as is known.
    expected: [Option<u64>; 2],
    written: [u64; 2],
    input: Option<(Replay, mpsc::Receiver<Vec<u8>>)>,
    raw: Option<Raw>,
    ended: Option<ProgramEnded>,
    has_no_reader: bool,
    detach: bool,
}

/// Why a connection is over.
enum Over {
    /// All is done.
    Done,
    /// It was lost: another one may go on.
    Lost(String),
    /// It is of no use to go on.
    Failed(Error),
}

impl Client {
    /// Of a program that is to be started.
    pub fn start(socket: PathBuf, name: String, start: StartProgram, wait: Duration) -> Self {
        let patience = wait.min(LONGEST).mul_f64(0.8);
        let expected = [Some(0), Some(0)];
        let id = start.id.clone();
        Self { start: Some(start), patience, expected, ..Self::attach(socket, name, id) }
    }

    /// Of a program that runs.
    pub fn attach(socket: PathBuf, name: String, id: String) -> Self {
        Self {
            socket,
            name,
            id,
            start: None,
            was_sent: false,
            was_lost: false,
            patience: USUAL,
            started: None,
            expected: [None, None],
            written: [0, 0],
            input: None,
            raw: None,
            ended: None,
            has_no_reader: false,
            detach: false,
        }
    }

    /// Until the program has ended, or only until it has started if it is to be `detached`.
    ///
    /// # Errors
    /// [`Error::Ended`] with what it exited with, unless that is 0.
    pub async fn run(mut self, printer: &mut Printer, detach: bool) -> Result<(), Error> {
        self.detach = detach;
        let failed = |error| Error::Read("standard input".to_owned(), error);
        let mut outputs = Outputs::start().map_err(failed)?;
        let mut signals = Signals::hear().map_err(failed)?;
        let mut lost_since: Option<Instant> = None;
        let mut is_told = false;
        loop {
            let begun = Instant::now();
            let over = self.connect(&mut outputs, &mut signals).await;
            let why = match over {
                Over::Done => break,
                Over::Failed(error) => {
                    self.raw = None;
                    return Err(error);
                }
                Over::Lost(why) => why,
            };
            self.was_lost = true;
            if self.started.is_none() && !self.was_sent {
                self.raw = None;
                return Err(Error::Program(why));
            }
            if begun.elapsed() > QUIET {
                lost_since = None;
            }
            let since = *lost_since.get_or_insert_with(Instant::now);
            if since.elapsed() > self.patience {
                self.raw = None;
                local::say(&format!("lost the program {}: {why}", self.id), false);
                return Err(Error::Ended(LOST));
            }
            if since.elapsed() > QUIET && !is_told {
                is_told = true;
                local::say(
                    &format!("{why}; trying to reach the program {} again", self.id),
                    self.raw.is_some(),
                );
            }
            tokio::time::sleep(PAUSE).await;
        }
        self.raw = None;
        if self.detach {
            return Ok(printer.text(&format!("{}\n", self.id))?);
        }
        let Some(ended) = &self.ended else { return Err(Error::Ended(LOST)) };
        let (code, words) = super::exit_code(ended);
        if let Some(words) = words {
            local::say(&words, false);
        }
        if ended.output_cut_off {
            local::say("the program's output is still open in others; what they write is lost", false);
        }
        if code == 0 { Ok(()) } else { Err(Error::Ended(code)) }
    }

    /// One connection.
    async fn connect(&mut self, outputs: &mut Outputs, signals: &mut Signals) -> Over {
        let over = client::with(self.socket.clone(), async |daemon| {
            Ok(self.converse(&daemon, outputs, signals).await)
        });
        match over.await {
            Ok(over) => over,
            Err(error @ Error::Closed) => Over::Lost(error.to_string()),
            Err(error @ (Error::NoSocket(_) | Error::NobodyAnswers(_))) if self.was_sent => {
                Over::Lost(error.to_string())
            }
            Err(error) => Over::Failed(error),
        }
    }

    async fn converse(&mut self, daemon: &Daemon, outputs: &mut Outputs, signals: &mut Signals) -> Over {
        let (requests, all) = mpsc::unbounded_channel();
        let say = |message| {
            // Whether it arrives is seen by what is answered.
            let _ = requests.send(ToProgram { message: Some(message) });
        };
        say(self.opening());
        self.was_sent = true;
        let mut client = daemon.exec();
        let opening = client.run_program(UnboundedReceiverStream::new(all));
        let mut answers = match opening.await {
            Ok(answers) => answers.into_inner(),
            Err(status) => return self.refused(status),
        };
        loop {
            if self.ended.is_some() && self.is_written() {
                say(Message::Forget(ForgetProgram {}));
                let _ = tokio::time::timeout(FAREWELL, answers.message()).await;
                return Over::Done;
            }
            let may_read = self.started.is_some() && self.ended.is_none();
            tokio::select! {
                biased;
                heard = signals.next() => if let Some(over) = self.hear(heard, &say) {
                    return over;
                },
                Some(written) = outputs.written.recv() => self.has_written(written, outputs, &say),
                part = next_part(&mut self.input), if may_read => self.read(part, &say),
                answer = answers.message(), if self.ended.is_none() && self.waiting() < MAX_WAITING => match answer {
                    Ok(Some(answer)) => if let Some(over) = self.take(answer, outputs, &say, &mut answers).await {
                        return over;
                    },
                    Ok(None) => return Over::Lost("the program's stream ended".to_owned()),
                    Err(status) => return self.refused(status),
                },
            }
        }
    }

    /// What is said first.
    fn opening(&self) -> Message {
        match &self.start {
            Some(start) if !self.was_sent => Message::Start(start.clone()),
            _ => Message::Attach(AttachProgram {
                name: self.name.clone(),
                id: self.id.clone(),
                output_from: self.expected[0],
                errors_from: self.expected[1],
            }),
        }
    }

    fn refused(&self, status: Status) -> Over {
        if std::error::Error::source(&status).is_some() {
            return Over::Lost("guestlet-host closed the connection".to_owned());
        }
        let by_guest = status.metadata().contains_key(SAID);
        let words = status.message().to_owned();
        // A host half that has just started has no session yet; an agent that stops, or has too much to do, says so.
        let is_again = self.started.is_some() || self.was_lost;
        if is_again && (!by_guest || matches!(status.code(), Code::Unavailable | Code::ResourceExhausted)) {
            return Over::Lost(words);
        }
        if !by_guest {
            return Over::Failed(Error::of_call(status, &self.name));
        }
        let code = status.metadata().get(EXIT_CODE).and_then(|code| code.to_str().ok()?.parse().ok());
        match (code, status.code()) {
            (Some(code), _) => Over::Failed(Error::NotRun(words, code)),
            (None, Code::NotFound) if self.start.is_some() && self.started.is_none() => {
                Over::Failed(Error::NotRun(
                    "the connection broke while the program was to be started; whether it was is not known"
                        .to_owned(),
                    LOST,
                ))
            }
            (None, Code::NotFound) if self.started.is_some() => {
                Over::Failed(Error::NotRun(format!("lost the program: {words}"), LOST))
            }
            (None, Code::Aborted | Code::Unavailable) => Over::Failed(Error::NotRun(words, LOST)),
            (None, _) => Over::Failed(Error::Program(words)),
        }
    }

    /// Something came from the program.
    async fn take(
        &mut self,
        answer: FromProgram,
        outputs: &Outputs,
        say: &impl Fn(Message),
        answers: &mut Streaming<FromProgram>,
    ) -> Option<Over> {
        match answer.message {
            Some(Told::Started(started)) => {
                if self.detach {
                    say(Message::Detach(DetachProgram {}));
                    let _ = tokio::time::timeout(FAREWELL, answers.message()).await;
                    return Some(Over::Done);
                }
                if let Err(error) = self.begin(started, say) {
                    return Some(Over::Failed(error));
                }
            }
            Some(Told::Output(data)) => self.output(0, data, outputs),
            Some(Told::Errors(data)) => self.output(1, data, outputs),
            Some(Told::InputTaken(count)) => {
                if let Some((replay, _)) = &mut self.input {
                    replay.taken(count);
                }
            }
            Some(Told::Ended(ended)) => self.ended = Some(ended),
            None => {}
        }
        None
    }

    /// The program runs, and this connection is attached to it.
    fn begin(&mut self, started: ProgramStarted, say: &impl Fn(Message)) -> Result<(), Error> {
        if self.started.is_none() {
            if started.has_terminal {
                self.raw = local::raw().map_err(|error| Error::Read("the terminal".to_owned(), error))?;
            }
            if started.has_input && self.start.as_ref().is_none_or(|start| start.has_input) {
                let input =
                    local::input().map_err(|error| Error::Read("standard input".to_owned(), error))?;
                self.input = Some((Replay::from(started.input_taken), input));
            }
        } else if let Some((replay, _)) = &mut self.input {
            replay.taken(started.input_taken);
            let (offset, data, end) = replay.again();
            if !data.is_empty() {
                say(Message::Input(ProgramData { offset, data }));
            }
            if let Some(end) = end {
                say(Message::EndOfInput(end));
            }
        }
        if started.has_terminal
            && let Some(size) = local::size()
        {
            say(Message::Resize(size));
        }
        self.started = Some(started);
        Ok(())
    }

    fn output(&mut self, which: usize, data: ProgramData, outputs: &Outputs) {
        let ProgramData { offset, data } = data;
        let expected = *self.expected[which].get_or_insert_with(|| {
            // Whoever attaches begins with the oldest byte that is kept.
            self.written[which] = offset;
            offset
        });
        if let Some(lost) = offset.checked_sub(expected).filter(|lost| *lost > 0) {
            let what = ["output", "standard error"][which];
            local::say(&format!("{lost} bytes of the program's {what} are lost"), self.raw.is_some());
        }
        let known = usize::try_from(expected.saturating_sub(offset)).unwrap_or(usize::MAX).min(data.len());
        self.expected[which] = Some(expected.max(offset) + (data.len() - known) as u64);
        if known < data.len() {
            outputs.write(which, offset + known as u64, data[known..].to_vec());
        }
    }

    /// Bytes that were taken and not written yet.
    fn waiting(&self) -> u64 {
        let waits = |which: usize| self.expected[which].unwrap_or(0).saturating_sub(self.written[which]);
        waits(0).saturating_add(waits(1))
    }

    fn is_written(&self) -> bool {
        (0..2).all(|which| self.expected[which].is_none_or(|expected| self.written[which] >= expected))
    }

    fn has_written(&mut self, first: Written, outputs: &mut Outputs, say: &impl Fn(Message)) {
        let mut next = Some(first);
        while let Some(written) = next {
            match written {
                Written::Up(which, before) => self.written[which] = before,
                Written::Broken if !self.has_no_reader => {
                    self.has_no_reader = true;
                    say(Message::Signal(SIGPIPE));
                }
                Written::Broken => {}
            }
            next = outputs.written.try_recv().ok();
        }
        let [output, errors] = self.written;
        say(Message::Taken(ProgramTaken { output, errors }));
    }

    fn read(&mut self, part: Option<Vec<u8>>, say: &impl Fn(Message)) {
        let Some((replay, _)) = &mut self.input else { return };
        match part.filter(|part| !part.is_empty()) {
            None => say(Message::EndOfInput(replay.ended())),
            Some(data) => {
                let offset = replay.read(&data);
                say(Message::Input(ProgramData { offset, data }));
            }
        }
    }

    fn hear(&mut self, heard: Heard, say: &impl Fn(Message)) -> Option<Over> {
        let is_terminal = self.started.as_ref().is_some_and(|started| started.has_terminal);
        match heard {
            Heard::Resized => {
                if let Some(size) = local::size().filter(|_| is_terminal) {
                    say(Message::Resize(size));
                }
                None
            }
            // Before it has started there is nothing to pass them on to; and who has lost the terminal cannot use it any more.
            Heard::Signal(number)
                if self.started.is_none() || is_terminal && matches!(number, SIGHUP | SIGTERM) =>
            {
                let code = u8::try_from(number).unwrap_or_default();
                Some(Over::Failed(Error::Ended(if self.started.is_some() { LOST } else { 128 + code })))
            }
            Heard::Signal(number) => {
                say(Message::Signal(number));
                None
            }
        }
    }
}

/// The next part of the input, as soon as there is room for it.
async fn next_part(input: &mut Option<(Replay, mpsc::Receiver<Vec<u8>>)>) -> Option<Vec<u8>> {
    match input {
        // A part has a quarter of the window.
        Some((replay, parts)) if replay.room() >= super::replay::WINDOW / 4 => parts.recv().await,
        _ => std::future::pending().await,
    }
}
