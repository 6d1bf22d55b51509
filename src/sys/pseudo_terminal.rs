//! The end of a pseudo-terminal whose controlling end another program has.

use std::io;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::path::Path;

use nix::fcntl::{OFlag, open};
use nix::sys::stat::{Mode, fstat, major};

/// Pseudo-terminals are below this.
const PLACE: &str = "/dev/pts/";
/// The numbers of their driver, by which the kernel knows them.
const MAJORS: RangeInclusive<u64> = 136..=143;

/// Opens the pseudo-terminal at `path`, if it belongs to this user. It does not become a controlling terminal,
/// and does not block.
///
/// # Errors
/// `InvalidInput` if it is not a pseudo-terminal, `PermissionDenied` if it belongs to another user; otherwise
/// the errors of open(2).
pub fn open_of(path: &Path, owner: u32) -> io::Result<OwnedFd> {
    let no_terminal = || io::Error::new(io::ErrorKind::InvalidInput, "it is not a pseudo-terminal");
    let number = path.to_str().and_then(|path| path.strip_prefix(PLACE));
    if !number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())) {
        return Err(no_terminal());
    }
    let flags = OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_NONBLOCK | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let terminal = open(path, flags, Mode::empty())?;
    let found = fstat(&terminal)?;
    if !MAJORS.contains(&major(found.st_rdev)) {
        return Err(no_terminal());
    }
    if found.st_uid != owner {
        let words =
            format!("it belongs to the user {}, and the hypervisor runs as the user {owner}", found.st_uid);
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, words));
    }
    Ok(terminal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_terminal_of_that_user_is_opened() {
        let pair = nix::pty::openpty(None, None).unwrap();
        let path = nix::unistd::ttyname(&pair.slave).unwrap();
        let own = nix::unistd::geteuid().as_raw();
        open_of(&path, own).unwrap();
        assert_eq!(open_of(&path, own + 1).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        for other in ["/dev/null", "/dev/pts/", "/dev/pts/ptmx", "/dev/pts/../null", "/dev/pts/+1", "pts/1"] {
            let error = open_of(Path::new(other), own).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{other}");
        }
        assert!(open_of(Path::new("/dev/pts/99999999"), own).is_err());
    }
}
