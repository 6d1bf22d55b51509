//! A client of QEMU's monitor: commands, and the events that came meanwhile.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

use super::lines::Lines;

const ANSWER: Duration = Duration::from_secs(30);

/// One connection to a QMP socket.
#[derive(Debug)]
pub struct Qmp(Mutex<State>);

#[derive(Debug)]
struct State {
    lines: Lines,
    events: VecDeque<Value>,
}

impl Qmp {
    /// Connects to a QEMU that may be starting.
    pub fn connect(socket: &Path) -> anyhow::Result<Self> {
        let lines = Lines::connect(socket, Duration::from_secs(15))?;
        let mut state = State { lines, events: VecDeque::new() };
        state.next(ANSWER)?.context("QEMU does not greet")?;
        let client = Self(Mutex::new(state));
        client.execute("qmp_capabilities", json!({}))?;
        Ok(client)
    }

    /// Runs a command and gives what it returns.
    pub fn execute(&self, command: &str, arguments: Value) -> anyhow::Result<Value> {
        let mut state = self.state();
        let mut request = json!({ "execute": command });
        if arguments.as_object().is_some_and(|map| !map.is_empty()) {
            request["arguments"] = arguments;
        }
        state.lines.send(format!("{request}\n").as_bytes())?;
        loop {
            let mut answer = state.next(ANSWER)?.with_context(|| format!("QMP {command}: no answer"))?;
            if answer.get("event").is_some() {
                state.events.push_back(answer);
            } else if let Some(error) = answer.get("error") {
                bail!("QMP {command}: {error}");
            } else {
                return Ok(answer["return"].take());
            }
        }
    }

    /// The oldest event of that name that nobody took; waits for one.
    pub fn wait_event(&self, name: &str, limit: Duration) -> anyhow::Result<Value> {
        let deadline = Instant::now() + limit;
        let mut state = self.state();
        loop {
            if let Some(at) = state.events.iter().position(|event| event["event"] == name) {
                return state.events.remove(at).context("no event");
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match state.next(left)? {
                Some(event) => state.events.push_back(event),
                None => bail!("no event {name} within {} s", limit.as_secs_f32()),
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn next(&mut self, limit: Duration) -> anyhow::Result<Option<Value>> {
        self.lines.next(limit)?.map(|line| Ok(serde_json::from_slice(&line)?)).transpose()
    }
}
