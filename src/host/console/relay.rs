//! Relay between one console and its client: a task that owns the connection to the hypervisor.
//!
//! ```text
//!  open ──┬─ closed by the hypervisor ──────▶ the client gets the remaining output, then the reason
//!         ├─ taken over, VM not known ──────▶ releases the console at once; the client gets the same
//!         ├─ caller no longer allowed ──────▶ releases the console at once; PERMISSION_DENIED
//!         └─ client disconnected ───────────▶ releases the console
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

/// Time for a client to read the remaining output after its console was closed.
const FAREWELL: Duration = Duration::from_secs(30);
/// Limit on the bytes of input that the hypervisor has not accepted yet.
const MOST_INPUT: usize = 64 << 10;
/// Limit on the messages with output that the client has not acknowledged.
const UNDER_WAY: u32 = 16;

/// Open console, and its client.
pub struct Relay {
    /// Connection to the hypervisor's console.
    pub console: Console,
    /// Messages from the client.
    pub messages: Streaming<ToConsole>,
    /// Messages to the client.
    pub answers: mpsc::Sender<Result<FromConsole, Status>>,
    /// Audit record of the connection; it gets the byte counts at the end.
    pub entry: Entry,
    /// Completes when the access rules no longer allow the caller this console.
    pub lost_sight: Pin<Box<dyn Future<Output = ()> + Send>>,
}

/// Reason why the relay ended.
enum Over {
    /// The hypervisor closed the console; with the system error, if there was one.
    Ended(Option<io::Error>),
    Evicted(String),
    NotKnown,
    Denied,
    /// The client disconnected or violated the protocol.
    Left(Code),
}

/// Bytes transferred, for the audit record.
#[derive(Default)]
struct Counts {
    output: u64,
    lost: u64,
    input: u64,
}

impl Relay {
    /// Relays until the console is closed or the client ends, and then tells the client why.
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
        // The connection is closed by now, so the next client finds the console free.
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
                // The client may have disconnected.
                let _ = answers.send(last).await;
            };
            let _ = tokio::time::timeout(FAREWELL, farewell).await;
        }
    }
}

/// Passes data in both directions.
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
                    // The client may have disconnected.
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

/// State of a client.
#[derive(Debug, Default)]
struct Client {
    /// Input that the hypervisor has not accepted yet.
    input: VecDeque<u8>,
    /// True if the client has been sent the current count of accepted input.
    is_told: bool,
    /// Messages with output that the client has not acknowledged.
    under_way: u32,
}

impl Client {
    /// Takes a message from the client. Fails with a description if it violates the protocol.
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
                self.under_way = left.ok_or("more messages are reported as taken than were sent")?;
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
