//! The verbs over this machine. They know no protocol: QGA and the guestlet API both call them.
//!
//! One file per subject. To add a verb: put it into its subject's file, with what it reads going through
//! the [`Root`], and its errors typed.

use std::sync::Arc;

use crate::sys::root::Root;

pub mod events;
pub mod identity;
pub mod monitor;
pub mod network;
pub mod power;
pub mod state;
pub mod system;

/// This machine, as the protocols hold it; clones share it.
#[derive(Debug, Clone, Default)]
pub struct Guest {
    /// Where its files are.
    pub root: Root,
    /// What happens in it.
    pub events: Arc<events::Hub>,
}
