//! The moments at which a test kills the program, or has a file system hang.

use std::io;

/// Does nothing but in tests.
#[derive(Debug, Default, Clone)]
pub struct Steps {
    /// So many are done before.
    #[cfg(test)]
    left: Option<std::sync::Arc<std::sync::atomic::AtomicUsize>>,
    /// Nothing goes on while somebody holds it.
    #[cfg(test)]
    hangs: std::sync::Arc<std::sync::Mutex<()>>,
}

#[cfg(not(test))]
#[allow(clippy::unused_self, clippy::unnecessary_wraps, reason = "only a test's program is killed")]
impl Steps {
    /// Another step is done; `last` is what is half done where the program is killed.
    pub fn step(&self, _: impl FnOnce()) -> io::Result<()> {
        Ok(())
    }

    /// Waits for the file system.
    pub fn wait(&self) {}
}

#[cfg(test)]
impl Steps {
    /// Killed after so many.
    pub fn killed_after(steps: usize) -> Self {
        Self { left: Some(std::sync::Arc::new(steps.into())), ..Self::default() }
    }

    /// With a file system that hangs while somebody holds this.
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
