//! The process's own memory.

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

use nix::libc;
use nix::sys::mman::{MmapAdvise, madvise};

use crate::sys::root::Root;

/// The largest block of memory that is kept when it is freed, in bytes.
#[cfg(target_env = "gnu")]
const KEPT_BLOCK: i32 = 4 << 20;

/// Mapped code that is worth being given back, in KiB.
const MUCH: u64 = 512;

/// Keeps freed memory at hand until [`give_back_freed`] is called: large buffers that come and go would otherwise be
/// asked of the kernel, which clears them, each time. Those of several MiB still are.
pub fn keep_freed() {
    #[cfg(target_env = "gnu")]
    for (parameter, value) in
        [(libc::M_ARENA_MAX, 1), (libc::M_MMAP_THRESHOLD, KEPT_BLOCK), (libc::M_TRIM_THRESHOLD, i32::MAX)]
    {
        // SAFETY: mallopt(3) takes two numbers, and these are within what it allows.
        if unsafe { libc::mallopt(parameter, value) } != 1 {
            tracing::debug!("mallopt({parameter}, {value}) is refused");
        }
    }
}

/// Gives memory that was freed back to the kernel. For when a large piece of work is done.
pub fn give_back_freed() {
    // SAFETY: malloc_trim(3) may be called at any time; it changes only memory that is free.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Program code that is seldom run, such as that of the start, and need not stay mapped.
#[derive(Debug)]
pub struct SeldomRun {
    /// What is mapped of files while the program idles, in KiB; not known since code was given back.
    idle: Option<u64>,
}

impl Default for SeldomRun {
    /// At first all that is mapped is that of the start.
    fn default() -> Self {
        Self { idle: Some(0) }
    }
}

impl SeldomRun {
    /// To be called now and then: gives code back if much of it has been mapped since an idle program was seen.
    pub fn look(&mut self, root: &Root) {
        let status = root.read("/proc/self/status").unwrap_or_default();
        let Some(mapped) = mapped_of_files(&String::from_utf8_lossy(&status)) else { return };
        match self.idle {
            None => self.idle = Some(mapped),
            Some(idle) if mapped > idle + MUCH => {
                give_back_code(root);
                self.idle = None;
            }
            Some(_) => {}
        }
    }
}

/// What of files is in memory, in KiB, as `proc_pid_status(5)` has it.
fn mapped_of_files(status: &str) -> Option<u64> {
    let value = status.lines().find_map(|line| line.strip_prefix("RssFile:"))?;
    value.trim().strip_suffix(" kB")?.parse().ok()
}

/// Unmaps the pages of program code that were run up to now, and that an idle program does not need. What is needed
/// is mapped again when it is run, from the page cache or the file. Where that is not possible nothing happens.
fn give_back_code(root: &Root) {
    let maps = root.read("/proc/self/maps").unwrap_or_default();
    for (start, length) in code(&String::from_utf8_lossy(&maps)) {
        let Some(address) = NonNull::new(std::ptr::with_exposed_provenance_mut::<c_void>(start.get())) else {
            continue;
        };
        // SAFETY: the range is a mapping of a file that is executable and not writable, so its pages are those of
        // the file, and reading them anew gives the same bytes (madvise(2), MADV_DONTNEED).
        if let Err(error) = unsafe { madvise(address, length, MmapAdvise::MADV_DONTNEED) } {
            tracing::debug!("cannot give back memory: {error}");
        }
    }
}

/// Start and length of each mapping of a file's code in `proc_pid_maps(5)`.
///
/// Only what is executable and not writable: the dynamic linker changes other pages and protects them later.
fn code(maps: &str) -> Vec<(NonZeroUsize, usize)> {
    let mapping = |line: &str| {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let (permissions, _offset, _device, inode) =
            (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
        let start = usize::from_str_radix(start, 16).ok()?;
        let length = usize::from_str_radix(end, 16).ok()?.checked_sub(start)?;
        (permissions == "r-xp" && inode != "0").then_some((NonZeroUsize::new(start)?, length))
    };
    maps.lines().filter_map(mapping).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_code_of_files_is_found() {
        let maps = "\
55d0c0a00000-55d0c0a5b000 r--p 00000000 fe:00 1311 /usr/bin/guestlet
55d0c0a5b000-55d0c0c70000 r-xp 0005b000 fe:00 1311 /usr/bin/guestlet
55d0c0d00000-55d0c0d30000 r--p 002d0000 fe:00 1311 /usr/bin/guestlet
55d0c0d30000-55d0c0d32000 rw-p 00300000 fe:00 1311 /usr/bin/guestlet
7f0000000000-7f0000021000 rwxp 00000000 fe:00 1311 /writable
7ffd3a5e6000-7ffd3a5e8000 r-xp 00000000 00:00 0 [vdso]
broken
";
        let found: Vec<_> = code(maps).into_iter().map(|(start, length)| (start.get(), length)).collect();
        assert_eq!(found, [(0x55d0_c0a5_b000, 0x21_5000)]);
    }

    #[test]
    fn the_program_goes_on_after_it() {
        give_back_code(&Root::default());
        assert_eq!("still here".len(), 10);
    }

    #[test]
    fn code_is_given_back_after_much_was_mapped() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        let status = root.path("/proc/self/status");
        std::fs::create_dir_all(status.parent().unwrap()).unwrap();
        let mut code = SeldomRun::default();
        let mut given_back = |mapped: u64| {
            #[allow(clippy::disallowed_methods, reason = "a test's file")]
            std::fs::write(&status, format!("VmRSS:\t    9000 kB\nRssFile:\t    {mapped} kB\n")).unwrap();
            code.look(&root);
            code.idle.is_none()
        };
        let looks = [(4100, true), (3000, false), (3500, false), (3513, true), (3100, false), (3200, false)];
        for (mapped, expected) in looks {
            assert_eq!(given_back(mapped), expected, "{mapped}");
        }
        assert_eq!(mapped_of_files("RssFile: x kB\n"), None);
    }
}
