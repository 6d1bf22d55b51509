//! Hybrid vsock, as Firecracker, Cloud Hypervisor and vhost-device-vsock speak it on the host: a unix socket
//! on which the dialler writes `CONNECT <port>\n` and reads `OK <host port>\n`; what follows are the guest's
//! own bytes. If nobody listens in the guest, the socket is closed without an answer.

/// The longest answer that is accepted, in bytes with its newline.
pub const MAX_ANSWER: usize = 32;

/// Returns the line that the dialler writes to connect to the guest's `port`.
pub fn request(port: u32) -> String {
    format!("CONNECT {port}\n")
}

/// Reason why an answer is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AnswerError {
    /// No newline among the first [`MAX_ANSWER`] bytes.
    #[error("the answer to CONNECT is longer than {MAX_ANSWER} bytes")]
    TooLong,
    /// The line is not `OK <number>`.
    #[error("the answer to CONNECT is not OK and a port number")]
    Malformed,
}

/// Collects the answer byte by byte, because every byte after it is the guest's.
#[derive(Debug, Default)]
pub struct Answer {
    line: Vec<u8>,
}

impl Answer {
    /// Takes one more byte; at the newline returns the host's port number.
    ///
    /// # Errors
    /// As soon as the answer cannot become a valid one.
    pub fn push(&mut self, byte: u8) -> Result<Option<u32>, AnswerError> {
        if byte == b'\n' {
            return parse(&self.line).map(Some);
        }
        if self.line.len() + 1 >= MAX_ANSWER {
            return Err(AnswerError::TooLong);
        }
        self.line.push(byte);
        Ok(None)
    }
}

fn parse(line: &[u8]) -> Result<u32, AnswerError> {
    let digits = line.strip_prefix(b"OK ").ok_or(AnswerError::Malformed)?;
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return Err(AnswerError::Malformed);
    }
    str::from_utf8(digits).ok().and_then(|digits| digits.parse().ok()).ok_or(AnswerError::Malformed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    type Read = Result<Option<(u32, usize)>, AnswerError>;

    fn read(bytes: &[u8]) -> Read {
        let mut answer = Answer::default();
        for (index, byte) in bytes.iter().enumerate() {
            if let Some(port) = answer.push(*byte)? {
                return Ok(Some((port, index + 1)));
            }
        }
        Ok(None)
    }

    #[test]
    fn answers() {
        let cases: [(&[u8], Read); 9] = [
            (b"OK 970\nHTTP", Ok(Some((970, 7)))),
            (b"OK 1073741824\n", Ok(Some((1_073_741_824, 14)))),
            (b"OK 97", Ok(None)),
            (b"OK\n", Err(AnswerError::Malformed)),
            (b"OK \n", Err(AnswerError::Malformed)),
            (b"OK +5\n", Err(AnswerError::Malformed)),
            (b"OK 4294967296\n", Err(AnswerError::Malformed)),
            (b"\n", Err(AnswerError::Malformed)),
            (&[b'O'; 32], Err(AnswerError::TooLong)),
        ];
        for (bytes, expected) in cases {
            assert_eq!(read(bytes), expected, "{:?}", String::from_utf8_lossy(bytes));
        }
    }

    proptest! {
        #[test]
        fn every_port_is_understood_and_no_byte_more_is_taken(port: u32, rest: Vec<u8>) {
            let line = format!("OK {port}\n");
            let bytes = [line.as_bytes(), &rest].concat();
            prop_assert_eq!(read(&bytes), Ok(Some((port, line.len()))));
        }

        #[test]
        fn any_bytes_end_within_the_bound(bytes in proptest::collection::vec(any::<u8>(), MAX_ANSWER..100)) {
            let ended = matches!(read(&bytes), Err(_) | Ok(Some(_)));
            prop_assert!(ended);
        }
    }
}
