//! Lines of a terminal, in which 80 columns are enough. Pure.

use std::fmt::Write as _;

use super::Sort;
use super::figures::Figures;
use crate::sys::terminal::Size;
use crate::text;

const HEAD: [&str; 12] =
    ["CPU", "MEM", "OF", "W-CPU", "W-MEM", "W-IO", "READ", "WRITE", "RECV", "SEND", "FULL", "NAME"];
/// Of each column but the last.
const WIDTHS: [usize; 11] = [4, 4, 6, 5, 5, 4, 5, 5, 5, 5, 4];
const HELP: &str = "q quit  by: c CPU m memory p pressure d disks n networks f full a name";

fn percent(ratio: Option<f64>) -> String {
    ratio.map_or("-".to_owned(), |ratio| format!("{:.0}%", ratio * 100.0))
}

/// At most five characters: `1023`, `1.5K`, `1023K`, `23G`.
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

/// What is on a terminal of this size: a head, as many guests as there is room for, and the keys.
pub fn lines(all: &[Figures], sort: Sort, size: Size) -> Vec<String> {
    let (rows, columns) = (usize::from(size.rows.max(4)), usize::from(size.columns.max(20)));
    let room = rows - 3;
    let answering = all.iter().filter(|one| one.answers).count();
    let more = if all.len() > room { format!(", {} more below", all.len() - room) } else { String::new() };
    let by = format!("{sort:?}").to_lowercase();
    let title = format!("{} VMs, {answering} answer; by {by}{more}", all.len());
    let mut lines = vec![title.chars().take(columns).collect()];
    lines.push(format!("\x1b[7m{:columns$}\x1b[0m", line(&HEAD.map(str::to_owned), columns)));
    lines.extend(all.iter().take(room).map(|one| line(&cells(one), columns)));
    lines.resize(rows - 1, String::new());
    lines.push(HELP.chars().take(columns).collect());
    lines
}

/// The same as a table without an end.
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
        let lines = lines(&all, Sort::Cpu, Size { rows: 24, columns: 80 });
        assert_eq!(lines.len(), 24);
        let width = |line: &String| line.replace("\x1b[7m", "").replace("\x1b[0m", "").chars().count();
        assert!(lines.iter().all(|line| width(line) <= 80), "{lines:#?}");
        assert_eq!(lines[0], "50 VMs, 50 answer; by cpu, 29 more below");
        assert!(
            lines[1].contains("W-MEM") && lines[2].ends_with(" vm-00") && lines[23].starts_with("q quit"),
            "{lines:#?}"
        );
        assert!(super::lines(&all, Sort::Name, Size { rows: 0, columns: 0 }).len() == 4);
    }
}
