//! Checks of the program, its settings and its unit.

use std::path::PathBuf;

use super::Patient;
use crate::privileges;
use crate::text::findings::Finding;

/// Names of capabilities in the order of their numbers in linux/capability.h.
const CAPABILITIES: [&str; 41] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];

/// Checks that the settings can be read.
pub fn settings(patient: &Patient<'_>) -> Finding {
    match patient.settings {
        Ok(_) => Finding::good("settings", "they are valid (guestlet -D shows them)"),
        Err(error) => Finding::wrong(
            "settings",
            error.to_string(),
            "fix that line; until then the agent does not start",
        ),
    }
}

/// Checks that the agent is running, and that it is the installed version.
pub fn running(patient: &Patient<'_>) -> Finding {
    let answer = match &patient.answer {
        Ok(answer) => answer,
        Err(why) => {
            return Finding::wrong(
                "agent",
                why.clone(),
                "journalctl --unit guestlet shows why it stopped, if it did",
            );
        }
    };
    let version = answer.status.guest.as_ref().map(|guest| guest.agent_version.as_str()).unwrap_or_default();
    if version == crate::VERSION {
        return Finding::good("agent", format!("guestlet {version} is running"));
    }
    let says = format!("guestlet {version} is running, but {} is installed", crate::VERSION);
    Finding::note("agent", says, "systemctl restart guestlet")
}

/// Checks that the agent has no mount namespace of its own, which would hide its mounts.
pub fn namespace(patient: &Patient<'_>) -> Option<Finding> {
    let process = patient.answer.as_ref().ok()?.process?;
    let of = |process: i32| std::fs::read_link(patient.root.path(&format!("/proc/{process}/ns/mnt"))).ok();
    let (its, everybodys): (PathBuf, PathBuf) = (of(process)?, of(1)?);
    (its != everybodys).then(|| {
        Finding::wrong(
            "mounts",
            "the agent has its own mount namespace: other processes do not see what it mounts",
            "systemctl cat guestlet: remove the option that creates one (such as ProtectSystem= or PrivateTmp=)",
        )
    })
}

/// Checks whether the unit has dropped privileges that the settings need, or still has some that they do not
/// need.
pub fn privileges(patient: &Patient<'_>) -> Option<Finding> {
    const RELOAD: &str = "systemctl daemon-reload && systemctl restart guestlet";
    let process = patient.answer.as_ref().ok()?.process?;
    let settings = patient.settings.ok()?;
    let text = patient.root.read(&format!("/proc/{process}/status")).ok()?;
    let text = String::from_utf8_lossy(&text);
    let bounds = text.lines().find_map(|line| line.strip_prefix("CapBnd:"))?;
    let bounds = u64::from_str_radix(bounds.trim(), 16).ok()?;
    let has = |name: &str| {
        let name = name.trim_start_matches("CAP_");
        CAPABILITIES.iter().position(|known| *known == name).is_some_and(|number| bounds >> number & 1 == 1)
    };
    match privileges::options(settings) {
        // Containers, and units written by people, omit capabilities such as SYS_MODULE on purpose, so those are not
        // checked.
        Err(reason) if !has("SYS_TIME") || !has("SETUID") => {
            let says = format!("the unit drops privileges, although {reason}");
            Some(Finding::wrong("privileges", says, RELOAD))
        }
        Err(reason) => Some(Finding::good("privileges", format!("all: {reason}"))),
        Ok(options) => {
            let needed = options.iter().find(|(option, _)| *option == "CapabilityBoundingSet");
            let needed: Vec<_> = needed.map(|(_, value)| value.split(' ').collect()).unwrap_or_default();
            let lacking: Vec<_> = needed.iter().filter(|name| !has(name)).copied().collect();
            let spare = CAPABILITIES.iter().filter(|name| has(name)).count() > needed.len();
            Some(if !lacking.is_empty() {
                let says = format!("the unit drops {}, which the settings need", lacking.join(", "));
                Finding::wrong("privileges", says, RELOAD)
            } else if spare {
                Finding::note("privileges", "more than the settings need", RELOAD)
            } else {
                Finding::good("privileges", "only those that the settings need")
            })
        }
    }
}
