//! What shells ask when Tab is typed: `guestctl __complete -- WORDS`, the last of which is not finished. Each line of the answer is a
//! candidate for it and, after a tab, what that is. Where nobody can be asked there are no candidates, and no complaints.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write as _};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Arg, Command, CommandFactory as _, FromArgMatches as _};
use clap_complete::engine::{
    ArgValueCandidates, ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter as _, complete,
};
use guestlet::ctl::cluster::Access;
use guestlet::ctl::{Where, cp, names};

use crate::Arguments;

/// The word that shells say first.
pub const WORD: &str = "__complete";
/// How long somebody who has typed Tab waits.
const PATIENCE: Duration = Duration::from_secs(2);

/// Answers a shell that asks about these words.
pub fn answer(words: Vec<OsString>) -> ExitCode {
    let mut command = with_names(Arguments::command(), &words);
    let unfinished = words.len().saturating_sub(1);
    let here = std::env::current_dir().ok();
    let found = complete(&mut command, words, unfinished, here.as_deref()).unwrap_or_default();
    match print(&found) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn print(found: &[CompletionCandidate]) -> io::Result<()> {
    let mut output = io::stdout().lock();
    for candidate in found {
        let value = candidate.get_value().as_bytes();
        // A shell takes no such word.
        if value.iter().any(u8::is_ascii_control) {
            continue;
        }
        output.write_all(value)?;
        let help = candidate.get_help().map(ToString::to_string).unwrap_or_default();
        if let Some(help) = help.lines().next().filter(|line| !line.is_empty()) {
            write!(output, "\t{help}")?;
        }
        output.write_all(b"\n")?;
    }
    output.flush()
}

/// The command, whose arguments that name VMs know which there are.
fn with_names(command: Command, words: &[OsString]) -> Command {
    let words = words.to_vec();
    let (all, labelled) = (words.clone(), words.clone());
    let vms = ArgValueCandidates::new(move || {
        let found = vms(place(&words)).unwrap_or_default();
        found.into_iter().map(CompletionCandidate::new).collect()
    });
    let command = with(command, &vms);
    let command = command.mut_subcommand("ls", |ls| {
        ls.mut_arg("selector", |arg| {
            arg.add(ArgValueCompleter::new(move |current: &OsStr| labels(&labelled, current)))
        })
    });
    command.mut_subcommand("cp", |cp| {
        cp.mut_args(|arg| {
            if arg.get_id() != "files" {
                return arg;
            }
            let words = all.clone();
            arg.add(ArgValueCompleter::new(move |current: &OsStr| files(&words, current)))
        })
    })
}

/// The labels that VMs have.
fn labels(words: &[OsString], current: &OsStr) -> Vec<CompletionCandidate> {
    let Some(typed) = current.to_str() else { return Vec::new() };
    let place = place(words);
    let all = wait(async { tokio::time::timeout(PATIENCE, names::labels(place)).await.ok()?.ok() });
    let fitting = selectors(typed, all.flatten().into_iter().flatten());
    fitting.into_iter().map(CompletionCandidate::new).collect()
}

/// Those of these labels that complete the last part of a selector, each with the parts before it. Values in parentheses are not
/// completed.
fn selectors(typed: &str, labels: impl Iterator<Item = String>) -> Vec<String> {
    if typed.rfind('(') > typed.rfind(')') {
        return Vec::new();
    }
    let (before, last) = typed.split_at(typed.rfind(',').map_or(0, |at| at + 1));
    labels.filter(|label| label.starts_with(last)).map(|label| format!("{before}{label}")).collect()
}

/// What can be copied: files here, VMs, and files in their guests.
fn files(words: &[OsString], current: &OsStr) -> Vec<CompletionCandidate> {
    let typed = current.as_bytes();
    match cp::Place::parse(current.to_owned()) {
        // What is typed of the path may be nothing.
        Ok(cp::Place::Guest { vm, path }) => entries(place(words), &vm, &path),
        Err(_) if typed.ends_with(b":") => {
            let vm = String::from_utf8_lossy(&typed[..typed.len() - 1]).into_owned();
            entries(place(words), &vm, b"/")
        }
        _ => {
            let mut found = PathCompleter::any().complete(current);
            if !typed.contains(&b'/') {
                let vms = vms(place(words)).unwrap_or_default().into_iter();
                let fits = vms.filter(|vm| vm.as_bytes().starts_with(typed));
                found.extend(fits.map(|vm| CompletionCandidate::new(format!("{vm}:"))));
            }
            found
        }
    }
}

/// What is in a guest under names that begin so.
fn entries(place: Where, vm: &str, path: &[u8]) -> Vec<CompletionCandidate> {
    let found = wait(async { tokio::time::timeout(PATIENCE, cp::entries(place, vm, path)).await.ok()? });
    let found = found.flatten().unwrap_or_default().into_iter();
    let word = |path: Vec<u8>| OsString::from_vec([vm.as_bytes(), b":", &path].concat());
    found.map(|path| CompletionCandidate::new(word(path))).collect()
}

fn with(command: Command, vms: &ArgValueCandidates) -> Command {
    let command = command.mut_args(|arg| if names_a_vm(&arg) { arg.add(vms.clone()) } else { arg });
    command.mut_subcommands(|command| with(command, vms))
}

/// Other things have names, too.
fn names_a_vm(arg: &Arg) -> bool {
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    ["name", "names", "vm"].contains(&arg.get_id().as_str()) && help.contains("VM")
}

/// Where that is asked, as far as it has been said.
fn place(words: &[OsString]) -> Where {
    let said = Arguments::command().ignore_errors(true).try_get_matches_from(words).ok();
    let access = said.as_ref().and_then(|said| Access::from_arg_matches(said).ok()).unwrap_or_default();
    if access.names_a_cluster() {
        return Where::Cluster(access);
    }
    let socket = said.and_then(|mut said| said.remove_one::<PathBuf>("socket"));
    Where::Here(socket.unwrap_or_default())
}

fn vms(place: Where) -> Option<Vec<String>> {
    wait(async { tokio::time::timeout(PATIENCE, names::vms(place)).await.ok()?.ok() }).flatten()
}

fn wait<T>(work: impl Future<Output = T>) -> Option<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    let found = runtime.block_on(work);
    // A thread that looks up a name is not waited for.
    runtime.shutdown_background();
    Some(found)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn naming(command: &Command, path: &str) -> Vec<String> {
        let path = format!("{path} {}", command.get_name());
        let own = command.get_arguments().filter(|arg| names_a_vm(arg)).map(|_| path.clone());
        own.chain(command.get_subcommands().flat_map(|command| naming(command, &path))).collect()
    }

    #[test]
    fn arguments_that_name_vms_are_known() {
        let all = naming(&Arguments::command(), "");
        for verb in [
            "ls",
            "info",
            "exec",
            "forward",
            "console",
            "logs",
            "freeze",
            "disk attach",
            "volumes attach",
            "trust show",
            "keys add",
            "receipts show",
        ] {
            assert!(all.contains(&format!(" guestctl {verb}")), "{verb} {all:?}");
        }
        for verb in ["volumes create", "lb rm", "volumes ls"] {
            assert!(!all.contains(&format!(" guestctl {verb}")), "{verb} {all:?}");
        }
    }

    #[test]
    fn the_last_part_of_a_selector_is_completed() {
        for (typed, expected) in [
            ("", &["env=prod", "tier=db", "tier=web"][..]),
            ("ti", &["tier=db", "tier=web"]),
            ("tier=w", &["tier=web"]),
            ("tier in (db,web),!gpu,e", &["tier in (db,web),!gpu,env=prod"]),
            ("tier in (t", &[]),
            ("x", &[]),
        ] {
            let labels = ["env=prod", "tier=db", "tier=web"].map(str::to_owned);
            assert_eq!(selectors(typed, labels.into_iter()), expected, "{typed}");
        }
    }

    #[test]
    fn what_was_said_before_says_where_is_asked() {
        let place = |words: &[&str]| place(&words.iter().map(OsString::from).collect::<Vec<_>>());
        assert!(
            matches!(place(&["guestctl", "--socket", "/s", "exec", ""]), Where::Here(path) if path == Path::new("/s"))
        );
        assert!(
            matches!(place(&["guestctl", "exec", "--socket", "/s", "-", ""]), Where::Here(path) if path == Path::new("/s"))
        );
        assert!(
            matches!(place(&["guestctl", "--context", "c", "info", "x"]), Where::Cluster(access) if access.context.as_deref() == Some("c"))
        );
    }
}
