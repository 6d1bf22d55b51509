//! How a stream of messages begins: the first of them says what the call is about.

use std::time::Duration;

use tonic::{Status, Streaming};

/// How long the first message may take.
const SOON: Duration = Duration::from_secs(10);

/// The first message of a call; nothing if that has none.
///
/// # Errors
/// `DEADLINE_EXCEEDED` if it does not come soon; as the stream, if that breaks.
pub async fn first<T>(messages: &mut Streaming<T>) -> Result<Option<T>, Status> {
    let first = tokio::time::timeout(SOON, messages.message()).await;
    first.map_err(|_| Status::deadline_exceeded("nothing is asked for"))?
}
