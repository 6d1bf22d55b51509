//! What a request has to say of itself to be handed on to an agent as it is.

use std::time::Duration;

use prost::Message;
use tonic::Status;

use super::asked::Asked;

/// A request that is handed on to an agent.
pub trait HandedOn: Asked + Message + Default + Send + 'static {
    /// What the agent answers.
    type Answer: Message + Default + Send + 'static;

    /// The path of the method, which agents and this host half have in common.
    const PATH: &'static str;

    /// How long it may take, its waiting for others included.
    const WITHIN: Duration;

    /// It ends what others have begun, and does not wait behind them.
    const IS_URGENT: bool = false;

    /// The VM's name, which is nothing to its guest.
    fn take_name(&mut self) -> String;

    /// Makes an answer fit to be shown, whatever the guest has said.
    ///
    /// # Errors
    /// If it is none.
    fn clean(answer: Self::Answer) -> Result<Self::Answer, Status>;
}
