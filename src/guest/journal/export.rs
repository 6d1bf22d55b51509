//! Parser of the journal export format of systemd: a field is a line `KEY=VALUE`, or a key, a length and that many
//! bytes; an empty line ends an entry. Fields that are not needed are skipped, however long they are. Pure.

use std::time::{Duration, SystemTime};

/// Maximum number of bytes of a message that are kept.
pub const MOST_MESSAGE: usize = 16 << 10;
/// Maximum number of bytes of a key, and of any other field, that are kept.
const MOST_FIELD: usize = 512;

/// Entry of the journal.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Position of the entry in the journal.
    pub cursor: String,
    /// Time when the entry was written, by the guest's clock.
    pub time: Option<SystemTime>,
    /// Name that the program gives itself (`SYSLOG_IDENTIFIER`).
    pub identifier: String,
    /// Kernel's name of the program (`_COMM`).
    pub command: String,
    /// PID of the process that logged the entry.
    pub process_id: u32,
    /// Unit of that process; for messages of systemd, the unit that they are about.
    pub unit: String,
    /// Priority from 0 (emergency) to 7 (debug).
    pub priority: Option<u8>,
    /// Beginning of the message; bytes that are not UTF-8 are replaced.
    pub message: String,
    /// Bytes of the message that were left out.
    pub left_out: u64,
}

/// Element of the format that is expected next.
#[derive(Debug)]
enum State {
    /// Key, or the end of an entry.
    Key,
    /// Value of the key that was read, up to the end of the line.
    Line,
    /// Bytes of a length.
    Length([u8; 8], usize),
    /// Rest of a value, of this length in bytes.
    Bytes(u64),
    /// End of the line after a value with a length.
    After,
}

/// Parser that reads entries piece by piece.
#[derive(Debug)]
pub struct Reader {
    state: State,
    key: Vec<u8>,
    value: Vec<u8>,
    beyond: u64,
    entry: Entry,
    /// Unit that the entry says it is about (`UNIT`).
    about: String,
    has_fields: bool,
}

/// Error: the input is not in the journal export format.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("the output of journalctl is not in the journal export format")]
pub struct Malformed;

impl Default for Reader {
    fn default() -> Self {
        Self {
            state: State::Key,
            key: Vec::new(),
            value: Vec::new(),
            beyond: 0,
            entry: Entry::default(),
            about: String::new(),
            has_fields: false,
        }
    }
}

impl Reader {
    /// Parses `bytes` up to the end of an entry. Returns how many bytes that took, with the entry; or all of them,
    /// without one.
    ///
    /// # Errors
    /// If they are not in this format.
    pub fn read(&mut self, bytes: &[u8]) -> Result<(usize, Option<Entry>), Malformed> {
        let mut at = 0;
        while let Some(byte) = bytes.get(at).copied() {
            match &mut self.state {
                State::Key => {
                    at += 1;
                    match byte {
                        b'\n' if self.key.is_empty() => {
                            let about = std::mem::take(&mut self.about);
                            if std::mem::take(&mut self.has_fields) {
                                // Only systemd (PID 1) is trusted to say which unit a message is about:
                                // any process can set this field.
                                if self.entry.process_id == 1 && !about.is_empty() {
                                    self.entry.unit = about;
                                }
                                return Ok((at, Some(std::mem::take(&mut self.entry))));
                            }
                        }
                        b'\n' => self.state = State::Length([0; 8], 0),
                        b'=' if !self.key.is_empty() => self.state = State::Line,
                        _ if self.key.len() < MOST_FIELD => self.key.push(byte),
                        _ => return Err(Malformed),
                    }
                }
                State::Line => {
                    let rest = &bytes[at..];
                    let end = rest.iter().position(|byte| *byte == b'\n');
                    self.take(&rest[..end.unwrap_or(rest.len())]);
                    at += end.map_or(rest.len(), |end| end + 1);
                    if end.is_some() {
                        self.end_field();
                    }
                }
                State::Length(length, filled) => {
                    length[*filled] = byte;
                    *filled += 1;
                    at += 1;
                    if *filled == 8 {
                        let length = u64::from_le_bytes(*length);
                        self.state = if length == 0 { State::After } else { State::Bytes(length) };
                    }
                }
                State::Bytes(left) => {
                    let rest = &bytes[at..];
                    let here = usize::try_from(*left).unwrap_or(usize::MAX).min(rest.len());
                    *left -= here as u64;
                    let is_over = *left == 0;
                    self.take(&rest[..here]);
                    at += here;
                    if is_over {
                        self.state = State::After;
                    }
                }
                State::After => {
                    if byte != b'\n' {
                        return Err(Malformed);
                    }
                    at += 1;
                    self.end_field();
                }
            }
        }
        Ok((at, None))
    }

    /// Adds bytes to the value, up to the maximum that is kept.
    fn take(&mut self, bytes: &[u8]) {
        let most = if self.key == b"MESSAGE" { MOST_MESSAGE } else { MOST_FIELD };
        let kept = bytes.len().min(most - self.value.len());
        self.value.extend_from_slice(&bytes[..kept]);
        self.beyond += (bytes.len() - kept) as u64;
    }

    fn end_field(&mut self) {
        let entry = &mut self.entry;
        let text = || String::from_utf8_lossy(&self.value).into_owned();
        let number = || std::str::from_utf8(&self.value).ok().and_then(|text| text.parse::<u64>().ok());
        match self.key.as_slice() {
            // A cursor that was cut is useless.
            b"__CURSOR" if self.beyond == 0 => entry.cursor = text(),
            b"__REALTIME_TIMESTAMP" => {
                entry.time = number().and_then(|microseconds| {
                    SystemTime::UNIX_EPOCH.checked_add(Duration::from_micros(microseconds))
                });
            }
            b"SYSLOG_IDENTIFIER" => entry.identifier = text(),
            b"_COMM" => entry.command = text(),
            b"_PID" => entry.process_id = number().and_then(|pid| u32::try_from(pid).ok()).unwrap_or(0),
            b"UNIT" => self.about = text(),
            b"_SYSTEMD_UNIT" => entry.unit = text(),
            b"PRIORITY" => {
                entry.priority =
                    number().and_then(|level| u8::try_from(level).ok()).filter(|level| *level < 8);
            }
            b"MESSAGE" => {
                entry.message = text();
                entry.left_out = self.beyond;
            }
            _ => {}
        }
        self.key.clear();
        self.value.clear();
        self.beyond = 0;
        self.has_fields = true;
        self.state = State::Key;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all(bytes: &[u8], piece: usize) -> Result<Vec<Entry>, Malformed> {
        let (mut reader, mut entries) = (Reader::default(), Vec::new());
        for mut piece in bytes.chunks(piece) {
            while !piece.is_empty() {
                let (taken, entry) = reader.read(piece)?;
                entries.extend(entry);
                piece = &piece[taken..];
            }
        }
        Ok(entries)
    }

    fn binary(key: &str, value: &[u8]) -> Vec<u8> {
        [key.as_bytes(), b"\n", &(value.len() as u64).to_le_bytes(), value, b"\n"].concat()
    }

    #[test]
    fn entries_are_read_in_whatever_pieces_they_come() {
        let mut bytes = b"__CURSOR=s=1;i=2\n__REALTIME_TIMESTAMP=1700000000000001\nPRIORITY=6\n_PID=17\n\
            SYSLOG_IDENTIFIER=sshd\n_SYSTEMD_UNIT=ssh.service\nMESSAGE=a=b\n\n__CURSOR=s=1;i=3\n"
            .to_vec();
        bytes.extend(binary("MESSAGE", b"two\nlines\n\n"));
        bytes.extend(b"_SYSTEMD_UNIT=init.scope\nUNIT=a.service\n_PID=1\nPRIORITY=9\n\n_SYSTEMD_UNIT=b.service\nUNIT=a.service\n_PID=2\n\n");
        for piece in [1, 2, 3, 7, 1000] {
            let entries = all(&bytes, piece).unwrap();
            assert_eq!((entries.len(), entries[2].unit.as_str()), (3, "b.service"));
            let one = &entries[0];
            assert_eq!((one.cursor.as_str(), one.process_id, one.priority), ("s=1;i=2", 17, Some(6)));
            assert_eq!(
                (one.identifier.as_str(), one.unit.as_str(), one.message.as_str()),
                ("sshd", "ssh.service", "a=b")
            );
            assert_eq!(one.time, Some(SystemTime::UNIX_EPOCH + Duration::from_micros(1_700_000_000_000_001)));
            let two = &entries[1];
            assert_eq!(
                (two.message.as_str(), two.unit.as_str(), two.priority),
                ("two\nlines\n\n", "a.service", None)
            );
        }
    }

    #[test]
    fn what_is_long_is_cut_and_what_follows_is_read() {
        let long = vec![b'x'; 3 << 20];
        let mut bytes = b"__CURSOR=a\n".to_vec();
        bytes.extend(binary("COREDUMP", &long));
        bytes.extend(binary("MESSAGE", &long));
        bytes.extend(b"\n__CURSOR=b\nMESSAGE=short\n\n");
        let entries = all(&bytes, 65_536).unwrap();
        assert_eq!(entries[0].message.len(), MOST_MESSAGE);
        assert_eq!(entries[0].left_out, (3 << 20) - MOST_MESSAGE as u64);
        assert_eq!((entries[1].cursor.as_str(), entries[1].message.as_str()), ("b", "short"));
        let key = vec![b'K'; 1000];
        assert_eq!(all(&key, 100), Err(Malformed));
    }

    proptest! {
        #[test]
        fn any_message_is_read_as_it_was_written(
            messages in prop::collection::vec("(?s).{0,300}", 1..5),
            piece in 1usize..64,
        ) {
            let mut bytes = Vec::new();
            for (number, message) in messages.iter().enumerate() {
                bytes.extend(format!("__CURSOR={number}\n").bytes());
                bytes.extend(binary("MESSAGE", message.as_bytes()));
                bytes.push(b'\n');
            }
            let entries = all(&bytes, piece).unwrap();
            prop_assert_eq!(entries.iter().map(|entry| entry.message.clone()).collect::<Vec<_>>(), messages);
        }

        #[test]
        fn anything_is_read_or_refused_within_bounds(bytes in prop::collection::vec(any::<u8>(), 0..4096)) {
            if let Ok(entries) = all(&bytes, 100) {
                prop_assert!(entries.iter().all(|entry| entry.message.len() <= 3 * MOST_MESSAGE));
            }
        }
    }
}
