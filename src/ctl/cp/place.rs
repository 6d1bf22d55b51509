//! Source or destination of a copy, as typed on the command line. Pure.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;

/// Location of a file or directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// Path on this machine.
    Here(Vec<u8>),
    /// Path in the guest of a VM.
    Guest {
        /// Name of the VM.
        vm: String,
        /// Path in the guest.
        path: Vec<u8>,
    },
    /// Standard input or output.
    Standard,
}

impl Place {
    /// Parses `VM:PATH`, a path, or `-`. A text with a "/" before the first ":" is a path on this machine.
    ///
    /// # Errors
    /// Fails if the name of the VM or the path is empty, or the name is not valid UTF-8.
    pub fn parse(typed: OsString) -> Result<Self, String> {
        let bytes = typed.into_vec();
        if bytes == b"-" {
            return Ok(Self::Standard);
        }
        let colon = bytes.iter().position(|byte| *byte == b':');
        let slash = bytes.iter().position(|byte| *byte == b'/');
        match colon {
            Some(colon) if slash.is_none_or(|slash| colon < slash) => {
                let (vm, path) = (&bytes[..colon], &bytes[colon + 1..]);
                let vm = std::str::from_utf8(vm).map_err(|_| "the name of the VM is not UTF-8".to_owned())?;
                if vm.is_empty() {
                    return Err(
                        "there is no name of a VM before \":\"; write ./:… for a file here".to_owned()
                    );
                }
                if path.is_empty() {
                    return Err(format!("there is no path after \"{vm}:\", such as {vm}:/etc/hosts"));
                }
                Ok(Self::Guest { vm: vm.to_owned(), path: path.to_vec() })
            }
            _ if bytes.is_empty() => Err("a path is empty".to_owned()),
            _ => Ok(Self::Here(bytes)),
        }
    }

    /// Returns the name of the VM, if the location is in a guest.
    pub fn vm(&self) -> Option<&str> {
        match self {
            Self::Guest { vm, .. } => Some(vm),
            _ => None,
        }
    }

    /// Returns the path in the form in which its end is requested.
    pub fn path(&self) -> &[u8] {
        match self {
            Self::Here(path) | Self::Guest { path, .. } => path,
            Self::Standard => b"-",
        }
    }

    /// Returns the location as shown to people.
    pub fn words(&self) -> String {
        match self {
            Self::Here(path) => shown(path),
            Self::Guest { vm, path } => format!("{vm}:{}", shown(path)),
            Self::Standard => "-".to_owned(),
        }
    }

    /// Returns whether it was typed as a directory.
    pub fn is_directory(&self) -> bool {
        *self != Self::Standard && self.path().ends_with(b"/")
    }
}

/// Escapes a name for people: characters that would move the cursor of a terminal, and bytes that are not
/// valid UTF-8.
pub fn shown(name: &[u8]) -> String {
    use std::fmt::Write as _;

    let mut text = String::new();
    for chunk in name.utf8_chunks() {
        for one in chunk.valid().chars() {
            if one.is_control()
                || matches!(one, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
            {
                text.extend(one.escape_default());
            } else {
                text.push(one);
            }
        }
        for byte in chunk.invalid() {
            // Writing to a String cannot fail.
            let _ = write!(text, "\\x{byte:02x}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_colon_before_any_slash_is_of_a_guest() {
        let parse = |typed: &str| Place::parse(typed.into());
        let guest = |vm: &str, path: &[u8]| Ok(Place::Guest { vm: vm.into(), path: path.to_vec() });
        assert_eq!(parse("web-1:/etc/hosts"), guest("web-1", b"/etc/hosts"));
        assert_eq!(parse("web-1:a:b"), guest("web-1", b"a:b"));
        for here in ["./a:b", "/x:y", "file", "a/b:c"] {
            assert_eq!(parse(here), Ok(Place::Here(here.as_bytes().to_vec())), "{here}");
        }
        assert_eq!(parse("-"), Ok(Place::Standard));
        for wrong in ["", ":/etc", "web-1:"] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }

    proptest! {
        #[test]
        fn nothing_that_is_shown_moves_the_cursor(name in proptest::collection::vec(any::<u8>(), 0..40)) {
            prop_assert!(!shown(&name).chars().any(char::is_control));
        }
    }
}
