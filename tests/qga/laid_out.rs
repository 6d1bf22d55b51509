//! The commands over a machine that is a folder: what they read is laid out in it, what they write is found there,
//! and what is no file is kept by a machine of the test's own.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use guestlet::guest::Guest;
use guestlet::pace::Complaints;
use guestlet::policy::Audit;
use guestlet::qga::owners::Owners;
use guestlet::qga::policy::Policy;
use guestlet::qga::room::Room;
use guestlet::qga::session::{self, End};
use guestlet::qga::{Context, PROTOCOL_VERSION};
use guestlet::sys::calendar::Date;
use guestlet::sys::effects::Effects;
use guestlet::sys::root::Root;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::runtime::Runtime;

use crate::agent::PATIENCE;

/// What is no file.
#[derive(Debug, Default)]
pub struct Machine(pub Mutex<State>);

/// How it stands.
#[derive(Debug, Default)]
pub struct State {
    /// The system's clock, once it was set.
    pub clock: Option<Duration>,
    /// The hardware clock, where there is one.
    pub hardware_clock: Option<Date>,
    /// Nothing can be changed.
    pub forbidden: bool,
}

impl State {
    fn change(&self) -> io::Result<()> {
        if self.forbidden { Err(io::Error::from_raw_os_error(1)) } else { Ok(()) }
    }
}

fn absent() -> io::Error {
    io::Error::from_raw_os_error(2)
}

impl Effects for Machine {
    fn set_clock(&self, time: Duration) -> io::Result<()> {
        let mut state = self.0.lock().unwrap();
        state.change()?;
        state.clock = Some(time);
        Ok(())
    }

    fn hardware_clock(&self, _: &Path) -> io::Result<Date> {
        self.0.lock().unwrap().hardware_clock.ok_or_else(absent)
    }

    fn set_hardware_clock(&self, _: &Path, date: Date) -> io::Result<()> {
        let mut state = self.0.lock().unwrap();
        state.hardware_clock.ok_or_else(absent)?;
        state.change()?;
        state.hardware_clock = Some(date);
        Ok(())
    }
}

/// The machine, and the event loop that its commands run in.
pub struct LaidOut {
    pub folder: TempDir,
    pub machine: Arc<Machine>,
    pub runtime: Runtime,
    context: Arc<Context>,
}

impl LaidOut {
    /// An empty one.
    pub fn new() -> Self {
        Self::limited(Policy::default())
    }

    /// An empty one with those limits.
    pub fn limited(policy: Policy) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let machine = Arc::new(Machine::default());
        let guest = Guest {
            root: Root::at(folder.path()),
            effects: Arc::clone(&machine) as Arc<dyn Effects>,
            ..Guest::default()
        };
        let context = Context {
            guest,
            policy,
            audit: Audit::default(),
            complaints: Complaints::default(),
            room: Room::default(),
            owners: Owners::default(),
            stopping: guestlet::qga::Stopping::new(),
            version: PROTOCOL_VERSION.to_owned(),
        };
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        Self { folder, machine, runtime, context: Arc::new(context) }
    }

    /// Where an absolute path of the machine is.
    pub fn path(&self, path: &str) -> PathBuf {
        self.folder.path().join(path.trim_start_matches('/'))
    }

    /// Lays out a file.
    pub fn write(&self, path: &str, text: impl AsRef<[u8]>) {
        let path = self.path(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    /// Lays out a program for `sh`, in which `$root` is the machine's folder. Another process writes it: one that this
    /// process had open for writing could be held open by a child of another test, and not be run.
    pub fn program(&self, path: &str, script: &str) {
        let text = format!("{path}.text");
        self.write(&text, format!("#!/bin/sh\nroot='{}'\n{script}\n", self.folder.path().display()));
        let install =
            Command::new("install").args(["-m", "755"]).args([self.path(&text), self.path(path)]).status();
        assert!(install.unwrap().success());
    }

    /// What a file holds now.
    pub fn read(&self, path: &str) -> String {
        std::fs::read_to_string(self.path(path)).unwrap()
    }

    /// The answers to what is said in one conversation.
    pub fn talk(&self, requests: &[u8]) -> Vec<Value> {
        let context = Arc::clone(&self.context);
        let (mut near, far) = tokio::io::duplex(1 << 16);
        let serving = self.runtime.spawn(async move {
            session::run(far, "test", &context, End::Said).await.finish().await.unwrap();
        });
        let talk = async {
            let (mut from, mut to) = tokio::io::split(&mut near);
            let mut answers = Vec::new();
            let ask = async {
                to.write_all(requests).await.unwrap();
                to.shutdown().await.unwrap();
            };
            tokio::join!(ask, async { from.read_to_end(&mut answers).await.unwrap() });
            answers
        };
        let answers =
            self.runtime.block_on(async { tokio::time::timeout(PATIENCE, talk).await }).expect("no answer");
        self.runtime.block_on(serving).unwrap();
        let lines = answers.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        lines.map(|line| serde_json::from_slice(line).unwrap()).collect()
    }

    /// Calls a command; what is not answered is null.
    pub fn ask(&self, command: &str, arguments: &Value) -> Value {
        let request = match arguments {
            Value::Null => json!({ "execute": command }),
            arguments => json!({ "execute": command, "arguments": arguments }),
        };
        self.talk(request.to_string().as_bytes()).pop().unwrap_or_default()
    }

    /// The result of a command that succeeds.
    pub fn call(&self, command: &str, arguments: &Value) -> Value {
        let answer = self.ask(command, arguments);
        answer.get("return").unwrap_or_else(|| panic!("{command} {arguments}: {answer}")).clone()
    }

    /// The description of the error of a command that fails.
    pub fn error(&self, command: &str, arguments: &Value) -> String {
        let answer = self.ask(command, arguments);
        let error = answer["error"]["desc"].as_str();
        error.unwrap_or_else(|| panic!("{command} {arguments}: {answer}")).to_owned()
    }
}
