//! Connection to an address of this machine, with or without TLS, on which every wait has a deadline.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use super::Problem;
use super::target::Files;
use crate::applications::connection::left;

/// Maximum number of bytes read from a file with certificates.
const MOST_PEM: u64 = 256 * 1024;

/// Socket whose reads and writes fail once the deadline has passed.
#[derive(Debug)]
struct Timed {
    socket: TcpStream,
    until: Instant,
}

impl Timed {
    fn left(&self) -> io::Result<std::time::Duration> {
        left(self.until).map_err(|problem| io::Error::new(io::ErrorKind::TimedOut, problem.to_string()))
    }
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.socket.set_read_timeout(Some(self.left()?))?;
        self.socket.read(buffer).map_err(late)
    }
}

impl Write for Timed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.socket.set_write_timeout(Some(self.left()?))?;
        self.socket.write(bytes).map_err(late)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.socket.flush()
    }
}

/// Converts the error of an expired socket timeout, `WouldBlock`, to one that says so.
fn late(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock {
        return io::Error::new(io::ErrorKind::TimedOut, "it did not answer in time");
    }
    error
}

/// Connection to etcd, with or without TLS.
#[derive(Debug)]
pub struct Stream(Kind);

#[derive(Debug)]
enum Kind {
    Plain(Timed),
    Tls(Box<StreamOwned<ClientConnection, Timed>>),
}

impl Stream {
    /// Connects; with files, over TLS.
    ///
    /// # Errors
    /// If the connection is not accepted by the deadline, or the files cannot be used.
    pub fn open(address: SocketAddr, files: Option<&Files>, until: Instant) -> Result<Self, Problem> {
        let tls = files.map(|files| settings(files).map(Arc::new)).transpose()?;
        let failed = |error: io::Error| Problem::new(format_args!("cannot connect to {address}: {error}"));
        let socket = TcpStream::connect_timeout(&address, left(until)?).map_err(failed)?;
        // Where no process listens, the kernel may have chosen that very port for the local end, and connected it with
        // itself.
        if socket.local_addr().map_err(failed)? == address {
            return Err(failed(io::ErrorKind::ConnectionRefused.into()));
        }
        let timed = Timed { socket, until };
        let Some(tls) = tls else { return Ok(Self(Kind::Plain(timed))) };
        let session = ClientConnection::new(tls, ServerName::IpAddress(address.ip().into()));
        let session = session.map_err(|error| Problem::new(format_args!("TLS to {address}: {error}")))?;
        Ok(Self(Kind::Tls(Box::new(StreamOwned::new(session, timed)))))
    }

    /// Sets another deadline for the waits from now on.
    pub fn set_until(&mut self, until: Instant) {
        self.timed_mut().until = until;
    }

    fn timed(&self) -> &Timed {
        match &self.0 {
            Kind::Plain(timed) => timed,
            Kind::Tls(stream) => &stream.sock,
        }
    }

    fn timed_mut(&mut self) -> &mut Timed {
        match &mut self.0 {
            Kind::Plain(timed) => timed,
            Kind::Tls(stream) => &mut stream.sock,
        }
    }

    /// Reads what has arrived after the last answer, such as TLS session tickets, without waiting.
    pub fn settle(&mut self) {
        let Kind::Tls(stream) = &mut self.0 else { return };
        if stream.sock.socket.set_nonblocking(true).is_err() {
            return;
        }
        // Errors and the end of the stream are left to [`Self::check`].
        while stream.conn.read_tls(&mut stream.sock.socket).is_ok_and(|read| read > 0) {
            if stream.conn.process_new_packets().is_err() {
                break;
            }
        }
        let _ = stream.sock.socket.set_nonblocking(false);
    }

    /// Checks that the connection is open. etcd sends nothing unasked, so anything that can be read means the end.
    ///
    /// # Errors
    /// If anything can be read.
    pub fn check(&self) -> Result<(), Problem> {
        let mut byte = [0];
        let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        match recv(self.as_fd().as_raw_fd(), &mut byte, flags) {
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(()),
            _ => {
                Err(Problem::new("etcd has closed the connection that was held: it may have been restarted"))
            }
        }
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match &mut self.0 {
            Kind::Plain(timed) => timed.read(buffer),
            Kind::Tls(stream) => stream.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.0 {
            Kind::Plain(timed) => timed.write(bytes),
            Kind::Tls(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.0 {
            Kind::Plain(timed) => timed.flush(),
            Kind::Tls(stream) => stream.flush(),
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.timed().socket.as_fd()
    }
}

/// Returns the TLS configuration: trusted certificates, and the client's own certificate if it has one.
fn settings(files: &Files) -> Result<ClientConfig, Problem> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(&files.ca)? {
        roots.add(certificate).map_err(|error| unusable(&files.ca, &error))?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder =
        builder.map_err(|error| Problem::new(format_args!("TLS: {error}")))?.with_root_certificates(roots);
    let (Some(certificate), Some(key)) = (&files.certificate, &files.key) else {
        return Ok(builder.with_no_client_auth());
    };
    let der = PrivateKeyDer::from_pem_slice(&read(key)?).map_err(|error| unusable(key, &error))?;
    builder
        .with_client_auth_cert(certificates(certificate)?, der)
        .map_err(|error| unusable(certificate, &error))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Problem> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(path)?).collect();
    let found = found.map_err(|error| unusable(path, &error))?;
    if found.is_empty() { Err(unusable(path, &"there is no certificate in it")) } else { Ok(found) }
}

fn read(path: &Path) -> Result<Vec<u8>, Problem> {
    let mut bytes = Vec::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(MOST_PEM).read_to_end(&mut bytes));
    read.map_err(|error| unusable(path, &error))?;
    Ok(bytes)
}

fn unusable(path: &Path, why: &dyn std::fmt::Display) -> Problem {
    Problem::new(format_args!("cannot use {} with the rights of etcd's user: {why}", path.display()))
}
