//! A guest whose settings let these targets be reached, and a `guestctl forward` that runs.

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::TcpStream;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use crate::host::{DEADLINE, terminate, wait};
use crate::lab::Lab;

/// Grants that let a host half without a key reach this.
pub fn grants(targets: &[String]) -> String {
    let targets: Vec<_> = targets.iter().map(|target| format!("{target:?}")).collect();
    let limit =
        if targets.is_empty() { String::new() } else { format!("forward = [{}]\n", targets.join(", ")) };
    format!(
        "[[grant]]\nhost = \"plain\"\nroles = [\"status\", \"disks\", \"topology\", \"forward\"]\n{limit}"
    )
}

/// A guest through which this can be reached.
pub fn lab(targets: &[String]) -> Lab {
    Lab::with(&grants(targets))
}

/// A guest through which these ports can be reached.
pub fn lab_of(ports: &[u16]) -> Lab {
    lab(&ports.iter().map(u16::to_string).collect::<Vec<_>>())
}

/// A running `guestctl forward`. Ends it when it is dropped.
pub struct Forwarding {
    pub child: Child,
    /// Where it listens, in the order of the specs.
    pub places: Vec<String>,
    complaints: mpsc::Receiver<String>,
}

impl Forwarding {
    /// Forwards this to the guest, and returns when it listens.
    pub fn start(lab: &Lab, specs: &[&str]) -> Self {
        let mut command = lab.host.ctl_command(&[&["forward", "web"], specs].concat());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let errors = BufReader::new(child.stderr.take().unwrap());
        let (sender, complaints) = mpsc::channel();
        std::thread::spawn(move || {
            errors.lines().map_while(Result::ok).all(|line| sender.send(line).is_ok())
        });
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let place = |line: String| {
            let words: Vec<_> = line.split(' ').collect();
            assert_eq!((words[0], words[words.len() - 1]), ("Forwarding", "web"), "{line}");
            words[1].to_owned()
        };
        let places = specs.iter().map(|spec| match lines.next() {
            Some(line) => place(line.unwrap()),
            None => panic!("{spec}: {:?}", complaints.iter().collect::<Vec<_>>()),
        });
        let places = places.collect();
        Self { child, places, complaints }
    }

    /// Forwards a free port here to this port of the guest.
    pub fn of(lab: &Lab, port: u16) -> Self {
        Self::start(lab, &[&format!("0:{port}")])
    }

    /// A new connection with the first target.
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.places[0]).unwrap();
        // Only so that a test that fails ends.
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.set_write_timeout(Some(DEADLINE)).unwrap();
        stream
    }

    /// The next complaint with these words.
    pub fn until_complains(&self, words: &str) -> String {
        let mut seen = Vec::new();
        loop {
            match self.complaints.recv_timeout(DEADLINE) {
                Ok(line) if line.contains(words) => return line,
                Ok(line) => seen.push(line),
                Err(error) => panic!("{error}: {words}; it says {seen:#?}"),
            }
        }
    }

    /// Ends it as Ctrl-C does.
    pub fn stop(&mut self) -> ExitStatus {
        terminate(&self.child);
        wait(&mut self.child)
    }
}

impl Drop for Forwarding {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
        if std::thread::panicking() {
            while let Ok(line) = self.complaints.recv_timeout(Duration::from_millis(50)) {
                eprintln!("{line}");
            }
        }
    }
}

/// Reads until the stream breaks, which it has to.
pub fn until_broken(mut stream: &TcpStream) -> std::io::ErrorKind {
    let mut part = [0; 4096];
    loop {
        match stream.read(&mut part) {
            Ok(0) => panic!("it ended, and did not break"),
            Ok(_) => {}
            Err(error) => return error.kind(),
        }
    }
}

/// A port of 127.0.0.1 that nobody has.
pub fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}
