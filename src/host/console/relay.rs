//! One console and its client: a task that owns the connection with the hypervisor.
//!
//! ```text
//!  open ──┬─ the hypervisor ends it ─────▶ told what is left of the output, then why
//!         ├─ taken over, VM not known ───▶ lets go at once; told the same
//!         ├─ the caller may no longer ───▶ lets go at once; PERMISSION_DENIED
//!         └─ the client is gone ─────────▶ lets go
//! ```

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::mpsc;
use tonic::{Code, Status, Streaming};

use super::ring::{Next, PART, Ring};
use super::seat::Seat;
use crate::host::audit::Entry;
use crate::host::backends::consoles::{Console, End};
use crate::host::text;
use crate::transport::BoxStream;
use crate::wire::proto::v1::console_closed::Reason;
use crate::wire::proto::v1::from_console::Message as Told;
use crate::wire::proto::v1::to_console::Message;
use crate::wire::proto::v1::{ConsoleClosed, ConsoleOpened, FromConsole, ToConsole};

/// How long a client may take to read what is left when its console is closed.
const FAREWELL: Duration = Duration::from_secs(30);
/// Bytes of input that the hypervisor has not taken.
const MOST_INPUT: usize = 64 << 10;
/// Messages with output that the client has not dealt with.
const UNDER_WAY: u32 = 16;

/// A console that is open, and its client.
pub struct Relay {
    /// The hypervisor's.
    pub console: Console,
    /// What the client says.
    pub messages: Streaming<ToConsole>,
    /// What it is told.
    pub answers: mpsc::Sender<Result<FromConsole, Status>>,
    /// Its record.
    pub entry: Entry,
    /// Completes when the caller may no longer have it.
    pub lost_sight: Pin<Box<dyn Future<Output = ()> + Send>>,
}

/// Why it is over.
enum Over {
    /// The hypervisor has ended it; what the system said, if it did.
    Ended(Option<io::Error>),
    Evicted(String),
    NotKnown,
    Denied,
    /// The client is gone, or has broken the rules.
    Left(Code),
}

/// Bytes that went through.
#[derive(Default)]
struct Counts {
    output: u64,
    lost: u64,
    input: u64,
}

impl Relay {
    /// Until it is over, from whomever it was taken.
    pub async fn run(self, mut seat: Seat) {
        let Self { console, messages, answers, mut entry, lost_sight } = self;
        let Console { stream, place, mut gone, after } = console;
        let (mut ring, mut counts) = (Ring::default(), Counts::default());
        let opened = ConsoleOpened { place: text::clean(&place), taken_from: seat.taken_from.clone() };
        let over = if answers.send(Ok(told(Told::Opened(opened)))).await.is_ok() {
            let work = pass(stream, messages, &answers, &mut ring, &mut counts);
            tokio::select! {
                biased;
                by = seat.ended_by() => Over::Evicted(by),
                () = lost_sight => Over::Denied,
                () = &mut gone => Over::NotKnown,
                over = work => over,
            }
        } else {
            Over::Left(Code::Cancelled)
        };
        // The connection is closed by now: whoever comes next finds the console free.
        drop(seat);
        let (code, last) = match over {
            Over::Left(code) => (code, None),
            Over::Denied => {
                let words =
                    "no [[access]] table in the settings of guestlet-host allows this console any more";
                (Code::PermissionDenied, Some(Err(Status::permission_denied(words))))
            }
            Over::Evicted(by) => (Code::Aborted, Some(Ok(closed(Reason::TakenOver, &by)))),
            Over::NotKnown => (Code::Unavailable, Some(Ok(closed(Reason::NotKnown, "")))),
            Over::Ended(why) => {
                let reason = match after.await {
                    End::Vm => Reason::VmEnded,
                    End::Console => Reason::Closed,
                };
                let why = why.map(|why| why.to_string()).unwrap_or_default();
                (Code::Ok, Some(Ok(closed(reason, &why))))
            }
        };
        let Counts { output, lost, input } = counts;
        entry.about(format!("closed; output {output}, of it lost {lost}, input {input} bytes"));
        entry.end(code);
        if let Some(last) = last {
            let farewell = async {
                while let Some(next) = ring.next() {
                    if answers.send(Ok(answer(next))).await.is_err() {
                        return;
                    }
                }
                // It may have gone.
                let _ = answers.send(last).await;
            };
            let _ = tokio::time::timeout(FAREWELL, farewell).await;
        }
    }
}

/// Passes everything on in both directions.
async fn pass(
    stream: BoxStream,
    mut messages: Streaming<ToConsole>,
    answers: &mpsc::Sender<Result<FromConsole, Status>>,
    ring: &mut Ring,
    counts: &mut Counts,
) -> Over {
    let (mut reader, mut writer) = tokio::io::split(stream);
    let mut part = vec![0; PART];
    let mut client = Client { is_told: true, ..Client::default() };
    loop {
        tokio::select! {
            read = reader.read(&mut part) => match read {
                Ok(0) => return Over::Ended(None),
                Ok(length) => {
                    counts.output += length as u64;
                    counts.lost += ring.push(&part[..length]);
                }
                Err(error) => return Over::Ended(Some(error)),
            },
            permit = answers.reserve(), if !client.is_told || client.under_way < UNDER_WAY && !ring.is_empty() => {
                let Ok(permit) = permit else { return Over::Left(Code::Cancelled) };
                if !client.is_told {
                    client.is_told = true;
                    permit.send(Ok(told(Told::InputTaken(counts.input))));
                } else if let Some(next) = ring.next() {
                    client.under_way += 1;
                    permit.send(Ok(answer(next)));
                }
            },
            written = writer.write(client.input.as_slices().0), if !client.input.is_empty() => match written {
                Ok(0) => return Over::Ended(None),
                Ok(length) => {
                    client.input.drain(..length);
                    counts.input += length as u64;
                    client.is_told = false;
                }
                Err(error) => return Over::Ended(Some(error)),
            },
            message = messages.message() => match message {
                Ok(Some(message)) => if let Err(words) = client.says(message) {
                    // It may have gone.
                    let _ = answers.try_send(Err(Status::invalid_argument(words)));
                    return Over::Left(Code::InvalidArgument);
                },
                Ok(None) => return Over::Left(Code::Ok),
                Err(_) => return Over::Left(Code::Cancelled),
            },
            () = answers.closed() => return Over::Left(Code::Cancelled),
        }
    }
}

/// What is known of a client.
#[derive(Debug, Default)]
struct Client {
    /// What it has sent and the hypervisor has not taken yet.
    input: VecDeque<u8>,
    /// It knows how much of its input was taken.
    is_told: bool,
    /// Messages with output that it has not dealt with.
    under_way: u32,
}

impl Client {
    /// Takes a message, unless that breaks the rules; in words how.
    fn says(&mut self, message: ToConsole) -> Result<(), &'static str> {
        match message.message {
            Some(Message::Input(bytes)) if bytes.is_empty() || bytes.len() > PART => {
                Err("a message has input of 1 byte to 16 KiB")
            }
            Some(Message::Input(bytes)) if self.input.len() + bytes.len() > MOST_INPUT => {
                Err("more than 64 KiB of input are under way")
            }
            Some(Message::Input(bytes)) => {
                self.input.extend(bytes);
                Ok(())
            }
            Some(Message::Taken(count)) => {
                let left = self.under_way.checked_sub(count);
                self.under_way = left.ok_or("more messages are taken than were sent")?;
                Ok(())
            }
            Some(Message::Open(_)) | None => Err("the console is open already"),
        }
    }
}

fn told(message: Told) -> FromConsole {
    FromConsole { message: Some(message) }
}

fn answer(next: Next) -> FromConsole {
    told(match next {
        Next::Lost(count) => Told::Lost(count),
        Next::Bytes(bytes) => Told::Output(bytes),
    })
}

fn closed(reason: Reason, detail: &str) -> FromConsole {
    told(Told::Closed(ConsoleClosed { reason: reason.into(), detail: text::clean(detail) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_keeps_the_rules() {
        let mut client = Client { under_way: 3, ..Client::default() };
        let mut says = |message| client.says(ToConsole { message });
        let input = |length| Some(Message::Input(vec![0; length]));
        assert_eq!(says(Some(Message::Taken(2))), Ok(()));
        says(Some(Message::Taken(2))).unwrap_err();
        for wrong in [input(0), input(PART + 1), None] {
            says(wrong).unwrap_err();
        }
        for _ in 0..4 {
            assert_eq!(says(input(PART)), Ok(()));
        }
        says(input(1)).unwrap_err();
        assert_eq!((client.input.len(), client.under_way), (MOST_INPUT, 1));
    }
}
