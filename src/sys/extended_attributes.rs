//! Extended attributes of files, xattr(7).

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd as _};

use nix::libc;

/// Gives one file the `SELinux` label of another, as far as the policy lets it: a file that replaces another should be
/// to everybody what that was. Without `SELinux` there is none.
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
        tracing::debug!("cannot copy an SELinux label: {}", std::io::Error::last_os_error());
    }
}
