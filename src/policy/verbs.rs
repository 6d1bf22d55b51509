//! Roles of the methods of the guestlet API, and the commands of QGA that each method corresponds to. (The
//! commands of QGA have their roles in their own table.)
//!
//! To add a method: its row here, in the order of the names. A method without a row is answered as if it did not
//! exist, and a test fails. A test also fails if a command of QGA has no method here and is not among those
//! [`ONLY_BY_QGA`].

use crate::policy::role::Role;
use crate::policy::rules::Detail;

/// Services of the control channel: the beginnings of their methods' paths.
const GUEST: &str = "/guestlet.v1.Guest/";
const ACCOUNTS: &str = "/guestlet.v1.Accounts/";
const FILE_SYSTEMS: &str = "/guestlet.v1.FileSystems/";
const FREEZE: &str = "/guestlet.v1.Freeze/";
const HEALTH_CHECKS: &str = "/guestlet.v1.HealthChecks/";
const JOURNAL: &str = "/guestlet.v1.Journal/";
const MACHINE: &str = "/guestlet.v1.Machine/";
const METRICS: &str = "/guestlet.v1.Metrics/";
const NETWORK: &str = "/guestlet.v1.Network/";
const POWER: &str = "/guestlet.v1.Power/";
const QGA: &str = "/guestlet.v1.Qga/";
const EXEC: &str = "/guestlet.v1.Exec/";
const FORWARD: &str = "/guestlet.v1.Forward/";
const COPIES: &str = "/guestlet.v1.Files/";

/// Method of the guestlet API, with the permissions that it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verb {
    /// Path of its service, up to and including the slash before the method's name.
    service: &'static str,
    /// Name of the method.
    pub name: &'static str,
    /// Role that its caller needs.
    pub role: Role,
    /// True if each call is recorded, because it changes something.
    pub audited: bool,
    /// Commands of QGA that do the same: a bound that forbids one of them forbids the method.
    pub commands: &'static [&'static str],
    /// Object of the call, as far as the settings restrict it.
    pub detail: Detail<'static>,
    /// True if it may be called while file systems are frozen.
    pub while_frozen: bool,
    /// True if the client's identity is passed to the code that carries the call out.
    pub names_asker: bool,
}

/// Defaults, which hold for most methods; a row overrides some of them.
const USUAL: Verb = Verb {
    service: GUEST,
    name: "",
    role: Role::Status,
    audited: false,
    commands: &[],
    detail: Detail::None,
    while_frozen: true,
    names_asker: false,
};

const fn verb(name: &'static str, role: Role, audited: bool) -> Verb {
    Verb { name, role, audited, ..USUAL }
}

/// Defines a method that does the same as commands of QGA: like them, it is refused while file systems are frozen.
const fn does(
    service: &'static str,
    name: &'static str,
    role: Role,
    audited: bool,
    commands: &'static [&'static str],
) -> Verb {
    Verb { service, name, role, audited, commands, while_frozen: false, ..USUAL }
}

/// Every method of the control channel.
pub static VERBS: &[Verb] = &[
    does(ACCOUNTS, "AddAuthorizedKeys", Role::Accounts, true, &["guest-ssh-add-authorized-keys"]),
    // The host half decides on the calls that the guest makes on this stream.
    verb("Callback", Role::Disks, false),
    // It returns the figures of all these commands. Frozen file systems can be inspected.
    Verb {
        while_frozen: true,
        ..does(
            METRICS,
            "CollectMetrics",
            Role::Metrics,
            false,
            &[
                "guest-get-cpustats",
                "guest-get-diskstats",
                "guest-get-load",
                "guest-get-fsinfo",
                "guest-network-get-interfaces",
            ],
        )
    },
    verb("Enroll", Role::Status, true),
    // Each command is decided on and recorded separately.
    Verb { service: QGA, name: "ExecuteQga", names_asker: true, ..USUAL },
    verb("FindDisk", Role::Disks, false),
    // Each connection is decided on and recorded separately.
    Verb { service: FORWARD, name: "ForwardConnections", role: Role::Forward, names_asker: true, ..USUAL },
    Verb {
        names_asker: true,
        ..does(
            FREEZE,
            "FreezeFileSystems",
            Role::Freeze,
            true,
            &["guest-fsfreeze-freeze", "guest-fsfreeze-freeze-list"],
        )
    },
    Verb { while_frozen: true, ..does(FREEZE, "GetFreeze", Role::Freeze, false, &["guest-fsfreeze-status"]) },
    verb("GetInfo", Role::Status, false),
    Verb { service: FREEZE, name: "GetReceipt", while_frozen: false, ..USUAL },
    does(MACHINE, "GetTime", Role::Status, false, &["guest-get-time", "guest-get-timezone"]),
    does(ACCOUNTS, "ListAuthorizedKeys", Role::Accounts, true, &["guest-ssh-get-authorized-keys"]),
    does(FILE_SYSTEMS, "ListFileSystems", Role::Status, false, &["guest-get-fsinfo"]),
    does(NETWORK, "ListInterfaces", Role::Status, false, &["guest-network-get-interfaces"]),
    does(
        MACHINE,
        "ListMemoryBlocks",
        Role::Status,
        false,
        &["guest-get-memory-block-info", "guest-get-memory-blocks"],
    ),
    does(MACHINE, "ListProcessors", Role::Status, false, &["guest-get-vcpus"]),
    Verb {
        names_asker: true,
        while_frozen: true,
        ..does(EXEC, "ListPrograms", Role::Exec, false, &["guest-exec"])
    },
    Verb { service: FREEZE, name: "ListReceipts", while_frozen: false, ..USUAL },
    does(NETWORK, "ListRoutes", Role::Status, false, &["guest-network-get-route"]),
    does(ACCOUNTS, "ListUsers", Role::Status, false, &["guest-get-users"]),
    verb("Ping", Role::Status, false),
    // Each file is decided on separately. Frozen file systems can be read.
    Verb {
        names_asker: true,
        while_frozen: true,
        ..does(COPIES, "ReadFiles", Role::FilesRead, true, &["guest-file-open"])
    },
    // Not recorded: the record would be a new journal entry, which a client that follows the journal reads at once.
    Verb { service: JOURNAL, name: "ReadJournal", role: Role::Logs, ..USUAL },
    verb("ReleaseDisk", Role::Disks, true),
    does(ACCOUNTS, "RemoveAuthorizedKeys", Role::Accounts, true, &["guest-ssh-remove-authorized-keys"]),
    verb("ReplaceHostKey", Role::Keys, true),
    verb("RotateKey", Role::Keys, true),
    // The program and the user are decided on separately, and no program is started while file systems are frozen. The
    // end of the program is recorded, too.
    Verb {
        names_asker: true,
        while_frozen: true,
        ..does(EXEC, "RunProgram", Role::Exec, true, &["guest-exec"])
    },
    Verb { service: HEALTH_CHECKS, name: "SetHealthChecks", role: Role::Topology, audited: true, ..USUAL },
    does(MACHINE, "SetMemoryBlocks", Role::Power, true, &["guest-set-memory-blocks"]),
    Verb {
        detail: Detail::Password,
        ..does(ACCOUNTS, "SetPassword", Role::Accounts, true, &["guest-set-user-password"])
    },
    does(MACHINE, "SetProcessors", Role::Power, true, &["guest-set-vcpus"]),
    does(MACHINE, "SetTime", Role::Power, true, &["guest-set-time"]),
    verb("SetTopology", Role::Topology, true),
    does(POWER, "Shutdown", Role::Power, true, &["guest-shutdown"]),
    Verb {
        names_asker: true,
        while_frozen: true,
        ..does(EXEC, "SignalProgram", Role::Exec, true, &["guest-exec"])
    },
    does(POWER, "SuspendToBoth", Role::Power, true, &["guest-suspend-hybrid"]),
    does(POWER, "SuspendToDisk", Role::Power, true, &["guest-suspend-disk"]),
    does(POWER, "SuspendToMemory", Role::Power, true, &["guest-suspend-ram"]),
    Verb {
        while_frozen: true,
        ..does(FREEZE, "ThawFileSystems", Role::Freeze, true, &["guest-fsfreeze-thaw"])
    },
    does(FILE_SYSTEMS, "TrimFileSystems", Role::Disks, true, &["guest-fstrim"]),
    verb("WatchEvents", Role::Status, false),
    Verb { names_asker: true, ..does(COPIES, "WriteFiles", Role::FilesWrite, true, &[]) },
];

/// Commands of QGA that have no method of their own; they can be called with `guestctl qga`.
pub static ONLY_BY_QGA: &[&str] = &[
    "guest-exec-status",
    "guest-file-close",
    "guest-file-flush",
    "guest-file-read",
    "guest-file-seek",
    "guest-file-write",
    "guest-get-disks",
    "guest-get-host-name",
    "guest-get-osinfo",
    "guest-info",
    "guest-ping",
    "guest-sync",
    "guest-sync-delimited",
];

/// Finds the method for the path of a request.
pub fn find(path: &str) -> Option<&'static Verb> {
    VERBS.iter().find(|verb| path.strip_prefix(verb.service) == Some(verb.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Proto files of the services that an agent serves on its control channel.
    const FILES: &[(&str, &str)] = &[
        ("guest.proto", GUEST),
        ("cloud.proto", HEALTH_CHECKS),
        ("qga.proto", QGA),
        ("freeze.proto", FREEZE),
        ("file_systems.proto", FILE_SYSTEMS),
        ("power.proto", POWER),
        ("machine.proto", MACHINE),
        ("network.proto", NETWORK),
        ("accounts.proto", ACCOUNTS),
        ("exec.proto", EXEC),
        ("forward.proto", FORWARD),
        ("files.proto", COPIES),
        ("journal.proto", JOURNAL),
        ("metrics.proto", METRICS),
    ];

    #[test]
    #[allow(clippy::disallowed_methods)]
    fn every_method_of_the_control_channel_has_a_role() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("proto/guestlet/v1");
        let mut methods = Vec::new();
        for (file, service) in FILES {
            let text = std::fs::read_to_string(folder.join(file)).unwrap();
            let name = service.trim_matches('/').trim_start_matches("guestlet.v1.");
            let begin = format!("service {name} {{");
            let lines = text.lines().skip_while(|line| *line != begin).take_while(|line| *line != "}");
            let names = lines.filter_map(|line| line.trim().strip_prefix("rpc ")?.split('(').next());
            let before = methods.len();
            methods.extend(names.map(|method| format!("{service}{}", method.trim())));
            assert!(methods.len() > before, "{file} has no {service}");
        }
        methods.sort_unstable();
        assert!(methods.len() > 5, "{methods:?}");
        assert!(VERBS.is_sorted_by_key(|verb| verb.name));
        let mut known: Vec<_> = VERBS.iter().map(|verb| format!("{}{}", verb.service, verb.name)).collect();
        known.sort_unstable();
        assert_eq!(known, methods, "src/policy/verbs.rs, and proto/guestlet/v1");
    }

    #[test]
    fn methods_are_found_by_their_paths_alone() {
        assert_eq!(find("/guestlet.v1.Guest/Ping").unwrap().role, Role::Status);
        assert_eq!(find("/guestlet.v1.HealthChecks/SetHealthChecks").unwrap().name, "SetHealthChecks");
        for path in [
            "/guestlet.v1.Guest/Pin",
            "/guestlet.v1.Guest/Ping/",
            "/guestlet.v1.Guest/SetHealthChecks",
            "/guestlet.v1.HealthChecks/Ping",
            "/guestlet.v1.Local/Ping",
            "Ping",
            "",
        ] {
            assert_eq!(find(path), None, "{path:?}");
        }
    }
}
