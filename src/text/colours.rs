//! Colours for people at terminals, of the sixteen that every terminal has and lets its user choose.

use std::ffi::OsStr;
use std::io::IsTerminal;

/// How a part of a text is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// Heads of tables, names.
    Bold,
    /// What matters least.
    Dim,
    /// All is well.
    Good,
    /// Worth a look.
    Note,
    /// Something is wrong.
    Wrong,
}

/// Whether there are colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Colours {
    /// There are.
    Shown,
    /// There are none, as for programs and files.
    Left,
}

impl Colours {
    /// As the stream can show them, and the environment wants them: none on what is no terminal or a dumb one, and none
    /// where `NO_COLOR` is set to anything (<https://no-color.org>).
    pub fn on(stream: &impl IsTerminal) -> Self {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        Self::wanted(stream.is_terminal(), variable("NO_COLOR").as_deref(), variable("TERM").as_deref())
    }

    fn wanted(is_terminal: bool, no_color: Option<&OsStr>, term: Option<&OsStr>) -> Self {
        let can = is_terminal && term.is_some_and(|term| term != "dumb");
        if can && no_color.is_none() { Self::Shown } else { Self::Left }
    }

    /// The text in this style.
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
