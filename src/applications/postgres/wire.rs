//! Frontend/backend protocol of PostgreSQL, version 3, as far as a client that only queries needs it: messages to
//! send, and those received. Pure functions of bytes.

use crate::applications::Problem;

/// Maximum size of a message from a server, in bytes.
pub const MOST_MESSAGE: usize = 64 * 1024;
/// Maximum number of columns of a row.
const MOST_COLUMNS: usize = 32;

/// Message from a server; those that this client does not need are [`Message::Other`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// The client has been authenticated.
    Authenticated,
    /// The server asks the client to authenticate by this method.
    Authenticate(&'static str),
    /// Error with its SQLSTATE and text.
    Error {
        /// SQLSTATE, five characters.
        code: String,
        /// Text of the error.
        words: String,
    },
    /// Row of an answer; NULL values are empty.
    Row(Vec<String>),
    /// The server is ready for the next query.
    Ready,
    /// Any other message.
    Other,
}

/// Builds the first message, which connects `user` to `database`.
pub fn startup(user: &str, database: &str) -> Vec<u8> {
    // Use only the server's own functions and operators, whatever users have created in other schemas.
    let parameters = [
        ("user", user),
        ("database", database),
        ("application_name", "guestlet"),
        ("client_encoding", "UTF8"),
        ("search_path", "pg_catalog"),
    ];
    let mut body = 196_608_u32.to_be_bytes().to_vec();
    for text in parameters.iter().flat_map(|(name, value)| [name, value]) {
        body.extend(text.bytes().filter(|byte| *byte != 0));
        body.push(0);
    }
    body.push(0);
    framed(&body)
}

/// Builds the message of a simple query.
pub fn query(text: &str) -> Vec<u8> {
    let mut body: Vec<u8> = text.bytes().filter(|byte| *byte != 0).collect();
    body.push(0);
    [b"Q".as_slice(), &framed(&body)].concat()
}

/// Builds the message that ends the session.
pub fn terminate() -> Vec<u8> {
    [b"X".as_slice(), &framed(&[])].concat()
}

fn framed(body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len() + 4).unwrap_or(u32::MAX);
    [length.to_be_bytes().as_slice(), body].concat()
}

/// Parses the five bytes before a message: returns its kind and the length of its body.
///
/// # Errors
/// If no server sends such a message.
pub fn head(bytes: [u8; 5]) -> Result<(u8, usize), Problem> {
    let [kind, length @ ..] = bytes;
    let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
    match length.checked_sub(4) {
        Some(length) if kind.is_ascii_alphanumeric() && length <= MOST_MESSAGE => Ok((kind, length)),
        _ => Err(strange()),
    }
}

/// Parses the body of a message of this kind.
///
/// # Errors
/// If it is malformed.
pub fn message(kind: u8, body: &[u8]) -> Result<Message, Problem> {
    Ok(match kind {
        b'R' => match number(body).ok_or_else(strange)?.0 {
            0 => Message::Authenticated,
            2 | 7 | 8 | 9 => Message::Authenticate("Kerberos"),
            3 | 5 | 10..=12 => Message::Authenticate("a password"),
            _ => Message::Authenticate("something unknown"),
        },
        b'E' => error(body).ok_or_else(strange)?,
        b'D' => row(body).ok_or_else(strange)?,
        b'Z' => Message::Ready,
        _ => Message::Other,
    })
}

fn strange() -> Problem {
    Problem::new("what answers does not speak PostgreSQL's protocol")
}

fn number(bytes: &[u8]) -> Option<(u32, &[u8])> {
    let (number, rest) = bytes.split_first_chunk()?;
    Some((u32::from_be_bytes(*number), rest))
}

/// Parses an error: fields of a letter and a zero-terminated text each, and a zero byte after the last.
fn error(body: &[u8]) -> Option<Message> {
    let (mut code, mut words, mut severity) = (String::new(), String::new(), String::new());
    let mut rest = body;
    loop {
        let (kind, after) = rest.split_first()?;
        if *kind == 0 {
            break;
        }
        let end = after.iter().position(|byte| *byte == 0)?;
        let text = String::from_utf8_lossy(after.get(..end)?).into_owned();
        match kind {
            b'C' => code = text,
            b'M' => words = text,
            b'S' => severity = text,
            _ => {}
        }
        rest = after.get(end + 1..)?;
    }
    Some(Message::Error { words: format!("{severity}: {words} ({code})"), code })
}

fn row(body: &[u8]) -> Option<Message> {
    let (count, mut rest) = body.split_first_chunk()?;
    let count = usize::from(u16::from_be_bytes(*count));
    if count > MOST_COLUMNS {
        return None;
    }
    let mut values = Vec::with_capacity(count);
    for _ in 0..count {
        let (length, after) = number(rest)?;
        // NULL.
        if length == u32::MAX {
            values.push(String::new());
            rest = after;
            continue;
        }
        let (value, after) = after.split_at_checked(usize::try_from(length).ok()?)?;
        values.push(String::from_utf8_lossy(value).into_owned());
        rest = after;
    }
    rest.is_empty().then_some(Message::Row(values))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn row_of(values: &[Option<&str>]) -> Vec<u8> {
        let mut body = u16::try_from(values.len()).unwrap().to_be_bytes().to_vec();
        for value in values {
            match value {
                None => body.extend(u32::MAX.to_be_bytes()),
                Some(value) => {
                    body.extend(u32::try_from(value.len()).unwrap().to_be_bytes());
                    body.extend(value.as_bytes());
                }
            }
        }
        body
    }

    #[test]
    fn what_is_sent_is_framed() {
        assert_eq!(query("SELECT 1"), b"Q\0\0\0\x0dSELECT 1\0");
        assert_eq!(terminate(), b"X\0\0\0\x04");
        let first = startup("postgres", "template1");
        assert_eq!(first.len(), usize::try_from(number(&first).unwrap().0).unwrap());
        assert!(first[4..].starts_with(b"\0\x03\0\0user\0postgres\0database\0template1\0"));
        assert!(first.ends_with(b"search_path\0pg_catalog\0\0"));
    }

    #[test]
    fn what_comes_is_read() {
        assert_eq!(message(b'R', &[0, 0, 0, 0]).unwrap(), Message::Authenticated);
        assert_eq!(message(b'R', &[0, 0, 0, 10, b'S']).unwrap(), Message::Authenticate("a password"));
        assert_eq!(message(b'Z', b"I").unwrap(), Message::Ready);
        let error = message(b'E', b"SFATAL\0C28000\0Mno\0\0").unwrap();
        assert_eq!(error, Message::Error { code: "28000".to_owned(), words: "FATAL: no (28000)".to_owned() });
        let row = message(b'D', &row_of(&[Some("a"), None, Some("")])).unwrap();
        assert_eq!(row, Message::Row(vec!["a".to_owned(), String::new(), String::new()]));
        assert_eq!(head(*b"D\0\0\0\x05").unwrap(), (b'D', 1));
    }

    #[test]
    fn what_no_server_sends_is_refused() {
        for wrong in [*b"D\0\0\0\x03", *b"D\xff\xff\xff\xff", *b"H\0\x01\0\x05", *b"\0\0\0\0\x08"] {
            assert!(head(wrong).is_err(), "{wrong:?}");
        }
        let many = row_of(&[None; MOST_COLUMNS + 1]);
        for (kind, body) in [
            (b'R', &b"\0"[..]),
            (b'E', b"Sx"),
            (b'E', b""),
            (b'D', b"\0\x01"),
            (b'D', b"\0\0x"),
            (b'D', &many),
        ] {
            assert!(message(kind, body).is_err(), "{kind} {body:?}");
        }
    }

    proptest! {
        #[test]
        fn whatever_comes_is_read_or_refused(kind: u8, body: Vec<u8>, bytes: [u8; 5]) {
            let _ = head(bytes);
            let _ = message(kind, &body);
        }

        #[test]
        fn rows_come_as_they_were_sent(values in proptest::collection::vec(proptest::option::of("\\PC{0,20}"), 0..20)) {
            let sent: Vec<_> = values.iter().map(Option::as_deref).collect();
            let Message::Row(found) = message(b'D', &row_of(&sent)).unwrap() else { panic!("no row") };
            let wanted: Vec<_> = values.into_iter().map(Option::unwrap_or_default).collect();
            prop_assert_eq!(found, wanted);
        }

        #[test]
        fn a_part_of_a_row_is_none(values in proptest::collection::vec("\\PC{0,9}", 1..9), cut in 1usize..20) {
            let whole = row_of(&values.iter().map(|value| Some(&**value)).collect::<Vec<_>>());
            let part = &whole[..whole.len().saturating_sub(cut)];
            prop_assert!(message(b'D', part).is_err());
        }
    }
}
