//! Colours for terminals: only the sixteen that every terminal has and lets its user configure.

use std::ffi::OsStr;
use std::io::IsTerminal;

/// Style of a part of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// Headers of tables, and names.
    Bold,
    /// Less important details.
    Dim,
    /// Success.
    Good,
    /// Remark that deserves attention.
    Note,
    /// Error or failure.
    Wrong,
}

/// Use of colours in an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Colours {
    /// Colours are used.
    Shown,
    /// Colours are left out, for programs and files.
    Left,
}

impl Colours {
    /// Decides whether to use colours on a stream: not if it is not a terminal or a dumb one, and not if `NO_COLOR` is
    /// set to anything (<https://no-color.org>).
    pub fn on(stream: &impl IsTerminal) -> Self {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        Self::wanted(stream.is_terminal(), variable("NO_COLOR").as_deref(), variable("TERM").as_deref())
    }

    fn wanted(is_terminal: bool, no_color: Option<&OsStr>, term: Option<&OsStr>) -> Self {
        let can = is_terminal && term.is_some_and(|term| term != "dumb");
        if can && no_color.is_none() { Self::Shown } else { Self::Left }
    }

    /// Returns the text in this style.
    pub fn paint(self, style: Style, text: &str) -> String {
        let code = match style {
            Style::Bold => "1",
            Style::Dim => "2",
            Style::Good => "32",
            Style::Note => "33",
            Style::Wrong => "1;31",
        };
        match self {
            Self::Shown if !text.is_empty() => format!("\x1b[{code}m{text}\x1b[0m"),
            _ => text.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_are_for_terminals_whose_users_want_them() {
        let term = Some(OsStr::new("xterm"));
        assert_eq!(Colours::wanted(true, None, term), Colours::Shown);
        for (is_terminal, no_color, term) in [
            (false, None, term),
            (true, Some(OsStr::new("1")), term),
            (true, None, Some(OsStr::new("dumb"))),
            (true, None, None),
        ] {
            assert_eq!(Colours::wanted(is_terminal, no_color, term), Colours::Left);
        }
        assert_eq!(Colours::Shown.paint(Style::Good, "ok"), "\x1b[32mok\x1b[0m");
        assert_eq!(Colours::Shown.paint(Style::Good, ""), "");
        assert_eq!(Colours::Left.paint(Style::Wrong, "bad"), "bad");
    }
}
