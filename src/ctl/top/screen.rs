//! Lines for a terminal of at least 80 columns. Pure.

use std::fmt::Write as _;

use super::Sort;
use super::figures::Figures;
use crate::ctl::recent::Bars;
use crate::sys::terminal::Size;
use crate::text;

const HEAD: [&str; 12] =
    ["CPU", "MEM", "OF", "W-CPU", "W-MEM", "W-IO", "READ", "WRITE", "RECV", "SEND", "FULL", "NAME"];
/// Widths of all columns but the last.
const WIDTHS: [usize; 11] = [4, 4, 6, 5, 5, 4, 5, 5, 5, 5, 4];
const HELP: &str = "q quit  h history  by: c CPU m memory p pressure d disk n network f full a name";
/// Columns of the bars, one per minute.
const BARS: u32 = 15;

/// Figures that are shown for guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum View {
    /// Present load.
    Now,
    /// Load in the last 15 minutes.
    History,
}

impl View {
    /// Returns the other view.
    pub fn other(self) -> Self {
        if self == Self::Now { Self::History } else { Self::Now }
    }
}

fn percent(ratio: Option<f64>) -> String {
    ratio.map_or("-".to_owned(), |ratio| format!("{:.0}%", ratio * 100.0))
}

/// Formats a number of bytes in at most five characters: `1023`, `1.5K`, `1023K`, `23G`.
fn bytes(number: Option<f64>) -> String {
    let Some(mut number) = number else { return "-".to_owned() };
    let mut unit = "";
    for next in ["K", "M", "G", "T", "P"] {
        if number < 1023.5 {
            break;
        }
        number /= 1024.0;
        unit = next;
    }
    if unit.is_empty() || number >= 9.95 {
        format!("{number:.0}{unit}")
    } else {
        format!("{number:.1}{unit}")
    }
}

fn cells(figures: &Figures) -> [String; 12] {
    [
        percent(figures.cpu_ratio),
        percent(figures.memory_ratio()),
        bytes(figures.memory_total_bytes),
        percent(figures.waiting_cpu_ratio),
        percent(figures.waiting_memory_ratio),
        percent(figures.waiting_io_ratio),
        bytes(figures.disk_read_bytes_per_second),
        bytes(figures.disk_written_bytes_per_second),
        bytes(figures.network_received_bytes_per_second),
        bytes(figures.network_sent_bytes_per_second),
        percent(figures.fullest_ratio),
        figures.name.clone(),
    ]
}

fn line(cells: &[String; 12], columns: usize) -> String {
    let mut line = String::new();
    for (cell, width) in cells.iter().zip(WIDTHS) {
        // Writing to a String cannot fail.
        let _ = write!(line, "{cell:>width$} ");
    }
    line.push_str(&cells[HEAD.len() - 1]);
    line.chars().take(columns).collect()
}

/// Formats a line of the history: the present value of each figure after its bars.
fn history(figures: &Figures, bars: Bars, columns: usize) -> String {
    let recent = figures.recent.as_ref();
    let parts = [
        (bars.line(recent, |point| point.cpu_ratio, BARS), figures.cpu_ratio),
        (bars.line(recent, |point| point.memory_used_ratio, BARS), figures.memory_ratio()),
        (bars.line(recent, |point| point.waiting_ratio, BARS), figures.waiting_ratio()),
    ];
    let mut line = String::new();
    for (bars, now) in parts {
        // Writing to a String cannot fail.
        let _ = write!(line, "{bars} {:>4} ", percent(now));
    }
    line.push_str(&figures.name);
    line.chars().take(columns).collect()
}

/// Formats the header of the history.
fn history_head(columns: usize) -> String {
    let of = |name: &str| format!("{name:<15} {:>4} ", "NOW");
    let head = format!("{}{}{}NAME", of("CPU 15 MIN"), of("MEM"), of("WAITING"));
    head.chars().take(columns).collect()
}

/// Formats the lines for a terminal of this size: a header, as many guests as fit, and the keys.
pub fn lines(all: &[Figures], (sort, view, bars): (Sort, View, Bars), size: Size) -> Vec<String> {
    let (rows, columns) = (usize::from(size.rows.max(4)), usize::from(size.columns.max(20)));
    let room = rows - 3;
    let answering = all.iter().filter(|one| one.answers).count();
    let more = if all.len() > room { format!(", {} more below", all.len() - room) } else { String::new() };
    let by = format!("{sort:?}").to_lowercase();
    let title = format!("{} VMs, {answering} answer; by {by}{more}", all.len());
    let mut lines = vec![title.chars().take(columns).collect()];
    let head = match view {
        View::Now => line(&HEAD.map(str::to_owned), columns),
        View::History => history_head(columns),
    };
    lines.push(format!("\x1b[7m{head:columns$}\x1b[0m"));
    lines.extend(all.iter().take(room).map(|one| match view {
        View::Now => line(&cells(one), columns),
        View::History => history(one, bars, columns),
    }));
    lines.resize(rows - 1, String::new());
    lines.push(HELP.chars().take(columns).collect());
    lines
}

/// Formats the same as a table of any length.
pub fn table(all: &[Figures]) -> String {
    let rows: Vec<_> = std::iter::once(HEAD.map(str::to_owned)).chain(all.iter().map(cells)).collect();
    text::table(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        for (number, expected) in [
            (0.0, "0"),
            (1023.0, "1023"),
            (1024.0, "1.0K"),
            (10_200.0, "10K"),
            (1_048_000.0, "1023K"),
            (2.5e10, "23G"),
            (1e30, "888178419700125P"),
        ] {
            assert_eq!(bytes(Some(number)), expected);
        }
        assert_eq!(
            (bytes(None), percent(None), percent(Some(0.126))),
            ("-".into(), "-".into(), "13%".into())
        );
    }

    #[test]
    fn a_small_terminal_is_filled_and_not_more() {
        let one =
            |number: usize| Figures { name: format!("vm-{number:02}"), answers: true, ..Figures::default() };
        let all: Vec<_> = (0..50).map(one).collect();
        let shown = (Sort::Cpu, View::Now, Bars::of_locale());
        let lines = lines(&all, shown, Size { rows: 24, columns: 80 });
        assert_eq!(lines.len(), 24);
        let width = |line: &String| line.replace("\x1b[7m", "").replace("\x1b[0m", "").chars().count();
        assert!(lines.iter().all(|line| width(line) <= 80), "{lines:#?}");
        assert_eq!(lines[0], "50 VMs, 50 answer; by cpu, 29 more below");
        assert!(
            lines[1].contains("W-MEM") && lines[2].ends_with(" vm-00") && lines[23].starts_with("q quit"),
            "{lines:#?}"
        );
        assert!(super::lines(&all, shown, Size { rows: 0, columns: 0 }).len() == 4);
        let history =
            super::lines(&all, (shown.0, View::Now.other(), shown.2), Size { rows: 24, columns: 80 });
        assert!(history.iter().all(|line| width(line) <= 80), "{history:#?}");
        assert!(
            history[1].contains("WAITING") && history[2].ends_with("    - vm-00") && history[23] == HELP,
            "{history:#?}"
        );
    }
}
