//! fopen(3)'s names for what a file is opened for.

use std::str::FromStr;

use crate::sys::open::How;

/// What a file is opened for, as fopen(3) says it. `b` means nothing on Linux, and letters that are extensions of
/// some C library are not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mode(How);

impl Mode {
    /// `r`: to be read.
    pub const READ: Self =
        Self(How { read: true, write: false, append: false, truncate: false, create: false });

    /// For the call of the system.
    pub fn how(self) -> How {
        self.0
    }

    /// Whether the file can change by it.
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
