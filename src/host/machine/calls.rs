//! Calls that are passed to agents, with one row for each.

use std::time::Duration;

use tonic::Status;

use super::clean;
use crate::access::verb::{self, Verb};
use crate::host::asked::{Asked, Object};
use crate::host::handed_on::{HandedOn, Turn};
use crate::host::text;
use crate::wire::proto::v1::{
    self, ExecuteQgaRequest, ExecuteQgaResponse, FreezeFileSystemsRequest, FreezeFileSystemsResponse,
    FreezeState, GetFreezeRequest, ListFileSystemsRequest, ListFileSystemsResponse, ListProgramsRequest,
    ListProgramsResponse, ShutdownMode, ShutdownRequest, ShutdownResponse, SignalProgramRequest,
    SignalProgramResponse, SuspendResponse, SuspendToBothRequest, SuspendToDiskRequest,
    SuspendToMemoryRequest, ThawFileSystemsRequest, ThawFileSystemsResponse, TrimFileSystemsRequest,
    TrimFileSystemsResponse,
};
use crate::wire::switches;

/// Timeout of calls that a healthy guest answers soon.
const USUAL: Duration = Duration::from_secs(60);
/// Timeout of calls that may wait for hooks, disks or programs in the guest.
const LONG: Duration = Duration::from_secs(600);

/// Timeout of calls that wait for nothing but the agent.
const SHORT: Duration = Duration::from_secs(10);

/// Declares one call: the type of the request, its verb, the path of its method, and the subject for the audit
/// log; the type of the answer, and how it is cleaned; the timeout. Optional are the queue that the call waits in,
/// and the capability that the agent must report, if these are not the usual ones.
macro_rules! handed_on {
    ($request:ty, $verb:expr, $path:literal, $subject:expr; $answer:ty, $clean:expr; $within:expr $(, $turn:expr)? $(; needs $capability:literal)?) => {
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
            $(const CAPABILITY: &'static str = $capability;)?

            $(fn turn(&self) -> Turn {
                let turn: fn(&$request) -> Turn = $turn;
                turn(self)
            })?

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
    |answer| Ok(FreezeFileSystemsResponse { mount_points: clean::all(&answer.mount_points), ..answer });
    LONG
);
handed_on!(
    ThawFileSystemsRequest, |_| &verb::THAW, "/guestlet.v1.Freeze/ThawFileSystems",
    |asked| asked.mount_points.join(" ");
    ThawFileSystemsResponse, |answer| Ok(clean::thawed(answer));
    USUAL, |_| Turn::Urgent
);
handed_on!(
    v1::ListReceiptsRequest, |_| &verb::RECEIPTS, "/guestlet.v1.Freeze/ListReceipts", |_| String::new();
    v1::ListReceiptsResponse, |answer| Ok(clean::receipts(answer));
    USUAL
);
handed_on!(
    v1::GetReceiptRequest, |_| &verb::RECEIPT, "/guestlet.v1.Freeze/GetReceipt", |asked| text::clean(&asked.id);
    v1::GetReceiptResponse, clean::receipt;
    USUAL
);
handed_on!(
    GetFreezeRequest, |_| &verb::FREEZE_STATUS, "/guestlet.v1.Freeze/GetFreeze", |_| String::new();
    FreezeState, |state| Ok(clean::freeze(state));
    USUAL, |_| Turn::Urgent
);
handed_on!(
    ListFileSystemsRequest, |_| &verb::FS, "/guestlet.v1.FileSystems/ListFileSystems", |_| String::new();
    ListFileSystemsResponse, |answer| Ok(clean::file_systems(answer));
    USUAL
);
handed_on!(
    TrimFileSystemsRequest, |_| &verb::TRIM, "/guestlet.v1.FileSystems/TrimFileSystems",
    |asked| asked.mount_points.join(" ");
    TrimFileSystemsResponse, |answer| Ok(clean::trims(answer));
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
    ExecuteQgaRequest, |_| &verb::QGA, "/guestlet.v1.Qga/ExecuteQga", |asked| clean::command(&asked.command);
    ExecuteQgaResponse, clean::qga; LONG
);

handed_on!(
    v1::CollectMetricsRequest, |_| &verb::METRICS, "/guestlet.v1.Metrics/CollectMetrics", |_| String::new();
    v1::CollectMetricsResponse, |answer| Ok(crate::metrics::check::clean(answer)); SHORT; needs "metrics"
);
handed_on!(
    ListProgramsRequest, |_| &verb::PS, "/guestlet.v1.Exec/ListPrograms", |_| String::new();
    ListProgramsResponse, |answer| Ok(clean::programs(answer)); SHORT
);
handed_on!(
    SignalProgramRequest, |_| &verb::KILL, "/guestlet.v1.Exec/SignalProgram", |asked| asked.id.clone();
    SignalProgramResponse, Ok; SHORT, |_| Turn::Urgent
);
handed_on!(
    v1::ReadJournalRequest, |_| &verb::LOGS, "/guestlet.v1.Journal/ReadJournal", |asked| asked.units.join(" ");
    v1::ReadJournalResponse, |answer| Ok(clean::journal(answer));
    USUAL, |asked| if asked.wait_seconds > 0 { Turn::Patient } else { Turn::Search }
);
handed_on!(
    v1::GetTimeRequest, |_| &verb::TIME, "/guestlet.v1.Machine/GetTime", |_| String::new();
    v1::TimeOfDay, |time| Ok(clean::time(time));
    USUAL
);
handed_on!(
    v1::SetTimeRequest, |_| &verb::SET_TIME, "/guestlet.v1.Machine/SetTime", |asked| clean::moment(asked.time);
    v1::SetTimeResponse, Ok;
    USUAL
);
handed_on!(
    v1::ListProcessorsRequest, |_| &verb::CPUS, "/guestlet.v1.Machine/ListProcessors", |_| String::new();
    v1::ListProcessorsResponse, Ok;
    USUAL
);
handed_on!(
    v1::SetProcessorsRequest, |_| &verb::SET_CPUS, "/guestlet.v1.Machine/SetProcessors", |asked| switches::words(&asked.processors);
    v1::SetProcessorsResponse, Ok;
    USUAL
);
handed_on!(
    v1::ListMemoryBlocksRequest, |_| &verb::MEMORY, "/guestlet.v1.Machine/ListMemoryBlocks", |_| String::new();
    v1::ListMemoryBlocksResponse, Ok;
    USUAL
);
handed_on!(
    v1::SetMemoryBlocksRequest, |_| &verb::SET_MEMORY, "/guestlet.v1.Machine/SetMemoryBlocks", |asked| switches::words(&asked.blocks);
    v1::SetMemoryBlocksResponse, |answer| Ok(clean::blocks(answer));
    USUAL
);
handed_on!(
    v1::ListInterfacesRequest, |_| &verb::NETWORK, "/guestlet.v1.Network/ListInterfaces", |_| String::new();
    v1::ListInterfacesResponse, |answer| Ok(clean::interfaces(answer));
    USUAL
);
handed_on!(
    v1::ListRoutesRequest, |_| &verb::ROUTES, "/guestlet.v1.Network/ListRoutes", |_| String::new();
    v1::ListRoutesResponse, |answer| Ok(clean::routes(answer));
    USUAL
);
handed_on!(
    v1::ListUsersRequest, |_| &verb::USERS, "/guestlet.v1.Accounts/ListUsers", |_| String::new();
    v1::ListUsersResponse, |answer| Ok(clean::users(answer));
    USUAL
);
handed_on!(
    v1::SetPasswordRequest, |_| &verb::PASSWD, "/guestlet.v1.Accounts/SetPassword", |asked| asked.user.clone();
    v1::SetPasswordResponse, Ok;
    USUAL
);
handed_on!(
    v1::ListAuthorizedKeysRequest, |_| &verb::KEYS_LS, "/guestlet.v1.Accounts/ListAuthorizedKeys", |asked| asked.user.clone();
    v1::ListAuthorizedKeysResponse, |answer| Ok(clean::keys(answer));
    USUAL
);
handed_on!(
    v1::AddAuthorizedKeysRequest, |_| &verb::KEYS_ADD, "/guestlet.v1.Accounts/AddAuthorizedKeys", |asked| asked.user.clone();
    v1::AddAuthorizedKeysResponse, Ok;
    USUAL
);
handed_on!(
    v1::RemoveAuthorizedKeysRequest, |_| &verb::KEYS_RM, "/guestlet.v1.Accounts/RemoveAuthorizedKeys", |asked| asked.user.clone();
    v1::RemoveAuthorizedKeysResponse, Ok;
    USUAL
);
