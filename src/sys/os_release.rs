//! Parser of the operating system's identification file, os-release(5).

/// The value of `key` in the bytes of an os-release file; the last one wins, as in a shell.
pub fn value(file: &[u8], key: &str) -> Option<String> {
    let text = String::from_utf8_lossy(file);
    let mut found = None;
    for line in text.lines() {
        if let Some((name, value)) = line.trim().split_once('=')
            && name == key
        {
            found = Some(unquote(value));
        }
    }
    found
}

/// Undoes the shell quoting that os-release(5) allows.
fn unquote(value: &str) -> String {
    let mut plain = String::with_capacity(value.len());
    let mut quote = None;
    let mut characters = value.chars();
    while let Some(character) = characters.next() {
        match (quote, character) {
            (None, '"' | '\'') => quote = Some(character),
            (Some(open), close) if open == close => quote = None,
            (Some('"'), '\\') => match characters.next() {
                // A shell keeps the backslash before a single quote; os-release files have it, and qemu-ga takes it off.
                Some(escaped @ ('"' | '\'' | '\\' | '$' | '`')) => plain.push(escaped),
                Some(other) => plain.extend(['\\', other]),
                None => plain.push('\\'),
            },
            (None, '\\') => plain.extend(characters.next()),
            (None, white) if white.is_whitespace() => break,
            (_, other) => plain.push(other),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From a Debian 12 guest, with lines added for the quoting rules.
    const DEBIAN: &[u8] = b"PRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\nNAME=\"Debian GNU/Linux\"\n\
        VERSION_ID=\"12\"\nID=debian\n# ID=comment\n  \nVARIANT='single \"quoted\"'\nX=\"a\\\"b\\$c\\n\"\n\
        BARE=one two\nTWICE=1\nTWICE=2\nESCAPED=\"Unit \\\"\\'\\$\\`\\\\ and \\\\ etc.\"\nPLAIN=a\\ \\'b\nBROKEN\nOPEN=\"never closed\n";

    #[test]
    fn values() {
        let cases = [
            ("PRETTY_NAME", Some("Debian GNU/Linux 12 (bookworm)")),
            ("ID", Some("debian")),
            ("VERSION_ID", Some("12")),
            ("VARIANT", Some("single \"quoted\"")),
            ("X", Some("a\"b$c\\n")),
            ("BARE", Some("one")),
            ("TWICE", Some("2")),
            ("ESCAPED", Some("Unit \"'$`\\ and \\ etc.")),
            ("PLAIN", Some("a 'b")),
            ("OPEN", Some("never closed")),
            ("BROKEN", None),
            ("VERSION", None),
        ];
        for (key, expected) in cases {
            assert_eq!(value(DEBIAN, key).as_deref(), expected, "{key}");
        }
    }
}
