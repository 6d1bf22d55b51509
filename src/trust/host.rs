//! The host half's end: the key that it shows to guests, and how it begins a connection with one.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{AlertDescription, ClientConfig};
use tokio::io::AsyncBufReadExt as _;
use tokio_rustls::TlsConnector;

use crate::sys::files;
use crate::transport::{BoxStream, Stream};
use crate::trust::certificate::{self, End};
use crate::trust::key::{Key, KeyError, PublicKey};
use crate::trust::tls::{self, BINDING, BINDING_LABEL, PROTOCOL};

/// Bytes of a file with certificates.
const MAX_FILE: u64 = 64 * 1024;
/// Ends of the names of files beside the key: the one that is to follow it, and the public half of the one before.
const NEXT: &str = ".next";
const RETIRED: &str = ".retired";
/// The certificate of the host half and that of its CA.
const MOST_CERTIFICATES: usize = 2;

/// Paths of the key of a host half, and of the certificate that a CA has issued for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    /// The private key, PEM. Made if it is not there and no certificate is named.
    pub key: PathBuf,
    /// The certificate, followed by that of its CA, PEM.
    pub certificate: Option<PathBuf>,
}

/// Reason why a host half has no usable identity.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    /// Unusable key.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// A CA vouches for it.
    #[error(
        "this host half's key is certified by a CA (trust.certificate): replace the key together with the certificate"
    )]
    OfAuthority,
    /// A key that has to be there is not.
    #[error("there is no key {0}")]
    NoKey(PathBuf),
    /// Unreadable certificate.
    #[error("cannot read {path}")]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Cause of the failure.
        source: io::Error,
    },
    /// Wrong contents of the certificate file.
    #[error("{path}: {problem}")]
    Certificate {
        /// Path of the file.
        path: PathBuf,
        /// Description of the fault.
        problem: String,
    },
    /// TLS does not take them.
    #[error("the key and its certificate cannot be used: {0}")]
    Tls(#[from] rustls::Error),
    /// Failure to make a self-signed certificate for the key.
    #[error("no certificate can be made for the key: {0}")]
    Make(#[from] rcgen::Error),
}

/// Key and certificate that a host half presents to guests.
#[derive(Debug, Clone)]
pub struct Shown {
    /// Public key of the host half.
    pub key: PublicKey,
    /// The public key of the CA that vouches for it, if one does.
    pub ca: Option<PublicKey>,
    config: Arc<ClientConfig>,
}

impl Shown {
    /// Reads the files. Blocks.
    ///
    /// # Errors
    /// If something is missing, damaged, or does not fit together.
    pub fn load(from: &Files) -> Result<Self, Unusable> {
        let key = Key::load(&from.key)?.ok_or_else(|| Unusable::NoKey(from.key.clone()))?;
        let Some(path) = &from.certificate else {
            let leaf = certificate::self_signed(&key, End::Host)?;
            return Ok(Self { key: key.public(), ca: None, config: tls::client::config(&key, vec![leaf])? });
        };
        let chain = chain(path)?;
        let wrong = |problem: &str| Unusable::Certificate { path: path.clone(), problem: problem.to_owned() };
        let read = |at: usize| {
            certificate::read(&chain[at])
                .ok_or_else(|| wrong("it has a certificate that is not for an Ed25519 key"))
        };
        if read(0)?.key != key.public() {
            return Err(wrong("its first certificate is not for the key of the host half"));
        }
        let ca = read(1)?.key;
        Ok(Self { key: key.public(), ca: Some(ca), config: tls::client::config(&key, chain)? })
    }
}

fn chain(path: &Path) -> Result<Vec<CertificateDer<'static>>, Unusable> {
    let wrong = |problem: String| Unusable::Certificate { path: path.to_owned(), problem };
    let bytes = files::read_at_most(path, MAX_FILE)
        .and_then(|bytes| bytes.ok_or_else(|| io::ErrorKind::NotFound.into()))
        .map_err(|source| Unusable::Read { path: path.to_owned(), source })?;
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let chain = chain.map_err(|error| wrong(format!("it is not PEM: {error}")))?;
    if chain.len() != MOST_CERTIFICATES {
        let problem = format!(
            "it has {} certificates; it needs two, that of the host half and then that of its CA",
            chain.len()
        );
        return Err(wrong(problem));
    }
    Ok(chain)
}

/// Key and certificate of a host half, read again when its files change, because certificates of a CA may be
/// valid for a few days only.
#[derive(Debug)]
pub struct Identity {
    files: Files,
    now: Mutex<Shown>,
    /// When the files were last read. Whoever has it reads, one at a time.
    stamp: Mutex<Stamp>,
}

/// When the files were last changed.
type Stamp = [Option<SystemTime>; 2];

impl Identity {
    /// Reads the files, and generates the key if there is none. Blocks.
    ///
    /// # Errors
    /// The errors of [`Shown::load`].
    pub fn load(files: Files) -> Result<Self, Unusable> {
        let stamp = stamp(&files);
        if files.certificate.is_none() && Key::load(&files.key)?.is_none() {
            Key::generate()?.save(&files.key)?;
        }
        let shown = Shown::load(&files)?;
        Ok(Self { files, now: Mutex::new(shown), stamp: Mutex::new(stamp) })
    }

    /// Reads the files again if they have changed. If the new contents are invalid, a message is logged and the
    /// previous identity stays in use. Blocks.
    pub fn refresh(&self) {
        let mut last = self.stamp.lock().unwrap_or_else(PoisonError::into_inner);
        let stamp = stamp(&self.files);
        if stamp != *last {
            match Shown::load(&self.files) {
                Ok(shown) => *self.now.lock().unwrap_or_else(PoisonError::into_inner) = shown,
                Err(error) => tracing::error!("the previous key stays in use: {error}"),
            }
            *last = stamp;
        }
    }

    /// Returns the current identity, as of the last check of the files.
    pub fn shown(&self) -> Shown {
        self.now.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn stamp(files: &Files) -> Stamp {
    let modified = |path: &Path| std::fs::metadata(path).and_then(|found| found.modified()).ok();
    [modified(&files.key), files.certificate.as_deref().and_then(modified)]
}

/// Rotation state of the host half's key, as it is reported to guests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rotation {
    /// The one that it is going to use.
    pub next: Option<PublicKey>,
    /// Keys that it used before.
    pub retired: Vec<PublicKey>,
}

impl Identity {
    fn beside(&self, end: &str) -> PathBuf {
        let mut path = self.files.key.clone().into_os_string();
        path.push(end);
        path.into()
    }

    /// The key that is to follow the one in use. One that is in use already was left by a step that was cut off.
    fn next(&self) -> Result<Option<Key>, KeyError> {
        let own = self.shown().key;
        Ok(Key::load(&self.beside(NEXT))?.filter(|key| key.public() != own))
    }

    /// Returns the rotation state to report to guests. Blocks.
    ///
    /// # Errors
    /// If a file cannot be used.
    pub fn rotation(&self) -> Result<Rotation, Unusable> {
        if self.files.certificate.is_some() {
            return Ok(Rotation::default());
        }
        let (own, next) = (self.shown().key, self.next()?.map(|key| key.public()));
        let path = self.beside(RETIRED);
        let retired = files::text(&path).map_err(|source| Unusable::Read { path, source })?;
        let retired = retired.unwrap_or_default();
        // A switch that was cut off has named the key that is still used.
        let retired = retired.lines().filter_map(|line| line.parse().ok()).filter(|retired| *retired != own);
        Ok(Rotation { next, retired: retired.collect() })
    }

    /// Returns the next key, and generates it if there is none. Blocks.
    ///
    /// # Errors
    /// If the key is certified by a CA, or a file cannot be written.
    pub fn prepare(&self) -> Result<PublicKey, Unusable> {
        if self.files.certificate.is_some() {
            return Err(Unusable::OfAuthority);
        }
        if let Some(key) = self.next()? {
            return Ok(key.public());
        }
        let key = Key::generate()?;
        key.save(&self.beside(NEXT))?;
        Ok(key.public())
    }

    /// Switches to the next key. Blocks.
    ///
    /// # Errors
    /// If there is no next key, or a file cannot be written.
    pub fn switch(&self) -> Result<PublicKey, Unusable> {
        let next = self.next()?.ok_or_else(|| Unusable::NoKey(self.beside(NEXT)))?;
        let (own, path) = (self.shown().key, self.beside(RETIRED));
        let write = |source| KeyError::Io { what: "write", path: self.beside(RETIRED), source };
        let retired = files::text(&path).map_err(write)?.unwrap_or_default();
        files::replace_synced(&path, format!("{retired}{own}\n").as_bytes()).map_err(write)?;
        next.save(&self.files.key)?;
        files::remove(&self.beside(NEXT));
        self.refresh();
        Ok(self.shown().key)
    }
}

/// A connection with a guest that has a key.
pub struct Secured {
    /// Carries the guestlet API.
    pub stream: BoxStream,
    /// The guest's key, which it holds.
    pub key: PublicKey,
    /// A secret of both ends of this very connection.
    pub binding: [u8; BINDING],
}

/// Reason why the connection could not be secured.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The guest speaks no TLS: it was given no key, or its agent is too old for them.
    #[error("the guest uses no keys")]
    Plain,
    /// Guest that closed the connection without an answer.
    #[error("the agent closed the connection")]
    Closed,
    /// Guest that does not accept this host half's key.
    #[error(
        "the guest does not know this host half's key; guestctl trust bootstrap says how to give it to the guest"
    )]
    Unknown,
    /// The certificate of this host half is not valid for it.
    #[error("the guest does not accept this host half's certificate: {0}")]
    Certificate(&'static str),
    /// Violation of the protocol by one end.
    #[error("the handshake with the guest failed: {0}")]
    Handshake(String),
    /// Broken stream.
    #[error("the stream broke during the handshake")]
    Broken(#[source] io::Error),
}

/// Begins a connection on a stream that was dialled. There is no deadline. Whose key it is that the guest has shown, the caller
/// has to check before it says anything.
///
/// # Errors
/// If it cannot be: the stream is closed.
pub async fn connect(stream: impl Stream, shown: &Shown) -> Result<Secured, Failure> {
    let connector = TlsConnector::from(Arc::clone(&shown.config));
    let name = ServerName::try_from("guestlet").map_err(|error| Failure::Handshake(error.to_string()))?;
    let mut stream = connector.connect(name, stream).await.map_err(|error| failed(error, true))?;
    // The guest judges this end last: its word comes with the first that it says.
    match stream.fill_buf().await {
        Ok([]) => return Err(Failure::Broken(io::ErrorKind::UnexpectedEof.into())),
        Ok(_) => {}
        Err(error) => return Err(failed(error, false)),
    }
    let connection = stream.get_ref().1;
    if connection.alpn_protocol() != Some(PROTOCOL) {
        return Err(Failure::Handshake("the guest does not speak guestlet/1 (ALPN)".to_owned()));
    }
    let mut binding = [0; BINDING];
    let exported = connection.export_keying_material(&mut binding, BINDING_LABEL, None);
    exported.map_err(|error| Failure::Handshake(error.to_string()))?;
    let leaf = connection.peer_certificates().and_then(|certificates| certificates.first());
    let key = leaf.and_then(certificate::read).map(|certified| certified.key);
    let key = key.ok_or_else(|| Failure::Handshake("the guest presents no key".to_owned()))?;
    Ok(Secured { stream: Box::new(stream), key, binding })
}

/// Translates an error of TLS. While `first` is true, the guest may not speak TLS at all.
fn failed(error: io::Error, first: bool) -> Failure {
    let told = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match told {
        Some(rustls::Error::AlertReceived(alert)) => match alert {
            AlertDescription::NoApplicationProtocol if first => Failure::Plain,
            AlertDescription::UnknownCA | AlertDescription::AccessDenied => Failure::Unknown,
            AlertDescription::CertificateExpired => {
                Failure::Certificate("it is not valid now; renew it, or check the guest's clock")
            }
            AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateUnknown => {
                Failure::Certificate("see the guest's log for what is wrong")
            }
            other => Failure::Handshake(format!("the guest says {other:?}")),
        },
        // The answer of the guest is not TLS.
        Some(rustls::Error::InvalidMessage(_)) if first => Failure::Plain,
        Some(other) => Failure::Handshake(other.to_string()),
        None if first
            && matches!(
                error.kind(),
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe
            ) =>
        {
            Failure::Closed
        }
        None => Failure::Broken(error),
    }
}
