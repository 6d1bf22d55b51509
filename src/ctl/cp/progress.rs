//! Progress of a copy, shown on a terminal.

use std::io::{self, IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

use super::place::shown;
use crate::sys::terminal;
use crate::text;

/// Interval between two updates of the display.
const PACE: Duration = Duration::from_millis(200);
/// Width of a terminal that does not report it.
const WIDTH: usize = 80;

/// Display of the progress.
pub struct Progress {
    is_shown: bool,
    is_drawn: bool,
    begun: Instant,
    drawn: Instant,
    bytes: u64,
    name: String,
    /// Bytes of the present file that were copied, and its size.
    file: (u64, u64),
}

impl Progress {
    /// Creates an empty display. It is shown if `is_wanted` and standard error is a terminal.
    pub fn new(is_wanted: bool) -> Self {
        let now = Instant::now();
        let is_shown = is_wanted && io::stderr().is_terminal();
        Self {
            is_shown,
            is_drawn: false,
            begun: now,
            drawn: now,
            bytes: 0,
            name: String::new(),
            file: (0, 0),
        }
    }

    /// Starts a file of this size, of which `there` bytes already exist.
    pub fn begin(&mut self, name: &[u8], there: u64, size: u64) {
        if self.is_shown {
            self.name = shown(name);
            self.file = (there, size);
            self.draw();
        }
    }

    /// Adds copied bytes.
    pub fn more(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.file.0 += bytes;
        if self.is_shown && self.drawn.elapsed() >= PACE {
            self.draw();
        }
    }

    fn draw(&mut self) {
        self.drawn = Instant::now();
        if self.drawn.duration_since(self.begun) < PACE {
            return;
        }
        let width = terminal::size(io::stderr()).map_or(WIDTH, |size| usize::from(size.columns).max(20));
        let line = line(&self.name, self.file, self.bytes, self.begun.elapsed(), width);
        // A failure is ignored, because the display is not essential.
        drop(write!(io::stderr(), "\r{line}\u{1b}[K"));
        self.is_drawn = true;
    }

    /// Clears the display.
    pub fn clear(&mut self) {
        if std::mem::take(&mut self.is_drawn) {
            drop(write!(io::stderr(), "\r\u{1b}[K"));
        }
    }
}

/// Formats one line that is narrower than the terminal.
fn line(name: &str, (there, size): (u64, u64), bytes: u64, took: Duration, width: usize) -> String {
    let rate = u128::from(bytes) * 1000 / took.as_millis().max(1);
    let rate = u64::try_from(rate).unwrap_or(u64::MAX);
    let mut end = format!("{}  {}/s", text::size(there), text::size(rate));
    if size > 0 {
        let percent = u128::from(there.min(size)) * 100 / u128::from(size);
        end = format!("{percent:3}%  {end}");
        if rate > 0 && there < size {
            let left = (size - there) / rate;
            end = format!("{end}  {}:{:02} left", left / 60, left % 60);
        }
    }
    let room = width.saturating_sub(end.chars().count() + 3);
    let length = name.chars().count();
    let name: String = if length > room {
        std::iter::once('…').chain(name.chars().skip(length - room.min(length) + 1)).take(room).collect()
    } else {
        name.to_owned()
    };
    format!("{name}  {end}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_never_too_long() {
        let second = Duration::from_secs(1);
        for width in [20, 40, 80, 200] {
            for name in ["a", &"x".repeat(300)] {
                let line = line(name, (50 << 20, 100 << 20), 50 << 20, second, width);
                assert!(line.contains(" 50%") && line.contains("0:01 left"), "{line}");
                assert!(line.chars().count() < width.max(45), "{width}: {line}");
            }
        }
        assert!(!line("a", (0, 0), 0, second, 80).contains('%'));
    }
}
