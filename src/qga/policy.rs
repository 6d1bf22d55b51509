//! Which commands may be called: block and allow lists, as qemu-ga has them.

use crate::qga::table::{self, COMMANDS};

/// Which rows of the command table are switched on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    enabled: Vec<bool>,
}

impl Default for Policy {
    fn default() -> Self {
        Self { enabled: vec![true; COMMANDS.len()] }
    }
}

impl Policy {
    /// A policy from lists of names. An `allow` list denies what it does not name; `block` wins over it.
    /// Names that are not known are returned, for a warning: a list may be meant for several versions.
    pub fn new<'a>(allow: Option<&'a [String]>, block: &'a [String]) -> (Self, Vec<&'a str>) {
        let mut policy = match allow {
            Some(_) => Self { enabled: vec![false; COMMANDS.len()] },
            None => Self::default(),
        };
        let mut unknown = Vec::new();
        let allowed = allow.unwrap_or_default().iter().map(|name| (name, true));
        for (name, enabled) in allowed.chain(block.iter().map(|name| (name, false))) {
            match table::find(name) {
                Some(place) => policy.enabled[place] = enabled,
                None => unknown.push(name.as_str()),
            }
        }
        (policy, unknown)
    }

    /// Whether the command at this place of the table may be called.
    pub fn allows(&self, place: usize) -> bool {
        self.enabled.get(place).copied().unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enabled(allow: Option<&[&str]>, block: &[&str]) -> Vec<&'static str> {
        let owned = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
        let allow = allow.map(owned);
        let block = owned(block);
        let (policy, _) = Policy::new(allow.as_deref(), &block);
        COMMANDS.iter().enumerate().filter(|(place, _)| policy.allows(*place)).map(|(_, c)| c.name).collect()
    }

    #[test]
    fn block_wins_over_allow_and_allow_denies_the_rest() {
        assert_eq!(enabled(None, &[]).len(), COMMANDS.len());
        assert!(!enabled(None, &["guest-shutdown"]).contains(&"guest-shutdown"));
        assert_eq!(enabled(Some(&["guest-ping", "guest-sync"]), &["guest-sync"]), ["guest-ping"]);
        assert!(enabled(Some(&[]), &[]).is_empty());
    }

    #[test]
    fn unknown_names_are_told() {
        let block = ["guest-exce".to_owned(), "guest-ping".to_owned()];
        assert_eq!(Policy::new(None, &block).1, ["guest-exce"]);
    }
}
