//! Opening of a stream of messages: the first message describes the call.

use std::time::Duration;

use tonic::{Status, Streaming};

/// Timeout for the first message.
const SOON: Duration = Duration::from_secs(10);

/// Returns the first message of a call; `None` if the call has none.
///
/// # Errors
/// `DEADLINE_EXCEEDED` if it does not arrive in time; the error of the stream, if that breaks.
pub async fn first<T>(messages: &mut Streaming<T>) -> Result<Option<T>, Status> {
    let first = tokio::time::timeout(SOON, messages.message()).await;
    first.map_err(|_| Status::deadline_exceeded("nothing is asked for"))?
}
