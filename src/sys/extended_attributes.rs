//! Extended attributes of files, xattr(7).

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use nix::libc;

/// Bytes of the names of all attributes of a file, and of one value, as the kernel bounds them.
const MAX_NAMES: usize = 64 << 10;
const MAX_VALUE: usize = 64 << 10;

/// The attributes of the file at a path, as far as `wanted` says so, at most so many bytes of them. The last link of the path is
/// followed. A file system that has none has none.
///
/// # Errors
/// As listxattr(2) and getxattr(2); `E2BIG` if there are more.
pub fn all(path: &Path, wanted: impl Fn(&[u8]) -> bool, most: usize) -> io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut names = vec![0_u8; MAX_NAMES];
    // SAFETY: the path is a string of C, and the kernel writes at most as many bytes as the buffer has.
    let length = unsafe { libc::listxattr(path.as_ptr(), names.as_mut_ptr().cast(), names.len()) };
    let Ok(length) = usize::try_from(length) else {
        let error = io::Error::last_os_error();
        return if error.raw_os_error() == Some(libc::EOPNOTSUPP) { Ok(Vec::new()) } else { Err(error) };
    };
    names.truncate(length);
    let (mut found, mut total) = (Vec::new(), 0);
    for name in names.split(|byte| *byte == 0).filter(|name| !name.is_empty() && wanted(name)) {
        let c_name = CString::new(name)?;
        let mut value = vec![0_u8; MAX_VALUE];
        // SAFETY: as above, with two strings.
        let length =
            unsafe { libc::getxattr(path.as_ptr(), c_name.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
        let Ok(length) = usize::try_from(length) else {
            let error = io::Error::last_os_error();
            // The attribute was removed meanwhile.
            if error.raw_os_error() == Some(libc::ENODATA) {
                continue;
            }
            return Err(error);
        };
        value.truncate(length);
        total += name.len() + length;
        if total > most {
            return Err(io::Error::from_raw_os_error(libc::E2BIG));
        }
        value.shrink_to_fit();
        found.push((name.to_vec(), value));
    }
    Ok(found)
}

/// Sets an attribute of an open file.
///
/// # Errors
/// As fsetxattr(2).
pub fn set(file: impl AsFd, name: &[u8], value: &[u8]) -> io::Result<()> {
    let name = CString::new(name)?;
    let descriptor = file.as_fd().as_raw_fd();
    // SAFETY: the name is a string of C, and the kernel reads as many bytes of the value as there are.
    let set = unsafe { libc::fsetxattr(descriptor, name.as_ptr(), value.as_ptr().cast(), value.len(), 0) };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Copies the `SELinux` label of one file to another, as far as the policy allows it: a file that replaces
/// another should have the same label. Does nothing where `SELinux` is not in use.
pub fn copy_security_label(from: impl AsFd, to: impl AsFd) {
    const LABEL: &CStr = c"security.selinux";
    let mut label = [0_u8; 1024];
    let from = from.as_fd().as_raw_fd();
    // SAFETY: the name is a string of C, and the kernel writes at most as many bytes as the buffer has.
    let length = unsafe { libc::fgetxattr(from, LABEL.as_ptr(), label.as_mut_ptr().cast(), label.len()) };
    let Ok(length @ 1..) = usize::try_from(length) else { return };
    let label = &label[..length.min(label.len())];
    // SAFETY: as above; the kernel reads as many bytes as there are.
    let set = unsafe {
        libc::fsetxattr(to.as_fd().as_raw_fd(), LABEL.as_ptr(), label.as_ptr().cast(), label.len(), 0)
    };
    if set != 0 {
        tracing::debug!("cannot copy an SELinux label: {}", io::Error::last_os_error());
    }
}
