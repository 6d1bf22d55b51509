//! Looks who is at the addresses that guests tell, again and again: an address may become another's at any time.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::reach::Neighbours;
use crate::sys::blocking;
use crate::sys::neighbours::{self, Seen};

/// How often that is.
const LOOK: Duration = Duration::from_secs(1);
/// And right after there are others, as long as some of them have not answered.
const SOON: Duration = Duration::from_millis(50);
const TIMES: u32 = 20;

/// Looks at all that are `asked`, and tells what there is, until the future is dropped. Tells nothing of any where the kernel does not
/// say it.
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
