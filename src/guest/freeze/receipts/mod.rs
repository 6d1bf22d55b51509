//! Receipts of freezes: made when a freeze has ended, put where they outlast this process, then signed and filed.
//!
//! ```text
//!  keeper, or guardian ──▶ tray (beside the marker, in memory) ──▶ clerk's thread: sign ──▶ cabinet (on a disk)
//!     after the thaw         outlasts the agent, not the boot         not while frozen       90 days, 1,000 receipts
//! ```
//!
//! The [`tray`] ensures that no receipt is lost with the agent. The [`cabinet`] is a directory that everybody with
//! root can read. The [`clerk`] moves receipts from the first to the second. None of them can make a thaw fail or
//! wait.

pub mod cabinet;
pub mod clerk;
pub mod inventory;
pub mod tray;

use std::io::Read as _;
use std::time::SystemTime;

use prost_types::Timestamp;

use crate::guest::identity;
use crate::receipt::{Caller, Machine, Moment, Receipt, SCHEMA};
use crate::sys::clock;
use crate::sys::root::Root;

/// Summary of a receipt for clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Told {
    /// ID of the receipt.
    pub id: String,
    /// Level in one word.
    pub level: &'static str,
    /// Reasons why the level is not higher.
    pub reasons: Vec<String>,
}

impl From<&Receipt> for Told {
    fn from(receipt: &Receipt) -> Self {
        Self { id: receipt.id.clone(), level: receipt.level.word(), reasons: receipt.reasons.clone() }
    }
}

/// Returns the present time, by all clocks that a receipt records.
pub fn now() -> Moment {
    let boottime = clock::since_boot().unwrap_or_default();
    Moment {
        boottime_ms: u64::try_from(boottime.as_millis()).unwrap_or(u64::MAX),
        time: Timestamp::from(SystemTime::now()).to_string(),
    }
}

/// Creates the receipt of a freeze that `caller` requests now.
pub fn begin(root: &Root, caller: Caller) -> Receipt {
    let identity::Identity { boot_id, dmi_uuid, .. } = identity::identity(root);
    let mut receipt = Receipt {
        schema: SCHEMA,
        id: id(root),
        agent: crate::VERSION.to_owned(),
        guest: Machine { host_name: identity::host_name(), dmi_uuid, boot_id },
        caller,
        ..Receipt::default()
    };
    receipt.times.asked = Some(now());
    receipt
}

/// Returns a random ID of 128 bits from the kernel.
fn id(root: &Root) -> String {
    let mut bytes = [0; 16];
    let random =
        std::fs::File::open(root.path("/dev/urandom")).and_then(|mut file| file.read_exact(&mut bytes));
    match random {
        Ok(()) => format!("{:032x}", u128::from_be_bytes(bytes)),
        // The fallback has slightly fewer random bits.
        Err(_) => root.line("/proc/sys/kernel/random/uuid").replace('-', ""),
    }
}
