//! Keys that are pressed.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::AsFd as _;

use tokio::io::Interest;

use super::Sort;
use crate::sys::descriptor;

/// Ctrl-C, as a raw terminal passes it on.
const INTERRUPT: u8 = 3;

/// The keys that are pressed on the terminal that is standard input.
pub struct Keys {
    terminal: File,
    left: Vec<u8>,
}

impl Keys {
    /// From now on.
    ///
    /// # Errors
    /// If there is no room for another descriptor.
    pub fn open() -> io::Result<Self> {
        Ok(Self { terminal: io::stdin().as_fd().try_clone_to_owned()?.into(), left: Vec::new() })
    }

    /// The next one; none if the terminal is gone.
    ///
    /// # Errors
    /// If it cannot be read.
    pub async fn next(&mut self) -> io::Result<Option<u8>> {
        if self.left.is_empty() {
            // Others may have the terminal, too: it is not made one that does not wait, and is read when something is there.
            descriptor::wait(self.terminal.as_fd(), Interest::READABLE).await?;
            let mut bytes = [0; 64];
            let length = self.terminal.read(&mut bytes)?;
            self.left = bytes.get(..length).unwrap_or_default().iter().rev().copied().collect();
        }
        Ok(self.left.pop())
    }

    /// Completes when somebody wants to end it; other keys are lost.
    pub async fn until_quit(&mut self) {
        while let Ok(Some(key)) = self.next().await {
            if is_quit(key) {
                return;
            }
        }
    }
}

/// Whether this key ends it.
pub fn is_quit(key: u8) -> bool {
    matches!(key, b'q' | b'Q' | INTERRUPT)
}

/// By what this key sorts.
pub fn sort(key: u8) -> Option<Sort> {
    Some(match key {
        b'c' => Sort::Cpu,
        b'm' => Sort::Memory,
        b'p' => Sort::Pressure,
        b'd' => Sort::Disk,
        b'n' => Sort::Network,
        b'f' => Sort::Full,
        b'a' => Sort::Name,
        _ => return None,
    })
}
