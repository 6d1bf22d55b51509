//! Entries for journald, as single datagrams in its native protocol
//! (<https://systemd.io/JOURNAL_NATIVE_PROTOCOL/>), sent without ever waiting: a journal that hangs, as it does while
//! its file system is frozen, costs entries (the next one says how many), never the program.

use std::fmt::Write as _;
use std::os::linux::fs::MetadataExt as _;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use tracing::Level;

const JOURNAL: &str = "/run/systemd/journal/socket";
/// Bytes of one entry's text; what is longer is cut.
const MAX_TEXT: usize = 16 * 1024;

/// The way to journald.
pub struct Journal {
    socket: UnixDatagram,
    /// Named with each entry: a journal that was restarted has another socket there.
    path: PathBuf,
    identifier: &'static str,
    lost: AtomicU64,
}

impl Journal {
    /// The journal, where systemd says that our standard error goes there (systemd.exec(5),
    /// `$JOURNAL_STREAM`).
    pub fn connect(identifier: &'static str) -> Option<Self> {
        let stream = std::env::var("JOURNAL_STREAM").ok()?;
        let stderr = std::fs::metadata("/proc/self/fd/2").ok()?;
        if stream != format!("{}:{}", stderr.st_dev(), stderr.st_ino()) {
            return None;
        }
        let socket = UnixDatagram::unbound().ok()?;
        socket.set_nonblocking(true).ok()?;
        Some(Self { socket, path: JOURNAL.into(), identifier, lost: AtomicU64::new(0) })
    }

    /// Sends one entry, or counts it as lost.
    pub fn send(&self, level: Level, text: &[u8]) {
        self.send_with(level, text, &[]);
    }

    /// The same with fields of its own.
    pub fn send_with(&self, level: Level, text: &[u8], fields: &[(&str, &str)]) {
        let lost = self.lost.swap(0, Ordering::Relaxed);
        let mut datagram = entry(self.identifier, level, text, lost);
        add_fields(&mut datagram, fields);
        if self.socket.send_to(&datagram, &self.path).is_err() {
            self.lost.fetch_add(lost + 1, Ordering::Relaxed);
        }
    }
}

fn entry(identifier: &str, level: Level, text: &[u8], lost: u64) -> Vec<u8> {
    let priority = match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    };
    let text = text.strip_suffix(b"\n").unwrap_or(text);
    let text = &text[..text.len().min(MAX_TEXT)];
    let mut note = String::new();
    if lost > 0 {
        let _ = write!(note, " ({lost} earlier entries were lost: the journal did not accept them)");
    }
    let mut datagram = format!("PRIORITY={priority}\nSYSLOG_IDENTIFIER={identifier}\nMESSAGE\n").into_bytes();
    datagram.extend_from_slice(&((text.len() + note.len()) as u64).to_le_bytes());
    datagram.extend_from_slice(text);
    datagram.extend_from_slice(note.as_bytes());
    datagram.push(b'\n');
    datagram
}

/// Adds fields to a datagram; line breaks of a value would begin another field.
fn add_fields(datagram: &mut Vec<u8>, fields: &[(&str, &str)]) {
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_empty()) {
        let value = value.replace('\n', " ");
        datagram.extend_from_slice(format!("{name}={value}\n").as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_stays_one_field() {
        let mut datagram = b"MESSAGE=x\n".to_vec();
        add_fields(&mut datagram, &[("A", "one\nPRIORITY=0"), ("B", ""), ("C", "two")]);
        assert_eq!(datagram, b"MESSAGE=x\nA=one PRIORITY=0\nC=two\n");
    }

    #[test]
    fn an_entry_keeps_line_breaks_and_says_what_was_lost() {
        let datagram = entry("guestlet", Level::WARN, b"two\nlines\n", 0);
        assert_eq!(
            datagram,
            b"PRIORITY=4\nSYSLOG_IDENTIFIER=guestlet\nMESSAGE\n\x09\0\0\0\0\0\0\0two\nlines\n"
        );
        let datagram = entry("guestlet", Level::INFO, b"x", 3);
        assert!(String::from_utf8_lossy(&datagram).contains("x (3 earlier entries were lost"));
    }

    #[test]
    fn a_journal_that_does_not_read_never_blocks() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let reader = UnixDatagram::bind(&path).unwrap();
        let socket = UnixDatagram::unbound().unwrap();
        socket.set_nonblocking(true).unwrap();
        let journal = Journal { socket, path: path.clone(), identifier: "guestlet", lost: AtomicU64::new(0) };
        for _ in 0..100_000 {
            journal.send(Level::INFO, &[b'x'; 1000]);
        }
        let lost = journal.lost.load(Ordering::Relaxed);
        assert!(lost > 0, "the queue of a datagram socket is bounded");
        let mut buffer = [0; 4096];
        reader.recv(&mut buffer).unwrap();
        journal.send(Level::INFO, b"after");
        assert_eq!(journal.lost.load(Ordering::Relaxed), 0);
        // journald is restarted.
        drop(reader);
        std::fs::remove_file(&path).unwrap();
        journal.send(Level::INFO, b"lost");
        let reader = UnixDatagram::bind(&path).unwrap();
        journal.send(Level::INFO, b"again");
        let length = reader.recv(&mut buffer).unwrap();
        assert!(String::from_utf8_lossy(&buffer[..length]).contains("again (1 earlier entries were lost"));
    }
}
