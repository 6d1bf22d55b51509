//! The process's own memory.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use nix::libc;
use nix::sys::mman::{MmapAdvise, madvise};
use nix::unistd::{SysconfVar, sysconf};

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
                give_back_code();
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

/// Unmaps the pages of the program and of its libraries that are never written to: code that was run up to now, and what
/// it read, which an idle program does not need. What is needed is mapped again when it is used, from the page cache or
/// the file. Where that is not possible nothing happens.
pub fn give_back_code() {
    for (address, length) in unwritten() {
        // SAFETY: the range is within a mapping of a file that is never writable, so its pages are those of the file,
        // and reading them anew gives the same bytes (madvise(2), MADV_DONTNEED).
        if let Err(error) = unsafe { madvise(address, length, MmapAdvise::MADV_DONTNEED) } {
            tracing::debug!("cannot give back memory: {error}");
        }
    }
}

/// The kernel's own, which is of no file.
const VDSO: &[u8] = b"linux-vdso";

/// Start and length of all segments of the program and of its libraries that are not writable, in whole pages.
///
/// What the dynamic linker changes and protects later is in segments that are writable (`dl_iterate_phdr(3)`, elf(5)).
fn unwritten() -> Vec<(NonNull<c_void>, usize)> {
    type Found = (usize, Vec<(NonNull<c_void>, usize)>);

    unsafe extern "C" fn object(
        information: *mut libc::dl_phdr_info,
        _: libc::size_t,
        found: *mut c_void,
    ) -> libc::c_int {
        // SAFETY: the linker gives a description that lives as long as the call, with a name and so many headers, and
        // passes on what `unwritten` has given it.
        let (information, (page, found)) = unsafe { (&*information, &mut *found.cast::<Found>()) };
        let (name, headers) = (information.dlpi_name, information.dlpi_phdr);
        if headers.is_null()
            // SAFETY: as above.
            || !name.is_null() && unsafe { CStr::from_ptr(name) }.to_bytes().starts_with(VDSO)
        {
            return 0;
        }
        // SAFETY: as above.
        let headers = unsafe { std::slice::from_raw_parts(headers, information.dlpi_phnum.into()) };
        for header in headers {
            if header.p_type != libc::PT_LOAD || header.p_flags & libc::PF_W != 0 {
                continue;
            }
            let start = information.dlpi_addr.wrapping_add(header.p_vaddr);
            let parts = usize::try_from(start).ok().zip(usize::try_from(header.p_memsz).ok());
            found.extend(parts.and_then(|(start, length)| whole_pages(start, length, *page)));
        }
        0
    }

    let Ok(Some(page)) = sysconf(SysconfVar::PAGE_SIZE) else { return Vec::new() };
    let mut found: Found = (page.unsigned_abs().try_into().unwrap_or(usize::MAX), Vec::new());
    // SAFETY: `object` takes what it is given here, and nothing else has it meanwhile.
    unsafe { libc::dl_iterate_phdr(Some(object), (&raw mut found).cast()) };
    found.1
}

/// The pages of so many bytes that are within a range, if there are any.
fn whole_pages(start: usize, length: usize, page: usize) -> Option<(NonNull<c_void>, usize)> {
    let first = start.checked_next_multiple_of(page)?;
    let end = start.checked_add(length)? / page * page;
    let address = NonNull::new(std::ptr::with_exposed_provenance_mut::<c_void>(first))?;
    let length = end.checked_sub(first).filter(|length| *length > 0)?;
    Some((address, length))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn only_what_is_never_written_is_found() {
        static MUTABLE: AtomicUsize = AtomicUsize::new(7);
        // The dynamic linker writes the addresses of the words.
        static WORDS: [&str; 2] = ["one", "two"];
        let ranges = unwritten();
        let is_found = |place: *const c_void| {
            let within = |(start, length): &(NonNull<c_void>, usize)| {
                (start.addr().get()..start.addr().get() + length).contains(&place.addr())
            };
            ranges.iter().any(within)
        };
        assert!(is_found(unwritten as fn() -> Vec<_> as *const c_void) && is_found(VDSO.as_ptr().cast()));
        assert!(is_found(libc::malloc as unsafe extern "C" fn(usize) -> *mut c_void as *const c_void));
        assert!(!is_found((&raw const MUTABLE).cast()) && !is_found((&raw const WORDS).cast()));
        // SAFETY: getauxval(3) may be called at any time.
        let vdso = usize::try_from(unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) }).unwrap();
        assert!(vdso == 0 || !is_found(std::ptr::without_provenance(vdso)));
        give_back_code();
        assert_eq!(
            (MUTABLE.load(Ordering::Relaxed), WORDS.concat().as_str(), VDSO),
            (7, "onetwo", b"linux-vdso".as_slice())
        );
    }

    #[test]
    fn pages_that_are_wholly_within_a_range() {
        let pages = |start, length| {
            whole_pages(start, length, 4096).map(|(first, length)| (first.addr().get(), length))
        };
        assert_eq!(pages(0x1000, 0x3000), Some((0x1000, 0x3000)));
        assert_eq!(pages(0x1001, 0x3000), Some((0x2000, 0x2000)));
        assert_eq!(pages(0x1001, 0x1ffe), None);
        assert_eq!((pages(0x1000, 0), pages(usize::MAX, 1), pages(1, usize::MAX)), (None, None, None));
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
