//! The lines in which a guest is given the public keys that it trusts, wherever they come from: a file of
//! `/etc/guestlet/hosts.d`, a systemd credential, or a string of the firmware.
//!
//! ```text
//! ed25519:<Base64 of the DER SubjectPublicKeyInfo> [ca] [role=NAME[,NAME…]] [# comment]
//! ```
//!
//! Empty lines and lines that begin with `#` are skipped. `ca` says that the key signs the certificates of host halves and
//! does not open the guest itself. `role=` gives roles beside those that the guest's settings grant. A text counts as a
//! whole: one mistake in it, and none of its keys is taken. What people paste by mistake may be a secret, so no message
//! repeats more of a line than its first word or one short one.
//!
//! Pure: text in, anchors out. One more word of a line is one more arm in `Words::parse`, and a part of [`line()`].

use std::collections::HashMap;
use std::fmt;

use base64_simd::STANDARD;

use crate::trust::Fingerprint;
use crate::trust::key::{self, PublicKey};
use crate::trust::public_key::NotAPublicKey;

/// Keys that a guest may be given, in one text and altogether.
pub const MAX_KEYS: usize = 64;
/// Bytes of a line, without its end.
pub const MAX_LINE: usize = 4096;

/// Names that `role=` accepts: the roles, followed by the profiles, which stand for several roles.
pub const ROLES: [&str; 17] = [
    "status",
    "metrics",
    "logs",
    "topology",
    "freeze",
    "disks",
    "files-read",
    "files-write",
    "exec",
    "forward",
    "power",
    "accounts",
    "keys",
    "qemu-ga",
    "monitor",
    "volumes",
    "operator",
];

/// Characters of what is repeated in a message; a private key has more in every spelling.
const MAX_REPEATED: usize = 24;

/// A public key that a guest was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Anchor {
    /// Public key of the host half or CA.
    pub public_key: PublicKey,
    /// Fingerprint of the key, for display.
    pub fingerprint: Fingerprint,
    /// True if the key belongs to a CA that signs the certificates of host halves, false if it belongs to a host
    /// half itself.
    pub is_ca: bool,
    /// The words after `role=`, in their order; each is one of [`ROLES`].
    pub roles: Vec<String>,
    /// Comment after `#`; empty if there is none.
    pub comment: String,
    /// Position of the line.
    pub origin: Origin,
}

impl Anchor {
    /// Returns whether both lines grant the same to a key; comments and the order of roles are ignored.
    fn agrees_with(&self, other: &Self) -> bool {
        let same_roles =
            self.roles.len() == other.roles.len() && self.roles.iter().all(|role| other.roles.contains(role));
        self.is_ca == other.is_ca && same_roles
    }
}

/// Position of a line; displayed as `place:line`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// The text that it is part of: a path, or what the text is called.
    pub place: String,
    /// Line number, from 1.
    pub line: usize,
}

impl fmt::Display for Origin {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.place, self.line)
    }
}

/// A text that is refused, with the first line that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{origin}: {problem}")]
pub struct Error {
    /// Position of the line.
    pub origin: Origin,
    /// Fault of the line.
    pub problem: Problem,
}

/// Fault of a line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// Line that does not begin with a key.
    #[error("{} is not a key; a line is `ed25519:<key> [ca] [role=NAME,…] [# comment]`", repeated(.0))]
    Prefix(String),
    /// Contents of a PEM file.
    #[error(
        "this is PEM; write one line in its place: `ed25519:` and, without the line breaks, the text between BEGIN and END"
    )]
    Pem,
    /// A line of `authorized_keys`.
    #[error(
        "this is an OpenSSH key; a host half's own line is needed, which `guestctl trust bootstrap` prints"
    )]
    OpenSsh,
    /// A fingerprint, which is enough to compare a key and not to verify one.
    #[error(
        "this is the fingerprint of a key; the key itself is needed, which `guestctl trust bootstrap` prints"
    )]
    Fingerprint,
    /// Invalid Base64 after `ed25519:`.
    #[error("the key is not Base64, or it is cut off; copy the whole line again")]
    Base64,
    /// Valid Base64 that is not an Ed25519 public key.
    #[error("{0}")]
    Key(NotAPublicKey),
    /// A PEM file of a private key.
    #[error("{}", NotAPublicKey::Private)]
    PrivateKey,
    /// A word that means nothing.
    #[error("unknown word {}; it is one of `ca` and `role=NAME,…`, and a comment begins with `#`", repeated(.0))]
    Word(String),
    /// The same word again.
    #[error("{0} is given twice")]
    Twice(&'static str),
    /// Unknown name after `role=`.
    #[error("unknown role {}; the roles are {}", repeated(.0), ROLES.join(", "))]
    Role(String),
    /// The same key stands in this text already.
    #[error("the key {fingerprint} is already in line {first}; remove one of them")]
    Duplicate {
        /// Fingerprint of the key.
        fingerprint: Fingerprint,
        /// The line that has it, too.
        first: usize,
    },
    /// The same key stands elsewhere with other words.
    #[error("the key {fingerprint} is also in {other}, with different `ca` or `role=`; make them equal")]
    Disagreement {
        /// Fingerprint of the key.
        fingerprint: Fingerprint,
        /// Position of the conflicting line.
        other: Origin,
    },
    /// A line that is too long to be one.
    #[error("the line has more than {MAX_LINE} bytes")]
    Long,
    /// Control character, which editors do not show.
    #[error("the line has a control character (U+{0:04X}); remove it")]
    ControlCharacter(u32),
    /// More keys than a guest takes.
    #[error("there are more than {MAX_KEYS} keys; use a CA, whose key covers all keys that it signs")]
    TooMany,
    /// File without any key.
    #[error("it has no key; add one, or remove the file")]
    Empty,
}

/// A word as it may be repeated: whole if it is short, and not at all else.
fn repeated(word: &str) -> String {
    if word.chars().count() <= MAX_REPEATED { format!("{word:?}") } else { "what stands here".to_owned() }
}

/// Reads the keys of a text.
///
/// # Errors
/// At the first line that is wrong, and if there is no key at all: a text is there to give one.
pub fn parse(place: &str, text: &str) -> Result<Vec<Anchor>, Error> {
    let mut anchors = Vec::new();
    let mut lines_of_keys = HashMap::new();
    let mut line = 1;
    for (count, content) in text.lines().enumerate() {
        line = count + 1;
        let wrong = |problem| error(place, line, problem);
        let Some(words) = Words::parse(content).map_err(wrong)? else { continue };
        if anchors.len() == MAX_KEYS {
            return Err(wrong(Problem::TooMany));
        }
        let anchor = words.anchor(Origin { place: place.to_owned(), line });
        if let Some(first) = lines_of_keys.insert(anchor.public_key, line) {
            return Err(wrong(Problem::Duplicate { fingerprint: anchor.fingerprint, first }));
        }
        anchors.push(anchor);
    }
    if anchors.is_empty() {
        return Err(error(place, line, Problem::Empty));
    }
    Ok(anchors)
}

fn error(place: &str, line: usize, problem: Problem) -> Error {
    Error { origin: Origin { place: place.to_owned(), line }, problem }
}

/// Puts what several texts give together. A key of several is taken once, as the first of them says it.
///
/// # Errors
/// If two of them differ in the words beside a key, or all have more than [`MAX_KEYS`] keys.
pub fn merge(texts: impl IntoIterator<Item = Vec<Anchor>>) -> Result<Vec<Anchor>, Error> {
    let mut merged: Vec<Anchor> = Vec::new();
    for anchor in texts.into_iter().flatten() {
        let known = merged.iter().find(|known| known.public_key == anchor.public_key);
        let problem = match known {
            Some(known) if known.agrees_with(&anchor) => continue,
            Some(known) => {
                Problem::Disagreement { fingerprint: anchor.fingerprint, other: known.origin.clone() }
            }
            None if merged.len() == MAX_KEYS => Problem::TooMany,
            None => {
                merged.push(anchor);
                continue;
            }
        };
        return Err(Error { origin: anchor.origin, problem });
    }
    Ok(merged)
}

/// Writes the line of a key, without a line's end. Of the comment, line breaks and other control characters become spaces,
/// and what would make the line too long is left out.
pub fn line(public_key: &PublicKey, is_ca: bool, roles: &[impl AsRef<str>], comment: &str) -> String {
    let mut line = public_key.to_string();
    if is_ca {
        line.push_str(" ca");
    }
    for (count, role) in roles.iter().enumerate() {
        line.push_str(if count == 0 { " role=" } else { "," });
        line.push_str(role.as_ref());
    }
    let comment = comment.replace(char::is_control, " ");
    let comment = comment.trim().trim_start_matches(|first: char| first == '#' || first.is_whitespace());
    if !comment.is_empty() {
        line.push_str(" # ");
        let room = MAX_LINE.saturating_sub(line.len());
        let fitting = comment.char_indices().take_while(|(at, character)| at + character.len_utf8() <= room);
        line.extend(fitting.map(|(_, character)| character));
        line.truncate(line.trim_end().len());
    }
    line
}

/// A line with a key, taken apart.
struct Words<'a> {
    public_key: PublicKey,
    is_ca: bool,
    roles: Option<Vec<&'a str>>,
    comment: &'a str,
}

impl<'a> Words<'a> {
    /// Parses a line; `None` if it has only spaces or a comment.
    fn parse(content: &'a str) -> Result<Option<Self>, Problem> {
        if content.len() > MAX_LINE {
            return Err(Problem::Long);
        }
        if let Some(control) = content.chars().find(|c| c.is_control() && *c != '\t') {
            return Err(Problem::ControlCharacter(control.into()));
        }
        let (content, comment) = without_comment(content);
        let mut rest = content.split_whitespace();
        let Some(key) = rest.next() else { return Ok(None) };
        let mut words = Self { public_key: read_key(content, key)?, is_ca: false, roles: None, comment };
        for word in rest {
            if word == "ca" {
                let again = std::mem::replace(&mut words.is_ca, true);
                if again {
                    return Err(Problem::Twice("`ca`"));
                }
            } else if let Some(names) = word.strip_prefix("role=") {
                let again = words.roles.replace(roles(names)?).is_some();
                if again {
                    return Err(Problem::Twice("`role=`"));
                }
            } else {
                return Err(Problem::Word(word.to_owned()));
            }
        }
        Ok(Some(words))
    }

    fn anchor(self, origin: Origin) -> Anchor {
        Anchor {
            public_key: self.public_key,
            fingerprint: self.public_key.fingerprint(),
            is_ca: self.is_ca,
            roles: self.roles.unwrap_or_default().into_iter().map(str::to_owned).collect(),
            comment: self.comment.to_owned(),
            origin,
        }
    }
}

/// Splits a line at the first word that begins with `#` into its contents and the comment.
fn without_comment(content: &str) -> (&str, &str) {
    let begins_word = |at: usize| content[..at].chars().next_back().is_none_or(char::is_whitespace);
    match content.match_indices('#').find(|(at, _)| begins_word(*at)) {
        Some((at, _)) => (&content[..at], content[at + 1..].trim()),
        None => (content, ""),
    }
}

/// The key that is the first word of a line.
fn read_key(content: &str, word: &str) -> Result<PublicKey, Problem> {
    let Some(base64) = word.strip_prefix(key::WORD) else { return Err(instead_of_a_key(content, word)) };
    let der = STANDARD.decode_to_vec(base64).map_err(|_| Problem::Base64)?;
    PublicKey::from_spki(&der).map_err(Problem::Key)
}

/// Describes a line that does not begin with a valid key.
fn instead_of_a_key(content: &str, word: &str) -> Problem {
    let der = STANDARD.decode_to_vec(word).ok().map(|der| PublicKey::from_spki(&der));
    if content.contains("PRIVATE KEY") || matches!(der, Some(Err(NotAPublicKey::Private))) {
        Problem::PrivateKey
    } else if content.trim_start().starts_with("-----BEGIN") {
        Problem::Pem
    } else if word.starts_with("ssh-") || word.starts_with("ecdsa-") || word.starts_with("sk-") {
        Problem::OpenSsh
    } else if word.starts_with("SHA256:") {
        Problem::Fingerprint
    } else {
        Problem::Prefix(word.split_once(':').map_or(word, |(prefix, _)| prefix).to_owned())
    }
}

fn roles(names: &str) -> Result<Vec<&str>, Problem> {
    let mut found: Vec<&str> = Vec::new();
    for name in names.split(',') {
        if !ROLES.contains(&name) {
            return Err(Problem::Role(name.to_owned()));
        }
        if found.contains(&name) {
            return Err(Problem::Twice("a role"));
        }
        found.push(name);
    }
    Ok(found)
}

#[cfg(test)]
mod tests;
