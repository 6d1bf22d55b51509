//! A real agent, behind a hybrid vsock.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Child;

use crate::launch;

/// It, until this is dropped.
pub struct Agent(Child, PathBuf);

impl Agent {
    /// One with a folder of its own, which is reached at `hybrid`.
    pub fn start(folder: &Path, hybrid: &Path) -> Self {
        Self::start_with(folder, hybrid, "")
    }

    /// The same with more settings.
    pub fn start_with(folder: &Path, hybrid: &Path, more: &str) -> Self {
        std::fs::create_dir_all(folder).unwrap();
        let more = format!("method = \"none\"\n[csi]\nenabled = false\n{more}");
        let settings = launch::settings_with(folder, &more);
        let file = folder.join("agent.toml");
        std::fs::write(&file, settings).unwrap();
        let log = std::fs::File::create(folder.join("log")).unwrap();
        let agent =
            launch::guestlet().arg("--settings").arg(file).arg("--verbose").stderr(log).spawn().unwrap();
        let agent = Self(agent, folder.join("control.sock"));
        agent.is_also_at(hybrid);
        agent
    }

    /// It is reached there, too, as after a migration.
    pub fn is_also_at(&self, hybrid: &Path) {
        lead(UnixListener::bind(hybrid).unwrap(), self.1.clone());
    }

    pub fn stop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Leads whoever says CONNECT to `agent`; ends with this process.
fn lead(listener: UnixListener, agent: PathBuf) {
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let agent = agent.clone();
            std::thread::spawn(move || client_of(&client, &agent));
        }
    });
}

fn client_of(client: &UnixStream, agent: &Path) -> Option<()> {
    let mut reader = BufReader::new(client);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    assert_eq!(line, "CONNECT 970\n");
    let agent = UnixStream::connect(agent).ok()?;
    (&*client).write_all(b"OK 1024\n").ok()?;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            drop(std::io::copy(&mut &agent, &mut &*client));
            drop(client.shutdown(Shutdown::Both));
        });
        drop(std::io::copy(&mut reader, &mut &agent));
        drop(agent.shutdown(Shutdown::Both));
    });
    Some(())
}
