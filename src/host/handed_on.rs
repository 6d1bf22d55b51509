//! Properties of a request that is forwarded to an agent unchanged.

use std::time::Duration;

use prost::Message;
use tonic::Status;

use super::asked::Asked;

/// Queue in which a request waits for other requests of the same kind to the same guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// Queue of most requests.
    Usual,
    /// Queue of requests that end what others have begun.
    Urgent,
    /// Queue of requests that search in the guest, which can take long.
    Search,
    /// Requests that wait in the guest for an event. They queue behind no others, but their number is limited for each
    /// caller.
    Patient,
}

/// Request that is forwarded to an agent.
pub trait HandedOn: Asked + Message + Default + Send + 'static {
    /// Answer of the agent.
    type Answer: Message + Default + Send + 'static;

    /// Path of the method, which is the same in agents and in this host half.
    const PATH: &'static str;

    /// Timeout of the call, including the time in the queue.
    const WITHIN: Duration;

    /// Capability that an agent reports if it supports this call.
    const CAPABILITY: &'static str = "machine";

    /// Returns the queue in which the request waits.
    fn turn(&self) -> Turn {
        Turn::Usual
    }

    /// Takes the name of the VM out of the request, because it means nothing to the guest.
    fn take_name(&mut self) -> String;

    /// Cleans the guest's answer so that it is safe to display.
    ///
    /// # Errors
    /// If the answer is malformed.
    fn clean(answer: Self::Answer) -> Result<Self::Answer, Status>;
}
