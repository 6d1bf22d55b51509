//! `guestctl ps`: the programs that were started in a guest.

use std::time::SystemTime;

use serde::Serialize;

use crate::ctl::client::{Daemon, answer};
use crate::ctl::print::Printer;
use crate::ctl::{Error, words};
use crate::text;
use crate::wire::proto::v1::{ListProgramsRequest, Program, program_ended::How};

/// Program in the list, for programs that read it. Keys are part of the interface: add, never change.
#[derive(Debug, Serialize)]
struct Value {
    id: String,
    process_id: u32,
    user: String,
    command: String,
    started: String,
    has_terminal: bool,
    is_attached: bool,
    is_running: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    exit_code: Option<u8>,
}

/// Lists the programs.
///
/// # Errors
/// Fails if the guest cannot be reached, or standard output cannot be written.
pub async fn run(daemon: &Daemon, printer: &mut Printer, name: String) -> Result<(), Error> {
    let mut call = daemon.exec();
    let programs =
        answer(call.list_programs(ListProgramsRequest { name: name.clone() }), &name).await?.programs;
    let values: Vec<_> = programs.iter().map(value).collect();
    Ok(printer.value(&values, || rows(&programs))?)
}

fn value(program: &Program) -> Value {
    Value {
        id: program.id.clone(),
        process_id: program.process_id,
        user: program.user.clone(),
        command: program.command.clone(),
        started: words::time(program.started.as_ref()),
        has_terminal: program.has_terminal,
        is_attached: program.is_attached,
        is_running: program.ended.is_none(),
        exit_code: program.ended.as_ref().map(|ended| super::exit_code(ended).0),
    }
}

fn rows(programs: &[Program]) -> String {
    let now = SystemTime::now();
    let mut rows = vec![["ID", "PID", "USER", "STATE", "SINCE", "COMMAND"].map(str::to_owned)];
    rows.extend(programs.iter().map(|program| {
        [
            program.id.clone(),
            program.process_id.to_string(),
            program.user.clone(),
            state(program),
            words::age(program.started.as_ref(), now),
            program.command.clone(),
        ]
    }));
    text::table(&rows)
}

fn state(program: &Program) -> String {
    match program.ended.as_ref().map(|ended| ended.how.as_ref()) {
        None if program.is_attached => "attached".to_owned(),
        None => "running".to_owned(),
        Some(Some(How::ExitCode(code))) => format!("exited {code}"),
        Some(Some(How::Signal(signal))) => format!("signal {signal}"),
        Some(_) => "ended".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::proto::v1::ProgramEnded;

    #[test]
    fn a_program_has_one_row() {
        let ended = |how| Some(ProgramEnded { how: Some(how), ..ProgramEnded::default() });
        let program = |ended| Program {
            id: "0123abcd".into(),
            process_id: 7,
            user: "root".into(),
            ended,
            ..Program::default()
        };
        let text = rows(&[program(None), program(ended(How::ExitCode(3))), program(ended(How::Signal(9)))]);
        for word in ["0123abcd", "running", "exited 3", "signal 9"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        assert_eq!(value(&program(ended(How::Signal(9)))).exit_code, Some(137));
    }
}
