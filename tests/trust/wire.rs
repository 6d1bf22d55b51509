//! What goes over an agent's socket, seen from outside.

use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How an HTTP/2 connection begins (RFC 9113, 3.4), with empty settings.
pub const PLAIN: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// Says something to the agent, and returns all that it answers until it closes the connection, or is silent.
pub fn say(socket: &Path, words: &[u8]) -> Vec<u8> {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(15))).unwrap();
    // It may have closed the connection already.
    drop(stream.write_all(words));
    let (mut answer, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return answer,
            Ok(length) => answer.extend_from_slice(&buffer[..length]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return answer,
        }
    }
}

/// Passes everything on between whoever connects to `front` and the agent at `back`, and keeps the first bytes of each direction
/// of each connection.
pub struct Tap {
    seen: Arc<Mutex<Vec<[Vec<u8>; 2]>>>,
}

impl Tap {
    pub fn new(front: &Path, back: &Path) -> Self {
        let listener = UnixListener::bind(front).unwrap();
        let seen: Arc<Mutex<Vec<[Vec<u8>; 2]>>> = Arc::default();
        let (list, back) = (Arc::clone(&seen), back.to_owned());
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), Ok(agent)) = (client, UnixStream::connect(&back)) else { continue };
                let number = {
                    let mut list = list.lock().unwrap();
                    list.push([Vec::new(), Vec::new()]);
                    list.len() - 1
                };
                let pairs = [(client.try_clone().unwrap(), agent.try_clone().unwrap()), (agent, client)];
                for (direction, (from, to)) in pairs.into_iter().enumerate() {
                    let list = Arc::clone(&list);
                    std::thread::spawn(move || pass(from, to, &list, number, direction));
                }
            }
        });
        Self { seen }
    }

    /// Of each connection, what the host half said, and what the agent said.
    pub fn seen(&self) -> Vec<[Vec<u8>; 2]> {
        self.seen.lock().unwrap().clone()
    }
}

fn pass(
    mut from: UnixStream,
    mut to: UnixStream,
    list: &Mutex<Vec<[Vec<u8>; 2]>>,
    number: usize,
    direction: usize,
) {
    let mut buffer = [0; 16 * 1024];
    while let Ok(length) = from.read(&mut buffer) {
        if length == 0 {
            break;
        }
        list.lock().unwrap()[number][direction].extend_from_slice(&buffer[..length]);
        if to.write_all(&buffer[..length]).is_err() {
            break;
        }
    }
    drop(to.shutdown(std::net::Shutdown::Both));
    drop(from.shutdown(std::net::Shutdown::Both));
}
