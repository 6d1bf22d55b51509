//! A QMP socket as QEMU has it, without a VM behind it.

use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;

/// Lives until it is dropped, as QEMU does until it is killed.
pub struct Qmp {
    path: PathBuf,
    events: Option<mpsc::UnboundedSender<&'static str>>,
    thread: Option<JoinHandle<()>>,
}

impl Qmp {
    /// Listens at `path`; the VM is in run state `status`.
    pub fn start(path: &Path, status: &'static str) -> Self {
        let listener = std::os::unix::net::UnixListener::bind(path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (events, mut happening) = mpsc::unbounded_channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let listener = UnixListener::from_std(listener).unwrap();
                let mut alive = true;
                while alive {
                    tokio::select! {
                        client = listener.accept() => alive = serve(client.unwrap().0, status, &mut happening).await,
                        event = happening.recv() => alive = event.is_some(),
                    }
                }
            });
        });
        Self { path: path.to_owned(), events: Some(events), thread: Some(thread) }
    }

    /// Lets QEMU report an event.
    pub fn event(&self, name: &'static str) {
        self.events.as_ref().unwrap().send(name).unwrap();
    }
}

impl Drop for Qmp {
    fn drop(&mut self) {
        drop(std::fs::remove_file(&self.path));
        drop(self.events.take());
        drop(self.thread.take().unwrap().join());
    }
}

/// Serves one client; false when QEMU is to end.
async fn serve(client: UnixStream, status: &str, happening: &mut mpsc::UnboundedReceiver<&str>) -> bool {
    let (reader, mut writer) = client.into_split();
    let mut lines = BufReader::new(reader).lines();
    let greeting = "{\"QMP\": {\"version\": {\"qemu\": {\"major\": 7}}, \"capabilities\": [\"oob\"]}}\r\n";
    writer.write_all(greeting.as_bytes()).await.unwrap();
    loop {
        let answer = tokio::select! {
            line = lines.next_line() => {
                let Ok(Some(line)) = line else { return true };
                let command: serde_json::Value = serde_json::from_str(&line).unwrap();
                let value = match command["execute"].as_str().unwrap() {
                    "qmp_capabilities" => serde_json::json!({}),
                    "query-status" => serde_json::json!({"status": status, "running": status == "running"}),
                    "query-named-block-nodes" | "query-block" | "query-cpus-fast" | "query-blockstats" => {
                        serde_json::json!([])
                    }
                    "query-memory-size-summary" => serde_json::json!({"base-memory": 1 << 20}),
                    "query-balloon" => serde_json::json!({"actual": 1 << 20}),
                    other => panic!("unexpected command {other}"),
                };
                serde_json::json!({"return": value, "id": command["id"]})
            }
            event = happening.recv() => {
                let Some(event) = event else { return false };
                serde_json::json!({"timestamp": {"seconds": 1, "microseconds": 2}, "event": event})
            }
        };
        if writer.write_all(format!("{answer}\r\n").as_bytes()).await.is_err() {
            return true;
        }
    }
}
