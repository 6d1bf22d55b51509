//! Events about the agent itself and its machine: start, stop, suspension, clock.

use super::Happening;
use crate::wire::proto::v1::{
    AgentReady, AgentStarted, AgentStopping, ClockJumped, Heartbeat, Resumed, ShutdownBegun,
    ShutdownRequested, Suspending,
};

impl Happening for AgentReady {
    fn words(&self) -> String {
        match (self.resumed, self.missed) {
            (true, _) => "agent ready, no events missed".to_owned(),
            (false, 0) => "agent ready".to_owned(),
            (false, missed) => format!("agent ready, {missed} events missed"),
        }
    }
}

impl Happening for Heartbeat {
    fn words(&self) -> String {
        "heartbeat".to_owned()
    }
}

impl Happening for AgentStarted {
    fn words(&self) -> String {
        if self.first_since_boot { "agent started (new boot)" } else { "agent started" }.to_owned()
    }
}

impl Happening for AgentStopping {
    fn words(&self) -> String {
        "agent stopping".to_owned()
    }
}

impl Happening for ShutdownRequested {
    fn words(&self) -> String {
        format!("shutdown requested: {}", self.mode)
    }
}

impl Happening for ShutdownBegun {
    fn words(&self) -> String {
        "shutdown begun".to_owned()
    }
}

impl Happening for Suspending {
    fn words(&self) -> String {
        "suspending".to_owned()
    }
}

impl Happening for Resumed {
    fn words(&self) -> String {
        "resumed".to_owned()
    }
}

impl Happening for ClockJumped {
    fn words(&self) -> String {
        let way = if self.milliseconds < 0 { "back" } else { "forward" };
        let milliseconds = self.milliseconds.unsigned_abs();
        format!("clock jumped {way} by {}.{:03} s", milliseconds / 1000, milliseconds % 1000)
    }
}
