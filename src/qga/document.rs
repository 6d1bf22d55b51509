//! docs/qga.md and `--block-rpcs help`, written from the command table.

use std::fmt::Write as _;

use crate::qga::table::{COMMANDS, Class, Command};

/// The names of all commands, one on each line.
pub fn names() -> String {
    COMMANDS.iter().fold(String::new(), |text, command| text + command.name + "\n")
}

/// The text of docs/qga.md.
pub fn markdown() -> String {
    let mut text = String::from(
        "# QGA commands\n\nWritten from the command table (`src/qga/commands`); a test holds the two together. \
         Names, types and semantics are those of\n\
         [QEMU's reference](https://www.qemu.org/docs/master/interop/qemu-ga-ref.html); what differs is said here.\n",
    );
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
        "\n## {}\n{}\n\n- since: QEMU {}\n- class: {}{}\n- arguments: {}\n- returns: {}\n- differs from qemu-ga: {}\n",
        command.name,
        command.summary,
        command.since,
        class(command.class),
        if command.audited { ", each call leaves a line in the log" } else { "" },
        none(command.arguments, "none"),
        if command.success_response {
            none(command.returns, "an empty object")
        } else {
            "success is not answered".to_owned()
        },
        none(command.differences, "no"),
    );
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

    /// `UPDATE_DOCS=1 cargo test` writes the file anew.
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
