//! Reports and counts failures between the host half and the API of its cluster.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::sync::watch;

use crate::host::backends::Problems;
use crate::host::half::Half;
use crate::kubernetes::standing::Teller;

/// Creates a reporter that shows `what` while it fails, such as "the Node cannot be read"; each failure counts
/// as one of the backend in the metrics of `half`.
pub fn teller(what: &'static str, problems: watch::Sender<Problems>, half: Arc<Half>) -> Teller {
    let count = move || {
        half.metrics.backend_failures.fetch_add(1, Ordering::Relaxed);
    };
    Teller::new(what, problems, Arc::new(count))
}
