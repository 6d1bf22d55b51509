//! Serial console of a VM: the character device of its first serial port, unless the settings name another one.
//!
//! ```text
//!  settings ─┬─ a label ───────────────┐
//!            ├─ nothing: serial ports ─┴─▶ query-chardev ─┬─ unix socket ──▶ connect ─▶ is the peer QEMU's process?
//!            └─ a socket ──────────────────────────────────┘
//!                                                         └─ pseudo-terminal ─▶ open ─▶ does it belong to QEMU's user?
//! ```
//!
//! QEMU itself names the device, through the connection to its QMP socket, and what is then found at that path
//! has to belong to the same process. `found` parses the answers, which is pure; `reach` connects.
//!
//! QEMU serves one client of such a socket at a time; others wait in the socket's backlog without seeing
//! anything. Therefore no connection is attempted to a socket that already has a client.

mod found;
mod reach;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::super::consoles::{Answer, Console, ConsoleError, Consoles, End};
use super::link::{CallError, Link, Standing};
use found::{Chardev, Place, Property, Serial};

/// Time for which QEMU may still count a client that has just disconnected.
const LETTING_GO: Duration = Duration::from_secs(3);
/// Time that QEMU's process may take to end after its end of the console has closed.
const ENDING: Duration = Duration::from_secs(5);
/// Interval between two checks.
const LOOK: Duration = Duration::from_millis(50);
/// Maximum number of devices that are inspected.
const MOST_DEVICES: usize = 64;
/// QOM paths of devices: those with an identifier, those without, and those of the machine.
const PARENTS: [&str; 3] = ["/machine/peripheral", "/machine/peripheral-anon", "/machine/unattached"];

/// Console of a VM according to the settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wish {
    /// Identifier of a character device.
    Label(String),
    /// Path of the socket.
    Socket(PathBuf),
}

/// VM of the list, with what is needed for its console.
#[derive(Debug, Clone)]
pub struct Target {
    /// Sends commands to the VM's QEMU.
    pub link: Link,
    /// Console according to the settings, if they name one.
    pub wish: Option<Wish>,
}

/// VMs of the list by name; `None` for one without a QMP socket.
pub type Targets = BTreeMap<String, Option<Target>>;

/// Connects to the consoles of the VMs of the list.
#[derive(Debug, Clone)]
pub struct Serials(watch::Receiver<Targets>);

impl Serials {
    /// Creates the consoles of these VMs.
    pub fn new(targets: watch::Receiver<Targets>) -> Self {
        Self(targets)
    }
}

impl Consoles for Serials {
    fn open(&self, vm: &str) -> Answer {
        let target = self.0.borrow().get(vm).cloned();
        let name = vm.to_owned();
        Box::pin(async move {
            let no_socket = || {
                let words = "the VM has no QMP socket in the settings of guestlet-host, which is needed to \
                             find its console; set qmp";
                ConsoleError::None(words.to_owned())
            };
            target.ok_or(ConsoleError::UnknownVm)?.ok_or_else(no_socket)?.open(&name).await
        })
    }
}

impl From<CallError> for ConsoleError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Refused { .. } => Self::Strange(error.to_string()),
            _ => Self::Unreachable(error.to_string()),
        }
    }
}

impl Target {
    async fn open(&self, name: &str) -> Result<Console, ConsoleError> {
        match self.link.standing().await {
            Standing::Absent => {
                return Err(ConsoleError::None("the VM is off: it has no console".to_owned()));
            }
            // The monitor has just ended.
            Standing::Untried => return Err(ConsoleError::UnknownVm),
            Standing::Connected | Standing::Silent(_) => {}
        }
        let place = self.free_place(name).await?;
        let peer = self.link.peer().ok_or_else(|| {
            ConsoleError::Unreachable("cannot tell which process is the VM's QEMU".to_owned())
        })?;
        let stream = match &place {
            Place::Socket { path, .. } => reach::socket(path, peer.pid()).await?,
            Place::Terminal(path) => reach::terminal(path, peer.uid())?,
        };
        let (gone, after) = (self.link.clone(), self.link.clone());
        Ok(Console {
            stream,
            place: place.to_string(),
            gone: Box::pin(async move { gone.ended().await }),
            after: Box::pin(async move { ended(&after).await }),
        })
    }

    /// Waits until the console has no client, and returns its location.
    async fn free_place(&self, name: &str) -> Result<Place, ConsoleError> {
        let label = match &self.wish {
            Some(Wish::Label(label)) => Some(label.clone()),
            Some(Wish::Socket(_)) => None,
            None => Some(self.first_serial().await?.ok_or_else(|| found::no_console(name))?),
        };
        let tried = async {
            loop {
                let chardevs: Vec<Chardev> = self.ask("query-chardev", Value::Null).await?;
                let place = match (&label, &self.wish) {
                    (Some(label), _) => found::place_of(&chardevs, label, name)?,
                    (None, Some(Wish::Socket(path))) => found::place_at(&chardevs, path),
                    (None, _) => return Err(found::no_console(name)),
                };
                if !place.is_taken() {
                    return Ok(place);
                }
                tokio::time::sleep(LOOK).await;
            }
        };
        tokio::time::timeout(LETTING_GO, tried).await.unwrap_or_else(|_| Err(found::taken()))
    }

    /// Returns the character device of the first serial port.
    async fn first_serial(&self) -> Result<Option<String>, ConsoleError> {
        let mut serials = Vec::new();
        for parent in PARENTS {
            // A machine may lack some of these paths.
            let listed = self.link.call("qom-list", json!({ "path": parent })).await;
            let Some(listed) = unless_refused(listed)? else { continue };
            let children: Vec<Property> = understood("qom-list", listed)?;
            for child in children {
                let Some(kind) = found::serial_kind(&child) else { continue };
                if serials.len() >= MOST_DEVICES {
                    break;
                }
                let path = format!("{parent}/{}", child.name);
                let chardev = self.property(&path, "chardev").await?;
                let index = self.property(&path, "index").await?.and_then(|index| index.as_u64());
                if let Some(chardev) = chardev.as_ref().and_then(Value::as_str) {
                    serials.push(Serial { kind, index, chardev: chardev.to_owned() });
                }
            }
        }
        Ok(found::first(serials))
    }

    /// Reads a property of a device; `None` if it does not have this property.
    async fn property(&self, path: &str, property: &str) -> Result<Option<Value>, ConsoleError> {
        let arguments = json!({ "path": path, "property": property });
        unless_refused(self.link.call("qom-get", arguments).await)
    }

    async fn ask<T: DeserializeOwned>(
        &self,
        command: &'static str,
        arguments: Value,
    ) -> Result<T, ConsoleError> {
        understood(command, self.link.call(command, arguments).await?)
    }
}

fn unless_refused(answer: Result<Value, CallError>) -> Result<Option<Value>, ConsoleError> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(CallError::Refused { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn understood<T: DeserializeOwned>(command: &str, answer: Value) -> Result<T, ConsoleError> {
    let strange = |_| ConsoleError::Strange(format!("QEMU's answer to {command} is not understood"));
    serde_json::from_value(answer).map_err(strange)
}

/// Determines whether QEMU has ended, after its end of a console has closed.
async fn ended(link: &Link) -> End {
    let process = link.process();
    let ends = async {
        while !process.as_ref().is_some_and(|process: &Arc<_>| process.has_ended().unwrap_or(false)) {
            tokio::time::sleep(LOOK).await;
        }
    };
    match tokio::time::timeout(ENDING, ends).await {
        Ok(()) => End::Vm,
        Err(_) => End::Console,
    }
}
