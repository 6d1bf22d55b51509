//! The process's own memory.

use std::ffi::{CStr, c_void};
use std::io;
use std::ptr::NonNull;

use nix::libc;
use nix::unistd::{SysconfVar, sysconf};

/// The largest block of memory that is kept when it is freed, in bytes.
#[cfg(target_env = "gnu")]
const KEPT_BLOCK: i32 = 4 << 20;

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

/// Keeps in memory what has been used, and will be used, of the code of the program and of its libraries, and of what that
/// reads: who is short of memory throws it away first, and then each call waits for a disk that may hang. What is never
/// used is not read. Where that is not allowed nothing happens.
pub fn keep_code() {
    lock(|address, length| {
        // SAFETY: mlock2(2) changes nothing but where pages are kept, and these are mapped as long as the program runs.
        unsafe { libc::mlock2(address.as_ptr(), length, libc::MLOCK_ONFAULT) }
    });
}

/// Reads all code of the program and locks it in memory, for an operation during which the disk may not
/// respond. Blocks on the disk that the program is on.
pub fn bring_code() {
    lock(|address, length| {
        // SAFETY: as with mlock2(2).
        unsafe { libc::mlock(address.as_ptr(), length) }
    });
}

fn lock(lock: impl Fn(NonNull<c_void>, usize) -> i32) {
    for (address, length) in unwritten() {
        if lock(address, length) != 0 {
            tracing::debug!("cannot keep code in memory: {}", io::Error::last_os_error());
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

    /// KiB of this program's code, those of them that are in memory, and whether they are kept there.
    fn code() -> (u64, u64, bool) {
        #[allow(clippy::disallowed_methods, reason = "a test")]
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let own = std::env::current_exe().unwrap();
        let starts = |line: &&str| line.contains(" r-xp ") && line.ends_with(own.to_str().unwrap());
        let mut lines = maps.lines();
        let mut found = Vec::new();
        while lines.by_ref().any(|line| starts(&line)) {
            let mut value = |key: &str| lines.by_ref().find_map(|line| line.strip_prefix(key)).unwrap();
            let number = |text: &str| text.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
            let (size, resident) = (number(value("Size:")), number(value("Rss:")));
            found.push((size, resident, value("VmFlags:").split(' ').any(|flag| flag == "lo")));
        }
        found.into_iter().max().unwrap()
    }

    #[test]
    fn code_is_kept_as_it_is_used_and_all_of_it_is_brought() {
        keep_code();
        let (size, before, kept) = code();
        assert!(kept && before <= size, "{before} of {size}");
        bring_code();
        let (size, resident, kept) = code();
        assert!(kept && resident == size, "{resident} of {size}");
    }

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
        assert_eq!((MUTABLE.load(Ordering::Relaxed), WORDS.concat().as_str()), (7, "onetwo"));
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
}
