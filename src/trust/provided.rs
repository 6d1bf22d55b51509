//! Data that the platform provides to this guest under a name: a systemd credential, or the source of one
//! where systemd is too old to pass it on (before 252).
//!
//! Two names are used: [`HOSTS`], lines of public keys, and [`ENROLLMENT`], a secret for the first contact.
//! Neither is interpreted here. The sources are checked in this order: the unit's own credentials, those of
//! the system, the guest's own credential store, the SMBIOS strings of the firmware, and QEMU's `fw_cfg`. To
//! add a source, add a line to `all`.
//!
//! In a confidential VM only the guest's own store is accepted: every other source may have been written by
//! the host, against which the guest is protected.

use std::io;
use std::path::Path;

use crate::sys::root::Root;
use crate::sys::{confidential, files, smbios};
use crate::trust::enrollment::{NotAToken, Token};

/// The name of the public keys of host halves: text.
pub const HOSTS: &str = "guestlet.hosts";
/// The name of the one-time token: 32 hexadecimal digits.
pub const ENROLLMENT: &str = "guestlet.enroll";

/// Bytes that may be given under a name, in one place.
const MAX_LENGTH: usize = 64 << 10;
/// Directory of the system's credentials.
const SYSTEM: &str = "/run/credentials/@system";
/// Directory in which systemd looks for credentials that are files of the guest itself.
const STORE: &str = "/etc/credstore";
/// Directory in which the kernel module `qemu_fw_cfg` shows them.
const FW_CFG: &str = "/sys/firmware/qemu_fw_cfg/by_name/opt/io.systemd.credentials";

/// A text, and where it was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Provided {
    /// A path, or which string of the firmware.
    pub place: String,
    /// Contents of the source.
    pub text: String,
}

/// A source that cannot be used, or must not.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// Source that exists and cannot be read.
    #[error("cannot read {place}")]
    Unreadable {
        /// Place of the source.
        place: String,
        /// Cause of the failure.
        #[source]
        error: io::Error,
    },
    /// More than anybody needs.
    #[error("{place}: there are more than {MAX_LENGTH} bytes")]
    TooLarge {
        /// Place of the source.
        place: String,
    },
    /// Bytes that are no text.
    #[error("{place}: it is not UTF-8")]
    NotText {
        /// Place of the source.
        place: String,
    },
    /// A string of the firmware that says it is Base64.
    #[error("{place}: it is not Base64, as io.systemd.credential.binary: requires")]
    NotBase64 {
        /// Place of the source.
        place: String,
    },
    /// Damaged table of the firmware.
    #[error("{place}: {error}")]
    CutOff {
        /// Place of the table.
        place: String,
        /// Damage of the table.
        error: smbios::CutOff,
    },
    /// Text that is not a token. The text is not logged, because it may be another secret.
    #[error(
        "{place}: it is not a token; write the 32 hexadecimal digits that `guestctl trust bootstrap --token` prints"
    )]
    NotAToken {
        /// Place of the source.
        place: String,
    },
    /// The guest is to be safe from who wrote it.
    #[error(
        "{place} is ignored: this VM is protected from its host by {technology}, and the host may have written it; put the \
         key into /etc/guestlet/hosts.d of the image"
    )]
    Ignored {
        /// Place of the source.
        place: String,
        /// Technology that protects the guest.
        technology: &'static str,
    },
}

impl Problem {
    /// Returns the place of the source.
    pub fn place(&self) -> &str {
        match self {
            Self::Unreadable { place, .. }
            | Self::TooLarge { place }
            | Self::NotText { place }
            | Self::NotBase64 { place }
            | Self::CutOff { place, .. }
            | Self::NotAToken { place }
            | Self::Ignored { place, .. } => place,
        }
    }
}

/// The texts with the public keys of host halves, from every source that has one. `credentials` is what the service manager
/// calls `$CREDENTIALS_DIRECTORY`. Systemd copies what it finds in the firmware, so that one text may come several times.
pub fn hosts(root: &Root, credentials: Option<&Path>) -> Vec<Result<Provided, Problem>> {
    all(root, credentials, HOSTS).into_iter().map(|found| found.and_then(Found::text)).collect()
}

/// Returns the one-time token of the first source that has one.
///
/// # Errors
/// If that source cannot be used; the others are not tried in its place.
pub fn enrollment_token(root: &Root, credentials: Option<&Path>) -> Result<Option<Token>, Problem> {
    let Some(first) = all(root, credentials, ENROLLMENT).into_iter().next() else { return Ok(None) };
    let Provided { place, text } = first.and_then(Found::text)?;
    text.parse().map(Some).map_err(|NotAToken| Problem::NotAToken { place })
}

/// Contents of one source.
struct Found {
    place: String,
    bytes: Vec<u8>,
}

impl Found {
    fn text(self) -> Result<Provided, Problem> {
        let Self { place, bytes } = self;
        match String::from_utf8(bytes) {
            Ok(text) => Ok(Provided { place, text }),
            Err(_) => Err(Problem::NotText { place }),
        }
    }
}

/// Returns what each source has under that name, in the order of the sources.
fn all(root: &Root, credentials: Option<&Path>, name: &str) -> Vec<Result<Found, Problem>> {
    let technology = confidential::technology(root);
    let by_the_host = |found: Result<Found, Problem>| match (found, technology) {
        (Ok(Found { place, .. }), Some(technology)) => Err(Problem::Ignored { place, technology }),
        (found, _) => found,
    };
    let in_the_unit = credentials.and_then(|folder| file(root, &folder.join(name)));
    let of_the_system = file(root, &Path::new(SYSTEM).join(name));
    let in_the_store = file(root, &Path::new(STORE).join(name));
    let in_fw_cfg = file(root, &Path::new(FW_CFG).join(name).join("raw"));
    let mut found = Vec::new();
    found.extend(in_the_unit.into_iter().chain(of_the_system).map(by_the_host));
    found.extend(in_the_store);
    found.extend(of_the_firmware(root, name).into_iter().chain(in_fw_cfg).map(by_the_host));
    found
}

/// Reads a file; `None` if it does not exist.
fn file(root: &Root, path: &Path) -> Option<Result<Found, Problem>> {
    let place = path.display().to_string();
    let path = root.path_of(path);
    match files::read_at_most(&path, MAX_LENGTH as u64 + 1) {
        Ok(None) => {
            let link = files::dangling(&path)?;
            let error = io::Error::other(format!("{} is a dangling symbolic link", link.display()));
            Some(Err(Problem::Unreadable { place, error }))
        }
        Ok(Some(bytes)) if bytes.len() > MAX_LENGTH => Some(Err(Problem::TooLarge { place })),
        Ok(Some(bytes)) => Some(Ok(Found { place, bytes })),
        Err(error) => Some(Err(Problem::Unreadable { place, error })),
    }
}

/// Returns the SMBIOS strings with that name.
fn of_the_firmware(root: &Root, name: &str) -> Vec<Result<Found, Problem>> {
    let place = smbios::TABLE.to_owned();
    let table = match files::read_at_most(&root.path(smbios::TABLE), smbios::MAX_TABLE) {
        Ok(table) => table.unwrap_or_default(),
        Err(error) => return vec![Err(Problem::Unreadable { place, error })],
    };
    match smbios::oem_strings(&table) {
        Ok(strings) => {
            let numbered = strings.into_iter().zip(1..);
            numbered.filter_map(|(string, number)| credential(string, number, name)).collect()
        }
        Err(error) => vec![Err(Problem::CutOff { place, error })],
    }
}

/// The value of an OEM string that is a credential of that name.
fn credential(string: &[u8], number: usize, name: &str) -> Option<Result<Found, Problem>> {
    let value =
        |kind: &str| string.strip_prefix(kind.as_bytes())?.strip_prefix(name.as_bytes())?.strip_prefix(b"=");
    let place = format!("SMBIOS OEM string {number}");
    let bytes = if let Some(text) = value("io.systemd.credential:") {
        text.to_vec()
    } else {
        let base64 = value("io.systemd.credential.binary:")?;
        match base64_simd::forgiving_decode_to_vec(base64) {
            Ok(bytes) => bytes,
            Err(_) => return Some(Err(Problem::NotBase64 { place })),
        }
    };
    Some(if bytes.len() > MAX_LENGTH { Err(Problem::TooLarge { place }) } else { Ok(Found { place, bytes }) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &str = "000102030405060708090a0b0c0d0e0F";
    const IN_THE_UNIT: &str = "/run/credentials/guestlet.service";

    /// A guest with these files, and these SMBIOS strings.
    fn guest(files: &[(&str, &[u8])], strings: &[&str]) -> (tempfile::TempDir, Root) {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        let mut table = vec![11, 5, 0, 0, u8::try_from(strings.len()).unwrap()];
        for string in strings {
            table.extend([string.as_bytes(), b"\0"].concat());
        }
        table.extend(b"\0\x7f\x04\0\0\0\0");
        let table = (!strings.is_empty()).then_some((smbios::TABLE, table.as_slice()));
        for (path, bytes) in files.iter().copied().chain(table) {
            let path = root.path(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            #[allow(clippy::disallowed_methods)]
            std::fs::write(path, bytes).unwrap();
        }
        (folder, root)
    }

    fn told(root: &Root) -> Vec<String> {
        let told = |found: Result<Provided, Problem>| match found {
            Ok(provided) => format!("{}={}", provided.place, provided.text),
            Err(problem) => format!("! {problem}"),
        };
        hosts(root, Some(Path::new(IN_THE_UNIT))).into_iter().map(told).collect()
    }

    fn token(root: &Root) -> Result<Option<Token>, String> {
        enrollment_token(root, Some(Path::new(IN_THE_UNIT))).map_err(|problem| problem.to_string())
    }

    #[test]
    fn a_guest_that_was_given_nothing() {
        let (_folder, root) = guest(&[], &[]);
        assert_eq!(told(&root), [""; 0]);
        assert_eq!(token(&root), Ok(None));
        assert!(hosts(&root, None).is_empty());
    }

    #[test]
    fn every_source_is_asked_in_order() {
        let files: [(&str, &[u8]); 5] = [
            ("/run/credentials/guestlet.service/guestlet.hosts", b"unit"),
            ("/run/credentials/@system/guestlet.hosts", b"system"),
            ("/etc/credstore/guestlet.hosts", b"store"),
            ("/sys/firmware/qemu_fw_cfg/by_name/opt/io.systemd.credentials/guestlet.hosts/raw", b"fw_cfg"),
            (
                "/sys/firmware/qemu_fw_cfg/by_name/opt/io.systemd.credentials/guestlet.enroll/raw",
                TOKEN.as_bytes(),
            ),
        ];
        let strings = [
            "io.systemd.credential:guestlet.hosts=a = b",
            "something else",
            "io.systemd.credential:guestlet.hosts.more=not",
            "io.systemd.credential.binary:guestlet.hosts=YmluYXJ5",
        ];
        let (_folder, root) = guest(&files, &strings);
        let expected = [
            "/run/credentials/guestlet.service/guestlet.hosts=unit",
            "/run/credentials/@system/guestlet.hosts=system",
            "/etc/credstore/guestlet.hosts=store",
            "SMBIOS OEM string 1=a = b",
            "SMBIOS OEM string 4=binary",
            "/sys/firmware/qemu_fw_cfg/by_name/opt/io.systemd.credentials/guestlet.hosts/raw=fw_cfg",
        ];
        assert_eq!(told(&root), expected);
        let token = token(&root).unwrap().unwrap();
        assert_eq!(token, Token::from([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]));
        assert_eq!(format!("{token:?}"), "Token(…)");
    }

    #[test]
    fn what_is_wrong_is_told_with_its_place_and_the_rest_counts() {
        let large = vec![b'a'; MAX_LENGTH + 1];
        let files: [(&str, &[u8]); 2] = [
            ("/run/credentials/guestlet.service/guestlet.hosts/file", b"a folder"),
            ("/run/credentials/@system/guestlet.hosts", &large),
        ];
        let strings =
            ["io.systemd.credential.binary:guestlet.hosts=*", "io.systemd.credential:guestlet.hosts=good"];
        let (_folder, root) = guest(&files, &strings);
        let expected = [
            "! cannot read /run/credentials/guestlet.service/guestlet.hosts",
            "! /run/credentials/@system/guestlet.hosts: there are more than 65536 bytes",
            "! SMBIOS OEM string 1: it is not Base64, as io.systemd.credential.binary: requires",
            "SMBIOS OEM string 2=good",
        ];
        assert_eq!(told(&root), expected);
        let (_folder, root) = guest(&[(smbios::TABLE, b"\x0b\x05\0\0\x01io.sys")], &[]);
        assert_eq!(
            told(&root),
            [format!("! {}: the table ends within its OEM strings, at byte 11", smbios::TABLE)]
        );
        let (_folder, root) = guest(&[("/run/credentials/@system/guestlet.hosts", b"\xff")], &[]);
        assert_eq!(told(&root), ["! /run/credentials/@system/guestlet.hosts: it is not UTF-8"]);
    }

    #[test]
    fn a_token_is_what_was_printed_and_never_repeated() {
        for (text, is_good) in [
            (TOKEN, true),
            (&format!("{TOKEN}\n"), true),
            ("", false),
            (&TOKEN[1..], false),
            (&format!("{TOKEN}0"), false),
            (&format!("+{}", &TOKEN[1..]), false),
            (&TOKEN.replace('0', "g"), false),
        ] {
            let (_folder, root) =
                guest(&[("/run/credentials/@system/guestlet.enroll", text.as_bytes())], &[]);
            match token(&root) {
                Ok(Some(_)) => assert!(is_good, "{text}"),
                Ok(None) => panic!("{text}"),
                Err(said) => assert!(!is_good && !said.contains("0102030405"), "{text}: {said}"),
            }
        }
    }

    #[test]
    fn a_guest_that_is_safe_from_its_host_takes_nothing_of_it() {
        let strings = [
            "io.systemd.credential:guestlet.hosts=a",
            &format!("io.systemd.credential:guestlet.enroll={TOKEN}"),
        ];
        let files: [(&str, &[u8]); 3] = [
            ("/sys/devices/virtual/misc/sev-guest/dev", b"10:1"),
            ("/run/credentials/guestlet.service/guestlet.hosts", b"copied"),
            ("/etc/credstore/guestlet.hosts", b"own"),
        ];
        let (_folder, root) = guest(&files, &strings);
        let said = told(&root);
        assert_eq!(said.len(), 3, "{said:?}");
        assert!(
            said[0].contains("guestlet.service/guestlet.hosts is ignored: this VM is protected"),
            "{said:?}"
        );
        assert_eq!(said[1], "/etc/credstore/guestlet.hosts=own");
        assert!(said[2].contains("OEM string 1 is ignored: this VM is protected"), "{said:?}");
        assert!(token(&root).unwrap_err().contains("OEM string 2 is ignored"));
    }
}
