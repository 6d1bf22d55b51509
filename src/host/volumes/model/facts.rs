//! What is believed of the VMs of the model, and of whoever plugs volumes into them.

use super::super::super::backends::authority::Said;
use super::super::super::backends::volumes::{Place, Published};

pub const VMS: usize = 2;
pub const NAMES: [&str; VMS] = ["0", "1"];

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Command {
    Add,
    /// Of the host half's own disk, or of one that another program has plugged: they are called differently.
    Delete {
        as_is: bool,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[allow(clippy::struct_excessive_bools, reason = "each of them changes by itself")]
pub struct Qemu {
    pub runs: bool,
    pub answers: bool,
    pub is_listed: bool,
    pub has_image: bool,
    /// Another program has plugged what it has, in its own way.
    pub as_is: bool,
    /// Sent, and not carried out yet.
    pub pending: Option<Command>,
    /// The host half saw its process end.
    pub end_was_seen: bool,
}

pub fn place(vm: usize) -> Place {
    Place { uuid: NAMES[vm].into(), vm: NAMES[vm].into() }
}

pub fn vm_of(uuid: &str) -> usize {
    NAMES.iter().position(|name| *name == uuid).unwrap()
}

pub fn published(vm: usize, leaving: bool) -> Published {
    let name = || NAMES[vm].to_owned();
    Published { uuid: name(), vm: name(), node: name(), read_only: false, leaving }
}

impl Qemu {
    pub fn new() -> Self {
        Self {
            runs: true,
            answers: true,
            is_listed: true,
            has_image: false,
            as_is: false,
            pending: None,
            end_was_seen: false,
        }
    }

    pub fn can_be_asked(&self) -> bool {
        self.is_listed && self.runs && self.answers
    }

    pub fn said(&self) -> Said {
        match self {
            Self { is_listed: false, .. } => Said::Unlisted,
            Self { runs: false, .. } => Said::Absent { ended: self.end_was_seen },
            Self { answers: false, .. } => Said::Silent(String::new()),
            Self { has_image: true, .. } => Said::Has(String::new()),
            _ => Said::HasNot,
        }
    }

    /// Carries out what it was sent; the image is there and nobody has it, or not.
    pub fn carry_out(&mut self, is_free: bool) {
        match self.pending.take() {
            Some(Command::Add) => self.has_image |= is_free,
            Some(Command::Delete { as_is }) if as_is == self.as_is => self.lose(),
            Some(Command::Delete { .. }) | None => {}
        }
    }

    /// Another program plugs it, or takes away what is there.
    pub fn is_meddled_with(&mut self, is_free: bool) {
        if self.has_image {
            self.lose();
        } else if is_free {
            (self.has_image, self.as_is) = (true, true);
        }
    }

    fn lose(&mut self) {
        (self.has_image, self.as_is) = (false, false);
    }
}
