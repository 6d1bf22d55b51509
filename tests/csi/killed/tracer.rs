//! Ends a process with SIGKILL at one certain of the system calls by which it changes something: just before that call,
//! or just after it.

use std::collections::HashSet;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;

use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// What changes mounts, files, disks or programs. A write to a file is followed by one of these.
const EFFECTS: [libc::c_long; 28] = [
    libc::SYS_clone,
    libc::SYS_clone3,
    libc::SYS_fallocate,
    libc::SYS_fchmod,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_ioctl,
    libc::SYS_mkdirat,
    libc::SYS_mount,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_pwrite64,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_syncfs,
    libc::SYS_umount2,
    libc::SYS_unlinkat,
    MKDIR,
    RENAME,
    RMDIR,
    UNLINK,
];
#[cfg(target_arch = "x86_64")]
const MKDIR: libc::c_long = libc::SYS_mkdir;
#[cfg(target_arch = "x86_64")]
const RENAME: libc::c_long = libc::SYS_rename;
#[cfg(target_arch = "x86_64")]
const RMDIR: libc::c_long = libc::SYS_rmdir;
#[cfg(target_arch = "x86_64")]
const UNLINK: libc::c_long = libc::SYS_unlink;
/// Elsewhere there is only one way to say these.
#[cfg(not(target_arch = "x86_64"))]
const MKDIR: libc::c_long = libc::SYS_mkdirat;
#[cfg(not(target_arch = "x86_64"))]
const RENAME: libc::c_long = libc::SYS_renameat2;
#[cfg(not(target_arch = "x86_64"))]
const RMDIR: libc::c_long = libc::SYS_unlinkat;
#[cfg(not(target_arch = "x86_64"))]
const UNLINK: libc::c_long = libc::SYS_unlinkat;

/// The beginnings and ends of calls are told apart from signals, and threads that are started are watched.
const OPTIONS: usize = (libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACECLONE).unsigned_abs() as usize;

/// Counts while nobody is to be killed.
const NEVER: usize = usize::MAX;

#[derive(Default)]
struct Counter {
    /// Beginnings and ends of such calls since it was armed; 0 is not armed.
    seen: AtomicUsize,
    /// At which it is killed.
    at: AtomicUsize,
}

/// A process whose calls are watched. Dropping it kills the process.
pub struct Traced {
    process: Pid,
    counter: Arc<Counter>,
    thread: Option<JoinHandle<()>>,
}

impl Traced {
    /// Watches a process from now on. Its end is not told to its parent, but only to this.
    pub fn new(process: u32) -> Self {
        let process = Pid::from_raw(i32::try_from(process).unwrap());
        let counter = Arc::new(Counter::default());
        let (ready, is_ready) = channel();
        let shared = Arc::clone(&counter);
        // The kernel lets one thread watch, and it alone may say how it goes on.
        let thread = std::thread::spawn(move || {
            seize_all(process);
            ready.send(()).unwrap();
            watch(process, &shared);
        });
        is_ready.recv().unwrap();
        Self { process, counter, thread: Some(thread) }
    }

    /// Counts from now on, and kills the process at the call with this number, from 1 on; never if none is said.
    pub fn arm(&self, at: Option<usize>) {
        self.counter.at.store(at.unwrap_or(NEVER), Ordering::SeqCst);
        self.counter.seen.store(1, Ordering::SeqCst);
    }

    /// Counts no more; how many beginnings and ends of calls there were.
    pub fn disarm(&self) -> usize {
        self.counter.seen.swap(0, Ordering::SeqCst).saturating_sub(1)
    }

    /// How many there were until now.
    pub fn seen(&self) -> usize {
        self.counter.seen.load(Ordering::SeqCst).saturating_sub(1)
    }

    /// Whether the process was killed by this.
    pub fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        if !self.has_ended() {
            let _ = kill(self.process, Signal::SIGKILL);
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Watches all threads of a process, those that it starts meanwhile as well.
fn seize_all(process: Pid) {
    let mut seized = Vec::new();
    loop {
        let threads = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
        let threads = threads.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap());
        let new: Vec<libc::pid_t> = threads.filter(|thread| !seized.contains(thread)).collect();
        if new.is_empty() {
            return;
        }
        for thread in new {
            // One that a watched thread has started is watched already.
            if request(libc::PTRACE_SEIZE, thread, 0, OPTIONS) == 0 {
                request(libc::PTRACE_INTERRUPT, thread, 0, 0);
            }
            seized.push(thread);
        }
    }
}

fn watch(process: Pid, counter: &Counter) {
    let mut changing = HashSet::new();
    loop {
        let mut status = 0;
        // SAFETY: the kernel writes the status to where it is told.
        let thread = unsafe { libc::waitpid(-1, &raw mut status, libc::__WALL | libc::__WNOTHREAD) };
        if thread < 0 {
            // None is left.
            return;
        }
        if !libc::WIFSTOPPED(status) {
            continue;
        }
        let (signal, is_event) = (libc::WSTOPSIG(status), status >> 16 != 0);
        let is_call = signal == libc::SIGTRAP | 0x80;
        if is_call && is_effect(thread, &mut changing) && counter.seen.load(Ordering::SeqCst) > 0 {
            let number = counter.seen.fetch_add(1, Ordering::SeqCst);
            if number == counter.at.load(Ordering::SeqCst) {
                kill(process, Signal::SIGKILL).unwrap();
            }
        }
        let delivered = if is_call || is_event { 0 } else { signal };
        request(libc::PTRACE_SYSCALL, thread, 0, usize::try_from(delivered).unwrap());
    }
}

/// Whether the call that a thread begins or ends changes something. Which one ends the kernel does not say: `changing` are the
/// threads that are in one that does.
fn is_effect(thread: libc::pid_t, changing: &mut HashSet<libc::pid_t>) -> bool {
    // SAFETY: all bytes zero is a value of this type.
    let mut information: libc::ptrace_syscall_info = unsafe { std::mem::zeroed() };
    let size = size_of_val(&information);
    request(libc::PTRACE_GET_SYSCALL_INFO, thread, size, (&raw mut information) as usize);
    if information.op != libc::PTRACE_SYSCALL_INFO_ENTRY {
        return changing.remove(&thread);
    }
    // SAFETY: of a call that begins the kernel tells this part.
    let number = unsafe { information.u.entry.nr };
    let is_effect = EFFECTS.iter().any(|effect| u64::try_from(*effect) == Ok(number));
    if is_effect {
        changing.insert(thread);
    }
    is_effect
}

fn request(what: libc::c_uint, thread: libc::pid_t, address: usize, data: usize) -> libc::c_long {
    // SAFETY: what the kernel writes to is the caller's, and as large as it says.
    unsafe { libc::ptrace(what, thread, address as *mut c_void, data as *mut c_void) }
}
