//! HTTP/1.1 client that sends one request after another on a connection, for etcd's JSON gateway. Answers are
//! short: one that is longer than a few kilobytes, or comes in chunks, is refused.

use std::io::{self, Read, Write};

/// Maximum sizes of the header and of the body of an answer, in bytes.
const MOST_HEAD: usize = 8 * 1024;
const MOST_BODY: usize = 64 * 1024;

/// Answer to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// HTTP status code, such as 200.
    pub status: u16,
    /// Body, without the headers.
    pub body: Vec<u8>,
}

/// Sends a request, and waits for the answer.
///
/// # Errors
/// The errors of the stream; `InvalidData` if the answer is malformed.
pub fn post(stream: &mut (impl Read + Write), host: &str, path: &str, body: &str) -> io::Result<Answer> {
    let length = body.len();
    let request = format!(
        "POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes())?;
    stream.flush()?;
    let mut bytes = Vec::with_capacity(1024);
    let (head, end) = loop {
        if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            let parsed = bytes.get(..end).and_then(head).ok_or_else(no_answer)?;
            break (parsed, end + 4);
        }
        if bytes.len() > MOST_HEAD {
            return Err(no_answer());
        }
        more(stream, &mut bytes)?;
    };
    let (status, length) = head;
    while bytes.len() < end + length {
        more(stream, &mut bytes)?;
    }
    // Bytes after the answer belong to no request.
    if bytes.len() > end + length {
        return Err(no_answer());
    }
    Ok(Answer { status, body: bytes.split_off(end) })
}

fn more(stream: &mut impl Read, bytes: &mut Vec<u8>) -> io::Result<()> {
    let mut buffer = [0; 1024];
    match stream.read(&mut buffer)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        read => {
            bytes.extend(buffer.get(..read).unwrap_or_default());
            Ok(())
        }
    }
}

/// Parses the header: returns the status and the length of the body, or `None` if it is malformed or lacks the
/// length.
fn head(bytes: &[u8]) -> Option<(u16, usize)> {
    let text = std::str::from_utf8(bytes).ok()?;
    let mut lines = text.split("\r\n");
    let mut first = lines.next()?.split(' ');
    if first.next()? != "HTTP/1.1" {
        return None;
    }
    let status = first.next().filter(|text| text.len() == 3)?.parse().ok()?;
    let mut length = None;
    for line in lines {
        let (name, value) = line.split_once(':')?;
        if name.eq_ignore_ascii_case("transfer-encoding") || name.eq_ignore_ascii_case("content-encoding") {
            return None;
        }
        if name.eq_ignore_ascii_case("content-length") {
            let known = value.trim().parse().ok().filter(|length| *length <= MOST_BODY)?;
            if length.replace(known).is_some_and(|other| other != known) {
                return None;
            }
        }
    }
    Some((status, length?))
}

fn no_answer() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "this is not an answer of etcd's JSON gateway")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Server with a prepared answer, which is sent one byte at a time.
    struct Canned(Vec<u8>, usize);

    impl Read for Canned {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let Some(byte) = self.0.get(self.1) else { return Ok(0) };
            buffer[0] = *byte;
            self.1 += 1;
            Ok(1)
        }
    }

    impl Write for Canned {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn ask(answer: &[u8]) -> io::Result<Answer> {
        post(&mut Canned(answer.to_vec(), 0), "localhost", "/", "{}")
    }

    #[test]
    fn an_answer_has_a_status_and_a_body_of_its_length() {
        let answer = ask(b"HTTP/1.1 200 OK\r\nDate: now\r\ncontent-length: 2\r\n\r\n{}").unwrap();
        assert_eq!(answer, Answer { status: 200, body: b"{}".to_vec() });
        for wrong in [
            &b""[..],
            b"HTTP/1.1 200 OK\r\n\r\n{}",
            b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}",
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{",
            b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n{}",
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
            b"SSH-2.0-OpenSSH_9.2p1\r\n\r\n\r\n",
        ] {
            assert!(ask(wrong).is_err(), "{}", wrong.escape_ascii());
        }
    }

    #[test]
    fn an_endless_head_has_an_end() {
        let mut endless = b"HTTP/1.1 200 OK\r\n".to_vec();
        endless.extend(b"a: b\r\n".repeat(MOST_HEAD));
        assert_eq!(ask(&endless).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    proptest! {
        #[test]
        fn whatever_comes_is_read_or_refused(bytes: Vec<u8>, length: u32) {
            let _ = ask(&bytes);
            let mut answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n").into_bytes();
            answer.extend(&bytes);
            if let Ok(answer) = ask(&answer) {
                prop_assert!(answer.body.len() == length as usize && bytes.starts_with(&answer.body));
            }
        }
    }
}
