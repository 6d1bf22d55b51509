//! A client of MySQL and MariaDB for tests, which shares nothing with the one that is tested: accounts without a password.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// A session.
pub struct Sql(UnixStream);

impl Sql {
    pub fn connect(socket: &Path, user: &str) -> io::Result<Self> {
        let mut sql = Self(UnixStream::connect(socket)?);
        sql.0.set_read_timeout(Some(super::stand::PATIENCE))?;
        sql.receive()?;
        let mut login = [0x0008_a205_u32.to_le_bytes(), (1_u32 << 24).to_le_bytes()].concat();
        login.push(45);
        login.extend([0; 23]);
        login.extend(format!("{user}\0\0mysql_native_password\0").bytes());
        sql.send(1, &login)?;
        loop {
            let (sequence, answer) = sql.receive()?;
            match answer.first() {
                Some(0) => return Ok(sql),
                Some(0xfe) => sql.send(sequence + 1, &[])?,
                _ => return Err(io::Error::other(String::from_utf8_lossy(&answer).into_owned())),
            }
        }
    }

    /// The rows of an answer, each with its values between tabs.
    pub fn run(&mut self, query: &str) -> io::Result<Vec<String>> {
        self.send(0, &[b"\x03", query.as_bytes()].concat())?;
        let (_, first) = self.receive()?;
        match first.first() {
            Some(0) => return Ok(Vec::new()),
            Some(0xff) => return Err(io::Error::other(String::from_utf8_lossy(&first).into_owned())),
            _ => {}
        }
        let (mut rows, mut ends) = (Vec::new(), 0);
        loop {
            let (_, packet) = self.receive()?;
            match packet.first() {
                Some(0xff) => return Err(io::Error::other(String::from_utf8_lossy(&packet).into_owned())),
                Some(0xfe) if packet.len() < 9 && ends == 1 => return Ok(rows),
                Some(0xfe) if packet.len() < 9 => ends += 1,
                _ if ends == 0 => {}
                _ => rows.push(values(&packet).join("\t")),
            }
        }
    }

    fn send(&mut self, sequence: u8, packet: &[u8]) -> io::Result<()> {
        let [low, middle, high, _] = u32::try_from(packet.len()).unwrap().to_le_bytes();
        self.0.write_all(&[&[low, middle, high, sequence], packet].concat())
    }

    fn receive(&mut self) -> io::Result<(u8, Vec<u8>)> {
        let mut head = [0; 4];
        self.0.read_exact(&mut head)?;
        let mut packet = vec![0; u32::from_le_bytes([head[0], head[1], head[2], 0]) as usize];
        self.0.read_exact(&mut packet)?;
        Ok((head[3], packet))
    }
}

/// Values of less than 251 bytes.
fn values(packet: &[u8]) -> Vec<String> {
    let (mut found, mut rest) = (Vec::new(), packet);
    while let [length, behind @ ..] = rest {
        if *length == 0xfb {
            found.push("NULL".to_owned());
            rest = behind;
            continue;
        }
        assert!(*length < 0xfb, "a long value: {packet:?}");
        let (value, behind) = behind.split_at((*length).into());
        found.push(String::from_utf8_lossy(value).into_owned());
        rest = behind;
    }
    found
}
