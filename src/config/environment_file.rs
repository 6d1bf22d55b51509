//! Reader of environment files, as a unit's `EnvironmentFile=` names them (systemd.exec(5)).
//!
//! Pure: text in, assignments out.

/// Assignment of one variable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assignment {
    /// Name of the variable.
    pub name: String,
    /// Value of the variable, without quotes.
    pub value: String,
    /// Line on which the assignment begins, from 1.
    pub line: usize,
}

/// Returns all assignments, in their order. Anything that is not an assignment is skipped, as the service manager
/// does.
pub fn parse(text: &str) -> Vec<Assignment> {
    let mut found = Vec::new();
    let mut rest = Rest { characters: text.chars().peekable(), line: 1 };
    loop {
        rest.skip_white();
        let line = rest.line;
        match rest.peek() {
            None => return found,
            Some('#' | ';') => rest.skip_comment(),
            Some(_) => {
                let name = rest.name();
                if let Some(name) = name {
                    let value = rest.value();
                    found.push(Assignment { name, value, line });
                }
            }
        }
    }
}

struct Rest<'a> {
    characters: std::iter::Peekable<std::str::Chars<'a>>,
    line: usize,
}

impl Rest<'_> {
    fn peek(&mut self) -> Option<char> {
        self.characters.peek().copied()
    }

    fn next(&mut self) -> Option<char> {
        let character = self.characters.next();
        self.line += usize::from(character == Some('\n'));
        character
    }

    fn skip_white(&mut self) {
        while self.peek().is_some_and(char::is_whitespace) {
            self.next();
        }
    }

    /// Skips to the end of the line. A line that ends with a backslash continues in the next one.
    fn skip_comment(&mut self) {
        while let Some(character) = self.next() {
            match character {
                '\n' => return,
                '\\' => drop(self.next()),
                _ => {}
            }
        }
    }

    /// Reads a variable's name and the `=` after it; none if the line is not an assignment.
    fn name(&mut self) -> Option<String> {
        let mut name = String::new();
        while let Some(character) = self.next() {
            match character {
                '=' => {
                    let name = name.trim_end();
                    if !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
                        return Some(name.to_owned());
                    }
                    self.skip_comment();
                    return None;
                }
                '\n' => return None,
                other => name.push(other),
            }
        }
        None
    }

    fn value(&mut self) -> String {
        let mut value = String::new();
        // The value up to here is kept when trailing white space is removed: it was quoted or escaped.
        let mut kept = 0;
        while matches!(self.peek(), Some(' ' | '\t')) {
            self.next();
        }
        while let Some(character) = self.next() {
            match character {
                '\n' => break,
                '\\' => {
                    match self.next() {
                        Some('\n') | None => {}
                        Some(escaped) => value.push(escaped),
                    }
                    kept = value.len();
                }
                '\'' => {
                    while let Some(inner) = self.next().filter(|inner| *inner != '\'') {
                        value.push(inner);
                    }
                    kept = value.len();
                }
                '"' => {
                    self.double_quoted(&mut value);
                    kept = value.len();
                }
                other => value.push(other),
            }
        }
        value.truncate(kept.max(value.trim_end().len()));
        value
    }

    fn double_quoted(&mut self, value: &mut String) {
        while let Some(inner) = self.next().filter(|inner| *inner != '"') {
            if inner != '\\' {
                value.push(inner);
                continue;
            }
            match self.next() {
                Some('\n') => {}
                Some(escaped @ ('"' | '\\' | '`' | '$')) => value.push(escaped),
                Some(other) => value.extend(['\\', other]),
                None => value.push('\\'),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_file_of_rhel() {
        let text = "\
# This is a systemd environment file, not a shell script.
; another comment \\
  that goes on: NOT=this

FILTER_RPC_ARGS=\"--allow-rpcs=guest-ping,\\
guest-info\"
BLACKLIST_RPC=guest-exec,guest-exec-status  \n\
FSFREEZE_HOOK_PATHNAME='/etc/qemu-ga/fsfreeze-hook'
EMPTY=
not an assignment
also none=NOR=this
 SPACES = a b 
DOUBLE=\"a \\\"b\\\" $c \\n\"
OPEN=\"never closed";
        let found: Vec<_> =
            parse(text).into_iter().map(|found| (found.name, found.value, found.line)).collect();
        let expected = [
            ("FILTER_RPC_ARGS", "--allow-rpcs=guest-ping,guest-info", 5),
            ("BLACKLIST_RPC", "guest-exec,guest-exec-status", 7),
            ("FSFREEZE_HOOK_PATHNAME", "/etc/qemu-ga/fsfreeze-hook", 8),
            ("EMPTY", "", 9),
            ("SPACES", "a b", 12),
            ("DOUBLE", "a \"b\" $c \\n", 13),
            ("OPEN", "never closed", 14),
        ];
        assert_eq!(found, expected.map(|(name, value, line)| (name.to_owned(), value.to_owned(), line)));
    }

    proptest! {
        #[test]
        fn any_text_is_read(text: String) {
            for found in parse(&text) {
                prop_assert!(!found.name.is_empty());
            }
        }

        #[test]
        fn what_looks_like_the_format_never_panics(text in "[A-Z=\"'\\\\ \n#;x]{0,40}") {
            parse(&text);
        }
    }
}
