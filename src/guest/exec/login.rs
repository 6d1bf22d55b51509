//! Programs in a session that PAM opens for their user (`guestctl exec --login`), started by runuser(1) of
//! util-linux: the agent loads no PAM modules, and its static build could not.
//!
//! ```text
//! agent ── runuser -l, root: opens the session, waits, closes it
//!              └── login shell, the user: reads its profile, and executes the program in its place
//! ```
//!
//! `pam_systemd` moves both to a control group of the session, out of the one that the agent has created:
//! [`members`](super::members) follows them.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::PathBuf;

use super::members::Members;
use super::task::{Error, PATH, Task};
use crate::sys::process::Process;
use crate::sys::root::Root;
use crate::sys::user_identity::Account;

/// Program of util-linux that opens sessions.
pub const RUNUSER: &str = "runuser";
/// Shell that reads the profile of a user whose own shell does not understand [`SCRIPT`].
const SHELL: &str = "/bin/sh";
/// Shells that understand `SCRIPT`, and programs that only refuse the login.
const SHELLS: [&str; 11] =
    ["ash", "bash", "busybox", "dash", "false", "ksh", "ksh93", "mksh", "nologin", "sh", "zsh"];
/// Script that runs the command. Its arguments are variables, an empty argument, the directory or an empty
/// argument, and the command. None of them is ever parsed as text of a script.
const SCRIPT: &str = "until [ -z \"$1\" ]; do export \"$1\"; shift; done; shift; \
                      [ -z \"$1\" ] || cd \"$1\" || exit 125; shift; exec \"$@\"";
/// Variable of runuser that identifies the agent that has started it. Programs started by runuser do not get it.
const AGENT: &str = "GUESTLET_AGENT";

/// Arguments and environment of runuser.
pub(super) struct Login {
    pub arguments: Vec<OsString>,
    pub environment: Vec<(OsString, OsString)>,
    /// Shell that executes the program. The caller must be allowed to run it, because it could execute anything.
    pub shell: PathBuf,
}

/// Checks that a task can be run with `--login`.
pub(super) fn check(task: &Task) -> Result<(), Error> {
    let Some(program) = task.command.first() else {
        let is_plain = task.environment.is_empty() && task.directory.is_none();
        return if is_plain { Ok(()) } else { Err(Error::LoginShell) };
    };
    // The shell would take the name for an option.
    if program.as_bytes().starts_with(b"-") {
        return Err(Error::LoginProgram(program.to_string_lossy().into_owned()));
    }
    let is_name = |name: &[u8]| {
        let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
        name.iter().all(is_part) && name.first().is_some_and(|byte| !byte.is_ascii_digit())
    };
    match task.environment.iter().find(|(name, _)| !is_name(name.as_bytes())) {
        Some((name, _)) => Err(Error::Variable(name.to_string_lossy().into_owned())),
        None => Ok(()),
    }
}

/// Returns how to start the login shell of an account, and the task's command in it.
pub(super) fn login(root: &Root, account: &Account, task: &Task) -> Login {
    let mut arguments: Vec<OsString> = vec!["-l".into()];
    let mut shell = account.shell.clone();
    let has_command = !task.command.is_empty();
    if has_command {
        // Unlike `--command`, this option creates no new session: the command stays on the terminal that the agent has
        // opened.
        arguments.push(format!("--session-command={SCRIPT}").into());
        let name = shell.file_name().unwrap_or_default();
        if !SHELLS.iter().any(|known| name == *known) {
            shell = SHELL.into();
            arguments.extend(["-s".into(), SHELL.into()]);
        }
    }
    arguments.extend(["--".into(), OsString::from(&account.name)]);
    if has_command {
        // The shell's `$0`, which it puts before its error messages.
        arguments.push("login".into());
        let variables = task.environment.iter().map(|(name, value)| {
            let mut variable = name.as_bytes().to_vec();
            variable.push(b'=');
            variable.extend(value.as_bytes());
            OsString::from_vec(variable)
        });
        arguments.extend(variables);
        arguments.push(OsString::new());
        // Relative to `/`, as without a login, where the program starts in the agent's own directory.
        // Being absolute it also cannot be `-`, which cd takes for the previous directory.
        let directory = task.directory.as_ref().map(|directory| PathBuf::from("/").join(directory));
        arguments.push(directory.unwrap_or_default().into());
        arguments.extend(task.command.iter().cloned());
    }
    let own = Process::with_number(root, std::process::id());
    let own = own.map(|own| format!("{}-{}", own.number, own.started)).unwrap_or_default();
    let mut environment: Vec<(OsString, OsString)> =
        vec![("PATH".into(), PATH.into()), (AGENT.into(), own.into())];
    if let Some((kind, _)) = task.terminal.as_ref().filter(|(kind, _)| !kind.is_empty()) {
        environment.push(("TERM".into(), kind.into()));
    }
    Login { arguments, environment, shell }
}

/// Ends the sessions that an earlier run of the agent has left: their pipes are lost. Only processes of root are
/// considered, because others could claim to be such a session.
pub(super) fn end_left_over(root: &Root) {
    for number in Process::numbers(root).unwrap_or_default() {
        if root.line(&format!("/proc/{number}/comm")) == RUNUSER && is_left_over(root, number) {
            tracing::warn!("ending a login that an earlier run of the agent left behind (process {number})");
            Members::new(root.clone(), number, None).with_login(true).kill(true);
        }
    }
}

fn is_left_over(root: &Root, number: u32) -> bool {
    use std::os::unix::fs::MetadataExt as _;

    let owner = std::fs::metadata(root.path(&format!("/proc/{number}"))).map(|metadata| metadata.uid());
    let Ok(environment) = root.read(&format!("/proc/{number}/environ")) else { return false };
    owner.is_ok_and(|owner| owner == 0) && is_of_gone(root, &environment)
}

/// Returns whether the variables name an agent process that no longer exists.
fn is_of_gone(root: &Root, environment: &[u8]) -> bool {
    let mut variables = environment.split(|byte| *byte == 0);
    let agent = variables.find_map(|variable| {
        let value = variable.strip_prefix(AGENT.as_bytes())?.strip_prefix(b"=")?;
        let (number, started) = std::str::from_utf8(value).ok()?.split_once('-')?;
        Some(Process { number: number.parse().ok()?, started: started.parse().ok()? })
    });
    agent.is_some_and(|agent| Process::with_number(root, agent.number) != Some(agent))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::guest::exec::state::Away;
    use crate::sys::spawn_manner::Identity;

    fn task(command: &[&str], environment: &[(&str, &str)], directory: Option<&str>) -> Task {
        Task {
            id: "0123456789".into(),
            owner: "host".into(),
            command: command.iter().map(OsString::from).collect(),
            environment: environment.iter().map(|(name, value)| (name.into(), value.into())).collect(),
            directory: directory.map(PathBuf::from),
            terminal: None,
            has_input: false,
            limit: None,
            away: Away::Ends(Duration::from_secs(30)),
            on_end: None,
            is_login: true,
        }
    }

    fn account(shell: &str) -> Account {
        let identity = Identity { uid: 1, gid: 1, groups: vec![1] };
        Account { name: "alice".into(), identity, home: "/home/alice".into(), shell: shell.into() }
    }

    fn arguments(shell: &str, task: &Task) -> Vec<String> {
        let login = login(&Root::default(), &account(shell), task);
        login.arguments.into_iter().map(|argument| argument.into_string().unwrap()).collect()
    }

    #[test]
    fn a_command_is_arguments_of_a_script_and_never_a_part_of_it() {
        let script = format!("--session-command={SCRIPT}");
        let found = arguments("/bin/zsh", &task(&["a b", "", "$x"], &[("A", "1 2"), ("B", "")], Some("-")));
        let wanted = ["-l", &script, "--", "alice", "login", "A=1 2", "B=", "", "/-", "a b", "", "$x"];
        assert_eq!(found, wanted);
        let found = arguments("/usr/bin/fish", &task(&["true"], &[], None));
        assert_eq!(found, ["-l", &script, "-s", "/bin/sh", "--", "alice", "login", "", "", "true"]);
        assert_eq!(arguments("/usr/bin/fish", &task(&[], &[], None)), ["-l", "--", "alice"]);
        assert_eq!(arguments("/usr/sbin/nologin", &task(&["true"], &[], None))[2..4], ["--", "alice"]);
    }

    #[test]
    fn what_a_shell_would_take_for_something_else_is_refused() {
        for (task, words) in [
            (task(&["-c", "x"], &[], None), "begins with \"-\""),
            (task(&["true"], &[("a-b", "1")], None), "\"a-b\" is not the name"),
            (task(&["true"], &[("1a", "1")], None), "\"1a\" is not the name"),
            (task(&["true"], &[("", "1")], None), "\"\" is not the name"),
            (task(&["true"], &[("x;reboot", "1")], None), "\"x;reboot\" is not the name"),
            (task(&[], &[("A", "1")], None), "a command"),
            (task(&[], &[], Some("/srv")), "a command"),
        ] {
            let error = check(&task).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        assert!(check(&task(&["./-c"], &[("_a1", "")], Some("/srv"))).is_ok());
        assert!(check(&task(&[], &[], None)).is_ok());
    }

    #[test]
    fn a_login_of_an_agent_that_is_gone_is_left_over() {
        let root = Root::default();
        let own = Process::with_number(&root, std::process::id()).unwrap();
        let of = |number: u32, started: u64| format!("A=1\0{AGENT}={number}-{started}\0B=2\0");
        assert!(is_of_gone(&root, of(own.number, own.started + 1).as_bytes()));
        assert!(!is_of_gone(&root, of(own.number, own.started).as_bytes()));
        for none in ["", "A=1\0", "GUESTLET_AGENT=\0", "GUESTLET_AGENT=x-1\0", "GUESTLET_AGENTS=1-1\0"] {
            assert!(!is_of_gone(&root, none.as_bytes()), "{none}");
        }
    }
}
