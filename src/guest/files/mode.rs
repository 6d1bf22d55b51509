//! Modes for opening a file, in the notation of fopen(3).

use std::str::FromStr;

use crate::sys::open::How;

/// Mode to open a file with, as in fopen(3). `b` has no effect on Linux; extensions of particular C libraries are
/// not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mode(How);

impl Mode {
    /// Mode `r`: for reading only.
    pub const READ: Self =
        Self(How { read: true, write: false, append: false, truncate: false, create: false });

    /// Returns the flags for open(2).
    pub fn how(self) -> How {
        self.0
    }

    /// Returns whether the file can be changed in this mode.
    pub fn writes(self) -> bool {
        self.0.write
    }
}

impl FromStr for Mode {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        let (kind, more) = name.split_at_checked(1).ok_or(())?;
        let both = match more {
            "" | "b" => false,
            "+" | "+b" | "b+" => true,
            _ => return Err(()),
        };
        let how = match kind {
            "r" => How { read: true, write: both, ..How::default() },
            "w" => How { read: both, write: true, truncate: true, create: true, ..How::default() },
            "a" => How { read: both, write: true, append: true, create: true, ..How::default() },
            _ => return Err(()),
        };
        Ok(Self(how))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes() {
        // read, write, append, truncate and create
        let cases = [
            (["r", "rb", "rb"], "r----"),
            (["r+", "rb+", "r+b"], "rw---"),
            (["w", "wb", "wb"], "-w-tc"),
            (["w+", "wb+", "w+b"], "rw-tc"),
            (["a", "ab", "ab"], "-wa-c"),
            (["a+", "ab+", "a+b"], "rwa-c"),
        ];
        for (names, flags) in cases {
            for name in names {
                let how = name.parse::<Mode>().unwrap().how();
                let letters = [
                    (how.read, 'r'),
                    (how.write, 'w'),
                    (how.append, 'a'),
                    (how.truncate, 't'),
                    (how.create, 'c'),
                ];
                let found: String =
                    letters.iter().map(|(on, letter)| if *on { *letter } else { '-' }).collect();
                assert_eq!(found, flags, "{name}");
            }
        }
        for name in ["", "x", "rw", "R", "wx", "re", "r+e", "r++", "rbb", "b", "+", "r ", "ä"] {
            assert_eq!(name.parse::<Mode>(), Err(()), "{name}");
        }
    }
}
