//! Cleans and bounds the answers of agents so that they are safe to display, whatever a guest has sent.

use tonic::Status;

use crate::host::text;
use crate::wire::proto::v1::program_ended::How;
use crate::wire::proto::v1::trimmed_file_system::Outcome;
use crate::wire::proto::v1::{
    self, DiskOfFileSystem, ExecuteQgaResponse, FileSystemOnDisk, FreezeState, ListFileSystemsResponse,
    ListProgramsResponse, TrimFileSystemsResponse, TrimmedFileSystem,
};

/// Programs of a guest that are listed at most.
const MOST_LISTED: usize = 1024;

/// Journal entries in one answer at most.
const MOST_ENTRIES: usize = 1024;

/// Returns the name of the requested QGA command, for the audit log. Only plain JSON is understood, while the
/// guest accepts more dialects.
pub fn command(request: &[u8]) -> String {
    #[derive(serde::Deserialize)]
    struct Named {
        execute: String,
    }
    let named = serde_json::from_slice::<Named>(request);
    named.map_or_else(|_| "not known".to_owned(), |named| text::clean(&named.execute))
}

/// Cleans the answer to a QGA command, and makes it one line.
///
/// # Errors
/// If it is not JSON.
pub fn qga(answer: ExecuteQgaResponse) -> Result<ExecuteQgaResponse, Status> {
    if answer.answer.is_empty() {
        return Ok(answer);
    }
    let clean = text::clean_json(&answer.answer);
    let mut answer =
        clean.ok_or_else(|| Status::data_loss("what the guest answered is not JSON"))?.into_bytes();
    answer.push(b'\n');
    Ok(ExecuteQgaResponse { answer })
}

/// Cleans each of these texts.
pub fn all(texts: &[String]) -> Vec<String> {
    texts.iter().map(|text| text::clean(text)).collect()
}

/// Cleans journal entries, whose messages may have several lines, and limits their number.
pub fn journal(mut answer: v1::ReadJournalResponse) -> v1::ReadJournalResponse {
    answer.entries.truncate(MOST_ENTRIES);
    answer.cursor = text::clean(&answer.cursor);
    for entry in &mut answer.entries {
        entry.time = entry.time.filter(text::can_be_written);
        entry.identifier = text::clean(&entry.identifier);
        entry.unit = text::clean(&entry.unit);
        entry.message = text::clean_lines(&entry.message);
    }
    answer
}

/// Cleans the texts in the state of a freeze.
pub fn freeze(mut state: FreezeState) -> FreezeState {
    state.stage = text::clean(&state.stage);
    state.holder = text::clean_words(&state.holder);
    state.since = state.since.filter(text::can_be_written);
    state.mount_points = all(&state.mount_points);
    state.spoiled = text::clean_words(&state.spoiled);
    state
}

/// Cleans the texts in the result of a thaw.
pub fn thawed(mut answer: v1::ThawFileSystemsResponse) -> v1::ThawFileSystemsResponse {
    answer.receipt = text::clean(&answer.receipt);
    answer.level = text::clean(&answer.level);
    answer.reasons.truncate(MOST_LISTED);
    for reason in &mut answer.reasons {
        *reason = text::clean_words(reason);
    }
    answer
}

/// Cleans receipts of freezes, and limits their number.
pub fn receipts(mut answer: v1::ListReceiptsResponse) -> v1::ListReceiptsResponse {
    answer.receipts.truncate(MOST_LISTED);
    for one in &mut answer.receipts {
        one.kept = one.kept.filter(text::can_be_written);
        one.caller = text::clean_words(&one.caller);
        for word in [&mut one.id, &mut one.level, &mut one.end, &mut one.verdict] {
            *word = text::clean(word);
        }
    }
    answer
}

/// Passes on one receipt byte by byte, since its signature covers these bytes. The guest's own verdict on it is
/// dropped.
///
/// # Errors
/// If it is longer than a receipt can be.
pub fn receipt(answer: v1::GetReceiptResponse) -> Result<v1::GetReceiptResponse, Status> {
    if answer.envelope.len() > crate::receipt::MOST_BYTES {
        return Err(Status::data_loss("the receipt is too long: it was altered in the guest"));
    }
    let v1::GetReceiptResponse { envelope, boottime_ms, .. } = answer;
    Ok(v1::GetReceiptResponse { envelope, boottime_ms, ..v1::GetReceiptResponse::default() })
}

/// Cleans file systems on disks.
pub fn file_systems(answer: ListFileSystemsResponse) -> ListFileSystemsResponse {
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

/// Cleans the results of trimming file systems.
pub fn trims(answer: TrimFileSystemsResponse) -> TrimFileSystemsResponse {
    let file_systems = answer.file_systems.into_iter().map(|one| TrimmedFileSystem {
        unsupported: one.unsupported,
        mount_point: text::clean(&one.mount_point),
        outcome: one.outcome.map(|outcome| match outcome {
            Outcome::Problem(problem) => Outcome::Problem(text::clean_words(&problem)),
            trimmed @ Outcome::Trimmed(_) => trimmed,
        }),
    });
    TrimFileSystemsResponse { file_systems: file_systems.collect() }
}

/// Cleans programs, and limits their number.
pub fn programs(mut answer: ListProgramsResponse) -> ListProgramsResponse {
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

/// Cleans the time of a guest.
pub fn time(mut answer: v1::TimeOfDay) -> v1::TimeOfDay {
    answer.zone = text::clean(&answer.zone);
    answer.time = answer.time.filter(text::can_be_written);
    answer
}

/// Formats, for the audit log, the time to which a clock is to be set.
pub fn moment(time: Option<prost_types::Timestamp>) -> String {
    match time {
        None => "the hardware clock".to_owned(),
        Some(time) if text::can_be_written(&time) => time.to_string(),
        Some(time) => format!("{} s", time.seconds),
    }
}

/// Cleans the results of switching memory blocks.
pub fn blocks(answer: v1::SetMemoryBlocksResponse) -> v1::SetMemoryBlocksResponse {
    let block = |one: v1::SwitchedBlock| v1::SwitchedBlock { problem: text::clean(&one.problem), ..one };
    v1::SetMemoryBlocksResponse { blocks: answer.blocks.into_iter().map(block).collect() }
}

/// Cleans network interfaces.
pub fn interfaces(answer: v1::ListInterfacesResponse) -> v1::ListInterfacesResponse {
    let interface = |one: v1::InterfaceOfGuest| v1::InterfaceOfGuest {
        name: text::clean(&one.name),
        hardware_address: text::clean(&one.hardware_address),
        addresses: all(&one.addresses),
        ..one
    };
    v1::ListInterfacesResponse { interfaces: answer.interfaces.into_iter().map(interface).collect() }
}

/// Cleans routes.
pub fn routes(answer: v1::ListRoutesResponse) -> v1::ListRoutesResponse {
    let route = |one: v1::Route| v1::Route {
        interface: text::clean(&one.interface),
        destination: text::clean(&one.destination),
        gateway: text::clean(&one.gateway),
        metric: one.metric,
    };
    v1::ListRoutesResponse { routes: answer.routes.into_iter().map(route).collect() }
}

/// Cleans users who are logged in.
pub fn users(answer: v1::ListUsersResponse) -> v1::ListUsersResponse {
    let user = |one: v1::LoggedInUser| v1::LoggedInUser {
        user: text::clean(&one.user),
        since: one.since.filter(text::can_be_written),
    };
    v1::ListUsersResponse { users: answer.users.into_iter().map(user).collect() }
}

/// Cleans SSH keys, which may be longer than most texts.
pub fn keys(mut answer: v1::ListAuthorizedKeysResponse) -> v1::ListAuthorizedKeysResponse {
    for key in &mut answer.keys {
        *key = text::clean_words(key);
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
        let answer = programs(ListProgramsResponse { programs: vec![program; MOST_LISTED + 1] });
        assert_eq!(answer.programs.len(), MOST_LISTED);
        assert_eq!(answer.programs[0].command, "a\u{fffd}b");
        let ended = answer.programs[0].ended.as_ref().unwrap();
        assert_eq!(ended.how, Some(How::Unknown("\u{fffd}".into())));
    }
}
