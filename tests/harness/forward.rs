//! Carries what two sockets say to each other.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;

/// A stream socket of any kind.
pub trait Socket: Sync {
    /// Ends both directions.
    fn end(&self);
}

impl Socket for UnixStream {
    fn end(&self) {
        drop(self.shutdown(Shutdown::Both));
    }
}

impl Socket for TcpStream {
    fn end(&self) {
        drop(self.shutdown(Shutdown::Both));
    }
}

/// Carries what each end says to the other, until one has ended; then both have.
pub fn couple<A: Socket, B: Socket>(one: &A, other: &B)
where
    for<'s> &'s A: Read + Write,
    for<'s> &'s B: Read + Write,
{
    std::thread::scope(|scope| {
        scope.spawn(|| {
            drop(std::io::copy(&mut &*one, &mut &*other));
            other.end();
        });
        drop(std::io::copy(&mut &*other, &mut &*one));
        one.end();
    });
}
