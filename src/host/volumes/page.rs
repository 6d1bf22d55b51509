//! Pages of lists of volumes. Pure.
//!
//! A token names the volume after which the next page begins. That volume may have been removed by then. A list
//! read in pages contains every volume that existed all the time, and none twice.

use super::problem::{Kind, Problem};
use crate::host::backends::volumes::Volume;

/// Largest number of volumes in one page.
const MOST: usize = 200;
/// Longest identifier in bytes.
const LONGEST: usize = 128;
/// Prefix of all tokens.
const PREFIX: &str = "after:";

/// Requested page of a list.
#[derive(Debug, Clone, Copy)]
pub struct Page<'t> {
    after: &'t str,
    most: usize,
}

impl<'t> Page<'t> {
    /// Parses the request for the page after `token`, with at most `most` volumes (0: as many as fit).
    ///
    /// # Errors
    /// If the token is invalid.
    pub fn new(token: &'t str, most: usize) -> Result<Self, Problem> {
        let after = parse(token)?.unwrap_or_default();
        Ok(Self { after, most: if most == 0 { MOST } else { most.min(MOST) } })
    }

    /// Returns the identifier after which the page begins.
    pub fn after(&self) -> &str {
        self.after
    }

    /// Returns how many volumes to look for: one more than the page has, which shows whether there is another page.
    pub fn wanted(&self) -> usize {
        self.most + 1
    }

    /// Cuts the page from the volumes that were found, and returns the token of the next one; empty if this is the
    /// last.
    pub fn cut(self, mut found: Vec<Volume>) -> (Vec<Volume>, String) {
        let is_last = found.len() <= self.most;
        found.truncate(self.most);
        let next = found.last().filter(|_| !is_last).map(|last| format!("{PREFIX}{}", last.id));
        (found, next.unwrap_or_default())
    }
}

fn parse(token: &str) -> Result<Option<&str>, Problem> {
    if token.is_empty() {
        return Ok(None);
    }
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.');
    let id = token.strip_prefix(PREFIX);
    let good = |id: &&str| (1..=LONGEST).contains(&id.len()) && id.bytes().all(plain);
    id.filter(good).map(Some).ok_or_else(|| {
        Problem::new(
            Kind::Aborted,
            "starting_token was not issued by this host; list again from the beginning",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn volumes(ids: &[String]) -> Vec<Volume> {
        let volume = |id: &String| Volume {
            id: id.clone(),
            name: String::new(),
            cluster: String::new(),
            class: String::new(),
            size: 0,
            claim: String::new(),
            published: None,
            sharers: None,
            problem: None,
        };
        ids.iter().map(volume).collect()
    }

    proptest! {
        #[test]
        fn all_parts_together_are_the_list(count in 0..50_u8, most in 1..20_usize, gone in 0..50_u8) {
            let ids: Vec<_> = (0..count).map(|number| format!("pool.{number:03}")).collect();
            let (mut token, mut seen) = (String::new(), Vec::new());
            loop {
                // A volume is removed between two pages.
                let left: Vec<_> = ids.iter().enumerate()
                    .filter(|(at, _)| *at != usize::from(gone) || *at >= seen.len())
                    .map(|(_, id)| id.clone()).collect();
                let page = Page::new(&token, most).unwrap();
                let found = left.into_iter().filter(|id| id.as_str() > page.after()).take(page.wanted());
                let (part, next) = page.cut(volumes(&found.collect::<Vec<_>>()));
                prop_assert!(part.len() <= most);
                seen.extend(part.into_iter().map(|volume| volume.id));
                if next.is_empty() { break }
                token = next;
            }
            prop_assert_eq!(seen, ids);
        }

        #[test]
        fn other_tokens_are_refused(token in "\\PC{1,200}") {
            match Page::new(&token, 0) {
                Ok(_) => prop_assert!(token.starts_with(PREFIX)),
                Err(problem) => prop_assert_eq!(problem.kind, Kind::Aborted),
            }
        }
    }

    #[test]
    fn tokens_that_are_none() {
        for token in ["after:", "x", "after:a/b", "after: a", &format!("after:{}", "a".repeat(129))] {
            assert_eq!(Page::new(token, 0).unwrap_err().kind, Kind::Aborted, "{token}");
        }
    }
}
