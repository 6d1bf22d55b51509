//! What is believed of the VMs of the model, and of whoever plugs volumes into them.

use super::super::super::backends::authority::Said;
use super::super::super::backends::volumes::{Holder, Place, Published};

pub const VMS: usize = 2;
pub const NAMES: [&str; VMS] = ["0", "1"];

/// What a QEMU is sent: one thing at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Command {
    /// To open the image as a block node.
    Open,
    /// To put a disk before the node.
    Plug,
    /// To take away the host half's own disk, with the node behind it, or one that another program has plugged: they are called
    /// differently.
    Delete { as_is: bool },
}

/// What a QEMU has of the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Has {
    Nothing,
    /// It has opened it as a block node, and nothing uses that: so it holds no lock on the image (raw images; of qcow2 ones it does).
    Node,
    /// A disk, and the locks.
    Disk {
        /// Another program has plugged it, in its own way.
        as_is: bool,
        /// QEMU has asked the guest's kernel to let go of it, which it does at any time.
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
    /// Sent, and not carried out yet.
    pub pending: Option<Command>,
    /// The host half saw its process end.
    pub end_was_seen: bool,
}

pub fn place(vm: usize) -> Place {
    Place { uuid: NAMES[vm].into(), vm: NAMES[vm].into() }
}

fn vm_of(uuid: &str) -> usize {
    NAMES.iter().position(|name| *name == uuid).unwrap()
}

/// What is remembered of the volume.
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

/// Who holds the volume, in few words.
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

/// The VM that a place is of.
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

    /// A command can be sent.
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

    /// All that can become of what it was sent, first what is wanted; the image is there or not, and another QEMU has locked it or
    /// not. Without nodes, images are opened and plugged at once.
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

    /// What counts no more is as it was at first, so that fewer states differ.
    pub fn simple(self) -> Self {
        // Nobody asks one that is in no list.
        Self { answers: self.answers || !self.is_listed, ..self }
    }

    /// Another program plugs it, or takes away what is there.
    pub fn is_meddled_with(&mut self, is_free: bool) {
        if self.has.is_disk() {
            self.has = Has::Nothing;
        } else if is_free {
            self.has = Has::Disk { as_is: true, is_asked: false };
        }
    }
}
