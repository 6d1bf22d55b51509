//! The calls that are handed on to agents: one row for each.

use std::time::Duration;

use tonic::Status;

use crate::access::verb::{self, Verb};
use crate::host::asked::{Asked, Object};
use crate::host::handed_on::HandedOn;
use crate::host::text;
use crate::wire::proto::v1::program_ended::How;
use crate::wire::proto::v1::trimmed_file_system::Outcome;
use crate::wire::proto::v1::{
    DiskOfFileSystem, ExecuteQgaRequest, ExecuteQgaResponse, FileSystemOnDisk, FreezeFileSystemsRequest,
    FreezeFileSystemsResponse, FreezeState, GetFreezeRequest, ListFileSystemsRequest,
    ListFileSystemsResponse, ListProgramsRequest, ListProgramsResponse, ShutdownMode, ShutdownRequest,
    ShutdownResponse, SignalProgramRequest, SignalProgramResponse, SuspendResponse, SuspendToBothRequest,
    SuspendToDiskRequest, SuspendToMemoryRequest, ThawFileSystemsRequest, ThawFileSystemsResponse,
    TrimFileSystemsRequest, TrimFileSystemsResponse, TrimmedFileSystem,
};

/// What a guest that is well answers soon.
const USUAL: Duration = Duration::from_secs(60);
/// What may wait for hooks, disks, or whatever a program does.
const LONG: Duration = Duration::from_secs(600);

/// What waits for nothing but the agent.
const SHORT: Duration = Duration::from_secs(10);
/// Most programs that are listed of a guest.
const MOST_LISTED: usize = 1024;

/// A row: the request, its verb and the path of its method, and what it is about; what the agent answers, and how that is
/// cleaned; how long it may take.
macro_rules! handed_on {
    ($request:ty, $verb:expr, $path:literal, $subject:expr; $answer:ty, $clean:expr; $within:expr $(, urgent = $urgent:literal)?) => {
        impl Asked for $request {
            fn verb(&self) -> &'static Verb {
                let verb: fn(&$request) -> &'static Verb = $verb;
                verb(self)
            }

            fn object(&self) -> Object<'_> {
                Object::Machine(&self.name)
            }

            fn subject(&self) -> String {
                let subject: fn(&$request) -> String = $subject;
                subject(self)
            }
        }

        impl HandedOn for $request {
            type Answer = $answer;
            const PATH: &'static str = $path;
            const WITHIN: Duration = $within;
            $(const IS_URGENT: bool = $urgent;)?

            fn take_name(&mut self) -> String {
                std::mem::take(&mut self.name)
            }

            fn clean(answer: $answer) -> Result<$answer, Status> {
                let clean: fn($answer) -> Result<$answer, Status> = $clean;
                clean(answer)
            }
        }
    };
}

handed_on!(
    FreezeFileSystemsRequest, |_| &verb::FREEZE, "/guestlet.v1.Freeze/FreezeFileSystems",
    |asked| asked.mount_points.join(" ");
    FreezeFileSystemsResponse,
    |answer| Ok(FreezeFileSystemsResponse { mount_points: cleaned(&answer.mount_points), ..answer });
    LONG
);
handed_on!(
    ThawFileSystemsRequest, |_| &verb::THAW, "/guestlet.v1.Freeze/ThawFileSystems",
    |asked| asked.mount_points.join(" ");
    ThawFileSystemsResponse, Ok;
    USUAL, urgent = true
);
handed_on!(
    GetFreezeRequest, |_| &verb::FREEZE_STATUS, "/guestlet.v1.Freeze/GetFreeze", |_| String::new();
    FreezeState, |state| Ok(clean_freeze(&state));
    USUAL, urgent = true
);
handed_on!(
    ListFileSystemsRequest, |_| &verb::FS, "/guestlet.v1.FileSystems/ListFileSystems", |_| String::new();
    ListFileSystemsResponse, |answer| Ok(clean_file_systems(answer));
    USUAL
);
handed_on!(
    TrimFileSystemsRequest, |_| &verb::TRIM, "/guestlet.v1.FileSystems/TrimFileSystems",
    |asked| asked.mount_points.join(" ");
    TrimFileSystemsResponse, |answer| Ok(clean_trims(answer));
    LONG
);
handed_on!(
    ShutdownRequest,
    |asked| if asked.mode() == ShutdownMode::Reboot { &verb::REBOOT } else { &verb::SHUTDOWN },
    "/guestlet.v1.Power/Shutdown",
    |asked| asked.mode().as_str_name().trim_start_matches("SHUTDOWN_MODE_").to_lowercase();
    ShutdownResponse, Ok;
    USUAL
);
handed_on!(
    SuspendToMemoryRequest, |_| &verb::SUSPEND, "/guestlet.v1.Power/SuspendToMemory", |_| String::new();
    SuspendResponse, Ok;
    USUAL
);
handed_on!(
    SuspendToDiskRequest, |_| &verb::SUSPEND_TO_DISK, "/guestlet.v1.Power/SuspendToDisk", |_| String::new();
    SuspendResponse, Ok;
    USUAL
);
handed_on!(
    SuspendToBothRequest, |_| &verb::SUSPEND_TO_BOTH, "/guestlet.v1.Power/SuspendToBoth", |_| String::new();
    SuspendResponse, Ok;
    USUAL
);
handed_on!(
    ExecuteQgaRequest, |_| &verb::QGA, "/guestlet.v1.Qga/ExecuteQga", |asked| command(&asked.command);
    ExecuteQgaResponse, clean_qga; LONG
);

handed_on!(
    ListProgramsRequest, |_| &verb::PS, "/guestlet.v1.Exec/ListPrograms", |_| String::new();
    ListProgramsResponse, |answer| Ok(clean_programs(answer)); SHORT
);
handed_on!(
    SignalProgramRequest, |_| &verb::KILL, "/guestlet.v1.Exec/SignalProgram", |asked| asked.id.clone();
    SignalProgramResponse, Ok; SHORT, urgent = true
);

/// Which command is asked for; the guest reads more dialects than this.
fn command(request: &[u8]) -> String {
    #[derive(serde::Deserialize)]
    struct Named {
        execute: String,
    }
    let named = serde_json::from_slice::<Named>(request);
    named.map_or_else(|_| "not known".to_owned(), |named| text::clean(&named.execute))
}

fn clean_qga(answer: ExecuteQgaResponse) -> Result<ExecuteQgaResponse, Status> {
    if answer.answer.is_empty() {
        return Ok(answer);
    }
    let clean = text::clean_json(&answer.answer);
    let mut answer =
        clean.ok_or_else(|| Status::data_loss("what the guest answered is no JSON"))?.into_bytes();
    answer.push(b'\n');
    Ok(ExecuteQgaResponse { answer })
}

fn cleaned(texts: &[String]) -> Vec<String> {
    texts.iter().map(|text| text::clean(text)).collect()
}

fn clean_freeze(state: &FreezeState) -> FreezeState {
    FreezeState {
        stage: text::clean(&state.stage),
        holder: text::clean_words(&state.holder),
        since: state.since.filter(text::can_be_written),
        mount_points: cleaned(&state.mount_points),
        seconds_left: state.seconds_left,
        spoiled: text::clean_words(&state.spoiled),
    }
}

fn clean_file_systems(answer: ListFileSystemsResponse) -> ListFileSystemsResponse {
    let disk = |disk: DiskOfFileSystem| DiskOfFileSystem {
        file: text::clean(&disk.file),
        serial: text::clean(&disk.serial),
    };
    let file_systems = answer.file_systems.into_iter().map(|one| FileSystemOnDisk {
        mount_point: text::clean(&one.mount_point),
        r#type: text::clean(&one.r#type),
        device: text::clean(&one.device),
        disks: one.disks.into_iter().map(disk).collect(),
        ..one
    });
    ListFileSystemsResponse { file_systems: file_systems.collect() }
}

fn clean_trims(answer: TrimFileSystemsResponse) -> TrimFileSystemsResponse {
    let file_systems = answer.file_systems.into_iter().map(|one| TrimmedFileSystem {
        mount_point: text::clean(&one.mount_point),
        outcome: one.outcome.map(|outcome| match outcome {
            Outcome::Problem(problem) => Outcome::Problem(text::clean_words(&problem)),
            trimmed @ Outcome::Trimmed(_) => trimmed,
        }),
    });
    TrimFileSystemsResponse { file_systems: file_systems.collect() }
}

fn clean_programs(mut answer: ListProgramsResponse) -> ListProgramsResponse {
    answer.programs.truncate(MOST_LISTED);
    for program in &mut answer.programs {
        program.id = text::clean(&program.id);
        program.user = text::clean(&program.user);
        program.command = text::clean_words(&program.command);
        if let Some(How::Unknown(why)) = program.ended.as_mut().and_then(|ended| ended.how.as_mut()) {
            *why = text::clean(why);
        }
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::proto::v1::{Program, ProgramEnded};

    #[test]
    fn a_list_of_programs_is_cleaned_and_no_longer_than_it_may_be() {
        let how = Some(How::Unknown("\u{7}".into()));
        let program = Program {
            command: "a\nb".into(),
            ended: Some(ProgramEnded { how, ..ProgramEnded::default() }),
            ..Program::default()
        };
        let answer = clean_programs(ListProgramsResponse { programs: vec![program; MOST_LISTED + 1] });
        assert_eq!(answer.programs.len(), MOST_LISTED);
        assert_eq!(answer.programs[0].command, "a\u{fffd}b");
        let ended = answer.programs[0].ended.as_ref().unwrap();
        assert_eq!(ended.how, Some(How::Unknown("\u{fffd}".into())));
    }
}
