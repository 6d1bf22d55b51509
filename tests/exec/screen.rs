//! A terminal at which somebody sits, made of a pseudo-terminal.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::Child;
use std::sync::{Arc, Mutex};

use guestlet::sys::terminal::{self, Size};
use nix::sys::termios::{LocalFlags, tcgetattr};

use crate::lab::until;

/// guestctl on a terminal, and what has come out of that.
pub struct Screen {
    pub child: Child,
    keys: File,
    pub terminal: OwnedFd,
    seen: Arc<Mutex<String>>,
}

impl Screen {
    pub fn of(mut command: std::process::Command, size: Size) -> Self {
        let (controller, terminal) = terminal::open(size).unwrap();
        let flags = nix::fcntl::OFlag::empty();
        nix::fcntl::fcntl(&controller, nix::fcntl::FcntlArg::F_SETFL(flags)).unwrap();
        for stream in [0, 1, 2] {
            let end = std::process::Stdio::from(terminal.try_clone().unwrap());
            match stream {
                0 => command.stdin(end),
                1 => command.stdout(end),
                _ => command.stderr(end),
            };
        }
        let child = command.env("TERM", "xterm").spawn().unwrap();
        let keys = File::from(controller);
        let seen = Arc::new(Mutex::new(String::new()));
        let (mut screen, all) = (keys.try_clone().unwrap(), Arc::clone(&seen));
        std::thread::spawn(move || {
            let mut part = [0; 4096];
            while let Ok(length @ 1..) = screen.read(&mut part) {
                all.lock().unwrap().push_str(&String::from_utf8_lossy(&part[..length]));
            }
        });
        Self { child, keys, terminal, seen }
    }

    pub fn type_keys(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    /// Kills guestctl, which can tell nobody then.
    #[allow(dead_code, reason = "each test program uses a part of it")]
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Forgets what has been seen.
    #[allow(dead_code, reason = "each test program uses a part of it")]
    pub fn clear(&self) {
        self.seen.lock().unwrap().clear();
    }

    pub fn until(&self, words: &str) {
        until(&format!("{words:?} in {:?}", self.seen.lock().unwrap()), || {
            self.seen.lock().unwrap().contains(words)
        });
    }

    pub fn is_raw(&self) -> bool {
        !tcgetattr(&self.terminal).unwrap().local_flags.contains(LocalFlags::ICANON)
    }

    /// What has been seen.
    #[allow(dead_code, reason = "each test program uses a part of it")]
    pub fn seen(&self) -> String {
        self.seen.lock().unwrap().clone()
    }

    /// The exit code of guestctl, once that has ended.
    pub fn code(&mut self) -> Option<i32> {
        let code = crate::host::wait(&mut self.child).code();
        assert!(!self.is_raw(), "the terminal is as it was");
        code
    }
}
