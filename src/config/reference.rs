//! docs/settings.md, written from the tables of `agent` and `host`; tests hold them against what the programs read.
//!
//! To add a setting: its row there, and `UPDATE_DOCS=1 cargo test --lib reference`.

use std::fmt::Write as _;
use std::path::Path;

use super::agent::fragment::AgentFragment;
use super::host::HostFragment;
use super::{Fragment, parse};

mod agent;
mod host;

use agent::AGENT;
use host::HOST;

/// Row of a table: key, default, meaning.
type Row = (&'static str, &'static str, &'static str);

/// Text before the tables.
const HEAD: &str = "# Settings: every key

Written from `src/config/reference`; tests hold it against what the programs read. Where settings come from, which place
wins, and qemu-ga's own options and files: [configuration.md](configuration.md). Rules for disks: [disks.md](disks.md).

An unknown key is refused, with its file and line, and so is a wrong value. Times are seconds, or a number and `s`, `min` or
`h`. Paths are absolute.
";

fn markdown() -> String {
    let mut text = HEAD.to_owned();
    for (title, words, rows) in [
        (
            "The agent: /etc/guestlet/agent.toml, then /etc/guestlet/agent.d/*.toml",
            "They take effect when the agent is restarted: `systemctl daemon-reload && systemctl restart guestlet`, where the \
             first makes the unit fit them ([security.md](security.md)). Under systemd the ports of the guestlet API are those \
             of `guestlet.socket`: to change one, change it there as well.",
            AGENT,
        ),
        (
            "The host half: /etc/guestlet/host.toml, then /etc/guestlet/host.d/*.toml",
            "They take effect when they are written, but for `socket`, `metrics`, `metrics-socket`, `volumes-dir`, `load-balancers` and `audit.file`. Each \
             VM is a table `[[vm]]`. `guestlet-host node` finds its VMs by the Kubernetes API: it refuses `[[vm]]`, `[[pool]]`, \
             `[[address-pool]]` and `[topology]`, and it alone has `[kubevirt]` ([kubevirt.md](kubevirt.md)).",
            HOST,
        ),
    ] {
        let _ = write!(text, "\n## {title}\n\n{words}\n\n| key | default | meaning |\n|---|---|---|\n");
        for (key, default, meaning) in rows {
            let _ = writeln!(text, "| `{key}` | {default} | {meaning} |");
        }
    }
    text
}

/// Finds the keys that a program reads: its error about an unknown key lists those that it knows.
fn known<F: Fragment>(prefix: &str, found: &mut Vec<String>) {
    let refused = |table: &str| match parse::<F>(Path::new("x"), table) {
        Ok(_) => String::new(),
        Err(error) => error.to_string(),
    };
    // A table, an array of tables, or a table with a name chosen by the user.
    let table = |header: String, next: String| (header + "\"@\" = 1\n", next);
    let tables = match prefix {
        "" => vec![table(String::new(), String::new())],
        prefix => vec![
            table(format!("[{prefix}]\n"), format!("{prefix}.")),
            table(format!("[[{prefix}]]\n"), format!("{prefix}.")),
            table(format!("[{prefix}.x]\n"), format!("{prefix}.<name>.")),
        ],
    };
    let told = tables.into_iter().find_map(|(table, next)| {
        let words = refused(&table);
        words.contains("unknown field `@`").then_some((words, next))
    });
    let Some((words, next)) = told else {
        return found.push(prefix.to_owned());
    };
    let expected = words.split("expected").nth(1).unwrap_or_default();
    for name in expected.split('`').skip(1).step_by(2) {
        let name = format!("{next}{name}");
        known::<F>(&name, found);
    }
}

#[test]
fn every_key_has_its_row() {
    for (name, rows, keys) in [
        ("AGENT", AGENT, {
            let mut keys = Vec::new();
            known::<AgentFragment>("", &mut keys);
            keys
        }),
        ("HOST", HOST, {
            let mut keys = Vec::new();
            known::<HostFragment>("", &mut keys);
            keys
        }),
    ] {
        let mut keys = keys;
        let mut told: Vec<_> = rows.iter().map(|(key, ..)| (*key).to_owned()).collect();
        keys.sort();
        told.sort();
        assert!(keys.len() > 20, "{keys:?}");
        assert_eq!(told, keys, "the rows of {name}, and the keys that are read");
    }
}

/// With `UPDATE_DOCS=1 cargo test` the file is written again.
#[test]
#[allow(clippy::disallowed_methods)]
fn the_page_in_docs_is_the_one_that_the_tables_give() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/settings.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&file, markdown()).unwrap();
    }
    let written = std::fs::read_to_string(&file).unwrap_or_default();
    assert_eq!(written, markdown(), "run UPDATE_DOCS=1 cargo test --lib reference");
}

/// Checks the packages' settings files: their commented-out keys have to exist, and their values have to be valid.
#[test]
#[allow(clippy::disallowed_methods)]
fn the_settings_that_are_packaged_can_be_used() {
    let text = |name: &str| {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging").join(name);
        let text = std::fs::read_to_string(file).unwrap();
        // Settings are commented out with one "# ", text with two.
        let used = |line: &str| match line.strip_prefix("# ") {
            Some(rest)
                if rest.starts_with('[')
                    || rest.split_once(" = ").is_some_and(|(key, _)| !key.contains(' ')) =>
            {
                Some(rest.to_owned())
            }
            _ => None,
        };
        text.lines().filter_map(used).collect::<Vec<_>>().join("\n")
    };
    let agent = text("agent.toml");
    assert!(agent.lines().count() > 20, "{agent}");
    parse::<AgentFragment>(Path::new("agent.toml"), &agent).unwrap();
    let host = text("host.toml");
    assert!(host.lines().count() > 5, "{host}");
    parse::<HostFragment>(Path::new("host.toml"), &host).unwrap();
}
