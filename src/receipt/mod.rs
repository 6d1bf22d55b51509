//! Receipts of freezes: how consistent a snapshot is that was taken during one, and why not more so.
//!
//! The guest makes a receipt when a freeze has ended, and keeps it in an [`envelope`] with its signature. The
//! [`judge`] decides from the facts alone how much is proved. All of this is pure: storing receipts and trusting
//! keys is done elsewhere.
//!
//! To add something to a receipt: a field with `#[serde(default)]`, so that receipts of earlier versions can be
//! read.

pub mod envelope;
pub mod judge;
pub mod show;

use serde::{Deserialize, Serialize};

/// Version of the document. A document with another version is not read.
pub const SCHEMA: u32 = 1;
/// Maximum size of a receipt in its envelope, in bytes.
pub const MOST_BYTES: usize = 16 * 1024;
/// Number of hexadecimal digits of an ID.
pub const ID_DIGITS: usize = 32;
/// Maximum length of one text of a receipt, in bytes.
const LONGEST: usize = 256;
/// Maximum number of entries of one list of a receipt, before it is cut to [`MOST_BYTES`].
pub const MOST_LISTED: usize = 256;

/// Consistency of a snapshot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Crash-consistent, as after a power failure: nothing is proved.
    #[default]
    Crash,
    /// The file systems were frozen from before the snapshot until after it.
    FileSystem,
    /// Applications were held during that time as well, by their own procedures.
    Application,
}

impl Level {
    /// Returns the level in one word, as in files, events and output for users.
    pub fn word(self) -> &'static str {
        match self {
            Self::Crash => "crash",
            Self::FileSystem => "filesystem",
            Self::Application => "application",
        }
    }

    /// Returns the level with this word.
    pub fn named(word: &str) -> Option<Self> {
        [Self::Crash, Self::FileSystem, Self::Application].into_iter().find(|level| level.word() == word)
    }
}

/// Moment on two clocks of the guest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Moment {
    /// Milliseconds since the guest booted, suspension included: only these are compared.
    pub boottime_ms: u64,
    /// Wall-clock time, RFC 3339.
    pub time: String,
}

/// Identity of the guest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Machine {
    /// Host name of the guest.
    pub host_name: String,
    /// UUID of the machine from DMI.
    pub dmi_uuid: String,
    /// Boot ID, which is different after every boot.
    pub boot_id: String,
}

/// Client that requested a freeze.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Caller {
    /// Description of the client, such as `the host half SHA256:… for uid:0 root`.
    pub name: String,
    /// Protocol of the request: `qga` or `guestlet`; empty if unknown.
    pub over: String,
}

impl Caller {
    /// Creates a caller with this name and protocol.
    pub fn new(name: &str, over: &str) -> Self {
        Self { name: name.to_owned(), over: over.to_owned() }
    }
}

/// Times of the steps of a freeze; absent if the step did not happen or its time is unknown.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Times {
    /// The freeze was requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub asked: Option<Moment>,
    /// Hooks and applications were notified.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hooks_begun: Option<Moment>,
    /// All hooks and applications had answered.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hooks_ended: Option<Moment>,
    /// All file systems were frozen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frozen: Option<Moment>,
    /// The thaw was requested, before any file system was thawed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thaw_asked: Option<Moment>,
    /// All file systems were thawed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thawed: Option<Moment>,
}

/// Caller's account of the snapshot that it took.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Cut {
    /// Name of the snapshot, in the caller's words; may be empty.
    pub id: String,
    /// Description of the action, in the caller's words.
    pub text: String,
    /// Start of the snapshot, by the caller's clock, RFC 3339.
    pub begun: String,
    /// End of the snapshot, by the caller's clock, RFC 3339.
    pub ended: String,
    /// Duration of the snapshot, in milliseconds.
    pub took_ms: u64,
    /// Exit status of the action; any value other than 0 means that no snapshot exists.
    pub exit_status: i32,
}

/// End of a freeze.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct End {
    /// Keyword: `asked`, `deadline`, `person`, `crash`, `hang`, or `failed` if it was not frozen.
    pub how: String,
    /// Description of the problem; empty if there was none.
    pub problem: String,
}

/// File system that was frozen, or was to be.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Volume {
    /// Mount point of the file system.
    pub mount_point: String,
    /// Type of the file system, such as `ext4`.
    pub kind: String,
    /// Source of the mount, such as `/dev/vda1`.
    pub source: String,
    /// Major and minor number of the device, such as `254:1`.
    pub device: String,
    /// UUID of the file system; empty if udev does not know it.
    pub uuid: String,
    /// Disks that hold the file system.
    pub disks: Vec<Disk>,
    /// Consistency of its snapshot.
    pub level: Level,
    /// Reason why it was not frozen for the whole time; empty if it was.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub problem: String,
}

/// Disk below a file system.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Disk {
    /// Device file, such as `/dev/vda`.
    pub file: String,
    /// Serial number; empty if the disk has none.
    pub serial: String,
}

/// File system that was not frozen.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NotFrozen {
    /// Mount point of the file system.
    pub mount_point: String,
    /// Type of the file system, such as `vfat`.
    pub kind: String,
    /// Reason why it was not frozen.
    pub reason: String,
    /// True if another client held it: it should have been frozen, and its state during the freeze is unknown.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_held: bool,
}

/// Application that took part in a freeze.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Application {
    /// Name of the application, such as `postgresql`.
    pub name: String,
    /// Instance of the application, such as its socket or unit.
    pub instance: String,
    /// Consistency of the snapshot for this application.
    pub level: Level,
    /// Reason why the level is not higher; empty at the level `application`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub problem: String,
    /// Facts that the application reported: names and values, such as positions in its log.
    pub evidence: Vec<(String, String)>,
}

/// Receipt of a freeze: the record of what was frozen, when and for whom.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Receipt {
    /// Version of the format: [`SCHEMA`].
    pub schema: u32,
    /// Identifier: 128 bits in hexadecimal digits.
    pub id: String,
    /// The version of the agent.
    pub agent: String,
    /// Guest whose file systems were frozen.
    pub guest: Machine,
    /// Client that requested the freeze.
    pub caller: Caller,
    /// Consistency of the snapshot as a whole.
    pub level: Level,
    /// Reasons why the level is not higher.
    pub reasons: Vec<String>,
    /// Times of the steps of the freeze.
    pub times: Times,
    /// End of the freeze.
    pub end: End,
    /// Caller's account of its snapshot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cut: Option<Cut>,
    /// Hooks that were notified.
    pub hooks: Vec<String>,
    /// Applications that took part.
    pub applications: Vec<Application>,
    /// File systems that were frozen.
    pub volumes: Vec<Volume>,
    /// File systems that were not frozen.
    pub not_frozen: Vec<NotFrozen>,
    /// Number of entries that were left out of the lists because they would make the receipt too long.
    pub left_out: u64,
}

/// Returns whether a text is the ID of a receipt.
pub fn is_id(text: &str) -> bool {
    text.len() == ID_DIGITS && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Replaces characters that control terminals, and limits the text to 256 bytes.
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

/// Returns whether a character is safe on a terminal: not a control character, and none that hides text or changes
/// its direction.
fn is_plain(character: char) -> bool {
    !character.is_control()
        && !matches!(
            character,
            '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
        )
}

impl Receipt {
    /// Returns the ID and the level, for example `0123…: filesystem`.
    pub fn words(&self) -> String {
        format!("{}: {}", self.id, self.level.word())
    }

    /// Tidies each text, and limits each list.
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

    /// Halves the longest list; returns false if nothing is left to shorten.
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
            // The first reasons matter most, so this list is shortened last.
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
