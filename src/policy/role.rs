//! Roles, and the profiles that name several of them.

use std::fmt;

/// What somebody may be allowed to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Read what the guest is: its name, addresses, disks, file systems, users; and its events.
    Status,
    /// Read its counters: load, processors, disks.
    Metrics,
    /// Read its logs.
    Logs,
    /// Tell it where it runs, and so change the labels of its Node; have it check its own node ports.
    Topology,
    /// Freeze and thaw its file systems.
    Freeze,
    /// Find, release and trim disks, and open the stream on which the guest asks for volumes.
    Disks,
    /// Read files.
    FilesRead,
    /// Write files, and read them.
    FilesWrite,
    /// Run programs.
    Exec,
    /// Reach its ports.
    Forward,
    /// Shut it down or suspend it, and set its clock, processors and memory.
    Power,
    /// Change who may log in.
    Accounts,
    /// Replace its own key, and that of the guest.
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
    /// Its word in settings and in audit records.
    pub const fn word(self) -> &'static str {
        WORDS[self as usize].1
    }

    /// The role of this word.
    pub fn named(word: &str) -> Option<Self> {
        WORDS.iter().find(|(_, known)| *known == word).map(|(role, _)| *role)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.word())
    }
}

/// A set of roles. Whoever may write files may read them, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Roles(u16);

/// What qemu-ga lets its clients do.
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

/// What a host half that has proved nothing may do in a guest without keys and grants for it: no programs and no files, which
/// whoever reaches the channel could otherwise use.
pub const PLAIN: Roles = QEMU_GA.without(Role::Exec).without(Role::FilesWrite).without(Role::FilesRead);

/// The profiles of the settings.
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
    /// No role.
    pub const NONE: Self = Self(0);

    /// These roles.
    pub const fn of(roles: &[Role]) -> Self {
        let mut set = Self::NONE;
        let mut place = 0;
        while place < roles.len() {
            set = set.with(roles[place]);
            place += 1;
        }
        set
    }

    /// Those of a profile, by its name.
    pub fn of_profile(name: &str) -> Option<Self> {
        PROFILES.iter().find(|(known, _)| *known == name).map(|(_, roles)| *roles)
    }

    /// Those of a word that names a role or a profile.
    pub fn of_word(word: &str) -> Option<Self> {
        Role::named(word).map(|role| Self::NONE.with(role)).or_else(|| Self::of_profile(word))
    }

    /// These and one more.
    #[must_use]
    pub const fn with(self, role: Role) -> Self {
        let more = 1 << role as u16;
        let implied = if matches!(role, Role::FilesWrite) { 1 << Role::FilesRead as u16 } else { 0 };
        Self(self.0 | more | implied)
    }

    /// These without one.
    #[must_use]
    pub const fn without(self, role: Role) -> Self {
        Self(self.0 & !(1 << role as u16))
    }

    /// Whether a role is among them.
    pub const fn has(self, role: Role) -> bool {
        self.0 & (1 << role as u16) != 0
    }

    /// Whether there are none.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Each of them.
    pub fn iter(self) -> impl Iterator<Item = Role> {
        WORDS.into_iter().map(|(role, _)| role).filter(move |role| self.has(*role))
    }
}

/// The words of all roles, for messages.
pub fn words() -> String {
    WORDS.map(|(_, word)| word).join(", ")
}

/// The names of all profiles, for messages.
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
