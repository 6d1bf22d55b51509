//! How people are shown things: sizes, rows of tables, and a dash where there is nothing.

/// Rows as columns of equal width, two spaces apart, with a line's end after each.
pub fn table<R: AsRef<[String]>>(rows: &[R]) -> String {
    let mut widths = vec![0; rows.iter().map(|row| row.as_ref().len()).max().unwrap_or(0)];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row.as_ref()) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in rows {
        let cells = row.as_ref().iter().zip(&widths);
        let line: Vec<_> = cells.map(|(cell, &width)| format!("{cell:width$}")).collect();
        text.push_str(line.join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// A size, such as `10 GiB` or `1.5 TiB`.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let (mut whole, mut tenths, mut unit) = (bytes, 0, 0);
    while whole >= 1024 && unit + 1 < UNITS.len() {
        tenths = whole % 1024 * 10 / 1024;
        whole /= 1024;
        unit += 1;
    }
    let name = UNITS.get(unit).copied().unwrap_or_default();
    if tenths == 0 { format!("{whole} {name}") } else { format!("{whole}.{tenths} {name}") }
}

/// The text, or a dash in place of none.
pub fn or_dash(text: &str) -> String {
    if text.is_empty() { "-".to_owned() } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_by_characters() {
        let row = |cells: [&str; 3]| cells.map(str::to_owned);
        let rows = [row(["NAME", "X", "REASON"]), row(["ünï", "-", ""]), row(["a", "long", "why"])];
        assert_eq!(table(&rows), "NAME  X     REASON\nünï   -\na     long  why\n");
    }

    #[test]
    fn sizes() {
        for (bytes, words) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (10 << 30, "10 GiB"),
            ((1 << 40) - 1, "1023.9 GiB"),
            (u64::MAX, "16383.9 PiB"),
        ] {
            assert_eq!(size(bytes), words);
        }
    }
}
