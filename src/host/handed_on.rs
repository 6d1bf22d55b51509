//! What a request has to say of itself to be handed on to an agent as it is.

use std::time::Duration;

use prost::Message;
use tonic::Status;

use super::asked::Asked;

/// The calls of the same guest that one waits behind, if there are many: those of its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// Most of them.
    Usual,
    /// Those that end what others have begun.
    Urgent,
    /// Those that search in the guest, which takes long if there is much.
    Search,
    /// Those that wait in the guest for something to happen: behind no others, but there are only so many of one caller.
    Patient,
}

/// A request that is handed on to an agent.
pub trait HandedOn: Asked + Message + Default + Send + 'static {
    /// What the agent answers.
    type Answer: Message + Default + Send + 'static;

    /// The path of the method, which agents and this host half have in common.
    const PATH: &'static str;

    /// How long it may take, its waiting for others included.
    const WITHIN: Duration;

    /// What an agent says that it can, if it answers this.
    const CAPABILITY: &'static str = "machine";

    /// What it waits behind.
    fn turn(&self) -> Turn {
        Turn::Usual
    }

    /// The VM's name, which is nothing to its guest.
    fn take_name(&mut self) -> String;

    /// Makes an answer fit to be shown, whatever the guest has said.
    ///
    /// # Errors
    /// If it is none.
    fn clean(answer: Self::Answer) -> Result<Self::Answer, Status>;
}
