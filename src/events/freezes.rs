//! Events about freezes of file systems and how they end.

use super::Happening;
use super::state::{Change, Excess};
use crate::text;
use crate::wire::proto::v1::{Frozen, LastFreeze, Thawed};

impl Happening for Frozen {
    fn words(&self) -> String {
        format!(
            "{} file systems frozen by {}, for {} s at most",
            self.file_systems, self.holder, self.deadline_seconds
        )
    }

    fn apply(&self, change: &mut Change<'_>) -> Result<(), Excess> {
        let since = change.at();
        let (state, ..) = change.parts();
        state.freeze = Some(LastFreeze {
            holder: self.holder.clone(),
            file_systems: self.file_systems,
            since,
            ..LastFreeze::default()
        });
        Ok(())
    }
}

impl Happening for Thawed {
    fn words(&self) -> String {
        match self.end.as_str() {
            // From an agent that reports only this.
            "" if self.by_itself => "thawed by itself: no thaw was requested in time".to_owned(),
            "" => "thawed".to_owned(),
            word => {
                let receipt = receipt(&self.receipt, &self.level);
                let (holder, problem) = (text::or_dash(&self.holder), problem(&self.problem));
                match word {
                    "failed" => format!("not frozen, for {holder}{problem}{receipt}"),
                    word => format!("thawed {}, for {holder}{problem}{receipt}", end(word)),
                }
            }
        }
    }

    fn apply(&self, change: &mut Change<'_>) -> Result<(), Excess> {
        // The event may have no time.
        let ended = Some(change.at().unwrap_or_default());
        let (state, ..) = change.parts();
        let begun = state.freeze.take().filter(|freeze| freeze.ended.is_none()).unwrap_or_default();
        state.freeze = Some(LastFreeze {
            holder: self.holder.clone(),
            ended,
            end: match self.end.as_str() {
                // From an agent that reports only this.
                "" if self.by_itself => "deadline",
                "" => "asked",
                end => end,
            }
            .to_owned(),
            problem: self.problem.clone(),
            receipt: self.receipt.clone(),
            level: self.level.clone(),
            ..begun
        });
        Ok(())
    }
}

/// Returns the end of a line that names the receipt, for example `; receipt 0123…: filesystem`; empty without an
/// id.
pub fn receipt(id: &str, level: &str) -> String {
    if id.is_empty() { String::new() } else { format!("; receipt {id}: {level}") }
}

/// Describes how a freeze ended, for example `by a thaw`.
pub fn end(word: &str) -> String {
    match word {
        "asked" => "by a thaw",
        "deadline" => "by its deadline",
        "person" => "by a person in the guest",
        "crash" => "because the agent crashed",
        "hang" => "because the agent hung",
        other => return format!("({})", text::or_dash(other)),
    }
    .to_owned()
}

/// Returns the end of a line with the problem of a freeze, for example `: the freeze ended by itself after 8 s`.
pub fn problem(problem: &str) -> String {
    if problem.is_empty() { String::new() } else { format!(": {problem}") }
}
