//! Specifications typed after `guestctl forward VM`: where to listen, and the target to reach.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use crate::text::target::Target;

/// Address or path to listen at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listen {
    /// Port of the default address; 0 selects any free one.
    Port(u16),
    /// Address and port.
    Address(SocketAddr),
    /// Unix socket at this path.
    Path(PathBuf),
}

/// Parsed `[LISTEN:]TARGET`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// Address to listen at, if it is given or follows from the port of the target.
    pub listen: Option<Listen>,
    /// True if the address to listen at was given.
    pub says_where: bool,
    /// Target to reach.
    pub target: Target,
}

/// Part of a specification between two colons.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Piece<'t> {
    Number(&'t str),
    /// Address; IPv6 addresses have brackets.
    Host(&'t str),
    Path(&'t str),
}

/// One side of a specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End<'t> {
    Port(&'t str),
    Address(&'t str, &'t str),
    Path(&'t str),
}

const USAGE: &str = "write [LISTEN:]TARGET, each of which is PORT, ADDRESS:PORT or the absolute path of a socket, as in 5432, \
                     15432:5432 or /tmp/db.sock:/run/db.sock; addresses of IPv6 are in brackets";

impl FromStr for Spec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let usage = || USAGE.to_owned();
        let pieces = pieces(text).ok_or_else(usage)?;
        let mut rest = pieces.as_slice();
        let first = end(&mut rest).ok_or_else(usage)?;
        if rest.is_empty() {
            let target = target(first)?;
            let listen = match &target {
                Target::Port(port) => Some(Listen::Port(*port)),
                Target::Address(address) => Some(Listen::Port(address.port())),
                Target::Path(_) => None,
            };
            return Ok(Self { listen, says_where: false, target });
        }
        let second = end(&mut rest).filter(|_| rest.is_empty()).ok_or_else(usage)?;
        Ok(Self { listen: Some(listen(first)?), says_where: true, target: target(second)? })
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Port(port) => write!(formatter, "port {port}"),
            Self::Address(address) => write!(formatter, "{address}"),
            Self::Path(path) => write!(formatter, "{}", path.display()),
        }
    }
}

/// Splits a specification into pieces; `None` if there are more than two sides can have.
fn pieces(text: &str) -> Option<Vec<Piece<'_>>> {
    let mut pieces = Vec::new();
    let mut rest = text;
    loop {
        let plain = rest.strip_prefix("unix:").filter(|path| path.starts_with('/')).unwrap_or(rest);
        let length = match plain.bytes().next()? {
            b'[' => plain.find(']')? + 1,
            _ => plain.find(':').unwrap_or(plain.len()),
        };
        let (piece, after) = plain.split_at_checked(length)?;
        pieces.push(match piece.bytes().next()? {
            b'/' => Piece::Path(piece),
            _ if piece.bytes().all(|byte| byte.is_ascii_digit()) => Piece::Number(piece),
            _ => Piece::Host(piece),
        });
        if after.is_empty() {
            return Some(pieces);
        }
        rest = after.strip_prefix(':').filter(|_| pieces.len() < 4)?;
    }
}

/// Takes one side off the pieces.
fn end<'t>(pieces: &mut &[Piece<'t>]) -> Option<End<'t>> {
    let (end, taken) = match **pieces {
        [Piece::Number(port), ..] => (End::Port(port), 1),
        [Piece::Path(path), ..] => (End::Path(path), 1),
        [Piece::Host(host), Piece::Number(port), ..] => (End::Address(host, port), 2),
        _ => return None,
    };
    *pieces = pieces.get(taken..)?;
    Some(end)
}

fn target(end: End<'_>) -> Result<Target, String> {
    let text = match end {
        End::Port(port) => port.to_owned(),
        End::Address(host, port) => format!("{host}:{port}"),
        End::Path(path) => format!("unix:{path}"),
    };
    text.parse().map_err(|error| format!("the target {error}"))
}

fn listen(end: End<'_>) -> Result<Listen, String> {
    let number = |port: &str| port.parse::<u16>().map_err(|_| format!("{port:?}: a port is 0 to 65535"));
    Ok(match end {
        End::Port(port) => Listen::Port(number(port)?),
        End::Address(host, port) => Listen::Address(SocketAddr::new(address(host)?, number(port)?)),
        End::Path(path) => match target(end)? {
            Target::Path(path) => Listen::Path(path),
            _ => return Err(format!("{path:?} is not the path of a socket")),
        },
    })
}

/// Parses an address of this machine.
fn address(host: &str) -> Result<IpAddr, String> {
    let plain = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    if host == "localhost" {
        return Ok(Ipv4Addr::LOCALHOST.into());
    }
    plain
        .parse()
        .map_err(|_| format!("{host:?} is not an address to listen on; write an IP address, or localhost"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_may_be_typed() {
        for (text, where_to, target) in [
            ("5432", Some("port 5432"), "5432"),
            ("15432:5432", Some("port 15432"), "5432"),
            ("0:5432", Some("port 0"), "5432"),
            ("10.0.0.5:80", Some("port 80"), "10.0.0.5:80"),
            ("localhost:80", Some("port 80"), "80"),
            ("8080:10.0.0.5:80", Some("port 8080"), "10.0.0.5:80"),
            ("127.0.0.1:8080:80", Some("127.0.0.1:8080"), "80"),
            ("localhost:8080:80", Some("127.0.0.1:8080"), "80"),
            ("127.0.0.1:15432:127.0.0.1:5432", Some("127.0.0.1:15432"), "127.0.0.1:5432"),
            ("[::1]:8080:[fd00::5]:80", Some("[::1]:8080"), "[fd00::5]:80"),
            ("[fd00::5]:80", Some("port 80"), "[fd00::5]:80"),
            ("8080:[fd00::5]:80", Some("port 8080"), "[fd00::5]:80"),
            ("[::]:8080:80", Some("[::]:8080"), "80"),
            ("/tmp/pg.sock:/run/pg/.s.PGSQL.5432", Some("/tmp/pg.sock"), "unix:/run/pg/.s.PGSQL.5432"),
            ("/tmp/x:22", Some("/tmp/x"), "22"),
            ("/tmp/x:10.0.0.5:22", Some("/tmp/x"), "10.0.0.5:22"),
            ("5432:/run/x", Some("port 5432"), "unix:/run/x"),
            ("127.0.0.1:5432:unix:/run/x", Some("127.0.0.1:5432"), "unix:/run/x"),
            ("unix:/tmp/x:unix:/run/x", Some("/tmp/x"), "unix:/run/x"),
            ("unix:/run/x", None, "unix:/run/x"),
            ("/run/x", None, "unix:/run/x"),
        ] {
            let spec: Spec = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
            let listen = spec.listen.map(|listen| listen.to_string());
            assert_eq!((listen.as_deref(), spec.target.to_string().as_str()), (where_to, target), "{text}");
        }
    }

    #[test]
    fn what_may_not() {
        for (text, words) in [
            ("", "write [LISTEN:]TARGET"),
            (":", "write [LISTEN:]TARGET"),
            ("80:", "write [LISTEN:]TARGET"),
            (":80", "write [LISTEN:]TARGET"),
            ("a", "write [LISTEN:]TARGET"),
            ("1:2:3", "write [LISTEN:]TARGET"),
            ("::1:80", "write [LISTEN:]TARGET"),
            ("[::1:80", "write [LISTEN:]TARGET"),
            ("[::1]80", "write [LISTEN:]TARGET"),
            ("unix:", "write [LISTEN:]TARGET"),
            ("0", "a port is 1 to 65535"),
            ("70000:80", "a port is 0 to 65535"),
            ("80:70000", "a port is 1 to 65535"),
            ("db:5432", "host names are not resolved"),
            ("host:80:80", "is not an address to listen on"),
            ("80:0.0.0.0:80", "is the unspecified address"),
            ("/tmp/../x:80", "must be absolute, without"),
        ] {
            let error = text.parse::<Spec>().unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_something_or_refused(text: String) {
            let _ = text.parse::<Spec>();
        }

        #[test]
        fn what_looks_like_it_is_something_or_refused(text in "(unix:|[/.0-9:\\[\\]a-f]){0,30}") {
            if let Ok(spec) = text.parse::<Spec>() {
                prop_assert!(spec.target.to_string().parse::<Target>().is_ok());
            }
        }
    }
}
