//! Assumptions about the VMs of the model, and about other programs that plug volumes into them.

use super::super::super::backends::authority::Said;
use super::super::super::backends::volumes::{Holder, Place, Published};

pub const VMS: usize = 2;
pub const NAMES: [&str; VMS] = ["0", "1"];

/// Command that a QEMU is sent; at most one at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Command {
    /// Open the image as a block node.
    Open,
    /// Attach a disk to the node.
    Plug,
    /// Delete the host half's own disk with its node or, if `as_is`, one that another program has plugged: the two
    /// have different identifiers.
    Delete { as_is: bool },
}

/// Part of the image that a QEMU has open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Has {
    Nothing,
    /// A block node that nothing uses. It holds no lock on a raw image. (It would on a qcow2 image.)
    Node,
    /// A disk, which holds the locks.
    Disk {
        /// True if another program has plugged it, in its own way.
        as_is: bool,
        /// True if QEMU has asked the guest's kernel to let go of it, which may happen at any time.
        is_asked: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(clippy::struct_excessive_bools, reason = "each of them changes by itself")]
pub struct Qemu {
    pub runs: bool,
    pub answers: bool,
    pub is_listed: bool,
    pub has: Has,
    /// Command that was sent and has not been carried out yet.
    pub pending: Option<Command>,
    /// True if the host half saw the process end.
    pub end_was_seen: bool,
}

pub fn place(vm: usize) -> Place {
    Place { uuid: NAMES[vm].into(), vm: NAMES[vm].into() }
}

fn vm_of(uuid: &str) -> usize {
    NAMES.iter().position(|name| *name == uuid).unwrap()
}

/// Record of the VM to which the volume is published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Record {
    pub vm: usize,
    pub leaving: bool,
}

impl Record {
    pub fn published(self) -> Published {
        let name = || NAMES[self.vm].to_owned();
        Published { uuid: name(), vm: name(), node: name(), read_only: false, leaving: self.leaving }
    }
}

/// Holder of the volume, in a compact form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Held {
    By(usize),
    Off,
    Unknown,
}

impl Held {
    pub fn holder(self) -> Holder {
        match self {
            Self::By(vm) => Holder::On(place(vm)),
            Self::Off => Holder::Off,
            Self::Unknown => Holder::Unknown(String::new()),
        }
    }
}

impl From<Holder> for Held {
    fn from(holder: Holder) -> Self {
        match holder {
            Holder::On(place) => Self::By(at(&place)),
            Holder::Off => Self::Off,
            Holder::Unknown(_) => Self::Unknown,
        }
    }
}

/// Returns the VM that a place names.
pub fn at(place: &Place) -> usize {
    vm_of(&place.uuid)
}

impl Has {
    pub const DISK: Self = Self::Disk { as_is: false, is_asked: false };

    pub fn is_disk(self) -> bool {
        matches!(self, Self::Disk { .. })
    }

    pub fn is_as_is(self) -> bool {
        matches!(self, Self::Disk { as_is: true, .. })
    }

    pub fn is_asked(self) -> bool {
        matches!(self, Self::Disk { is_asked: true, .. })
    }
}

impl Qemu {
    pub fn new() -> Self {
        let (runs, answers, is_listed) = (true, true, true);
        Self { runs, answers, is_listed, has: Has::Nothing, pending: None, end_was_seen: false }
    }

    pub fn can_be_asked(self) -> bool {
        self.is_listed && self.runs && self.answers
    }

    /// Reports whether a command can be sent.
    pub fn is_ready(self) -> bool {
        self.can_be_asked() && self.pending.is_none()
    }

    pub fn said(self) -> Said {
        match self {
            Self { is_listed: false, .. } => Said::Unlisted,
            Self { runs: false, .. } => Said::Absent { ended: self.end_was_seen },
            Self { answers: false, .. } => Said::Silent(String::new()),
            Self { has: Has::Nothing, .. } => Said::HasNot,
            _ => Said::Has(String::new()),
        }
    }

    /// Returns all possible results of the pending command, the wanted one first. The image exists or not, and another
    /// QEMU has locked it or not. Without nodes, images are opened and plugged in one step.
    pub fn carried_out(self, is_there: bool, is_locked: bool, has_nodes: bool) -> Vec<Self> {
        let done = |has| Self { has, pending: None, ..self };
        match (self.pending, self.has) {
            (Some(Command::Open), Has::Nothing) if !has_nodes && is_there && !is_locked => {
                vec![done(Has::DISK)]
            }
            (Some(Command::Open), has) if !has_nodes => vec![done(has)],
            (Some(Command::Open), Has::Nothing) if is_there => vec![done(Has::Node)],
            (Some(Command::Plug), Has::Node) if !is_locked => vec![done(Has::DISK)],
            (Some(Command::Delete { as_is: false }), Has::Node) => vec![done(Has::Nothing)],
            (Some(Command::Delete { as_is: wanted }), Has::Disk { as_is, .. }) if wanted == as_is => {
                let slow = [Has::Node, Has::Disk { as_is, is_asked: true }].into_iter().filter(|_| has_nodes);
                std::iter::once(Has::Nothing).chain(slow).map(done).collect()
            }
            (_, has) => vec![done(has)],
        }
    }

    /// Resets what no longer matters, so that fewer states differ.
    pub fn simple(self) -> Self {
        // A VM that is in no list is never asked.
        Self { answers: self.answers || !self.is_listed, ..self }
    }

    /// Plugs the volume as another program would, or unplugs whatever disk there is.
    pub fn is_meddled_with(&mut self, is_free: bool) {
        if self.has.is_disk() {
            self.has = Has::Nothing;
        } else if is_free {
            self.has = Has::Disk { as_is: true, is_asked: false };
        }
    }
}
