//! What a terminal shows after it was sent something: as much of a terminal as guestctl uses.

use guestlet::sys::terminal::Size;

/// How a character is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Style {
    pub bold: bool,
    pub dim: bool,
    pub reverse: bool,
    /// One of the first eight, as SGR numbers them from 30.
    pub colour: Option<u8>,
}

/// Rows of characters.
pub struct Terminal {
    pub rows: Vec<Vec<(char, Style)>>,
    pub columns: usize,
    row: usize,
    column: usize,
    style: Style,
}

impl Terminal {
    pub fn new(size: Size) -> Self {
        let columns = usize::from(size.columns);
        let rows = vec![vec![(' ', Style::default()); columns]; size.rows.into()];
        Self { rows, columns, row: 0, column: 0, style: Style::default() }
    }

    /// Shows text, whose line ends may be bare.
    pub fn write(&mut self, text: &str) {
        let mut rest = text;
        while let Some(character) = rest.chars().next() {
            rest = &rest[character.len_utf8()..];
            match character {
                '\x1b' => rest = self.sequence(rest),
                '\r' => self.column = 0,
                '\n' => self.next_row(),
                _ => {
                    if self.column == self.columns {
                        self.next_row();
                    }
                    self.rows[self.row][self.column] = (character, self.style);
                    self.column += 1;
                }
            }
        }
    }

    fn next_row(&mut self) {
        self.column = 0;
        if self.row + 1 < self.rows.len() {
            self.row += 1;
        } else {
            self.rows.remove(0);
            self.rows.push(vec![(' ', Style::default()); self.columns]);
        }
    }

    /// Does what an escape sequence says, and returns what follows.
    fn sequence<'t>(&mut self, text: &'t str) -> &'t str {
        let text = text.strip_prefix('[').unwrap_or_else(|| panic!("{text:?}"));
        let end = text.find(|one: char| one.is_ascii_alphabetic()).unwrap();
        let (parameters, blank) = (&text[..end], (' ', Style::default()));
        match text.as_bytes()[end] {
            b'm' => parameters.split(';').for_each(|code| self.style(code)),
            b'H' => (self.row, self.column) = (0, 0),
            b'K' => self.rows[self.row][self.column..].fill(blank),
            b'J' => {
                self.rows[self.row][self.column..].fill(blank);
                self.rows[self.row + 1..].iter_mut().for_each(|row| row.fill(blank));
            }
            // The other screen, and the cursor.
            b'h' | b'l' => {}
            other => panic!("{} {parameters}", char::from(other)),
        }
        &text[end + 1..]
    }

    fn style(&mut self, code: &str) {
        match code {
            "" | "0" => self.style = Style::default(),
            "1" => self.style.bold = true,
            "2" => self.style.dim = true,
            "7" => self.style.reverse = true,
            _ => self.style.colour = Some(code.parse::<u8>().unwrap() - 30),
        }
    }

    /// Forgets rows at the end that show nothing.
    pub fn cut(&mut self) {
        while self.rows.last().is_some_and(|row| row.iter().all(|(character, _)| *character == ' ')) {
            self.rows.pop();
        }
    }
}
