//! Connections from host halves to listeners in this guest: their number is limited here, and they are made here.
//! (Their data is copied by `transport::carry`.)

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::sys::socket::Socket;

/// Maximum number of connections, unless the settings say otherwise.
pub const MOST: usize = 1024;
/// Connections out of the maximum that a single caller cannot take, so that others still get some.
const RESERVED: usize = 24;
/// Number of connections below which each new one may have a wider window.
const WIDE: usize = 16;
/// Timeout for connecting.
const PATIENCE: Duration = Duration::from_secs(10);

/// Address that can be connected to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// TCP address.
    Address(SocketAddr),
    /// Path of a Unix socket.
    Path(PathBuf),
}

/// Reason why no further connection is allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Full {
    /// The caller has reached its limit.
    #[error(
        "this caller has {0} connections through this guest, which is the limit; forward.connections in the \
         guest's settings sets it"
    )]
    OfOne(usize),
    /// All callers together have reached the limit.
    #[error(
        "there are {0} connections through this guest, which is the limit; forward.connections in the guest's \
         settings sets it"
    )]
    OfAll(usize),
}

/// Present connections, counted by caller.
#[derive(Debug)]
pub struct Forwards {
    most: AtomicUsize,
    /// Number of connections by caller. Callers without connections are not in it.
    table: Mutex<BTreeMap<String, usize>>,
}

impl Default for Forwards {
    fn default() -> Self {
        Self { most: MOST.into(), table: Mutex::default() }
    }
}

/// Connection that is counted until this is dropped.
#[derive(Debug)]
pub struct Counted {
    forwards: Arc<Forwards>,
    caller: String,
    /// True if few connections were open when this one began, so that it may have a wider window.
    pub is_among_few: bool,
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut table = self.forwards.table();
        if let Some(count) = table.get_mut(&self.caller) {
            *count -= 1;
            if *count == 0 {
                table.remove(&self.caller);
            }
        }
    }
}

impl Forwards {
    /// Sets the maximum number of connections from now on. Connections above it are not closed.
    pub fn allow(&self, most: usize) {
        self.most.store(most, Ordering::Relaxed);
    }

    /// Counts one more connection of this caller.
    ///
    /// # Errors
    /// If the caller, or all callers together, have too many.
    pub fn one_more(self: &Arc<Self>, caller: &str) -> Result<Counted, Full> {
        let most = self.most.load(Ordering::Relaxed);
        let of_one = if most > RESERVED { most - RESERVED } else { most };
        let mut table = self.table();
        let all: usize = table.values().sum();
        if all >= most {
            return Err(Full::OfAll(all));
        }
        let own = table.get(caller).copied().unwrap_or(0);
        if own >= of_one {
            return Err(Full::OfOne(own));
        }
        table.insert(caller.to_owned(), own + 1);
        drop(table);
        let forwards = Arc::clone(self);
        Ok(Counted { forwards, caller: caller.to_owned(), is_among_few: all < WIDE })
    }

    /// Returns the number of connections of each caller.
    pub fn standing(&self) -> Vec<(String, usize)> {
        self.table().iter().map(|(caller, count)| (caller.clone(), *count)).collect()
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<String, usize>> {
        // No step under the lock can leave the table half changed, so a poisoned lock is safe to use.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Connects to the first of these addresses that answers, with one timeout for all of them.
///
/// # Errors
/// The error of the first address.
pub async fn connect(places: &[Place]) -> io::Result<Socket> {
    let work = async {
        let mut failed = None;
        for place in places {
            let connected = match place {
                Place::Address(address) => Socket::to_address(*address).await,
                Place::Path(path) => Socket::to_path(path).await,
            };
            match connected {
                Ok(socket) => return Ok(socket),
                Err(error) => drop(failed.get_or_insert(error)),
            }
        }
        Err(failed.unwrap_or_else(|| io::ErrorKind::NotFound.into()))
    };
    tokio::time::timeout(PATIENCE, work).await.unwrap_or_else(|_| {
        Err(io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {} s", PATIENCE.as_secs())))
    })
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[test]
    fn each_caller_has_its_own_count_and_leaves_some_to_others() {
        let forwards = Arc::new(Forwards::default());
        forwards.allow(RESERVED + 2);
        let first = forwards.one_more("a").unwrap();
        let second = forwards.one_more("a").unwrap();
        assert!(first.is_among_few && second.is_among_few);
        assert_eq!(forwards.one_more("a").unwrap_err(), Full::OfOne(2));
        let others: Vec<_> = (0..RESERVED).map(|of| forwards.one_more(&format!("b{of}")).unwrap()).collect();
        assert!(!others[RESERVED - 1].is_among_few);
        assert_eq!(forwards.one_more("c").unwrap_err(), Full::OfAll(RESERVED + 2));
        drop((first, others));
        assert_eq!(forwards.standing(), [("a".to_owned(), 1)]);
        drop(second);
        assert!(forwards.standing().is_empty());
    }

    #[tokio::test]
    async fn the_first_place_that_answers_is_taken_and_the_first_reason_told() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let missing = Place::Path("/nonexistent/socket".into());
        assert!(connect(&[missing.clone(), Place::Address(address)]).await.is_ok());
        drop(listener);
        let error = connect(&[Place::Address(address), missing]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }

    /// A connection to a local port without a listener may be connected to itself.
    #[tokio::test]
    async fn nothing_is_connected_with_itself() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        for _ in 0..2000 {
            assert!(connect(&[Place::Address(address)]).await.is_err());
        }
    }
}
