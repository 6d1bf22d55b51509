//! The role of each method of the guestlet API. (The commands of QGA have theirs in their own table.)
//!
//! To add a method: its row here, in the order of the names. One without a row is answered as if it did not exist, and a
//! test fails.

use crate::policy::role::Role;

/// The service of the control channel, as paths begin with it.
const SERVICE: &str = "/guestlet.v1.Guest/";

/// A method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verb {
    /// Its name.
    pub name: &'static str,
    /// What its caller has to have.
    pub role: Role,
    /// Each call leaves a record, as it changes something.
    pub audited: bool,
}

const fn verb(name: &'static str, role: Role, audited: bool) -> Verb {
    Verb { name, role, audited }
}

/// All methods of `guestlet.v1.Guest`.
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
    verb("SetTopology", Role::Topology, true),
    verb("WatchEvents", Role::Status, false),
];

/// The method that a request with this path calls.
pub fn find(path: &str) -> Option<&'static Verb> {
    let name = path.strip_prefix(SERVICE)?;
    VERBS.iter().find(|verb| verb.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::disallowed_methods)]
    fn every_method_of_the_control_channel_has_a_role() {
        let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("proto/guestlet/v1/guest.proto");
        let text = std::fs::read_to_string(file).unwrap();
        let methods = text.lines().filter_map(|line| line.trim().strip_prefix("rpc ")?.split('(').next());
        let mut methods: Vec<_> = methods.map(str::trim).collect();
        methods.sort_unstable();
        assert!(methods.len() > 5, "{methods:?}");
        let known: Vec<_> = VERBS.iter().map(|verb| verb.name).collect();
        assert_eq!(known, methods, "src/policy/verbs.rs, and proto/guestlet/v1/guest.proto");
    }

    #[test]
    fn methods_are_found_by_their_paths_alone() {
        assert_eq!(find("/guestlet.v1.Guest/Ping").unwrap().role, Role::Status);
        for path in
            ["/guestlet.v1.Guest/Pin", "/guestlet.v1.Guest/Ping/", "/guestlet.v1.Local/Ping", "Ping", ""]
        {
            assert_eq!(find(path), None, "{path:?}");
        }
    }
}
