//! How people are shown things, and write them: sizes, rows of tables, a dash where there is nothing, patterns of names.

pub mod findings;
pub mod target;
pub mod wildcard;

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

/// A size as people write it: a number of bytes, or one with K, M, G or T for the powers of 1024.
///
/// # Errors
/// With what is wrong, if it is none.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let wrong = || "give a number, or one with K, M, G or T, such as 10G".to_owned();
    let digits = text.trim_end_matches(|one: char| one.is_ascii_alphabetic());
    let shift = match &text[digits.len()..] {
        "" => 0,
        "K" | "Ki" | "KiB" => 10,
        "M" | "Mi" | "MiB" => 20,
        "G" | "Gi" | "GiB" => 30,
        "T" | "Ti" | "TiB" => 40,
        _ => return Err(wrong()),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).filter(|bytes| *bytes > 0).ok_or_else(wrong)
}

/// A size in the largest unit in which it is a whole number, as [`parse_size`] takes it.
pub fn exact_size(bytes: u64) -> String {
    let units = [(40, "T"), (30, "G"), (20, "M"), (10, "K")];
    let fits = |(shift, _): &(u32, &str)| bytes > 0 && bytes.trailing_zeros() >= *shift;
    units
        .into_iter()
        .find(fits)
        .map_or(bytes.to_string(), |(shift, unit)| format!("{}{unit}", bytes >> shift))
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
    fn sizes_that_people_write() {
        let cases = [
            ("512", 512, "512"),
            ("10G", 10 << 30, "10G"),
            ("1536M", 1536 << 20, "1536M"),
            ("2TiB", 2 << 40, "2T"),
        ];
        for (text, bytes, back) in cases {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
            assert_eq!(exact_size(bytes), back, "{text}");
        }
        for wrong in ["", "G", "0", "-1G", "1.5G", "10g", "10 G", "99999999999T", "1P", "1µ"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
        assert_eq!(exact_size(0), "0");
        assert_eq!(exact_size(1025), "1025");
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
