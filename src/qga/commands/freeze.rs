//! Commands that freeze and thaw file systems.

use crate::guest::freeze::{self, By};
use crate::policy::Role;
use crate::qga::call::Call;
use crate::qga::reply::Reply;
use crate::qga::table::{Class, Command, Outcome, Pending, Run};
use crate::receipt::Caller;

/// Rows of the command table.
pub const COMMANDS: &[Command] = &[
    Command {
        name: "guest-fsfreeze-status",
        role: Some(Role::Freeze),
        since: "0.15",
        returns: "`thawed` or `frozen`",
        always: true,
        summary: "Whether file systems are frozen.",
        differences: "`frozen` also while they are being frozen.",
        run: Run::Now(status),
        ..Command::USUAL
    },
    Command {
        name: "guest-fsfreeze-freeze",
        role: Some(Role::Freeze),
        since: "0.15",
        returns: "how many file systems were frozen",
        class: Class::Control,
        audited: true,
        summary: "Freezes all file systems on disks, after the hooks.",
        differences: FREEZE,
        run: Run::Later(freeze),
        ..Command::USUAL
    },
    Command {
        name: "guest-fsfreeze-freeze-list",
        role: Some(Role::Freeze),
        since: "2.2",
        arguments: "mountpoints? (list of mount points; default all)",
        returns: "how many file systems were frozen",
        class: Class::Control,
        audited: true,
        summary: "As guest-fsfreeze-freeze, for the file systems at some mount points.",
        differences: "As guest-fsfreeze-freeze; what is not a mount point is an error that names it.",
        run: Run::Later(freeze_list),
        ..Command::USUAL
    },
    Command {
        name: "guest-fsfreeze-thaw",
        role: Some(Role::Freeze),
        since: "0.15",
        returns: "how many file systems were frozen",
        class: Class::Control,
        always: true,
        audited: true,
        summary: "Thaws all file systems, no matter who froze them, then runs the hooks.",
        differences: "Ends a freeze that is still under way. An error, once, if the freeze has ended by \
                      itself, by a crash, or by a person in the guest before it: the snapshot is not \
                      consistent. Hooks are run only if they were run for the freeze.",
        run: Run::Later(thaw),
        ..Command::USUAL
    },
];

const FREEZE: &str = "Ends by itself after a deadline (`qga.freeze.deadline`, 2 minutes). File systems that live on others, \
                      as in files of them, are frozen before those. Each hook has a deadline, and may be a directory. \
                      guest-ping, -info, -sync, -sync-delimited, -fsfreeze-status and -fsfreeze-thaw are answered \
                      meanwhile on other streams; on the same one answers keep their order, and guest-fsfreeze-thaw ends it. \
                      See docs/freeze.md.";

/// Implements `guest-fsfreeze-status`.
pub fn status(call: &Call<'_>) -> Outcome {
    call.arguments.none()?;
    Reply::value(if call.context.guest.freezer.restricts() { "frozen" } else { "thawed" })
}

/// Implements `guest-fsfreeze-freeze`.
pub fn freeze<'a>(call: &'a Call<'a>) -> Pending<'a> {
    Box::pin(async move {
        call.arguments.none()?;
        Reply::value(&freeze::freeze(&call.context.guest, None, &caller(call)).await?)
    })
}

/// Implements `guest-fsfreeze-freeze-list`.
pub fn freeze_list<'a>(call: &'a Call<'a>) -> Pending<'a> {
    Box::pin(async move {
        let which: Option<Vec<String>> =
            call.arguments.read(|arguments| arguments.optional("mountpoints"))?;
        if let Some(which) = &which {
            call.concerns(which.join(" "));
        }
        Reply::value(&freeze::freeze(&call.context.guest, which, &caller(call)).await?)
    })
}

/// Returns the caller of a freeze, for its record.
fn caller(call: &Call<'_>) -> Caller {
    Caller::new(call.peer(), "qga")
}

/// Implements `guest-fsfreeze-thaw`.
pub fn thaw<'a>(call: &'a Call<'a>) -> Pending<'a> {
    Box::pin(async move {
        call.arguments.none()?;
        Reply::value(&freeze::thaw(&call.context.guest, By::Client).await?)
    })
}
