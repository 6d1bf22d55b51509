//! Privileges that the settings leave the agent: `guestlet unit-options`, which is run by the systemd generator.
//!
//! An agent that may run programs keeps all privileges: whatever is taken from it is taken from the programs, too.
//! One that runs none keeps those that its functions need. To add a function: its line in `NEEDS`.

use std::fmt::Write as _;

use crate::config::agent::{AgentSettings, ApiChannel, QgaChannel};
use crate::policy::{Asked, Detail, Host, Mode, Who};
use crate::qga::table;

const PASSWORD: &str = "guest-set-user-password";

/// Commands of QGA with the capabilities that they need in addition to [`ALWAYS`]. A command that is not here
/// needs none.
const NEEDS: &[(&[&str], &[&str])] = &[
    (&["guest-set-time"], &["CAP_SYS_TIME"]),
    (&["guest-shutdown"], &["CAP_SYS_BOOT"]),
    (&[PASSWORD], &["CAP_AUDIT_WRITE"]),
    // Keys are read and written as the user that they belong to.
    (&["guest-ssh-add-authorized-keys", "guest-ssh-remove-authorized-keys"], &["CAP_SETGID", "CAP_SETUID"]),
    (&["guest-ssh-get-authorized-keys"], &["CAP_SETGID", "CAP_SETUID"]),
];

/// Capabilities that are always kept: for mounting, formatting, growing, freezing and releasing disks, for finding
/// their users, and for reading the data of all processes.
const ALWAYS: &[&str] = &[
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_IPC_LOCK",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_SYS_ADMIN",
    "CAP_SYS_PTRACE",
    "CAP_SYS_RAWIO",
    "CAP_SYS_RESOURCE",
];

/// Further options of the unit, which do not affect an agent that runs no programs for others. None of them
/// creates a mount namespace.
const ALSO: &[(&str, &str)] = &[
    ("NoNewPrivileges", "yes"),
    ("LockPersonality", "yes"),
    ("MemoryDenyWriteExecute", "yes"),
    ("RestrictRealtime", "yes"),
    ("RestrictNamespaces", "yes"),
    ("RestrictAddressFamilies", "AF_UNIX AF_VSOCK AF_NETLINK AF_INET AF_INET6 AF_ALG"),
    ("SystemCallArchitectures", "native"),
    ("SystemCallFilter", "~@cpu-emulation @debug @module @obsolete"),
    ("SystemCallErrorNumber", "EPERM"),
];

/// Returns the first reason why the agent keeps all privileges.
fn all_needed_by(settings: &AgentSettings) -> Option<&'static str> {
    if settings.fsfreeze_hook.is_some() {
        return Some("qga.fsfreeze-hook is set, and a hook may do anything");
    }
    if settings.applications.any_as_root() {
        return Some("a freeze.application runs as root, and may do anything");
    }
    is_wanted(settings, "guest-exec").then_some("guest-exec may be called, and what it runs may do anything")
}

/// Returns whether a client may call a command, or a verb that does the same. The roles in the line of a key are
/// not known here: a host half that is to set the clock, the processors or passwords needs a grant.
fn is_wanted(settings: &AgentSettings, command: &str) -> bool {
    may_call(settings, command) || host_may_call(settings, command)
}

/// Returns whether a host half may call a command, by a grant or without one.
fn host_may_call(settings: &AgentSettings, command: &str) -> bool {
    let Some(row) = table::find(command).and_then(|place| table::COMMANDS.get(place)) else { return false };
    let detail = if command == PASSWORD { Detail::Password } else { Detail::None };
    let who = Who::Plain { guest_has_keys: false };
    let asked = Asked { detail, ..Asked::new(who, "", command, row.needs()) };
    let rules = &settings.rules;
    let is_granted = || {
        let mut grants = rules.grants.iter().filter(|grant| grant.host != Host::Qga);
        rules.mode == Mode::Audit || grants.any(|grant| grant.roles.has(row.needs()))
    };
    settings.control != ApiChannel::None
        && rules.bounds.forbid(&asked).is_none()
        && (rules.granted(&asked).passes() || is_granted())
}

/// Returns whether QGA clients may call a command.
pub fn may_call(settings: &AgentSettings, command: &str) -> bool {
    let Some(row) = table::find(command).and_then(|place| table::COMMANDS.get(place)) else { return false };
    let protocol = row.class == table::Class::Protocol;
    let detail = if command == PASSWORD { Detail::Password } else { Detail::None };
    let asked = Asked { detail, protocol, ..Asked::new(Who::Qga, "", command, row.needs()) };
    settings.qga != QgaChannel::None && settings.rules.decide(&asked).passes()
}

/// Returns the options of the agent's unit that drop the privileges which the settings leave unused.
///
/// # Errors
/// The function that needs all privileges, if there is one. That is not a fault.
pub fn options(settings: &AgentSettings) -> Result<Vec<(&'static str, String)>, &'static str> {
    if let Some(reason) = all_needed_by(settings) {
        return Err(reason);
    }
    let mut options = vec![("CapabilityBoundingSet", capabilities(settings).join(" "))];
    options.extend(ALSO.iter().map(|(option, value)| (*option, (*value).to_owned())));
    Ok(options)
}

/// Returns the capabilities that an agent with these settings needs, if it does not need all.
fn capabilities(settings: &AgentSettings) -> Vec<&'static str> {
    let mut needed = ALWAYS.to_vec();
    for (commands, capabilities) in NEEDS {
        if commands.iter().any(|command| is_wanted(settings, command)) {
            needed.extend(*capabilities);
        }
    }
    // Clients of databases and commands of applications run as the users of the applications.
    if settings.applications.any() && is_wanted(settings, "guest-fsfreeze-freeze") {
        needed.extend(["CAP_SETGID", "CAP_SETUID"]);
    }
    // To bind ports below 1024, if systemd does not pass a socket.
    let vsock = |channel: &ApiChannel| matches!(channel, ApiChannel::Vsock { .. });
    let listens = matches!(settings.qga, QgaChannel::VsockListen { .. });
    if listens || vsock(&settings.control) {
        needed.push("CAP_NET_BIND_SERVICE");
    }
    needed.sort_unstable();
    needed.dedup();
    needed
}

/// Returns the text of a drop-in for the agent's unit.
pub fn drop_in(settings: &AgentSettings) -> String {
    match options(settings) {
        Err(reason) => format!("# Nothing is restricted: {reason}.\n"),
        Ok(options) => {
            let mut text = "# Restricts what the settings of guestlet do not use.\n[Service]\n".to_owned();
            for (option, value) in options {
                // Writing to a string cannot fail.
                let _ = writeln!(text, "{option}={value}");
            }
            text
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::agent::fragment::AgentFragment;
    use crate::config::agent::options::Program;
    use crate::config::agent::{Places, load};
    use crate::qga::table::COMMANDS;

    fn settings(text: &str) -> AgentSettings {
        let fragment: AgentFragment = toml::from_str(text).unwrap();
        load(&Places::from(std::path::Path::new("/nonexistent")), Program::Guestlet, fragment).unwrap()
    }

    /// Parses settings from a file, because grants are read from files only.
    #[allow(clippy::disallowed_methods)]
    fn settings_in_file(text: &str) -> AgentSettings {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("etc/guestlet/agent.toml");
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, text).unwrap();
        load(&Places::from(folder.path()), Program::Guestlet, AgentFragment::default()).unwrap()
    }

    #[test]
    fn who_runs_programs_keeps_everything() {
        for text in [
            "",
            "qga.exec.paths = ['/usr/lib/backup']",
            "qga.block-rpcs = ['guest-exec']\nqga.fsfreeze-hook = '/etc/hook'",
            "qga.block-rpcs = ['guest-exec']\n[[freeze.application]]\nkind = 'postgresql'\ntarget = '/x'\nuser = 'root'",
        ] {
            assert!(options(&settings(text)).is_err(), "{text}");
            assert!(drop_in(&settings(text)).starts_with("# Nothing is restricted: "), "{text}");
        }
    }

    #[test]
    fn what_is_off_loses_its_privilege() {
        let set = |text: &str| drop_in(&settings_in_file(text));
        let all = set("qga.block-rpcs = ['guest-exec']");
        for capability in ["SYS_TIME", "SYS_BOOT", "AUDIT_WRITE", "SETUID", "NET_BIND_SERVICE", "SYS_ADMIN"] {
            assert!(all.contains(capability), "{capability}: {all}");
        }
        assert!(!all.contains("SYS_MODULE") && !all.contains("NET_ADMIN"), "{all}");
        let few = set("qga.allow-rpcs = ['guest-ping']\ncontrol.listen = 'none'");
        for capability in ["SYS_TIME", "SYS_BOOT", "AUDIT_WRITE", "SETUID", "NET_BIND_SERVICE"] {
            assert!(!few.contains(capability), "{capability}: {few}");
        }
        assert!(!set("qga.block-rpcs = ['guest-exec']\nqga.passwords.allow = false").contains("AUDIT_WRITE"));
        assert!(set("qga.method = 'none'").contains("SYS_TIME"), "host halves may set the clock");
        assert!(!set("qga.method = 'none'\ncontrol.listen = 'none'").contains("SYS_TIME"));
        // With a grant for a client, only its roles count, unless nothing is enforced yet.
        let plain = "[[grant]]\nhost = 'plain'\nprofile = 'volumes'\n";
        let monitored = set(&format!("{plain}[[grant]]\nhost = 'qga'\nprofile = 'monitor'"));
        for capability in ["SYS_TIME", "SYS_BOOT", "AUDIT_WRITE", "SETUID"] {
            assert!(!monitored.contains(capability), "{capability}: {monitored}");
        }
        let power = set(&format!("{plain}[[grant]]\nhost = 'qga'\nroles = ['power']"));
        assert!(
            power.contains("SYS_TIME") && power.contains("SYS_BOOT") && !power.contains("SETUID"),
            "{power}"
        );
        let half = set("qga.method = 'none'\n[[grant]]\nhost = '*'\nroles = ['accounts']");
        assert!(half.contains("SETUID") && half.contains("SYS_TIME"), "{half}");
        let runs = "qga.method = 'none'\n[[grant]]\nhost = '*'\nroles = ['exec']";
        assert!(options(&settings_in_file(runs)).is_err());
        let audited = "policy.mode = 'audit'\n[[grant]]\nhost = 'qga'\nroles = ['power']";
        assert!(options(&settings_in_file(audited)).is_err());
    }

    #[test]
    fn commands_and_options_are_real_ones() {
        for (commands, _) in NEEDS {
            for command in *commands {
                assert!(COMMANDS.iter().any(|row| row.name == *command), "{command}");
            }
        }
        // Each of these would create a mount namespace, and the guest would not see what the agent mounts.
        for (option, _) in ALSO {
            let makes_one = [
                "Protect",
                "Private",
                "ReadOnly",
                "ReadWrite",
                "Inaccessible",
                "Temporary",
                "Bind",
                "Root",
                "Mount",
            ];
            assert!(!makes_one.iter().any(|start| option.starts_with(start)), "{option}");
        }
    }
}
