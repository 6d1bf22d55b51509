//! What is reached: servers on 127.0.0.1 and on unix sockets, which serve each client in a thread.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// A stream of either kind.
pub trait Stream: Read + Write + Send + 'static {
    fn shut(&self, how: Shutdown);
    fn twin(&self) -> Box<dyn Stream>;
}

impl Stream for TcpStream {
    fn shut(&self, how: Shutdown) {
        self.shutdown(how).unwrap();
    }

    fn twin(&self) -> Box<dyn Stream> {
        Box::new(self.try_clone().unwrap())
    }
}

impl Stream for UnixStream {
    fn shut(&self, how: Shutdown) {
        self.shutdown(how).unwrap();
    }

    fn twin(&self) -> Box<dyn Stream> {
        Box::new(self.try_clone().unwrap())
    }
}

/// Serves clients of a port, which is returned, for as long as this process lives.
pub fn tcp(serve: impl Fn(TcpStream) + Clone + Send + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (serve, client) = (serve.clone(), client.unwrap());
            std::thread::spawn(move || serve(client));
        }
    });
    port
}

/// The same at a path.
pub fn unix(path: &Path, serve: impl Fn(UnixStream) + Clone + Send + 'static) {
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (serve, client) = (serve.clone(), client.unwrap());
            std::thread::spawn(move || serve(client));
        }
    });
}

/// Sends back what comes, and the end after it.
pub fn echo(mut stream: impl Stream) {
    let mut part = vec![0; 1 << 16];
    loop {
        match stream.read(&mut part) {
            Ok(0) => break,
            Ok(length) => {
                if stream.write_all(&part[..length]).is_err() {
                    return;
                }
            }
            Err(_) => return,
        }
    }
    // One that has broken cannot be shut.
    let _ = stream.flush();
}

/// Bytes whose place in the stream can be told.
pub fn pattern(length: usize) -> Vec<u8> {
    (0..length as u64).map(|at| (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
}

/// Sends this to an echo server and ends, while what comes back is read; it has to be the same.
pub fn round_trip(stream: &mut dyn Stream, bytes: &[u8]) {
    let (mut writer, sent) = (stream.twin(), bytes.to_vec());
    let writing = std::thread::spawn(move || {
        writer.write_all(&sent).unwrap();
        writer.shut(Shutdown::Write);
    });
    let mut back = Vec::with_capacity(bytes.len());
    stream.read_to_end(&mut back).unwrap();
    writing.join().unwrap();
    assert_eq!(back.len(), bytes.len());
    assert!(back == bytes, "other bytes came back");
}

/// Sends a few bytes and reads them back; the stream stays as it is.
pub fn ping(stream: &mut dyn Stream) {
    stream.write_all(b"ping").unwrap();
    let mut back = [0; 4];
    stream.read_exact(&mut back).unwrap();
    assert_eq!(&back, b"ping");
}
