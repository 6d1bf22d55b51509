//! A QEMU that has disks, behind a QMP socket: its answers have the shape of QEMU 7.2's, and what it was told
//! outlives every connection.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;

use serde_json::{Value, json};

/// The disk that was there from the start.
const ROOT: &str = "/machine/peripheral-anon/device[0]/virtio-backend";

/// How the guest takes it that a device is to go.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// It lets go at once.
    Prompt,
    /// It lets go when the test says so.
    Slow,
    /// It refuses.
    Stubborn,
}

/// When a connection breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The command is not carried out.
    Before,
    /// It is, and is not answered.
    After,
}

/// What happens at the command that `at` counts down to.
struct Trouble {
    at: usize,
    only: Option<&'static str>,
    moment: Moment,
    /// Waits for the test here before the connection breaks.
    meanwhile: Option<(mpsc::Sender<()>, mpsc::Receiver<()>)>,
}

#[derive(Default)]
struct State {
    nodes: BTreeMap<String, Value>,
    /// Their files, open as QEMU has them.
    files: BTreeMap<String, Option<File>>,
    /// What `query-status` says, if not that it runs.
    status: Option<&'static str>,
    /// Nothing is answered.
    silent: bool,
    /// What questions are answered with, whatever there is.
    answers: BTreeMap<&'static str, Value>,
    devices: BTreeMap<String, Value>,
    leaving: BTreeSet<String>,
    /// The guest lets go when it is asked whether something can be plugged into a port.
    lets_go_of_ports: bool,
    /// Nodes that their device still holds, though it is gone.
    held: BTreeSet<String>,
    ports: Vec<&'static str>,
    manner: Option<Manner>,
    trouble: Option<Trouble>,
    commands: Vec<String>,
    client: Option<UnixStream>,
}

/// Lives until it is dropped.
pub struct Hypervisor {
    path: PathBuf,
    state: Arc<Mutex<State>>,
    thread: Option<JoinHandle<()>>,
}

impl Hypervisor {
    /// Listens at `path`; the VM has a virtio-scsi controller and these root ports.
    pub fn start(path: &Path, ports: &[&'static str]) -> Self {
        let listener = UnixListener::bind(path).unwrap();
        let state = Arc::new(Mutex::new(State { ports: ports.to_vec(), ..State::default() }));
        let shared = Arc::clone(&state);
        let thread = std::thread::spawn(move || {
            // One client at a time, as QEMU does. One that says nothing ends it.
            while let Ok((client, _)) = listener.accept() {
                if !serve(&client, &shared) {
                    return;
                }
            }
        });
        Self { path: path.to_owned(), state, thread: Some(thread) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub fn guest_is(&self, manner: Manner) {
        self.state().manner = Some(manner);
    }

    /// Says from now on that the VM is in this state; whoever is connected is to ask again.
    pub fn status_is(&self, status: &'static str) {
        let mut state = self.state();
        state.status = Some(status);
        state.hang_up();
    }

    /// Takes clients and their commands, and answers none.
    pub fn be_silent(&self) {
        let mut state = self.state();
        state.silent = true;
        state.hang_up();
    }

    /// Hangs: connections stay, and nothing is answered.
    pub fn hang(&self) {
        self.state().silent = true;
    }

    /// Answers a question with this from now on.
    pub fn answer(&self, command: &'static str, answer: Value) {
        self.state().answers.insert(command, answer);
    }

    /// The guest lets go of everything that it was asked for.
    pub fn let_go(&self) {
        self.state().let_go();
    }

    /// The guest lets go of everything that it was asked for when somebody looks at the ports next.
    pub fn let_go_at_ports(&self) {
        self.state().lets_go_of_ports = true;
    }

    /// Whether there is still a device.
    pub fn has_devices(&self) -> bool {
        !self.state().devices.is_empty()
    }

    /// The connection breaks at a command; 0 is the next one.
    pub fn break_at(&self, at: usize, moment: Moment) {
        self.state().trouble = Some(Trouble { at, only: None, moment, meanwhile: None });
    }

    /// As [`Hypervisor::break_at`] the next command of this name, but only after the returned sender was used; the
    /// receiver tells that it is so far.
    pub fn stop_at(&self, command: &'static str, moment: Moment) -> (mpsc::Receiver<()>, mpsc::Sender<()>) {
        let ((told, tell), (go, wait)) = (mpsc::channel(), mpsc::channel());
        let meanwhile = Some((told, wait));
        self.state().trouble = Some(Trouble { at: 0, only: Some(command), moment, meanwhile });
        (tell, go)
    }

    /// Whether what was to break has broken; it does not any more.
    pub fn has_broken(&self) -> bool {
        self.state().trouble.take().is_none()
    }

    /// A node that somebody left.
    pub fn leave_node(&self, name: &str) {
        self.state().nodes.insert(name.into(), json!({"driver": "raw", "file": {"filename": "/left"}}));
    }

    /// As after a start with this file on its command line: it has no other disks.
    pub fn was_started_with(&self, name: &str, file: &Path) {
        let mut state = self.state();
        state.devices.clear();
        state.nodes.clear();
        state.files.clear();
        let open = File::options().read(true).write(true).open(file).unwrap();
        state.files.insert(name.into(), Some(open));
        state.nodes.insert(name.into(), json!({"driver": "raw", "file": {"filename": file}}));
    }

    /// Closes a node that no device has.
    pub fn close_node(&self, name: &str) {
        let mut state = self.state();
        state.files.remove(name);
        state.nodes.remove(name).unwrap();
    }

    /// Tells the client something that happened to the VM, such as STOP.
    pub fn event(&self, name: &str) {
        let event = json!({"timestamp": {"seconds": 1, "microseconds": 2}, "event": name});
        let state = self.state();
        let mut client = state.client.as_ref().unwrap();
        client.write_all(format!("{event}\r\n").as_bytes()).unwrap();
    }

    /// What `device_add` was told of all devices, in the order of their names.
    pub fn devices(&self) -> Vec<Value> {
        self.state().devices.values().cloned().collect()
    }

    pub fn nodes(&self) -> Vec<Value> {
        self.state().nodes.values().cloned().collect()
    }

    /// The names of the commands since the last look.
    pub fn commands(&self) -> Vec<String> {
        std::mem::take(&mut self.state().commands)
    }
}

impl Drop for Hypervisor {
    fn drop(&mut self) {
        // As QEMU does, first of all.
        self.state().files.clear();
        if let Some(client) = self.state().client.take() {
            drop(client.shutdown(Shutdown::Both));
        }
        // The daemon may connect again first; then this one waits until it is gone.
        if let Ok(mut last) = UnixStream::connect(&self.path) {
            drop(last.write_all(b"end\n"));
        }
        drop(std::fs::remove_file(&self.path));
        if std::thread::panicking() {
            return;
        }
        drop(self.thread.take());
    }
}

/// False when nobody is to be served any more.
fn serve(client: &UnixStream, shared: &Mutex<State>) -> bool {
    let lines = BufReader::new(client).lines().map_while(Result::ok);
    let mut writer = client;
    let greeting = json!({"QMP": {"version": {"qemu": {"major": 7}}, "capabilities": ["oob"]}});
    if writer.write_all(format!("{greeting}\r\n").as_bytes()).is_err() {
        return true;
    }
    shared.lock().unwrap().client = client.try_clone().ok();
    for line in lines {
        if line == "end" {
            return false;
        }
        let command: Value = serde_json::from_str(&line).unwrap();
        let name = command["execute"].as_str().unwrap().to_owned();
        let mut state = shared.lock().unwrap();
        if state.silent {
            continue;
        }
        let trouble = state.trouble_at(&name);
        let breaks = |moment| trouble.as_ref().is_some_and(|trouble| trouble.moment == moment);
        if breaks(Moment::Before) {
            drop(state);
            wait(trouble);
            break;
        }
        state.commands.push(name.clone());
        let answer = state.execute(&name, &command["arguments"]);
        if breaks(Moment::After) {
            drop(state);
            wait(trouble);
            break;
        }
        let (mut answer, event) = match answer {
            Ok((value, event)) => (json!({ "return": value }), event),
            Err((class, words)) => (json!({"error": {"class": class, "desc": words}}), None),
        };
        answer["id"] = command["id"].clone();
        drop(writer.write_all(format!("{answer}\r\n").as_bytes()));
        if let Some(event) = event {
            drop(writer.write_all(format!("{event}\r\n").as_bytes()));
        }
    }
    shared.lock().unwrap().client = None;
    drop(client.shutdown(Shutdown::Both));
    true
}

fn wait(trouble: Option<Trouble>) {
    if let Some((told, wait)) = trouble.and_then(|trouble| trouble.meanwhile) {
        told.send(()).unwrap();
        wait.recv().unwrap();
    }
}

/// What `query-blockstats` has of an entry of `query-block`.
fn statistics(block: &Value) -> Value {
    let (reads, writes) = (if block["inserted"].is_null() { 0 } else { 7 }, 3);
    json!({"device": block["device"], "qdev": block["qdev"], "node-name": block["inserted"]["node-name"], "stats": {
        "rd_bytes": reads * 512, "wr_bytes": writes * 512, "rd_operations": reads, "wr_operations": writes,
        "rd_total_time_ns": 1_500_000_000_u64, "wr_total_time_ns": 0, "flush_operations": 0,
    }})
}

type Outcome = Result<(Value, Option<Value>), (&'static str, String)>;

fn event(name: &str, device: &str) -> Value {
    let data = json!({"device": device, "path": format!("/machine/peripheral/{device}")});
    json!({"timestamp": {"seconds": 1, "microseconds": 2}, "event": name, "data": data})
}

impl State {
    fn trouble_at(&mut self, name: &str) -> Option<Trouble> {
        // What a monitor does by itself when it connects is no step of an operation.
        if matches!(name, "qmp_capabilities" | "query-status") {
            return None;
        }
        let trouble = self.trouble.as_mut()?;
        if trouble.only.is_some_and(|only| only != name) {
            return None;
        }
        if trouble.at > 0 {
            trouble.at -= 1;
            return None;
        }
        self.trouble.take()
    }

    fn let_go(&mut self) {
        for device in std::mem::take(&mut self.leaving) {
            self.delete(&device);
        }
    }

    fn hang_up(&mut self) {
        if let Some(client) = self.client.take() {
            drop(client.shutdown(Shutdown::Both));
        }
    }

    fn delete(&mut self, device: &str) {
        if let Some(device) = self.devices.remove(device) {
            self.held.insert(device["drive"].as_str().unwrap().to_owned());
        }
        if let Some(mut client) = self.client.as_ref() {
            drop(client.write_all(format!("{}\r\n", event("DEVICE_DELETED", device)).as_bytes()));
        }
    }

    fn execute(&mut self, name: &str, arguments: &Value) -> Outcome {
        let generic = |words: &str| Err(("GenericError", words.to_owned()));
        let text = |key: &str| arguments[key].as_str().unwrap().to_owned();
        if let Some(answer) = self.answers.get(name) {
            return Ok((answer.clone(), None));
        }
        let value = match name {
            "query-cpus-fast" => json!([{"cpu-index": 0}, {"cpu-index": 1}]),
            "query-memory-size-summary" => json!({"base-memory": 1_u64 << 30, "plugged-memory": 1 << 20}),
            "query-balloon" => return Err(("DeviceNotActive", "No balloon device".to_owned())),
            "query-blockstats" => self.blocks().as_array().unwrap().iter().map(statistics).collect(),
            "qmp_capabilities" => json!({}),
            "query-status" => {
                json!({"status": self.status.unwrap_or("running"), "running": self.status.is_none()})
            }
            "query-block" => self.blocks(),
            "query-named-block-nodes" => self.nodes.keys().map(|name| self.node(name)).collect(),
            "qom-list" => return self.objects(&text("path")).map(|list| (list, None)),
            "qom-get" => {
                let path = text("path");
                if text("property") == "hotplug" && std::mem::take(&mut self.lets_go_of_ports) {
                    self.let_go();
                }
                let device =
                    path.trim_start_matches("/machine/peripheral/").trim_end_matches("/virtio-backend");
                match (self.devices.get(device), text("property").as_str()) {
                    (Some(device), "serial") => device["serial"].clone(),
                    (Some(device), "device_id") if device["driver"] == "scsi-hd" => {
                        device["device_id"].clone()
                    }
                    (None, "serial") if path == ROOT => json!("root-disk"),
                    (None, "hotplug") => json!(true),
                    _ => return Err(("DeviceNotFound", format!("Device '{path}' not found"))),
                }
            }
            "blockdev-add" => {
                let name = text("node-name");
                if self.nodes.contains_key(&name) {
                    return generic("Duplicate nodes with node-name");
                }
                let file = arguments["file"]["filename"].as_str().unwrap();
                let mut node = arguments.clone();
                node["size"] = json!(std::fs::metadata(file).map_or(0, |found| found.len()));
                let is_read_only = node["read-only"].as_bool().unwrap_or(false);
                let open = File::options().read(true).write(!is_read_only).open(file);
                self.files.insert(name.clone(), open.ok());
                self.nodes.insert(name, node);
                json!({})
            }
            "blockdev-del" => {
                let name = text("node-name");
                let used = self.devices.values().any(|device| device["drive"] == name.as_str());
                if used || self.held.remove(&name) {
                    return generic(&format!("Node {name} is in use"));
                }
                if self.nodes.remove(&name).is_none() {
                    return generic("Failed to find node with node-name");
                }
                self.files.remove(&name);
                json!({})
            }
            "block_resize" => {
                let node = self.nodes.get_mut(&text("node-name")).unwrap();
                node["size"] = arguments["size"].clone();
                json!({})
            }
            "device_add" => {
                assert!(self.nodes.contains_key(&text("drive")), "{arguments}");
                if self.devices.contains_key(&text("id")) {
                    return generic("Duplicate device ID");
                }
                // No serial number that is drawn is one of these.
                if text("serial") == "bad" {
                    return generic("it does not like it");
                }
                if text("serial") == "locked" {
                    return generic("Failed to get \"write\" lock");
                }
                self.devices.insert(text("id"), arguments.clone());
                json!({})
            }
            "device_del" => return self.leave(&text("id")),
            other => panic!("unexpected command {other}"),
        };
        Ok((value, None))
    }

    fn leave(&mut self, id: &str) -> Outcome {
        if !self.devices.contains_key(id) {
            return Err(("DeviceNotFound", format!("Device '{id}' not found")));
        }
        match self.manner.unwrap_or(Manner::Prompt) {
            Manner::Stubborn => Ok((json!({}), Some(event("DEVICE_UNPLUG_GUEST_ERROR", id)))),
            Manner::Slow if self.leaving.insert(id.to_owned()) => Ok((json!({}), None)),
            Manner::Slow => Err(("GenericError", format!("Device {id} is already in the process of unplug"))),
            Manner::Prompt => {
                let device = self.devices.remove(id).unwrap();
                self.held.insert(device["drive"].as_str().unwrap().to_owned());
                Ok((json!({}), Some(event("DEVICE_DELETED", id))))
            }
        }
    }

    fn node(&self, name: &str) -> Value {
        let node = &self.nodes[name];
        json!({
            "node-name": name, "drv": node["driver"], "file": node["file"]["filename"],
            "ro": node["read-only"].as_bool().unwrap_or(false), "image": {"virtual-size": node["size"].as_u64().unwrap_or(0)},
        })
    }

    fn blocks(&self) -> Value {
        let root = json!({
            "node-name": "#block168", "drv": "qcow2", "file": "/images/root.qcow2", "ro": false,
            "image": {"virtual-size": 1_u64 << 30},
        });
        let mut blocks =
            vec![json!({"device": "root", "qdev": ROOT, "inserted": root}), json!({"device": "cd"})];
        for (id, device) in &self.devices {
            let qdev = match device["driver"].as_str().unwrap() {
                "scsi-hd" => id.clone(),
                _ => format!("/machine/peripheral/{id}/virtio-backend"),
            };
            let node = self.node(device["drive"].as_str().unwrap());
            blocks.push(json!({"device": "", "qdev": qdev, "inserted": node}));
        }
        Value::Array(blocks)
    }

    fn objects(&self, path: &str) -> Result<Value, (&'static str, String)> {
        let mut list = vec![("type".to_owned(), "string".to_owned())];
        let on = |bus: &str| {
            let on_it = self.devices.values().filter(|device| device["bus"] == bus);
            let links = on_it.map(|device| format!("link<{}>", device["driver"].as_str().unwrap()));
            links.enumerate().map(|(at, link)| (format!("child[{at}]"), link)).collect::<Vec<_>>()
        };
        let parts: Vec<_> = path.trim_start_matches("/machine/").split('/').collect();
        match parts[..] {
            ["peripheral"] => {
                list.push(("scsi0".into(), "child<virtio-scsi-pci>".into()));
                list.extend(self.ports.iter().map(|port| ((*port).into(), "child<pcie-root-port>".into())));
                let kind = |device: &Value| format!("child<{}>", device["driver"].as_str().unwrap());
                list.extend(self.devices.iter().map(|(id, device)| (id.clone(), kind(device))));
            }
            ["peripheral-anon"] => list.push(("device[0]".into(), "child<virtio-blk-pci>".into())),
            ["peripheral", "scsi0", "virtio-backend"] => list.push(("scsi0.0".into(), "child<SCSI>".into())),
            ["peripheral", "scsi0", "virtio-backend", bus @ "scsi0.0"] => list.extend(on(bus)),
            ["peripheral", port] if self.ports.contains(&port) => {
                list.push((port.into(), "child<PCIE>".into()));
            }
            ["peripheral", port, bus] if self.ports.contains(&port) && port == bus => list.extend(on(bus)),
            _ => return Err(("DeviceNotFound", format!("Device '{path}' not found"))),
        }
        Ok(list.into_iter().map(|(name, kind)| json!({ "name": name, "type": kind })).collect())
    }
}
