//! Looks up regularly which machine is at each address that guests report, since an address may move at any time.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::reach::Neighbours;
use crate::sys::blocking;
use crate::sys::neighbours::{self, Seen};

/// Time between two looks.
const LOOK: Duration = Duration::from_secs(1);
/// Shorter time between looks right after the addresses have changed, until all of them have answered.
const SOON: Duration = Duration::from_millis(50);
const TIMES: u32 = 20;

/// Looks up all addresses in `asked` again and again, and reports what is found, until the future is dropped. If
/// the kernel's neighbour table cannot be read, reports no address at all.
pub async fn run(mut asked: watch::Receiver<BTreeSet<IpAddr>>, told: watch::Sender<Arc<Neighbours>>) {
    let (mut soon, mut is_said) = (TIMES, false);
    loop {
        let addresses = asked.borrow_and_update().clone();
        let is_idle = addresses.is_empty();
        let found = if is_idle {
            Ok(Neighbours::new())
        } else {
            blocking::run(move || neighbours::look(&addresses)).await
        };
        let found = found.unwrap_or_else(|error| {
            if !std::mem::replace(&mut is_said, true) {
                tracing::error!(
                    "cannot look up the hardware addresses of nodes, so nothing is forwarded to them: {error}"
                );
            }
            Neighbours::new()
        });
        let is_open = found.values().any(|seen| *seen == Seen::Nobody);
        told.send_if_modified(|before| {
            let is_news = **before != found;
            if is_news {
                *before = Arc::new(found);
            }
            is_news
        });
        let wait = if is_open && soon > 0 { SOON } else { LOOK };
        soon = soon.saturating_sub(1);
        let changed = async {
            if asked.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        if is_idle {
            changed.await;
            soon = TIMES;
        } else if tokio::time::timeout(wait, changed).await.is_ok() {
            soon = TIMES;
        }
    }
}
