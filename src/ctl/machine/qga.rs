//! `guestctl qga`: executes any QGA command, and prints the answer as qemu-ga would write it.

use std::io::{self, Read as _};
use std::time::Duration;

use serde::Deserialize;

use crate::ctl::Error;
use crate::ctl::client::Daemon;
use crate::ctl::machine::answer;
use crate::ctl::print::Printer;
use crate::wire::proto::v1::ExecuteQgaRequest;

/// Longest command in bytes.
const LONGEST: u64 = 1 << 20;

/// Part of an answer that tells whether the command failed.
#[derive(Deserialize)]
struct Answer {
    error: Option<Failure>,
}

#[derive(Deserialize)]
struct Failure {
    class: String,
    desc: String,
}

/// Executes a QGA command, and prints the answer, whatever it is.
///
/// # Errors
/// Fails if the guest cannot be reached, or answers with an error.
pub async fn run(
    daemon: &Daemon,
    printer: &mut Printer,
    name: String,
    command: String,
    within: Duration,
) -> Result<(), Error> {
    let command = if command == "-" { read()? } else { command.into_bytes() };
    let request = ExecuteQgaRequest { name: name.clone(), command };
    let mut client = daemon.qga();
    let answer = answer(client.execute_qga(request), &name, within).await?.answer;
    printer.text(&String::from_utf8_lossy(&answer))?;
    if answer.is_empty() {
        // Some commands, such as guest-shutdown, send no answer if they succeed.
        return Ok(());
    }
    match serde_json::from_slice(&answer) {
        Ok(Answer { error: None }) => Ok(()),
        Ok(Answer { error: Some(Failure { class, desc }) }) => Err(Error::Qga(format!("{class}: {desc}"))),
        Err(error) => Err(Error::Qga(format!("the guest's answer is not a QGA answer: {error}"))),
    }
}

/// Reads standard input, up to the number of bytes at which it is refused for its size.
fn read() -> Result<Vec<u8>, Error> {
    let mut command = Vec::new();
    let read = io::stdin().lock().take(LONGEST + 1).read_to_end(&mut command);
    read.map_err(|error| Error::Read("standard input".to_owned(), error))?;
    Ok(command)
}
