//! Identity of the machine that a key was made on.

/// Identifiers that distinguish a machine from its copies; empty where unknown.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Machine {
    /// The SMBIOS system UUID.
    pub dmi: String,
    /// Machine ID, machine-id(5).
    pub id: String,
    /// Changes with each copy of the VM's memory or disk, where the hypervisor provides that (vmgenid).
    pub generation: String,
}

impl Machine {
    pub(super) fn text(&self) -> String {
        format!("dmi {}\nmachine-id {}\nvmgenid {}\n", self.dmi, self.id, self.generation)
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let mut value = |name: &str| Some(lines.next()?.strip_prefix(name)?.trim().to_owned());
        Some(Self { dmi: value("dmi")?, id: value("machine-id")?, generation: value("vmgenid")? })
    }

    /// Returns whether both can be the same machine. An identifier that one of them lacks does not count, because
    /// a driver may be loaded late, or not at all.
    pub(super) fn may_be(&self, other: &Self) -> bool {
        let fits = |one: &str, other: &str| one.is_empty() || other.is_empty() || one == other;
        fits(&self.dmi, &other.dmi) && fits(&self.id, &other.id) && fits(&self.generation, &other.generation)
    }

    /// Returns these identifiers, with the missing ones taken from `other`.
    pub(super) fn with(&self, other: Self) -> Self {
        let known = |one: &str, other: String| if one.is_empty() { other } else { one.to_owned() };
        Self {
            dmi: known(&self.dmi, other.dmi),
            id: known(&self.id, other.id),
            generation: known(&self.generation, other.generation),
        }
    }
}
