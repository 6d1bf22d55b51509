//! Keys pressed on the terminal.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::AsFd as _;

use tokio::io::Interest;

use super::Sort;
use crate::sys::descriptor;

/// Ctrl-C, as a raw terminal passes it on.
const INTERRUPT: u8 = 3;

/// Keys pressed on the terminal at standard input.
pub struct Keys {
    terminal: File,
    left: Vec<u8>,
}

impl Keys {
    /// Starts to read keys.
    ///
    /// # Errors
    /// Fails if no further descriptor can be opened.
    pub fn open() -> io::Result<Self> {
        Ok(Self { terminal: io::stdin().as_fd().try_clone_to_owned()?.into(), left: Vec::new() })
    }

    /// Returns the next key; `None` if the terminal was closed.
    ///
    /// # Errors
    /// Fails if the terminal cannot be read.
    pub async fn next(&mut self) -> io::Result<Option<u8>> {
        if self.left.is_empty() {
            // Others may share the terminal, so it is not switched to non-blocking mode, and is read only when input is
            // available.
            descriptor::wait(self.terminal.as_fd(), Interest::READABLE).await?;
            let mut bytes = [0; 64];
            let length = self.terminal.read(&mut bytes)?;
            self.left = bytes.get(..length).unwrap_or_default().iter().rev().copied().collect();
        }
        Ok(self.left.pop())
    }

    /// Completes when the user ends the program; other keys are ignored.
    pub async fn until_quit(&mut self) {
        while let Ok(Some(key)) = self.next().await {
            if is_quit(key) {
                return;
            }
        }
    }
}

/// Returns whether this key ends the program.
pub fn is_quit(key: u8) -> bool {
    matches!(key, b'q' | b'Q' | INTERRUPT)
}

/// Returns the order that this key selects.
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
