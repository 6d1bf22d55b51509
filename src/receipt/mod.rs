//! Receipts of freezes: what a snapshot that was taken meanwhile is worth, and why not more.
//!
//! The guest makes one when a freeze is over, and keeps it in an [`envelope`] with its signature. The [`judge`] decides from
//! the facts alone how much is proved. All of it is pure: who keeps receipts, and whose keys count, is decided elsewhere.
//!
//! To add something to a receipt: a field with `#[serde(default)]`, so that receipts of earlier versions can be read.

pub mod envelope;
pub mod judge;
pub mod show;

use serde::{Deserialize, Serialize};

/// The version of the document. One with another version is not read.
pub const SCHEMA: u32 = 1;
/// Bytes of a receipt in its envelope.
pub const MOST_BYTES: usize = 16 * 1024;
/// Digits of an id.
pub const ID_DIGITS: usize = 32;
/// Bytes of one text of a receipt.
const LONGEST: usize = 256;
/// Entries of one list of a receipt, before it is cut to [`MOST_BYTES`].
pub const MOST_LISTED: usize = 256;

/// What a snapshot is worth.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As after a power failure: nothing is proved.
    #[default]
    Crash,
    /// The file systems were frozen from before the snapshot until after it.
    FileSystem,
    /// So were applications, by their own procedures.
    Application,
}

impl Level {
    /// One word, as files, events and people have it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Crash => "crash",
            Self::FileSystem => "filesystem",
            Self::Application => "application",
        }
    }

    /// The level of this word.
    pub fn named(word: &str) -> Option<Self> {
        [Self::Crash, Self::FileSystem, Self::Application].into_iter().find(|level| level.word() == word)
    }
}

/// A moment on two clocks of the guest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Moment {
    /// Milliseconds since the guest booted, suspension included: only these are compared.
    pub boottime_ms: u64,
    /// The time of day, RFC 3339.
    pub time: String,
}

/// The guest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Machine {
    /// Its host name.
    pub host_name: String,
    /// The UUID that its DMI has.
    pub dmi_uuid: String,
    /// Another one after every boot.
    pub boot_id: String,
}

/// Who asked for a freeze.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Caller {
    /// In words, such as `the host half SHA256:… for uid:0 root`.
    pub name: String,
    /// What it asked over: `qga` or `guestlet`; empty if that is not known.
    pub over: String,
}

impl Caller {
    /// One that asks over this.
    pub fn new(name: &str, over: &str) -> Self {
        Self { name: name.to_owned(), over: over.to_owned() }
    }
}

/// The moments of a freeze; absent are those that there were not, or that nobody knows.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Times {
    /// It was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub asked: Option<Moment>,
    /// Hooks and applications were told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hooks_begun: Option<Moment>,
    /// All of them had answered.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hooks_ended: Option<Moment>,
    /// Everything was frozen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frozen: Option<Moment>,
    /// The thaw was asked for, before anything was thawed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thaw_asked: Option<Moment>,
    /// Everything was thawed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thawed: Option<Moment>,
}

/// What the caller says of the snapshot that it took.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Cut {
    /// The snapshot's name, in the caller's words; may be empty.
    pub id: String,
    /// What was done, in the caller's words.
    pub text: String,
    /// When it was begun and done, by the caller's clock, RFC 3339.
    pub begun: String,
    /// The same.
    pub ended: String,
    /// How long it took, in milliseconds.
    pub took_ms: u64,
    /// With what exit status it ended; all but 0 mean that there is no snapshot.
    pub exit_status: i32,
}

/// How a freeze ended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct End {
    /// `asked`, `deadline`, `person`, `crash`, `hang`, or `failed` if it was not frozen.
    pub how: String,
    /// What was wrong, in words; empty if nothing was.
    pub problem: String,
}

/// A file system that was frozen, or was to be.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Volume {
    /// Where it is mounted.
    pub mount_point: String,
    /// Such as `ext4`.
    pub kind: String,
    /// What it was mounted from, such as `/dev/vda1`.
    pub source: String,
    /// Major and minor number, such as `254:1`.
    pub device: String,
    /// The UUID of the file system; empty where udev does not know it.
    pub uuid: String,
    /// The disks that it lives on.
    pub disks: Vec<Disk>,
    /// What the snapshot of it is worth.
    pub level: Level,
    /// Why it was not frozen from the beginning to the end; empty if it was.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub problem: String,
}

/// A disk below a file system.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Disk {
    /// Such as `/dev/vda`.
    pub file: String,
    /// Its serial number; empty if it has none.
    pub serial: String,
}

/// A file system that was not frozen.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NotFrozen {
    /// Where it is mounted.
    pub mount_point: String,
    /// Such as `vfat`.
    pub kind: String,
    /// Why not.
    pub reason: String,
    /// Somebody else held it: it was meant to be frozen, and what became of it is not known.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_held: bool,
}

/// An application that took part.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Application {
    /// Such as `postgresql`.
    pub name: String,
    /// Which one of them, such as its socket or unit.
    pub instance: String,
    /// What the snapshot is worth to it.
    pub level: Level,
    /// Why not more; empty at the level `application`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub problem: String,
    /// What it said of itself: names and values, such as positions in its log.
    pub evidence: Vec<(String, String)>,
}

/// A receipt.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Receipt {
    /// [`SCHEMA`].
    pub schema: u32,
    /// 128 bits, in hexadecimal digits.
    pub id: String,
    /// The version of the agent.
    pub agent: String,
    /// The guest.
    pub guest: Machine,
    /// Who asked for the freeze.
    pub caller: Caller,
    /// What the snapshot of all that was frozen is worth.
    pub level: Level,
    /// Why not more.
    pub reasons: Vec<String>,
    /// When what happened.
    pub times: Times,
    /// How it ended.
    pub end: End,
    /// What the caller says of its snapshot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cut: Option<Cut>,
    /// The hooks that were told.
    pub hooks: Vec<String>,
    /// Applications that took part.
    pub applications: Vec<Application>,
    /// What was frozen.
    pub volumes: Vec<Volume>,
    /// What was not.
    pub not_frozen: Vec<NotFrozen>,
    /// How many entries of the lists are not here, because there are too many.
    pub left_out: u64,
}

/// Whether a text is an id of a receipt.
pub fn is_id(text: &str) -> bool {
    text.len() == ID_DIGITS && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// The text without what terminals obey, of at most some hundred bytes.
pub fn tidy(text: &str) -> String {
    let mut tidied = String::new();
    for character in text.chars() {
        let character = if is_plain(character) { character } else { char::REPLACEMENT_CHARACTER };
        if tidied.len() + character.len_utf8() > LONGEST {
            break;
        }
        tidied.push(character);
    }
    tidied
}

/// Whether a character neither moves a cursor nor turns the direction of what follows.
fn is_plain(character: char) -> bool {
    !character.is_control()
        && !matches!(
            character,
            '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
        )
}

impl Receipt {
    /// Such as `0123…: filesystem`.
    pub fn words(&self) -> String {
        format!("{}: {}", self.id, self.level.word())
    }

    /// Makes each text tidy, and each list not too long.
    pub fn tidy(&mut self) {
        let Self { id, agent, guest, caller, reasons, times, end, cut, hooks, .. } = self;
        let texts = [id, agent, &mut guest.host_name, &mut guest.dmi_uuid, &mut guest.boot_id];
        let more = [&mut caller.name, &mut caller.over, &mut end.how, &mut end.problem];
        let Times { asked, hooks_begun, hooks_ended, frozen, thaw_asked, thawed } = times;
        let times = [asked, hooks_begun, hooks_ended, frozen, thaw_asked, thawed].into_iter().flatten();
        let of_cut = cut.iter_mut().flat_map(|cut| {
            let Cut { id, text, begun, ended, .. } = cut;
            [id, text, begun, ended]
        });
        let volumes = self.volumes.iter_mut().flat_map(|volume| {
            let Volume { mount_point, kind, source, device, uuid, problem, disks, .. } = volume;
            let disks = disks.iter_mut().flat_map(|disk| [&mut disk.file, &mut disk.serial]);
            [mount_point, kind, source, device, uuid, problem].into_iter().chain(disks)
        });
        let others =
            self.not_frozen.iter_mut().flat_map(|one| [&mut one.mount_point, &mut one.kind, &mut one.reason]);
        let applications = self.applications.iter_mut().flat_map(|one| {
            let Application { name, instance, problem, evidence, .. } = one;
            let evidence = evidence.iter_mut().flat_map(|(name, value)| [name, value]);
            [name, instance, problem].into_iter().chain(evidence)
        });
        let texts = texts.into_iter().chain(more).chain(times.map(|moment| &mut moment.time)).chain(of_cut);
        let texts = texts.chain(reasons.iter_mut()).chain(hooks.iter_mut());
        for text in texts.chain(volumes).chain(others).chain(applications) {
            *text = tidy(text);
        }
    }

    /// Makes the longest list half as long; false if there is nothing left to shorten.
    fn shorten(&mut self) -> bool {
        fn halve<T>(list: &mut Vec<T>) -> u64 {
            let kept = list.len() / 2;
            let gone = list.len() - kept;
            list.truncate(kept);
            gone as u64
        }
        let lengths = [
            self.not_frozen.len(),
            self.volumes.len(),
            self.hooks.len(),
            self.applications.len(),
            // The first ones weigh most, and are asked for last.
            self.reasons.len().saturating_sub(4),
        ];
        let longest = lengths.iter().enumerate().rev().max_by_key(|(_, length)| **length);
        let Some((place, _)) = longest.filter(|(_, length)| **length > 0) else { return false };
        self.left_out += match place {
            0 => halve(&mut self.not_frozen),
            1 => halve(&mut self.volumes),
            2 => halve(&mut self.hooks),
            3 => halve(&mut self.applications),
            _ => halve(&mut self.reasons),
        };
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_has_32_digits() {
        assert!(is_id("0123456789abcdef0123456789abcdef"));
        for wrong in
            ["", "0123456789ABCDEF0123456789ABCDEF", "0123456789abcdef", "../../../../../../../../../etc/x"]
        {
            assert!(!is_id(wrong), "{wrong}");
        }
    }

    #[test]
    fn texts_are_tidied_wherever_they_are() {
        let bad = || "a\u{1b}[2J\u{202e}".to_owned() + &"ä".repeat(1000);
        let mut receipt = Receipt {
            caller: Caller { name: bad(), over: bad() },
            volumes: vec![Volume {
                mount_point: bad(),
                disks: vec![Disk { file: bad(), serial: bad() }],
                ..Volume::default()
            }],
            not_frozen: vec![NotFrozen { reason: bad(), ..NotFrozen::default() }],
            applications: vec![Application { evidence: vec![(bad(), bad())], ..Application::default() }],
            cut: Some(Cut { text: bad(), ..Cut::default() }),
            reasons: vec![bad()],
            hooks: vec![bad()],
            ..Receipt::default()
        };
        receipt.tidy();
        let text = serde_json::to_string(&receipt).unwrap();
        assert!(!text.contains("\\u001b") && !text.contains('\u{202e}'), "{text}");
        assert!(text.len() < 16 * LONGEST, "{}", text.len());
    }

    #[test]
    fn levels_have_their_words_and_their_order() {
        for level in [Level::Crash, Level::FileSystem, Level::Application] {
            assert_eq!(Level::named(level.word()), Some(level));
            assert_eq!(serde_json::to_value(level).unwrap(), level.word());
        }
        assert!(Level::Crash < Level::FileSystem && Level::FileSystem < Level::Application);
    }
}
