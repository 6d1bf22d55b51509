//! One program and its client, over as many connections as it takes.
//!
//! ```text
//! start ──▶ open ──ended──▶ outputs written ──▶ forget ──▶ exit code
//!             │ lost                 ▲
//!             └──▶ dial, attach ─────┘ (not for longer than the program waits)
//! ```
//!
//! Input that is read while no connection is attached goes to the replay, from which it is sent once the program has said how
//! much it has taken: what comes next then has no gap before it.

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
/// How long it is tried to connect again, whatever the program does meanwhile.
const LONGEST: Duration = Duration::from_secs(600);
/// How long a client of a program of which it does not know how long it waits tries it.
const USUAL: Duration = Duration::from_secs(25);
/// How long guestlet-host may take to begin: longer than it waits for an agent.
const OPENING: Duration = Duration::from_secs(90);
/// How long the last answer may take.
const FAREWELL: Duration = Duration::from_secs(2);
/// Bytes that wait to be written here: beyond that no more is taken, whatever a guest keeps for this client.
const MAX_WAITING: u64 = 1 << 20;
const SIGPIPE: u32 = 13;

/// The client.
#[allow(clippy::struct_excessive_bools, reason = "what has happened so far, in any order")]
pub struct Client {
    door: Door,
    name: String,
    id: String,
    /// What is asked for first, until it was.
    start: Option<StartProgram>,
    /// It may have been asked for.
    was_sent: bool,
    /// A connection was lost since then.
    was_lost: bool,
    /// How long there has been no connection.
    outage: Outage,
    started: Option<ProgramStarted>,
    /// The connection that there is has the program, and has sent it all input that was lost with others.
    is_attached: bool,
    /// Signals for the program that are said as soon as it is attached.
    signals: Vec<u32>,
    /// The numbers of the bytes that come next, as far as is known.
    expected: [Option<u64>; 2],
    written: [u64; 2],
    input: Option<(Replay, Parts)>,
    /// The attachments to the program from which its newest input may have come, if others have not sent any since.
    attachments: [Option<u64>; 2],
    raw: Option<Changed>,
    ended: Option<ProgramEnded>,
    has_no_reader: bool,
    detach: bool,
    /// Standard input is for the program.
    wants_input: bool,
    /// Only a program with a terminal will do.
    wants_terminal: bool,
}

/// What is read from standard input.
type Parts = mpsc::Receiver<io::Result<Vec<u8>>>;

/// How a connection is over, unless with an error that ends everything.
enum Over {
    /// All is done.
    Done,
    /// It was lost, or refused for now: another one may go on.
    Lost(String),
    /// Refused with an error, unless the host half has only just started.
    Early(Error),
}

impl Client {
    /// Of a program that is to be started.
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

    /// Of a program that runs, which is to get standard input, and has to have a terminal, if that is wanted.
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

    /// Until the program has ended, or only until it has started if it is to be `detached`.
    ///
    /// # Errors
    /// [`Error::Ended`] with what it exited with, unless that is 0.
    pub async fn run(mut self, printer: &mut Printer, detach: bool) -> Result<(), Error> {
        self.detach = detach;
        let failed = |error| Error::Read("standard input".to_owned(), error);
        let mut outputs = Outputs::start().map_err(failed)?;
        let mut signals = local::signals().map_err(failed)?;
        let done = self.until_done(&mut outputs, &mut signals).await;
        // Before anything is said: the terminal is as it was.
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

    /// As many connections as it takes.
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

    /// One connection.
    async fn connect(&mut self, outputs: &mut Outputs, signals: &mut Signals) -> Result<Over, Error> {
        let door = self.door.clone();
        let line = match self.unless_interrupted(signals, door.dial()).await? {
            Ok(line) => line,
            Err(error) if !self.was_sent => return Err(error),
            // It is bound before it is opened to others.
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
            // Whether it arrives is seen by what is answered.
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

    fn refused(&self, status: Status) -> Result<Over, Error> {
        if std::error::Error::source(&status).is_some() {
            return Ok(Over::Lost("guestlet-host closed the connection".to_owned()));
        }
        let by_guest = status.metadata().contains_key(SAID_BY_GUEST);
        let words = status.message().to_owned();
        // A host half that has just started has no session yet; an agent that stops, or has too much to do, says so.
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

    /// Something came from the program; whether nothing else is wanted of it.
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

    /// The program runs, and this connection is attached to it.
    fn begin(&mut self, started: ProgramStarted, say: &impl Fn(Message)) -> Result<(), Error> {
        if self.started.is_none() {
            if self.wants_terminal && !started.has_terminal {
                return Err(self.unfit("it has no terminal", "-t"));
            }
            // Keys that nobody reads need not be passed on one by one: Ctrl-C comes as a signal then.
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

    /// What is read here comes after what others have sent, which the program may not have taken yet.
    fn replay(&self, started: &ProgramStarted) -> Result<Replay, Error> {
        if !started.has_input {
            return Err(self.unfit("it has no input", "-i"));
        }
        if started.input_has_ended {
            return Err(self.unfit("its input has already been closed", "-i"));
        }
        let received = match started.input_received {
            // Nobody but this client has sent any.
            None if self.start.is_some() => Some(started.input_taken),
            received => received,
        };
        let received = received.ok_or_else(|| {
            let why = "the agent is too old to say how much input has arrived";
            self.unfit(why, "-i")
        })?;
        Ok(Replay::from(started.input_taken, received))
    }

    /// What was read here has no place after what others have sent.
    fn input_of_others(&self) -> Error {
        let (id, name) = (&self.id, &self.name);
        let words = format!(
            "another client sent input to the program {id} while there was no connection, so what was read \
             here was not sent; guestctl attach -i {name} {id} continues after what has arrived"
        );
        Error::NotRun(words, LOST)
    }

    /// A program is not one that this option is for.
    fn unfit(&self, why: &str, option: &str) -> Error {
        let (id, name) = (&self.id, &self.name);
        Error::Program(format!(
            "cannot attach to the program {id} of {name} with {option}: {why}; leave out {option}"
        ))
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
}
