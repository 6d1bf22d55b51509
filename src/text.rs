//! Text for users, and from them: sizes, tables, a dash in the place of an empty text, patterns of names.

use std::cmp::Ordering;

pub mod colours;
pub mod findings;
pub mod target;
pub mod wildcard;

/// Formats rows as columns of equal width, two spaces apart, with a line feed after each row.
pub fn table<R: AsRef<[String]>>(rows: &[R]) -> String {
    painted_table(rows, |_, _, cell| cell.to_owned())
}

/// Formats rows as `table` does, with each cell replaced by what `paint` returns for its row and column number.
pub fn painted_table<R: AsRef<[String]>>(rows: &[R], paint: impl Fn(usize, usize, &str) -> String) -> String {
    let mut widths = vec![0; rows.iter().map(|row| row.as_ref().len()).max().unwrap_or(0)];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row.as_ref()) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for (number, row) in rows.iter().enumerate() {
        // Spaces to insert before the next cell that is not empty.
        let mut owed = 0;
        for (column, (cell, width)) in row.as_ref().iter().zip(&widths).enumerate() {
            let cell = cell.trim_end();
            if !cell.is_empty() {
                text.extend(std::iter::repeat_n(' ', owed));
                text.push_str(&paint(number, column, cell));
                owed = 0;
            }
            owed += width + 2 - cell.chars().count();
        }
        text.push('\n');
    }
    text
}

/// Formats a size, such as `10 GiB` or `1.5 TiB`.
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

/// Parses a size as users write it: a number of bytes, or one with K, M, G or T for the powers of 1024.
///
/// # Errors
/// A message for the user, if the text is not a size, or the size is 0 or too large.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let wrong = || "give a number, optionally with K, M, G or T, such as 10G".to_owned();
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

/// Formats a size in the largest unit in which it is a whole number, for [`parse_size`].
pub fn exact_size(bytes: u64) -> String {
    let units = [(40, "T"), (30, "G"), (20, "M"), (10, "K")];
    let fits = |(shift, _): &(u32, &str)| bytes > 0 && bytes.trailing_zeros() >= *shift;
    units
        .into_iter()
        .find(fits)
        .map_or(bytes.to_string(), |(shift, unit)| format!("{}{unit}", bytes >> shift))
}

/// Compares texts with the numbers in them as numbers, so that `web-2` comes before `web-10`.
pub fn natural_order(one: &str, other: &str) -> Ordering {
    let (mut one_rest, mut other_rest) = (one, other);
    loop {
        let numbers = number(one_rest).zip(number(other_rest));
        let order = if let Some(((one, after_one), (other, after_other))) = numbers {
            (one_rest, other_rest) = (after_one, after_other);
            one.len().cmp(&other.len()).then_with(|| one.cmp(other))
        } else {
            let (mut one_characters, mut other_characters) = (one_rest.chars(), other_rest.chars());
            let pair = (one_characters.next(), other_characters.next());
            if pair == (None, None) {
                // The texts differ in leading zeros only.
                return one.cmp(other);
            }
            (one_rest, other_rest) = (one_characters.as_str(), other_characters.as_str());
            pair.0.cmp(&pair.1)
        };
        if order != Ordering::Equal {
            return order;
        }
    }
}

/// Splits off the digits at the beginning, without leading zeros.
fn number(text: &str) -> Option<(&str, &str)> {
    let rest = text.trim_start_matches(|one: char| one.is_ascii_digit());
    let digits = &text[..text.len() - rest.len()];
    (!digits.is_empty()).then(|| (digits.trim_start_matches('0'), rest))
}

/// Returns the text, or a dash if it is empty.
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
        let gap = [row(["a", "", "b"]), row(["", "cc", ""]), row([" d ", " ", "e"])];
        assert_eq!(table(&gap), "a        b\n     cc\n d       e\n");
        let paint = |row, column, cell: &str| format!("<{row}{column}{cell}>");
        assert_eq!(painted_table(&gap[..2], paint), "<00a>      <02b>\n   <11cc>\n");
    }

    #[test]
    fn numbers_in_texts_are_compared_as_numbers() {
        let ascending =
            ["", "07", "7", "8a", "10", "192.0.2.9", "192.0.2.10", "a", "a-2", "a-10b", "a-10c", "b", "ä"];
        for (at, one) in ascending.iter().enumerate() {
            for (other_at, other) in ascending.iter().enumerate() {
                assert_eq!(natural_order(one, other), at.cmp(&other_at), "{one:?} {other:?}");
            }
        }
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
