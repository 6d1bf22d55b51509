//! Targets of the client: an etcd process, or a URL on this machine, with files for TLS that are read as etcd's
//! user.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use serde::Deserialize;

use super::Problem;

/// Client port of etcd, if the URL has none.
const PORT: u16 = 2379;

/// Target that the process of the application is started with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// PID of a process whose listening sockets are tried.
    Process(u32),
    /// Address at which etcd listens.
    Address {
        /// Loopback address of etcd's client port.
        address: SocketAddr,
        /// Files for TLS; `None` for plain HTTP.
        files: Option<Files>,
        /// Data directory, for an etcd whose directories cannot be determined because it runs in a container, or with
        /// capabilities.
        data: Option<PathBuf>,
    },
}

/// Files that a TLS client needs, in PEM format.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Files {
    /// Certificate of the authority that has signed etcd's certificate.
    pub ca: PathBuf,
    /// Certificate of the client, unless etcd requires none.
    pub certificate: Option<PathBuf>,
    /// Private key of the client's certificate.
    pub key: Option<PathBuf>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    url: String,
    #[serde(default)]
    ca: Option<PathBuf>,
    #[serde(default)]
    certificate: Option<PathBuf>,
    #[serde(default)]
    key: Option<PathBuf>,
    #[serde(default)]
    data: Option<PathBuf>,
}

impl Target {
    /// Parses a target: `process:` and a PID, a URL, or a JSON document `{"url": …, "ca": …, "certificate": …, "key":
    /// …, "data": …}`, of which only `url` is required.
    ///
    /// # Errors
    /// If it is none of them, or the URL leads to another machine.
    pub fn parse(text: &str) -> Result<Self, Problem> {
        let wrong = |why: &str| Problem::new(format_args!("{text:?} is not an etcd on this machine: {why}"));
        if let Some(number) = text.strip_prefix("process:") {
            return number.parse().map(Self::Process).map_err(|_| wrong("a process is given by its number"));
        }
        let document = if text.starts_with('{') {
            serde_json::from_str(text).map_err(|error| wrong(&error.to_string()))?
        } else {
            Document { url: text.to_owned(), ca: None, certificate: None, key: None, data: None }
        };
        let (is_tls, rest) =
            match (document.url.strip_prefix("https://"), document.url.strip_prefix("http://")) {
                (Some(rest), _) => (true, rest),
                (_, Some(rest)) => (false, rest),
                _ => return Err(wrong("its URL has to begin with http:// or https://")),
            };
        let address = address(rest.strip_suffix('/').unwrap_or(rest))
            .ok_or_else(|| wrong("the host of its URL has to be localhost or a loopback address"))?;
        let files = match (is_tls, document.ca, document.certificate, document.key) {
            (false, None, None, None) => None,
            (false, ..) => return Err(wrong("http takes no certificates; use https")),
            (true, None, ..) => return Err(wrong("https needs the file of a CA")),
            (true, Some(ca), certificate, key) if certificate.is_some() == key.is_some() => {
                Some(Files { ca, certificate, key })
            }
            (true, ..) => {
                return Err(wrong("a client certificate needs its key, and a key its certificate"));
            }
        };
        Ok(Self::Address { address, files, data: document.data })
    }
}

/// Parses a host with or without a port; returns its address if that is on this machine.
fn address(host: &str) -> Option<SocketAddr> {
    let local = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let address = if let Ok(address) = host.parse::<SocketAddr>() {
        address
    } else if let Some(port) = host.strip_prefix("localhost:") {
        SocketAddr::new(local, port.parse().ok()?)
    } else if host == "localhost" {
        SocketAddr::new(local, PORT)
    } else {
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        SocketAddr::new(bare.parse().ok()?, PORT)
    };
    (address.ip().is_loopback() && address.port() != 0).then_some(address)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn targets_are_of_this_machine() {
        let plain =
            |address: &str| Target::Address { address: address.parse().unwrap(), files: None, data: None };
        for (text, expected) in [
            ("process:4711", Target::Process(4711)),
            ("http://127.0.0.1:2379", plain("127.0.0.1:2379")),
            ("http://localhost/", plain("127.0.0.1:2379")),
            ("http://localhost:1", plain("127.0.0.1:1")),
            ("http://[::1]:2379", plain("[::1]:2379")),
            ("http://[::1]", plain("[::1]:2379")),
            (r#"{"url": "http://127.0.0.2"}"#, plain("127.0.0.2:2379")),
        ] {
            assert_eq!(Target::parse(text), Ok(expected), "{text}");
        }
        let Ok(Target::Address { files: Some(files), data, .. }) = Target::parse(
            r#"{"url":"https://127.0.0.1","ca":"/ca","certificate":"/crt","key":"/key","data":"/data"}"#,
        ) else {
            panic!("no TLS");
        };
        assert_eq!((files.ca, files.key, data), ("/ca".into(), Some("/key".into()), Some("/data".into())));
        for wrong in [
            "",
            "process:-1",
            "127.0.0.1:2379",
            "http://10.0.0.1:2379",
            "http://etcd.example:2379",
            "http://127.0.0.1:0",
            "http://127.0.0.1:2379/v3",
            "http://localhost@10.0.0.1",
            "https://127.0.0.1",
            r#"{"url":"http://127.0.0.1","ca":"/ca"}"#,
            r#"{"url":"https://127.0.0.1","ca":"/ca","key":"/key"}"#,
            r#"{"url":"http://127.0.0.1","more":1}"#,
        ] {
            assert!(Target::parse(wrong).is_err(), "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn whatever_is_said_no_other_machine_is_asked(text in "(https?://)?[0-9a-f:.\\[\\]]{0,20}") {
            if let Ok(Target::Address { address, .. }) = Target::parse(&text) {
                prop_assert!(address.ip().is_loopback());
            }
        }
    }
}
