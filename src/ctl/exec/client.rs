//! Client of one program, over as many connections as necessary.
//!
//! ```text
//! start ──▶ open ──ended──▶ outputs written ──▶ forget ──▶ exit code
//!             │ lost                 ▲
//!             └──▶ dial, attach ─────┘ (not for longer than the program waits)
//! ```
//!
//! Input that is read while no connection is attached goes to the replay. It is sent once the program has
//! reported how much it has taken, so that later input follows without a gap.

mod this_end;

use std::io;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Code, Status, Streaming};

use super::local::{self, Outputs, Signals};
use super::replay::Replay;
use crate::ctl::Error;
use crate::ctl::client::Daemon;
use crate::ctl::door::Door;
use crate::ctl::outage::{self, Outage};
use crate::ctl::print::Printer;
use crate::sys::terminal::Changed;
use crate::wire::exec::{EXIT_CODE, SAID_BY_GUEST};
use crate::wire::proto::v1::from_program::Message as Told;
use crate::wire::proto::v1::to_program::Message;
use crate::wire::proto::v1::{
    AttachProgram, DetachProgram, ForgetProgram, FromProgram, ProgramData, ProgramEnded, ProgramStarted,
    StartProgram, ToProgram,
};
use this_end::{next_part, until};

/// Exit codes: guestctl or the guest has failed; the program was lost.
pub const FAILED: u8 = 125;
pub const LOST: u8 = 255;
/// Longest time for which reconnecting is tried, whatever the program does meanwhile.
const LONGEST: Duration = Duration::from_secs(600);
/// Time for which reconnecting is tried if it is not known how long the program waits for a client.
const USUAL: Duration = Duration::from_secs(25);
/// Timeout for guestlet-host to begin: longer than that of guestlet-host for an agent.
const OPENING: Duration = Duration::from_secs(90);
/// Time for the last answer to arrive.
const FAREWELL: Duration = Duration::from_secs(2);
/// Limit of the bytes that wait to be written here. No further output is accepted beyond it, however much a
/// guest keeps for this client.
const MAX_WAITING: u64 = 1 << 20;
const SIGPIPE: u32 = 13;

/// Client of a program that reconnects after a lost connection.
#[allow(clippy::struct_excessive_bools, reason = "what has happened so far, in any order")]
pub struct Client {
    door: Door,
    name: String,
    id: String,
    /// Request to start the program, until it has started.
    start: Option<StartProgram>,
    /// True if the request may have been sent.
    was_sent: bool,
    /// True if a connection was lost since then.
    was_lost: bool,
    /// Time without a connection.
    outage: Outage,
    started: Option<ProgramStarted>,
    /// True if the present connection is attached to the program, and has repeated all input that was lost with
    /// earlier ones.
    is_attached: bool,
    /// Signals to be sent to the program as soon as it is attached.
    signals: Vec<u32>,
    /// Numbers of the next bytes of both streams, as far as they are known.
    expected: [Option<u64>; 2],
    written: [u64; 2],
    input: Option<(Replay, Parts)>,
    /// Attachments from which the newest input may have come, if no other client has sent any since.
    attachments: [Option<u64>; 2],
    raw: Option<Changed>,
    ended: Option<ProgramEnded>,
    has_no_reader: bool,
    detach: bool,
    /// True if standard input is for the program.
    wants_input: bool,
    /// True if the program must have a terminal.
    wants_terminal: bool,
}

/// Parts read from standard input.
type Parts = mpsc::Receiver<io::Result<Vec<u8>>>;

/// Reasons why a connection has ended, apart from errors that end the client.
enum Over {
    /// The program has ended, or the client has detached.
    Done,
    /// The connection was lost, or refused for now: another one may continue.
    Lost(String),
    /// The connection was refused with an error, unless the host half has only just started.
    Early(Error),
}

impl Client {
    /// Creates a client that starts a program.
    pub fn start(door: Door, name: String, start: StartProgram, wait: Duration) -> Self {
        let patience = wait.min(LONGEST).mul_f64(0.8);
        let expected = [Some(0), Some(0)];
        let (id, has_input) = (start.id.clone(), start.has_input);
        Self {
            start: Some(start),
            outage: Outage::none(patience),
            expected,
            ..Self::attach(door, name, id, has_input, false)
        }
    }

    /// Creates a client that attaches to a running program. It may be required that the program receives standard
    /// input, and that it has a terminal.
    pub fn attach(door: Door, name: String, id: String, wants_input: bool, wants_terminal: bool) -> Self {
        Self {
            door,
            name,
            id,
            start: None,
            was_sent: false,
            was_lost: false,
            outage: Outage::none(USUAL),
            started: None,
            is_attached: false,
            signals: Vec::new(),
            expected: [None, None],
            written: [0, 0],
            input: None,
            attachments: [None, None],
            raw: None,
            ended: None,
            has_no_reader: false,
            detach: false,
            wants_input,
            wants_terminal,
        }
    }

    /// Runs until the program has ended or, if it is to be `detached`, until it has started.
    ///
    /// # Errors
    /// [`Error::Ended`] with the exit code of the program, unless that is 0.
    pub async fn run(mut self, printer: &mut Printer, detach: bool) -> Result<(), Error> {
        self.detach = detach;
        let failed = |error| Error::Read("standard input".to_owned(), error);
        let mut outputs = Outputs::start().map_err(failed)?;
        let mut signals = local::signals().map_err(failed)?;
        let done = self.until_done(&mut outputs, &mut signals).await;
        // The terminal is restored before any message.
        self.raw = None;
        done?;
        if self.detach {
            return Ok(printer.text(&format!("{}\n", self.id))?);
        }
        let Some(ended) = &self.ended else { return Err(Error::Ended(LOST)) };
        let (code, words) = super::exit_code(ended);
        if let Some(words) = words {
            local::say(&words, false);
        }
        if ended.output_cut_off {
            local::say(
                "other processes still have the program's output open; what they write is lost",
                false,
            );
        }
        if code == 0 { Ok(()) } else { Err(Error::Ended(code)) }
    }

    /// Makes as many connections as necessary.
    async fn until_done(&mut self, outputs: &mut Outputs, signals: &mut Signals) -> Result<(), Error> {
        loop {
            let over = self.connect(outputs, signals).await;
            self.is_attached = false;
            match over? {
                Over::Done => return Ok(()),
                Over::Lost(why) if !self.was_sent => return Err(Error::Program(why)),
                Over::Lost(why) => self.outage.goes_on(why, Instant::now()),
                Over::Early(error) => {
                    if !self.outage.may_be_early(error.to_string(), Instant::now()) {
                        return Err(error);
                    }
                }
            }
            self.was_lost = true;
            if self.outage.is_too_long(Instant::now()) {
                let words = format!("lost the connection to the program {}: {}", self.id, self.outage.why());
                return Err(Error::NotRun(words, LOST));
            }
            let pause = self.door.pause();
            self.unless_interrupted(signals, tokio::time::sleep(pause)).await?;
        }
    }

    /// Makes one connection, and uses it until it ends.
    async fn connect(&mut self, outputs: &mut Outputs, signals: &mut Signals) -> Result<Over, Error> {
        let door = self.door.clone();
        let line = match self.unless_interrupted(signals, door.dial()).await? {
            Ok(line) => line,
            Err(error) if !self.was_sent => return Err(error),
            // The socket is bound before its mode gives others access, so this may be temporary.
            Err(error @ Error::Forbidden(_)) => return Ok(Over::Early(error)),
            Err(Error::Cluster(error)) if !error.may_pass() => return Ok(Over::Early(error.into())),
            Err(error) => return Ok(Over::Lost(error.to_string())),
        };
        match line.over(async |daemon| self.converse(&daemon, outputs, signals).await).await {
            Err(error) if error.is_of_connection() => Ok(Over::Lost(error.to_string())),
            over => over,
        }
    }

    async fn converse(
        &mut self,
        daemon: &Daemon,
        outputs: &mut Outputs,
        signals: &mut Signals,
    ) -> Result<Over, Error> {
        let (requests, all) = mpsc::unbounded_channel();
        let say = |message| {
            // A lost message shows in the answers.
            let _ = requests.send(ToProgram { message: Some(message) });
        };
        say(self.opening());
        self.was_sent = true;
        let mut client = daemon.exec();
        let opening = tokio::time::timeout(OPENING, client.run_program(UnboundedReceiverStream::new(all)));
        let mut answers = match self.unless_interrupted(signals, opening).await? {
            Ok(Ok(answers)) => answers.into_inner(),
            Ok(Err(status)) => return self.refused(status),
            Err(_) => return Ok(Over::Lost(Error::Silent.to_string())),
        };
        loop {
            if self.ended.is_some() && self.is_written() {
                say(Message::Forget(ForgetProgram {}));
                let _ = tokio::time::timeout(FAREWELL, answers.message()).await;
                return Ok(Over::Done);
            }
            let may_read = self.ended.is_none();
            tokio::select! {
                biased;
                heard = signals.next() => self.hear(heard, &say)?,
                Some(written) = outputs.written.recv() => self.has_written(written, outputs, &say)?,
                part = next_part(&mut self.input), if may_read => self.read(part, &say)?,
                () = until(self.outage.tell_at()) => self.tell(),
                answer = answers.message(), if self.ended.is_none() && self.waiting() < MAX_WAITING => match answer {
                    Ok(Some(answer)) => if self.take(answer, outputs, &say, &mut answers).await? {
                        return Ok(Over::Done);
                    },
                    Ok(None) => return Ok(Over::Lost("the program's stream ended".to_owned())),
                    Err(status) => return self.refused(status),
                },
            }
        }
    }

    /// Returns the first message of a connection.
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

    fn refused(&self, status: Status) -> Result<Over, Error> {
        if std::error::Error::source(&status).is_some() {
            return Ok(Over::Lost("guestlet-host closed the connection".to_owned()));
        }
        let by_guest = status.metadata().contains_key(SAID_BY_GUEST);
        let words = status.message().to_owned();
        // A host half that has just started has no session yet. An agent that is stopping or overloaded refuses
        // temporarily, too.
        let is_again = self.started.is_some() || self.was_lost;
        if is_again && outage::may_pass(status.code(), by_guest) {
            return Ok(Over::Lost(words));
        }
        if !by_guest {
            let is_early = is_again && status.code() == Code::NotFound;
            if is_early && self.door.follows() {
                return Ok(Over::Lost(words));
            }
            let error = Error::of_call(status, &self.name);
            return if is_early { Ok(Over::Early(error)) } else { Err(error) };
        }
        let code = status.metadata().get(EXIT_CODE).and_then(|code| code.to_str().ok()?.parse().ok());
        Err(match (code, status.code()) {
            (Some(code), _) => Error::NotRun(words, code),
            (None, Code::NotFound) if self.start.is_some() && self.started.is_none() => Error::NotRun(
                "the connection broke while the program was being started; it is not known whether it was"
                    .to_owned(),
                LOST,
            ),
            (None, Code::NotFound) if self.started.is_some() => {
                Error::NotRun(format!("lost the connection to the program: {words}"), LOST)
            }
            (None, Code::Aborted | Code::Unavailable) => Error::NotRun(words, LOST),
            (None, _) => Error::Program(words),
        })
    }

    /// Handles a message of the program; returns whether this was the last one that is needed.
    async fn take(
        &mut self,
        answer: FromProgram,
        outputs: &Outputs,
        say: &impl Fn(Message),
        answers: &mut Streaming<FromProgram>,
    ) -> Result<bool, Error> {
        match answer.message {
            Some(Told::Started(started)) => {
                if self.detach {
                    say(Message::Detach(DetachProgram {}));
                    let _ = tokio::time::timeout(FAREWELL, answers.message()).await;
                    return Ok(true);
                }
                self.begin(started, say)?;
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
        Ok(false)
    }

    /// Handles the start of the program, or the attachment to it.
    fn begin(&mut self, started: ProgramStarted, say: &impl Fn(Message)) -> Result<(), Error> {
        if self.started.is_none() {
            if self.wants_terminal && !started.has_terminal {
                return Err(self.unfit("it has no terminal", "-t"));
            }
            // Keys that the program does not read need not be passed on one by one. Ctrl-C then arrives as a signal.
            if self.wants_input {
                let replay = self.replay(&started)?;
                if started.has_terminal {
                    self.raw = local::raw().map_err(|error| Error::Read("the terminal".to_owned(), error))?;
                }
                let input =
                    local::input().map_err(|error| Error::Read("standard input".to_owned(), error))?;
                self.input = Some((replay, input));
            }
        } else if let Some((replay, _)) = &mut self.input {
            if started.attachment.is_some() && !self.attachments.contains(&started.input_attachment) {
                return Err(self.input_of_others());
            }
            replay.taken(started.input_taken);
            let (offset, data, end) = replay.again();
            if !data.is_empty() {
                say(Message::Input(ProgramData { offset, data }));
            }
            if let Some(end) = end {
                say(Message::EndOfInput(end));
            }
        }
        if self.has_no_reader {
            say(Message::Signal(SIGPIPE));
        }
        for signal in self.signals.drain(..) {
            say(Message::Signal(signal));
        }
        if started.has_terminal
            && let Some(size) = local::size()
        {
            say(Message::Resize(size));
        }
        // The agent may not have received what was acknowledged over a connection that broke. With its ring full of that, the
        // program would write nothing more, and without more output nothing would ever be acknowledged again.
        say(self.acknowledgement());
        self.attachments = [started.attachment, started.input_attachment];
        self.started = Some(started);
        self.is_attached = true;
        self.outage.ends();
        Ok(())
    }

    /// Prepares the input of this client. It follows what others have sent, which the program may not have taken
    /// yet.
    fn replay(&self, started: &ProgramStarted) -> Result<Replay, Error> {
        if !started.has_input {
            return Err(self.unfit("it has no input", "-i"));
        }
        if started.input_has_ended {
            return Err(self.unfit("its input has already been closed", "-i"));
        }
        let received = match started.input_received {
            // Only this client can have sent any input.
            None if self.start.is_some() => Some(started.input_taken),
            received => received,
        };
        let received = received.ok_or_else(|| {
            let why = "the agent is too old to say how much input has arrived";
            self.unfit(why, "-i")
        })?;
        Ok(Replay::from(started.input_taken, received))
    }

    /// Returns the error for input that cannot be sent, because others have sent input in the meantime.
    fn input_of_others(&self) -> Error {
        let (id, name) = (&self.id, &self.name);
        let words = format!(
            "another client sent input to the program {id} while there was no connection, so what was read \
             here was not sent; guestctl attach -i {name} {id} continues after what has arrived"
        );
        Error::NotRun(words, LOST)
    }

    /// Returns the error for a program that does not support this option.
    fn unfit(&self, why: &str, option: &str) -> Error {
        let (id, name) = (&self.id, &self.name);
        Error::Program(format!(
            "cannot attach to the program {id} of {name} with {option}: {why}; leave out {option}"
        ))
    }

    fn output(&mut self, which: usize, data: ProgramData, outputs: &Outputs) {
        let ProgramData { offset, data } = data;
        let expected = *self.expected[which].get_or_insert_with(|| {
            // A new attachment begins with the oldest byte that is kept.
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

    /// Returns the number of bytes that were received but not written yet.
    fn waiting(&self) -> u64 {
        let waits = |which: usize| self.expected[which].unwrap_or(0).saturating_sub(self.written[which]);
        waits(0).saturating_add(waits(1))
    }

    fn is_written(&self) -> bool {
        (0..2).all(|which| self.expected[which].is_none_or(|expected| self.written[which] >= expected))
    }
}
