//! Terminals: pairs for programs that are started, and the one that a person sits at.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};

use nix::libc;
use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};

/// Size of a terminal in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Size {
    /// Number of rows.
    pub rows: u16,
    /// Number of columns.
    pub columns: u16,
}

/// Opens a new pseudo-terminal of this size: the controlling end, which does not block, and the program's end.
///
/// # Errors
/// The errors of pty(7).
#[cfg(feature = "agent")]
pub fn open(size: Size) -> io::Result<(OwnedFd, OwnedFd)> {
    use nix::fcntl::{OFlag, open};
    use nix::pty::{grantpt, posix_openpt, ptsname_r, unlockpt};
    use nix::sys::stat::Mode;

    let flags = OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    let controller = posix_openpt(flags | OFlag::O_NONBLOCK)?;
    grantpt(&controller)?;
    unlockpt(&controller)?;
    let terminal = open(ptsname_r(&controller)?.as_str(), flags, Mode::empty())?;
    let controller = OwnedFd::from(controller);
    set_size(&controller, size)?;
    Ok((controller, terminal))
}

/// Sets the size of a terminal; its foreground programs are notified by SIGWINCH.
///
/// # Errors
/// If the descriptor is not a terminal.
#[cfg(feature = "agent")]
pub fn set_size(terminal: impl AsFd, size: Size) -> io::Result<()> {
    let size = libc::winsize { ws_row: size.rows, ws_col: size.columns, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the kernel reads a winsize, which lives here.
    let done = unsafe { libc::ioctl(terminal.as_fd().as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns the size of a terminal.
///
/// # Errors
/// If the descriptor is not a terminal.
pub fn size(terminal: impl AsFd) -> io::Result<Size> {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the kernel fills in a winsize, which lives here.
    let done = unsafe { libc::ioctl(terminal.as_fd().as_raw_fd(), libc::TIOCGWINSZ, &raw mut size) };
    if done == 0 {
        Ok(Size { rows: size.ws_row, columns: size.ws_col })
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Returns the foreground process group of a terminal, given its controlling end.
#[cfg(feature = "agent")]
pub fn foreground(controller: impl AsFd) -> Option<nix::unistd::Pid> {
    nix::unistd::tcgetpgrp(controller.as_fd()).ok().filter(|group| group.as_raw() > 0)
}

/// A terminal whose settings are others until this is dropped: then they are as they were before.
#[derive(Debug)]
pub struct Changed {
    terminal: OwnedFd,
    before: Termios,
    when: SetArg,
}

impl Changed {
    /// Sets raw mode, in which each key is passed on as it is pressed.
    ///
    /// # Errors
    /// If the descriptor is not a terminal.
    pub fn raw(terminal: impl AsFd) -> io::Result<Self> {
        Self::make(terminal, SetArg::TCSADRAIN, cfmakeraw)
    }

    /// Turns off the echo of input, except for line ends, and discards earlier input. No key sends a signal, and
    /// `end` ends a line as the Enter key does.
    ///
    /// # Errors
    /// If the descriptor is not a terminal.
    #[cfg(feature = "ctl")]
    pub fn silent(terminal: impl AsFd, end: u8) -> io::Result<Self> {
        use nix::sys::termios::{LocalFlags, SpecialCharacterIndices};

        Self::make(terminal, SetArg::TCSAFLUSH, |settings| {
            settings.local_flags.remove(LocalFlags::ECHO | LocalFlags::ISIG);
            settings.local_flags.insert(LocalFlags::ECHONL);
            settings.control_chars[SpecialCharacterIndices::VEOL as usize] = end;
        })
    }

    fn make(terminal: impl AsFd, when: SetArg, change: impl FnOnce(&mut Termios)) -> io::Result<Self> {
        let terminal = terminal.as_fd().try_clone_to_owned()?;
        let before = tcgetattr(&terminal)?;
        let mut settings = before.clone();
        change(&mut settings);
        tcsetattr(&terminal, when, &settings)?;
        Ok(Self { terminal, before, when })
    }
}

impl Drop for Changed {
    fn drop(&mut self) {
        // The terminal may have been closed.
        let _ = tcsetattr(&self.terminal, self.when, &self.before);
    }
}

#[cfg(all(test, feature = "agent"))]
mod tests {
    use nix::sys::termios::LocalFlags;

    use super::*;

    #[test]
    fn a_terminal_has_its_size_and_is_as_before_after_it_was_raw() {
        let wanted = Size { rows: 31, columns: 101 };
        let (controller, terminal) = open(wanted).unwrap();
        assert_eq!(size(&terminal).unwrap(), wanted);
        set_size(&controller, Size::default()).unwrap();
        assert_eq!(size(&terminal).unwrap(), Size::default());
        let echoes = || tcgetattr(&terminal).unwrap().local_flags.contains(LocalFlags::ECHO);
        assert!(echoes());
        let raw = Changed::raw(&terminal).unwrap();
        assert!(!echoes());
        drop(raw);
        assert!(echoes());
        assert_eq!(foreground(&controller), None, "nobody has it as controlling terminal");
        let (reader, _writer) = io::pipe().unwrap();
        assert!(size(&reader).is_err() && Changed::raw(&reader).is_err());
    }
}
