//! Parses mount options as people write them into flags of the kernel and options of the file system.

use nix::mount::MsFlags;

use crate::guest::volumes::Error;

/// Options that are flags, and those that clear a flag.
const FLAGS: &[(&str, MsFlags, bool)] = &[
    ("ro", MsFlags::MS_RDONLY, true),
    ("rw", MsFlags::MS_RDONLY, false),
    ("nosuid", MsFlags::MS_NOSUID, true),
    ("suid", MsFlags::MS_NOSUID, false),
    ("nodev", MsFlags::MS_NODEV, true),
    ("dev", MsFlags::MS_NODEV, false),
    ("noexec", MsFlags::MS_NOEXEC, true),
    ("exec", MsFlags::MS_NOEXEC, false),
    ("sync", MsFlags::MS_SYNCHRONOUS, true),
    ("async", MsFlags::MS_SYNCHRONOUS, false),
    ("dirsync", MsFlags::MS_DIRSYNC, true),
    ("noatime", MsFlags::MS_NOATIME, true),
    ("atime", MsFlags::MS_NOATIME, false),
    ("nodiratime", MsFlags::MS_NODIRATIME, true),
    ("diratime", MsFlags::MS_NODIRATIME, false),
    ("relatime", MsFlags::MS_RELATIME, true),
    ("norelatime", MsFlags::MS_RELATIME, false),
    ("strictatime", MsFlags::MS_STRICTATIME, true),
    ("nostrictatime", MsFlags::MS_STRICTATIME, false),
    ("lazytime", MsFlags::MS_LAZYTIME, true),
    ("nolazytime", MsFlags::MS_LAZYTIME, false),
];

/// Options that only concern /etc/fstab and its readers; ignored.
const IGNORED: &[&str] = &[
    "auto", "defaults", "group", "noauto", "nofail", "nogroup", "noowner", "nouser", "owner", "user",
    "users", "_netdev",
];

/// Options that are set in other ways, or never allowed.
const REFUSED: &[&str] = &[
    "bind",
    "loop",
    "move",
    "offset",
    "private",
    "rbind",
    "remount",
    "rprivate",
    "rshared",
    "rslave",
    "runbindable",
    "shared",
    "sizelimit",
    "slave",
    "unbindable",
];

/// Flags that an existing mount must match.
pub(super) const COMPARED: &[(&str, MsFlags)] = &[
    ("ro", MsFlags::MS_RDONLY),
    ("nosuid", MsFlags::MS_NOSUID),
    ("nodev", MsFlags::MS_NODEV),
    ("noexec", MsFlags::MS_NOEXEC),
];

/// Limit on the bytes of all options of a file system together: the kernel accepts one page.
const LONGEST: usize = 4000;

/// Parsed options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Mount flags of the kernel.
    pub flags: MsFlags,
    /// Options of the file system, separated by commas.
    pub data: String,
}

impl Options {
    /// Parses options. One string may hold several, separated by commas; later ones win.
    ///
    /// # Errors
    /// If one is not meant for mount(2), or contains invalid characters.
    pub fn parse(options: &[String], read_only: bool) -> Result<Self, Error> {
        let mut parsed = Self { flags: MsFlags::empty(), data: String::new() };
        // Commas within quotes do not separate options. Nobody needs that here, so an option with a quote is
        // refused.
        for option in options.iter().flat_map(|some| some.split(',')).filter(|option| !option.is_empty()) {
            parsed.add(option)?;
        }
        if read_only {
            parsed.flags.insert(MsFlags::MS_RDONLY);
        }
        if parsed.data.len() > LONGEST {
            return Err(Error::wrong("the mount options", "are too long"));
        }
        Ok(parsed)
    }

    fn add(&mut self, option: &str) -> Result<(), Error> {
        let name = option.split('=').next().unwrap_or_default();
        let refuse = |problem| Err(Error::wrong(format!("the mount option {option:?}"), problem));
        if option.chars().any(|character| character.is_control() || character == '"') {
            return refuse("has a quote or a control character");
        }
        if REFUSED.contains(&name) {
            return refuse("cannot be used here");
        }
        if let Some((_, flag, set)) = FLAGS.iter().find(|(known, ..)| *known == option) {
            self.flags.set(*flag, *set);
        } else if !IGNORED.contains(&name) && !name.starts_with("x-") && name != "comment" {
            self.own(option);
        }
        Ok(())
    }

    /// Returns the part of the file system that is mounted, without a leading slash; empty for all of it.
    pub(super) fn subvolume(&self) -> &str {
        let named = self.data.split(',').find_map(|option| option.strip_prefix("subvol="));
        named.unwrap_or_default().trim_start_matches('/')
    }

    /// Adds an option of the file system, unless it is present.
    pub fn own(&mut self, option: &str) {
        if self.data.split(',').any(|known| known == option) {
            return;
        }
        if !self.data.is_empty() {
            self.data.push(',');
        }
        self.data.push_str(option);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(options: &[&str], read_only: bool) -> Result<Options, Error> {
        let options: Vec<_> = options.iter().map(|&option| option.to_owned()).collect();
        Options::parse(&options, read_only)
    }

    #[test]
    fn options_are_parted() {
        let parsed = parse(
            &["defaults,noatime", "discard", "ro,x-systemd.automount", "rw", "commit=5,discard"],
            false,
        );
        let expected = Options { flags: MsFlags::MS_NOATIME, data: "discard,commit=5".to_owned() };
        assert_eq!(parsed.unwrap(), expected);
        assert_eq!(parse(&["rw"], true).unwrap().flags, MsFlags::MS_RDONLY);
        for refused in ["bind", "remount,ro", "loop=/dev/loop0", "a\"b", "a\nb", "rshared"] {
            let error = parse(&[refused], false).unwrap_err().to_string();
            assert!(error.starts_with("the mount option "), "{error}");
        }
        parse(&[&"x".repeat(LONGEST + 1)], false).unwrap_err();
    }

    proptest! {
        #[test]
        fn any_text_will_do(options: Vec<String>) {
            if let Ok(parsed) = Options::parse(&options, false) {
                prop_assert!(parsed.data.len() <= LONGEST);
            }
        }
    }
}
