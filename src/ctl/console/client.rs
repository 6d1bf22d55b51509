//! Client of one console, over as many connections as necessary.
//!
//! ```text
//! open ──▶ at it ──closed, or left──▶ output written ──▶ exit code
//!            │ lost
//!            └──▶ dial, open again (keys are lost meanwhile, and so is what the guest writes)
//! ```

use std::collections::VecDeque;
use std::pin::pin;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Code, Status};

use super::seat::{Seat, signals};
use super::{ENDED, LOST, TAKEN_OVER};
use crate::ctl::Error;
use crate::ctl::client::Daemon;
use crate::ctl::door::Door;
use crate::ctl::exec::local::{Outputs, PART};
use crate::ctl::outage::Outage;
use crate::ctl::signals::Signals;
use crate::wire::proto::v1::console_closed::Reason;
use crate::wire::proto::v1::from_console::Message as Told;
use crate::wire::proto::v1::to_console::Message;
use crate::wire::proto::v1::{ConsoleClosed, ConsoleOpened, ConsoleRequest, FromConsole, ToConsole};

/// Limit of the input bytes that the hypervisor has not taken yet.
const WINDOW: u64 = 64 << 10;
/// Time for which reconnecting is tried.
const PATIENCE: Duration = Duration::from_secs(600);
/// Timeout for guestlet-host to open a console: longer than that of guestlet-host for a hypervisor.
const OPENING: Duration = Duration::from_secs(60);

/// Client of a console that reconnects after a lost connection.
pub struct Client {
    door: Door,
    name: String,
    force: bool,
    outage: Outage,
    /// True if the console was open before.
    was_open: bool,
    seat: Seat,
    /// Bytes sent on this connection, and those of them that the hypervisor has taken.
    sent: u64,
    taken: u64,
    /// Positions of the output at the ends of the messages of this connection that are not written yet.
    messages: VecDeque<u64>,
}

/// Reasons why the client has ended.
enum Done {
    /// The user has left, or the reader of the output has closed it.
    Left,
    /// The session has ended for this reason, with this exit code.
    Ended(String, u8),
}

/// Reasons why a connection has ended.
enum Over {
    Done(Done),
    /// The connection was lost, or refused for now.
    Lost(String),
    /// The connection was refused with an error, unless the host half has only just started.
    Early(Error),
}

impl Client {
    /// Creates a client of the console of the VM of this name.
    pub fn new(door: Door, name: String, force: bool) -> Self {
        let outage = Outage::none(PATIENCE);
        Self {
            door,
            name,
            force,
            outage,
            was_open: false,
            seat: Seat::default(),
            sent: 0,
            taken: 0,
            messages: VecDeque::new(),
        }
    }

    /// Runs until the session ends.
    ///
    /// # Errors
    /// Fails if the console cannot be opened, or ends for a reason other than the wish of the user.
    pub async fn run(mut self) -> Result<(), Error> {
        let failed = |error| Error::Read("standard input".to_owned(), error);
        let mut outputs = Outputs::start().map_err(failed)?;
        let mut signals = signals().map_err(failed)?;
        let done = self.until_done(&mut outputs, &mut signals).await;
        // The terminal is restored before any message.
        self.seat.end();
        match done? {
            Done::Left => Ok(()),
            Done::Ended(words, code) => Err(Error::NotRun(words, code)),
        }
    }

    /// Makes as many connections as necessary.
    async fn until_done(&mut self, outputs: &mut Outputs, signals: &mut Signals<u8>) -> Result<Done, Error> {
        loop {
            match self.connect(outputs, signals).await? {
                Over::Done(Done::Left) => return Ok(Done::Left),
                Over::Done(done) => {
                    // Output that came before the end is still shown.
                    self.seat.show_rest(outputs, signals).await?;
                    return Ok(done);
                }
                Over::Lost(why) => self.outage.goes_on(why, Instant::now()),
                Over::Early(error) => {
                    if !self.outage.may_be_early(error.to_string(), Instant::now()) {
                        return Err(error);
                    }
                }
            }
            if self.outage.is_too_long(Instant::now()) {
                let words =
                    format!("lost the connection to the console of {}: {}", self.name, self.outage.why());
                return Ok(Done::Ended(words, LOST));
            }
            let pause = tokio::time::sleep(self.door.pause());
            if self.unless_left(outputs, signals, pause).await?.is_none() {
                return Ok(Done::Left);
            }
        }
    }

    /// Makes one connection, and uses it until it ends.
    async fn connect(&mut self, outputs: &mut Outputs, signals: &mut Signals<u8>) -> Result<Over, Error> {
        let door = self.door.clone();
        let line = match self.unless_left(outputs, signals, door.dial()).await? {
            None => return Ok(Over::Done(Done::Left)),
            Some(Ok(line)) => line,
            Some(Err(error)) if !self.was_open => return Err(error),
            // The socket is bound before its mode gives others access, so this may be temporary.
            Some(Err(error @ Error::Forbidden(_))) => return Ok(Over::Early(error)),
            Some(Err(error)) => return Ok(Over::Lost(error.to_string())),
        };
        match line.over(async |daemon| self.converse(&daemon, outputs, signals).await).await {
            Err(error) if self.was_open && error.is_of_connection() => Ok(Over::Lost(error.to_string())),
            over => over,
        }
    }

    async fn converse(
        &mut self,
        daemon: &Daemon,
        outputs: &mut Outputs,
        signals: &mut Signals<u8>,
    ) -> Result<Over, Error> {
        let (requests, all) = mpsc::unbounded_channel();
        // The console is taken over once, and not again from the client that has it then.
        let force = self.force && !self.was_open;
        let open = ConsoleRequest { name: self.name.clone(), force };
        // A lost message shows in the answers.
        let _ = requests.send(said(Message::Open(open)));
        let mut client = daemon.console();
        let opening = tokio::time::timeout(OPENING, client.open_console(UnboundedReceiverStream::new(all)));
        let mut answers = match self.unless_left(outputs, signals, opening).await? {
            None => return Ok(Over::Done(Done::Left)),
            Some(Ok(Ok(answers))) => answers.into_inner(),
            Some(Ok(Err(status))) => return self.refused(status),
            Some(Err(_)) if self.was_open => return Ok(Over::Lost(Error::Silent.to_string())),
            Some(Err(_)) => return Err(Error::Silent),
        };
        (self.sent, self.taken) = (0, 0);
        self.messages.clear();
        let mut is_open = false;
        loop {
            let may_read = is_open && self.sent - self.taken + PART as u64 <= WINDOW;
            tokio::select! {
                biased;
                signal = signals.next() => return Err(Error::Ended(128 + signal)),
                written = outputs.written.recv() => {
                    if self.seat.has_written(written)? {
                        return Ok(Over::Done(Done::Left));
                    }
                    self.tell_taken(&requests);
                },
                part = self.seat.next_part(), if may_read => {
                    let (bytes, leaves) = self.seat.read(part)?;
                    if !bytes.is_empty() {
                        self.sent += bytes.len() as u64;
                        let _ = requests.send(said(Message::Input(bytes)));
                    }
                    if leaves {
                        return Ok(Over::Done(Done::Left));
                    }
                },
                answer = answers.message(), if self.seat.has_room() => match answer {
                    Ok(Some(FromConsole { message: Some(Told::Opened(opened)) })) => {
                        self.begin(&opened)?;
                        is_open = true;
                    }
                    Ok(Some(answer)) => {
                        if let Some(done) = self.take(answer, outputs) {
                            return Ok(Over::Done(done));
                        }
                        self.tell_taken(&requests);
                    }
                    Ok(None) => return Ok(self.lost("guestlet-host ended the console without a reason")),
                    Err(status) => return self.refused(status),
                },
            }
        }
    }

    /// Handles the opening of the console.
    fn begin(&mut self, opened: &ConsoleOpened) -> Result<(), Error> {
        let is_again = std::mem::replace(&mut self.was_open, true);
        if is_again {
            let words = "reconnected to the console; what the guest wrote meanwhile is lost";
            if self.outage.is_told() {
                self.seat.say(words);
            }
            self.outage.ends();
            return Ok(());
        }
        self.seat.begin()?;
        let ConsoleOpened { place, taken_from } = opened;
        if !taken_from.is_empty() {
            self.seat.say(&format!("the console was taken from {taken_from}"));
        }
        self.seat.greet(&self.name, place);
        Ok(())
    }

    /// Handles an answer; returns the reason of the end if this was the last one.
    fn take(&mut self, answer: FromConsole, outputs: &Outputs) -> Option<Done> {
        match answer.message {
            Some(Told::Output(bytes)) => {
                let end = self.seat.show(bytes, outputs);
                self.messages.push_back(end);
            }
            // The count is limited to what was sent, whatever the peer reports.
            Some(Told::InputTaken(count)) => self.taken = count.clamp(self.taken, self.sent),
            Some(Told::Lost(count)) => {
                self.messages.push_back(self.seat.received());
                let words = format!(
                    "{count} bytes of the guest's output were dropped here: they came faster than they were read"
                );
                self.seat.say(&words);
            }
            Some(Told::Closed(closed)) => return Some(self.closed(&closed)),
            Some(Told::Opened(_)) | None => {}
        }
        None
    }

    /// Acknowledges the messages whose output has been written, if there are any.
    fn tell_taken(&mut self, requests: &mpsc::UnboundedSender<ToConsole>) {
        let mut count = 0;
        while self.messages.front().is_some_and(|end| *end <= self.seat.written()) {
            self.messages.pop_front();
            count += 1;
        }
        if count > 0 {
            // A lost message shows in the answers.
            let _ = requests.send(said(Message::Taken(count)));
        }
    }

    fn closed(&self, closed: &ConsoleClosed) -> Done {
        let (name, detail) = (&self.name, &closed.detail);
        match closed.reason() {
            Reason::VmEnded => Done::Ended(format!("the VM {name} has ended"), ENDED),
            Reason::TakenOver => {
                Done::Ended(format!("{detail} has taken the console of {name} over"), TAKEN_OVER)
            }
            Reason::NotKnown => {
                let words = format!("the settings of guestlet-host for {name} have changed");
                Done::Ended(words, ENDED)
            }
            Reason::Closed | Reason::Unspecified if detail.is_empty() => {
                Done::Ended(format!("the hypervisor has closed the console of {name}"), ENDED)
            }
            Reason::Closed | Reason::Unspecified => {
                Done::Ended(format!("the hypervisor has closed the console of {name}: {detail}"), ENDED)
            }
        }
    }

    /// Handles the loss of a connection with an open console.
    fn lost(&mut self, why: &str) -> Over {
        let unknown = self.sent - self.taken;
        if unknown > 0 {
            let words =
                format!("it is not known whether the last {unknown} bytes of the input reached the guest");
            self.seat.say(&words);
            (self.sent, self.taken) = (0, 0);
        }
        Over::Lost(why.to_owned())
    }

    fn refused(&mut self, status: Status) -> Result<Over, Error> {
        if !self.was_open {
            return Err(Error::of_call(status, &self.name));
        }
        if std::error::Error::source(&status).is_some() {
            return Ok(self.lost("guestlet-host closed the connection"));
        }
        match status.code() {
            Code::Unavailable | Code::ResourceExhausted | Code::DeadlineExceeded => {
                Ok(self.lost(status.message()))
            }
            // A host half that has just started does not know its VMs yet.
            Code::NotFound => Ok(Over::Early(Error::of_call(status, &self.name))),
            // Another client has the console by now, or the VM is off.
            _ => Ok(Over::Done(Done::Ended(status.message().to_owned(), LOST))),
        }
    }

    /// Runs `work` while the console is not connected, unless the user leaves. Keys typed at a terminal meanwhile
    /// are discarded; other input waits.
    async fn unless_left<T>(
        &mut self,
        outputs: &mut Outputs,
        signals: &mut Signals<u8>,
        work: impl Future<Output = T>,
    ) -> Result<Option<T>, Error> {
        let mut work = pin!(work);
        loop {
            let is_raw = self.seat.is_raw();
            tokio::select! {
                biased;
                signal = signals.next() => return Err(Error::Ended(128 + signal)),
                written = outputs.written.recv() => if self.seat.has_written(written)? { return Ok(None) },
                part = self.seat.next_part(), if is_raw => if self.seat.read(part)?.1 { return Ok(None) },
                () = until(self.outage.tell_at()) => {
                    let why = self.outage.tell().to_owned();
                    let what = if is_raw { "keys are lost meanwhile; Ctrl-] disconnects" } else { "input waits" };
                    self.seat.say(&format!("{why}; reconnecting to the console ({what})"));
                }
                done = &mut work => return Ok(Some(done)),
            }
        }
    }
}

fn said(message: Message) -> ToConsole {
    ToConsole { message: Some(message) }
}

/// Completes at this time; never without one.
async fn until(when: Option<Instant>) {
    match when {
        Some(when) => tokio::time::sleep_until(when.into()).await,
        None => std::future::pending().await,
    }
}
