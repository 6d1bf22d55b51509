//! Points at which a test kills the program, or makes a file system hang.

use std::io;

/// Hooks for tests; does nothing otherwise.
#[derive(Debug, Default, Clone)]
pub struct Steps {
    /// Number of steps that are left before the kill.
    #[cfg(test)]
    left: Option<std::sync::Arc<std::sync::atomic::AtomicUsize>>,
    /// Lock that makes every step wait while a test holds it.
    #[cfg(test)]
    hangs: std::sync::Arc<std::sync::Mutex<()>>,
}

#[cfg(not(test))]
#[allow(clippy::unused_self, clippy::unnecessary_wraps, reason = "only a test's program is killed")]
impl Steps {
    /// Marks the completion of a step. `last` is run if the program is killed here, and does half of the next step.
    pub fn step(&self, _: impl FnOnce()) -> io::Result<()> {
        Ok(())
    }

    /// Waits for the file system.
    pub fn wait(&self) {}
}

#[cfg(test)]
impl Steps {
    /// Creates hooks that kill the program after this number of steps.
    pub fn killed_after(steps: usize) -> Self {
        Self { left: Some(std::sync::Arc::new(steps.into())), ..Self::default() }
    }

    /// Creates hooks whose file system hangs while this lock is held.
    pub fn hanging(hangs: std::sync::Arc<std::sync::Mutex<()>>) -> Self {
        Self { hangs, ..Self::default() }
    }

    pub fn step(&self, last: impl FnOnce()) -> io::Result<()> {
        use std::sync::atomic::Ordering::SeqCst;
        self.wait();
        let Some(left) = &self.left else { return Ok(()) };
        if left.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok() {
            return Ok(());
        }
        last();
        Err(io::Error::other("killed"))
    }

    pub fn wait(&self) {
        drop(self.hangs.lock());
    }
}
