//! Text of docs/qga.md and of `--block-rpcs help`, generated from the command table.

use std::fmt::Write as _;

use crate::policy::Role;
use crate::qga::table::{COMMANDS, Class, Command};

/// Returns the names of all commands, one per line.
pub fn names() -> String {
    COMMANDS.iter().fold(String::new(), |text, command| text + command.name + "\n")
}

/// Section on the order of answers, which concerns all commands of a client together.
const ORDER: &str = "
# The order of answers

On one stream, commands are carried out one after the other, and answered in their order, with ids and without. Several
clients, on a socket, do not wait for each other. A disk or a hook may hang; then:

- **guest-sync and guest-sync-delimited drop the commands before them.** A command that has not begun is never run; one that
  is under way continues, and its result is not reported. If the commands before it were received at least 1 s ago,
  guest-sync is answered at once, otherwise after that time: a client that sends something together with guest-sync still
  gets its answer if it is quick.
- **guest-ping, guest-info, guest-fsfreeze-status and guest-fsfreeze-thaw wait no longer than 5 s** for each command before
  them. That command is then answered with an error which says that it continues and that its outcome is not known. A freeze
  or a thaw is not abandoned in this way, because it ends by itself (docs/freeze.md).
- **guest-fsfreeze-thaw takes effect before its turn** if it comes at least 1 s after the command that is under way: it ends a
  freeze that takes long. The answers keep their order: first the freeze's, an error, then the thaw's.
- 64 commands, or 1 MiB of them, wait for their turn; then no more is read until the command that is under way has ended or,
  as above, is abandoned after 5 s.
- The number of abandoned commands is limited: 8 of one client, 16 of one name and 128 of all clients, including clients that
  have disconnected. Beyond that, a command that may have to wait is answered with an error; commands that never wait are
  still answered.

Large answers that are not read yet may take 32 MiB of memory for all clients together. Beyond that, guest-exec-status and
guest-file-read refuse an answer of more than 192 KiB, and nothing of it is lost. A client of a socket that reads nothing of
such an answer for 60 s is disconnected.

# Commands
";

/// Returns the text of docs/qga.md.
pub fn markdown() -> String {
    let mut text = String::from(
        "# QGA commands\n\nWritten from the command table (`src/qga/commands`); a test holds the two together. \
         Names, types and semantics are those of\n\
         [QEMU's reference](https://www.qemu.org/docs/master/interop/qemu-ga-ref.html); what differs is said here.\n",
    );
    text.push_str(ORDER);
    for command in COMMANDS {
        section(&mut text, command);
    }
    text
}

fn section(text: &mut String, command: &Command) {
    let none = |value: &str, otherwise: &str| match value {
        "" => otherwise.to_owned(),
        value => value.to_owned(),
    };
    // Writing to a string cannot fail.
    let _ = write!(
        text,
        "\n## {}\n{}\n\n- since: QEMU {}\n- class: {}{}\n- role: {}\n- arguments: {}\n- returns: {}\n- differs from qemu-ga: {}\n",
        command.name,
        command.summary,
        command.since,
        class(command.class),
        if command.audited { ", each call leaves a line in the log" } else { "" },
        role(command),
        none(command.arguments, "none"),
        if command.success_response {
            none(command.returns, "an empty object")
        } else {
            "success is not answered".to_owned()
        },
        none(command.differences, "no"),
    );
}

/// Returns the role that the command needs, and the exceptions.
fn role(command: &Command) -> String {
    let role = command.needs();
    match command.class {
        Class::Protocol => format!("`{role}`; nobody is refused it"),
        _ if command.name == "guest-file-open" => format!("`{role}`, and `{}` to write", Role::FilesWrite),
        _ => format!("`{role}`"),
    }
}

fn class(class: Class) -> &'static str {
    match class {
        Class::Protocol => "protocol",
        Class::Query => "reads what the guest is",
        Class::Control => "changes the guest",
        Class::Files => "files (limited by `qga.files`)",
        Class::Exec => "runs programs (limited by `qga.exec`)",
        Class::Credentials => "who may log in (passwords limited by `qga.passwords`)",
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// Fails if docs/qga.md is not up to date; `UPDATE_DOCS=1 cargo test` writes the file again.
    #[test]
    #[allow(clippy::disallowed_methods)]
    fn the_page_in_docs_is_the_one_that_the_table_gives() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/qga.md");
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(&file, super::markdown()).unwrap();
        }
        let written = std::fs::read_to_string(&file).unwrap_or_default();
        assert_eq!(written, super::markdown(), "run UPDATE_DOCS=1 cargo test --lib document");
    }
}
