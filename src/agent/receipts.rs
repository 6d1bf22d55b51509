//! Receipts of freezes: their signature, and `guestlet receipts`, for root in the guest, whether the agent runs or
//! not.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use prost_types::Timestamp;
use serde_json::{Value, json};

use crate::agent::keys;
use crate::agent::words::{self, Words};
use crate::config::agent::AgentSettings;
use crate::guest::Guest;
use crate::guest::freeze::Freezer;
use crate::guest::freeze::receipts::cabinet::{self, Entry};
use crate::guest::freeze::receipts::clerk::Clerk;
use crate::receipt::envelope::{Check, Opened, Signature, Verdict, open};
use crate::receipt::{is_id, show};
use crate::sys::blocking;
use crate::text::{or_dash, table};
use crate::trust::Fingerprint;
use crate::trust::key::signer;
use crate::trust::keyring::Keyring;

/// Time for which the end of the agent waits for receipts that are being written.
const LAST: Duration = Duration::from_secs(5);

/// Makes the freezer sign its receipts with this guest's own key.
pub fn sign_with(freezer: &Freezer, keyring: &Keyring) {
    let Some(clerk) = freezer.clerk() else { return };
    let keyring = keyring.clone();
    clerk.sign_with(Box::new(move |message| {
        let (key, bytes) = keyring.sign(message)?;
        Some(Signature { key: key.to_string(), bytes })
    }));
}

/// Tries again to write receipts that could not be written before.
pub fn tick(freezer: &Freezer) {
    if let Some(clerk) = freezer.clerk() {
        clerk.tick();
    }
}

/// Waits for receipts that are being written, before the agent ends: those in memory would be lost with the
/// machine.
pub async fn finish(freezer: &Freezer) {
    let Some(clerk) = freezer.clerk().cloned() else { return };
    drop(blocking::attempt(move || clerk.wait(LAST)).await);
}

/// Subcommand of `guestlet receipts`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// List all receipts.
    List,
    /// Show the receipt with this id.
    Show(String),
    /// Check the signature of the receipt with this id, or in this file.
    Verify(OsString),
}

/// Command line after `guestlet receipts`.
#[derive(Debug)]
pub struct Asked {
    /// Subcommand to run.
    pub action: Action,
    /// True to print JSON, for programs.
    pub json: bool,
    /// Settings file given on the command line.
    pub settings: Option<PathBuf>,
}

/// Parses the command line after `guestlet receipts`.
///
/// # Errors
/// A message for people.
pub fn parse(words: &[OsString]) -> Result<Asked, String> {
    const HELP: &str = "specify what to do with receipts: guestlet receipts ls, show ID, or verify ID|FILE";

    let Words { plain, json, settings } = words::read(words, usize::MAX)?;
    let mut words = plain.into_iter();
    let verb = words.next();
    let object = words.next();
    let action = match (verb.as_ref().and_then(|verb| verb.to_str()), object, words.next()) {
        (Some("ls"), None, None) => Action::List,
        (Some("show"), Some(id), None) => Action::Show(id.to_string_lossy().into_owned()),
        (Some("verify"), Some(what), None) => Action::Verify(what),
        _ => return Err(HELP.to_owned()),
    };
    Ok(Asked { action, json, settings })
}

/// Result of a command: the output, and whether it succeeded.
#[derive(Debug)]
pub struct Answer {
    /// Text for standard output.
    pub text: String,
    /// True if the receipt is signed by this guest's key; for other subcommands, if they have succeeded.
    pub is_good: bool,
}

/// Runs the subcommand. Blocks.
///
/// # Errors
/// If receipts cannot be read, or no receipt has that id.
pub fn answer(settings: AgentSettings, action: &Action, json: bool) -> anyhow::Result<Answer> {
    let (folder, directory) = (settings.state_folder.clone(), settings.receipts.clone());
    let own = keys::keyring(settings.trust, false, &Guest::default()).list().own.map(|key| key.fingerprint());
    let clerk = Clerk::new(&folder, &directory);
    let shown = |text: String| Answer { text, is_good: true };
    match action {
        Action::List => list(&clerk, json).map(shown),
        Action::Show(id) => show(&clerk, id, own, json).map(shown),
        Action::Verify(what) => verify(&clerk, Path::new(what), own, json),
    }
}

fn check(key: &str, message: &[u8], signature: &[u8]) -> Check {
    signer(key, message, signature).map_or(Check::Bad, |fingerprint| Check::Good(fingerprint.to_string()))
}

fn list(clerk: &Clerk, json: bool) -> anyhow::Result<String> {
    let directory = clerk.directory().display();
    let entries = clerk.list().with_context(|| format!("cannot read {directory}"))?;
    let mut rows = vec![["ID", "KEPT", "LEVEL", "ENDED", "SIGNATURE", "FOR"].map(str::to_owned)];
    let mut values = Vec::new();
    for Entry { filed, id } in entries {
        let kept = Timestamp::from(UNIX_EPOCH + Duration::from_secs(filed)).to_string();
        let opened = match clerk.get(&id) {
            Ok(Some(envelope)) => open(&envelope, Some(&id), check),
            Ok(None) => continue,
            Err(error) => Opened { receipt: None, verdict: Verdict::Unreadable(error.to_string()) },
        };
        let receipt = opened.receipt;
        let text = |of: fn(&crate::receipt::Receipt) -> String| receipt.as_ref().map(of).unwrap_or_default();
        let (level, end) = (text(|one| one.level.word().to_owned()), text(|one| one.end.how.clone()));
        let caller = text(|one| one.caller.name.clone());
        if json {
            values.push(json!({
                "id": id, "kept": kept, "level": level, "end": end, "caller": caller, "verdict": opened.verdict.word(),
            }));
        } else {
            let verdict = opened.verdict.word().to_owned();
            rows.push([id, kept, or_dash(&level), or_dash(&end), verdict, or_dash(&caller)]);
        }
    }
    Ok(if json { format!("{:#}\n", Value::from(values)) } else { table(&rows) })
}

/// Returns the envelope of the receipt with this id.
fn envelope(clerk: &Clerk, id: &str) -> anyhow::Result<Vec<u8>> {
    let directory = clerk.directory().display();
    if !is_id(id) {
        bail!(
            "{id:?} is not the id of a receipt, which has 32 hexadecimal digits; guestlet receipts ls lists them"
        );
    }
    let found = clerk.get(id).with_context(|| format!("cannot read the receipt {id} in {directory}"))?;
    found.with_context(|| {
        format!(
            "there is no receipt {id} in {directory}; guestlet receipts ls lists the receipts of this guest"
        )
    })
}

fn show(clerk: &Clerk, id: &str, own: Option<Fingerprint>, json: bool) -> anyhow::Result<String> {
    let opened = open(&envelope(clerk, id)?, Some(id), check);
    let verdict = words(&opened.verdict, own);
    let Some(receipt) = &opened.receipt else { bail!("the receipt {id} is {verdict}") };
    Ok(if json {
        let value = json!({ "receipt": receipt, "verdict": opened.verdict.word(), "detail": verdict });
        format!("{value:#}\n")
    } else {
        show::words(receipt, &verdict)
    })
}

fn verify(clerk: &Clerk, what: &Path, own: Option<Fingerprint>, json: bool) -> anyhow::Result<Answer> {
    let opened = if let Some(id) = what.to_str().filter(|id| is_id(id)) {
        open(&envelope(clerk, id)?, Some(id), check)
    } else {
        let read = cabinet::read_file(what).with_context(|| format!("cannot read {}", what.display()))?;
        open(&read.with_context(|| format!("there is no file {}", what.display()))?, None, check)
    };
    let words = words(&opened.verdict, own);
    let is_good = matches!(&opened.verdict, Verdict::Signed(key) if is_own(key, own));
    let receipt = opened.receipt.unwrap_or_default();
    let text = if json {
        let value = json!({
            "id": receipt.id, "level": receipt.level.word(), "verdict": opened.verdict.word(), "good": is_good, "detail": words,
        });
        format!("{value:#}\n")
    } else if receipt.id.is_empty() {
        format!("{words}\n")
    } else {
        format!("{}\n{words}\n", receipt.words())
    };
    Ok(Answer { text, is_good })
}

fn is_own(key: &str, own: Option<Fingerprint>) -> bool {
    own.is_some_and(|own| own.to_string() == key)
}

fn words(verdict: &Verdict, own: Option<Fingerprint>) -> String {
    let whose = match verdict {
        Verdict::Signed(key) if is_own(key, own) => ", the key of this guest",
        Verdict::Signed(_) => {
            ", which is not the key of this guest: the key was replaced since then, or another guest made this receipt"
        }
        _ => "",
    };
    show::verdict(verdict, whose)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read() {
        let parsed = |words: &[&str]| parse(&words.iter().map(OsString::from).collect::<Vec<_>>());
        assert_eq!(parsed(&["ls"]).unwrap().action, Action::List);
        let asked = parsed(&["show", "ab", "-o", "json", "--settings", "/x"]).unwrap();
        assert_eq!((asked.action, asked.json), (Action::Show("ab".to_owned()), true));
        assert_eq!(asked.settings.unwrap(), Path::new("/x"));
        assert_eq!(parsed(&["verify", "/file"]).unwrap().action, Action::Verify("/file".into()));
        for wrong in [&[][..], &["show"], &["ls", "x"], &["verify", "a", "b"], &["rm", "x"]] {
            assert!(parsed(wrong).unwrap_err().contains("receipts ls"), "{wrong:?}");
        }
    }
}
