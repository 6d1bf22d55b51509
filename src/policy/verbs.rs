//! The role of each method of the guestlet API. (The commands of QGA have theirs in their own table.)
//!
//! To add a method: its row here, in the order of the names. One without a row is answered as if it did not exist, and a
//! test fails.

use crate::policy::role::Role;

/// The services of the control channel, as paths begin with them.
const GUEST: &str = "/guestlet.v1.Guest/";
const HEALTH_CHECKS: &str = "/guestlet.v1.HealthChecks/";

/// A method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verb {
    /// What the paths of its service begin with.
    service: &'static str,
    /// Its name.
    pub name: &'static str,
    /// What its caller has to have.
    pub role: Role,
    /// Each call leaves a record, as it changes something.
    pub audited: bool,
}

const fn verb(name: &'static str, role: Role, audited: bool) -> Verb {
    Verb { service: GUEST, name, role, audited }
}

/// All methods of the control channel.
pub static VERBS: &[Verb] = &[
    // What the guest asks on it is decided by the host half.
    verb("Callback", Role::Disks, false),
    verb("Enroll", Role::Status, true),
    verb("FindDisk", Role::Disks, false),
    verb("GetInfo", Role::Status, false),
    verb("Ping", Role::Status, false),
    verb("ReleaseDisk", Role::Disks, true),
    verb("ReplaceHostKey", Role::Keys, true),
    verb("RotateKey", Role::Keys, true),
    Verb { service: HEALTH_CHECKS, name: "SetHealthChecks", role: Role::Topology, audited: true },
    verb("SetTopology", Role::Topology, true),
    verb("WatchEvents", Role::Status, false),
];

/// The method that a request with this path calls.
pub fn find(path: &str) -> Option<&'static Verb> {
    VERBS.iter().find(|verb| path.strip_prefix(verb.service) == Some(verb.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::disallowed_methods)]
    fn every_method_of_the_control_channel_has_a_role() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("proto/guestlet/v1");
        let mut methods = Vec::new();
        for (file, service) in [("guest.proto", GUEST), ("cloud.proto", HEALTH_CHECKS)] {
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
