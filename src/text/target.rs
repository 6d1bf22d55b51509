//! Targets that can be reached through a guest, as settings and command lines write them: `22`, `127.0.0.1:5432`,
//! `[::1]:80`, `unix:/run/app.sock`.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

/// Maximum length of a socket's path in bytes: the kernel has no room for more.
const MAX_PATH: usize = 107;
/// Prefix of the paths of sockets.
const UNIX: &str = "unix:";
/// Name for the guest itself.
const LOCALHOST: &str = "localhost";

/// Address that can be reached through a guest.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Target {
    /// A port of the guest itself, at 127.0.0.1 or `::1`.
    Port(u16),
    /// A port at this address.
    Address(SocketAddr),
    /// A unix socket in the guest, by its absolute path.
    Path(PathBuf),
}

/// Reason why a text is not a target.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoTarget {
    /// The text is in none of the forms of a target.
    #[error("{0:?} is not a target; write a port, ADDRESS:PORT with an IP address, or unix:/PATH")]
    Unknown(String),
    /// The text has a host name, and these are not resolved.
    #[error("{0:?}: host names are not resolved; write an IP address, or localhost")]
    Name(String),
    /// The port is 0 or greater than 65535.
    #[error("{0:?}: a port is 1 to 65535")]
    Port(String),
    /// The address is the unspecified one, which stands for all addresses.
    #[error("{0:?}: this is the unspecified address; write localhost or a specific address")]
    Unspecified(String),
    /// The path of a socket is not absolute, names a directory, is too long, or has "..".
    #[error(
        "{0:?}: the path of a socket must be absolute, without \"..\", must not end like that of a directory, \
         and have at most {MAX_PATH} bytes"
    )]
    Path(String),
}

impl FromStr for Target {
    type Err = NoTarget;

    fn from_str(text: &str) -> Result<Self, NoTarget> {
        if let Some(path) = text.strip_prefix(UNIX) {
            return socket(path).ok_or_else(|| NoTarget::Path(shown(text)));
        }
        if is_number(text) {
            return port(text).map(Self::Port).ok_or_else(|| NoTarget::Port(shown(text)));
        }
        let (host, number) = text.rsplit_once(':').ok_or_else(|| NoTarget::Unknown(shown(text)))?;
        if !is_number(number) {
            return Err(NoTarget::Unknown(shown(text)));
        }
        let port = port(number).ok_or_else(|| NoTarget::Port(shown(text)))?;
        if host == LOCALHOST {
            return Ok(Self::Port(port));
        }
        let address = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            Some(inner) => inner.parse().ok().map(IpAddr::V6),
            None => host.parse().ok().map(IpAddr::V4),
        };
        match address.map(|address| address.to_canonical()) {
            None if host.is_empty() || host.contains([':', '[', ']', '/']) => {
                Err(NoTarget::Unknown(shown(text)))
            }
            None => Err(NoTarget::Name(shown(text))),
            Some(address) if address.is_unspecified() => Err(NoTarget::Unspecified(shown(text))),
            Some(address) => Ok(Self::Address(SocketAddr::new(address, port))),
        }
    }
}

impl fmt::Display for Target {
    /// Formats the target in the form in which it is written.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Port(port) => write!(formatter, "{port}"),
            Self::Address(address) => write!(formatter, "{address}"),
            Self::Path(path) => write!(formatter, "{UNIX}{}", path.display()),
        }
    }
}

impl Target {
    /// Returns whether a connection to `other` is also one to this target: a port of the guest itself covers the same
    /// port at 127.0.0.1 and `::1`.
    pub fn covers(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Port(port), Self::Address(address)) => {
                address.port() == *port && LOOPBACK.contains(&address.ip())
            }
            _ => self == other,
        }
    }

    /// Returns the addresses that the target stands for, in the order in which they are tried.
    pub fn places(&self) -> Vec<Self> {
        match self {
            Self::Port(port) => {
                LOOPBACK.map(|address| Self::Address(SocketAddr::new(address, *port))).to_vec()
            }
            one => vec![one.clone()],
        }
    }
}

/// Loopback addresses, which stand for the guest itself.
const LOOPBACK: [IpAddr; 2] =
    [IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), IpAddr::V6(std::net::Ipv6Addr::LOCALHOST)];

/// Limits the length of a text, for messages.
fn shown(text: &str) -> String {
    text.chars().take(MAX_PATH * 2).collect()
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn port(text: &str) -> Option<u16> {
    text.parse().ok().filter(|port| *port > 0)
}

fn socket(path: &str) -> Option<Target> {
    let plain = Path::new(path);
    let is_fit = plain.is_absolute()
        && path.len() <= MAX_PATH
        && !path.contains('\0')
        && !path.ends_with('/')
        && !path.ends_with("/.")
        && !plain.components().any(|part| matches!(part, Component::ParentDir));
    // Collected from components, so that each path has one spelling only.
    is_fit.then(|| Target::Path(plain.components().collect()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn target(text: &str) -> Target {
        text.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn targets_are_read_and_written_alike() {
        for (text, same) in [
            ("22", "22"),
            ("localhost:22", "22"),
            ("127.0.0.1:5432", "127.0.0.1:5432"),
            ("[::1]:80", "[::1]:80"),
            ("[::ffff:127.0.0.1]:80", "127.0.0.1:80"),
            ("[fd00:0::5]:443", "[fd00::5]:443"),
            ("unix:/run//app.sock", "unix:/run/app.sock"),
        ] {
            assert_eq!(target(text).to_string(), same, "{text}");
        }
    }

    #[test]
    fn what_is_no_target_is_refused_with_what_to_write() {
        for (text, words) in [
            ("", "is not a target"),
            ("x", "is not a target"),
            ("a:b", "is not a target"),
            ("::1:80", "is not a target"),
            (":80", "is not a target"),
            ("[::1]", "is not a target"),
            ("-1", "is not a target"),
            ("0", "a port is 1 to 65535"),
            ("65536", "a port is 1 to 65535"),
            ("10.0.0.1:0", "a port is 1 to 65535"),
            ("db:5432", "host names are not resolved"),
            ("10.1:80", "host names are not resolved"),
            ("0.0.0.0:80", "is the unspecified address"),
            ("[::]:80", "is the unspecified address"),
            ("[::ffff:0.0.0.0]:80", "is the unspecified address"),
            ("unix:run/x", "must be absolute"),
            ("unix:/run/../x", "must be absolute"),
            ("unix:/run/", "must not end like that of a directory"),
            ("unix:/.", "must not end like that of a directory"),
            ("unix:/run/.", "must not end like that of a directory"),
            ("unix:/x\0", "must be absolute"),
            ("unix:", "must be absolute"),
        ] {
            let error = text.parse::<Target>().unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
        let long = format!("unix:/{}", "x".repeat(200));
        assert!(long.parse::<Target>().is_err() && "9".repeat(5000).parse::<Target>().is_err());
    }

    #[test]
    fn a_port_is_one_of_this_machine_and_no_other() {
        for (one, other, expected) in [
            ("22", "22", true),
            ("22", "127.0.0.1:22", true),
            ("22", "[::1]:22", true),
            ("22", "23", false),
            ("22", "127.0.0.1:23", false),
            ("22", "127.0.0.2:22", false),
            ("127.0.0.1:22", "22", false),
            ("127.0.0.1:22", "[::1]:22", false),
            ("unix:/a", "unix:/a", true),
            ("unix:/a", "unix:/a/b", false),
        ] {
            assert_eq!(target(one).covers(&target(other)), expected, "{one} {other}");
        }
        let places: Vec<_> = target("22").places().iter().map(Target::to_string).collect();
        assert_eq!(places, ["127.0.0.1:22", "[::1]:22"]);
    }

    proptest! {
        #[test]
        fn any_text_is_a_target_or_none(text: String) {
            if let Ok(target) = text.parse::<Target>() {
                prop_assert_eq!(target.to_string().parse::<Target>().unwrap(), target);
            }
        }

        #[test]
        fn targets_that_look_like_ones(text in "(unix:)?[/.0-9:\\[\\]a-f]{0,20}") {
            if let Ok(target) = text.parse::<Target>() {
                prop_assert_eq!(target.to_string().parse::<Target>().unwrap(), target);
            }
        }
    }
}
