//! Roles, and the profiles, which are named sets of roles.

use std::fmt;

/// Class of verbs that may be allowed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Read the guest's state: its name, addresses, disks, file systems and users; and its events.
    Status,
    /// Read the guest's metrics: load, processors, disks.
    Metrics,
    /// Read the guest's logs.
    Logs,
    /// Set the guest's topology, and with it the labels of its Node; have it check its own node ports.
    Topology,
    /// Freeze and thaw the guest's file systems.
    Freeze,
    /// Find, release and trim disks, and open the stream on which the guest requests volumes.
    Disks,
    /// Read files of the guest.
    FilesRead,
    /// Write and read files of the guest.
    FilesWrite,
    /// Run programs in the guest.
    Exec,
    /// Connect to ports and unix sockets through the guest.
    Forward,
    /// Shut the guest down or suspend it, and set its clock, processors and memory.
    Power,
    /// Change who may log in to the guest.
    Accounts,
    /// Replace the host half's own key, and that of the guest.
    Keys,
}

/// Every role with its word in the settings, in the order of [`Role`].
const WORDS: [(Role, &str); 13] = [
    (Role::Status, "status"),
    (Role::Metrics, "metrics"),
    (Role::Logs, "logs"),
    (Role::Topology, "topology"),
    (Role::Freeze, "freeze"),
    (Role::Disks, "disks"),
    (Role::FilesRead, "files-read"),
    (Role::FilesWrite, "files-write"),
    (Role::Exec, "exec"),
    (Role::Forward, "forward"),
    (Role::Power, "power"),
    (Role::Accounts, "accounts"),
    (Role::Keys, "keys"),
];

impl Role {
    /// Returns the role's word in settings and in audit records.
    pub const fn word(self) -> &'static str {
        WORDS[self as usize].1
    }

    /// Returns the role with this word.
    pub fn named(word: &str) -> Option<Self> {
        WORDS.iter().find(|(_, known)| *known == word).map(|(role, _)| *role)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.word())
    }
}

/// Set of roles. The role to write files includes that to read them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Roles(u16);

/// Roles that allow what qemu-ga allows its clients.
pub const QEMU_GA: Roles = Roles::of(&[
    Role::Status,
    Role::Metrics,
    Role::Topology,
    Role::Freeze,
    Role::Disks,
    Role::FilesWrite,
    Role::Exec,
    Role::Power,
    Role::Accounts,
]);

/// Roles of a host half that has proved no key, in a guest without keys and without grants for it. Programs and
/// files are not among them, because every process that can reach the channel has these roles.
pub const PLAIN: Roles = QEMU_GA.without(Role::Exec).without(Role::FilesWrite).without(Role::FilesRead);

/// Profiles that settings can name.
pub const PROFILES: [(&str, Roles); 4] = [
    ("qemu-ga", QEMU_GA),
    ("monitor", Roles::of(&[Role::Status, Role::Metrics, Role::Logs])),
    ("volumes", Roles::of(&[Role::Status, Role::Topology, Role::Disks, Role::Keys])),
    (
        "operator",
        Roles::of(&[
            Role::Status,
            Role::Metrics,
            Role::Logs,
            Role::Topology,
            Role::Freeze,
            Role::Disks,
            Role::FilesRead,
            Role::Forward,
            Role::Power,
            Role::Keys,
        ]),
    ),
];

impl Roles {
    /// The empty set.
    pub const NONE: Self = Self(0);

    /// Creates the set of these roles.
    pub const fn of(roles: &[Role]) -> Self {
        let mut set = Self::NONE;
        let mut place = 0;
        while place < roles.len() {
            set = set.with(roles[place]);
            place += 1;
        }
        set
    }

    /// Returns the roles of a profile, by its name.
    pub fn of_profile(name: &str) -> Option<Self> {
        PROFILES.iter().find(|(known, _)| *known == name).map(|(_, roles)| *roles)
    }

    /// Returns the roles of a word that names a role or a profile.
    pub fn of_word(word: &str) -> Option<Self> {
        Role::named(word).map(|role| Self::NONE.with(role)).or_else(|| Self::of_profile(word))
    }

    /// Returns the set with one more role.
    #[must_use]
    pub const fn with(self, role: Role) -> Self {
        let more = 1 << role as u16;
        let implied = if matches!(role, Role::FilesWrite) { 1 << Role::FilesRead as u16 } else { 0 };
        Self(self.0 | more | implied)
    }

    /// Returns the set without one role.
    #[must_use]
    pub const fn without(self, role: Role) -> Self {
        Self(self.0 & !(1 << role as u16))
    }

    /// Returns whether the set contains a role.
    pub const fn has(self, role: Role) -> bool {
        self.0 & (1 << role as u16) != 0
    }

    /// Returns whether the set is empty.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Iterates over the roles, in the order in which they are declared.
    pub fn iter(self) -> impl Iterator<Item = Role> {
        WORDS.into_iter().map(|(role, _)| role).filter(move |role| self.has(*role))
    }
}

/// Lists the words of all roles, for messages.
pub fn words() -> String {
    WORDS.map(|(_, word)| word).join(", ")
}

/// Lists the names of all profiles, for messages.
pub fn profiles() -> String {
    PROFILES.map(|(name, _)| name).join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_role_has_its_word() {
        for (place, (role, word)) in WORDS.into_iter().enumerate() {
            assert_eq!((role as usize, role.word(), Role::named(word)), (place, word, Some(role)));
        }
        assert_eq!(Role::named("Status"), None);
    }

    #[test]
    fn profiles_give_what_their_page_says() {
        let words =
            |name| Roles::of_profile(name).unwrap().iter().map(Role::word).collect::<Vec<_>>().join(" ");
        assert_eq!(words("monitor"), "status metrics logs");
        assert_eq!(words("volumes"), "status topology disks keys");
        assert_eq!(
            words("operator"),
            "status metrics logs topology freeze disks files-read forward power keys"
        );
        assert_eq!(
            words("qemu-ga"),
            "status metrics topology freeze disks files-read files-write exec power accounts"
        );
        assert_eq!(Roles::of_word("freeze"), Some(Roles::of(&[Role::Freeze])));
        assert_eq!(Roles::of_word("monitors"), None);
    }

    #[test]
    fn who_writes_files_reads_them() {
        let roles = Roles::of(&[Role::FilesWrite]);
        assert!(roles.has(Role::FilesRead));
        assert_eq!(roles.without(Role::FilesWrite), Roles::of(&[Role::FilesRead]));
    }
}
