//! Queries of the vital product data of SCSI disks, where the kernel has not read it: INQUIRY (SCSI Primary
//! Commands, 6.6) by the `SG_IO` ioctl.

use std::io;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::ptr;

use nix::errno::Errno;

use crate::sys::block_device;

/// Command INQUIRY, with the bit that requests a page of vital product data.
const INQUIRY: u8 = 0x12;
const VITAL_PRODUCT_DATA: u8 = 1;
/// Requested number of bytes, far more than a disk returns.
const LONGEST: u16 = 1024;
/// Timeout of a request to the disk, in milliseconds.
const PATIENCE: u32 = 3000;

/// A page of the vital product data of the disk at `path`, with its header. May take longer than the disk is given, if the
/// kernel has to reset it.
///
/// # Errors
/// `EIO` if the disk has no such page, or does not answer in time; as open(2) and ioctl(2) give them.
pub fn page(path: &Path, page: u8) -> io::Result<Vec<u8>> {
    let device = block_device::open(path)?;
    let [high, low] = LONGEST.to_be_bytes();
    let command = [INQUIRY, VITAL_PRODUCT_DATA, page, high, low, 0];
    let mut answer = vec![0; usize::from(LONGEST)];
    let mut request = ioctl::Request {
        interface: i32::from(b'S'),
        direction: ioctl::FROM_DEVICE,
        command_length: 6,
        sense_room: 0,
        vectors: 0,
        length: u32::from(LONGEST),
        data: answer.as_mut_ptr(),
        command: command.as_ptr(),
        sense: ptr::null_mut(),
        patience: PATIENCE,
        flags: 0,
        id: 0,
        user: ptr::null_mut(),
        status: 0,
        masked_status: 0,
        message_status: 0,
        sense_length: 0,
        host_status: 0,
        driver_status: 0,
        left: 0,
        duration: 0,
        information: 0,
    };
    // SAFETY: the request is a `struct sg_io_hdr`, and what it points to is as long as it says and outlives the call.
    unsafe { ioctl::sg_io(device.as_raw_fd(), &raw mut request) }?;
    if request.status != 0 || request.host_status != 0 || request.driver_status != 0 {
        return Err(Errno::EIO.into());
    }
    let left = usize::try_from(request.left).unwrap_or_default();
    answer.truncate(answer.len().saturating_sub(left));
    // The second byte is the page's own number.
    if answer.get(1) == Some(&page) { Ok(answer) } else { Err(Errno::EIO.into()) }
}

/// Definitions of scsi/sg.h.
mod ioctl {
    use std::ffi::c_void;

    pub const FROM_DEVICE: i32 = -3;

    /// Request `struct sg_io_hdr`.
    #[repr(C)]
    pub struct Request {
        pub interface: i32,
        pub direction: i32,
        pub command_length: u8,
        pub sense_room: u8,
        pub vectors: u16,
        pub length: u32,
        pub data: *mut u8,
        pub command: *const u8,
        pub sense: *mut u8,
        pub patience: u32,
        pub flags: u32,
        pub id: i32,
        pub user: *mut c_void,
        pub status: u8,
        pub masked_status: u8,
        pub message_status: u8,
        pub sense_length: u8,
        pub host_status: u16,
        pub driver_status: u16,
        pub left: i32,
        pub duration: u32,
        pub information: u32,
    }

    nix::ioctl_readwrite_bad!(sg_io, 0x2285, Request);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_scsi_disk_has_no_page() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(page(file.path(), 0x80).unwrap_err().raw_os_error(), Some(Errno::ENOTBLK as i32));
        assert_eq!(page(Path::new("/nowhere"), 0x80).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
