//! Clone of a guest: a separate QEMU, and the agent in it, which is reached over the QGA port. The host's end
//! of that port is QEMU's standard input, so no socket in the file system is needed, and none is left behind.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use base64_simd::STANDARD;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::process::{Child, ChildStderr, Command};
use tokio::select;
use tokio::time::{sleep, timeout};

use super::{Image, Trial, Unproved};
use crate::receipt::{Receipt, is_id, tidy};

/// Longest line of an answer in bytes.
const MOST_LINE: usize = 1 << 20;
/// Bytes of QEMU's last output that are kept.
const MOST_SAID: usize = 200;
/// Interval at which an awaited change is checked.
const AGAIN: Duration = Duration::from_millis(200);
/// Wait for an agent before it is sent another synchronisation request.
const SYNC: Duration = Duration::from_secs(5);
/// Time for QEMU to end.
const END: Duration = Duration::from_secs(30);
/// Byte before the answer to guest-sync-delimited.
const DELIMITER: u8 = 0xff;
/// Name of the agent's program, which is searched for in the PATH of the clone.
const AGENT: &str = "guestlet";
/// Shell script that becomes QEMU, unless its parent (`$0` is this program's process ID) ended before the
/// parent-death signal was set.
const UNLESS_ALONE: &str = r#"[ "$PPID" = "$0" ] && exec "$@""#;

/// Virtual machine of a clone. Its QEMU is killed whenever this program ends, for whatever reason.
pub struct Machine {
    qemu: Child,
    /// Standard error of QEMU; `None` after its end.
    errors: Option<ChildStderr>,
    said: Vec<u8>,
    agent: UnixStream,
    received: Vec<u8>,
}

/// Formats the file of an image for QEMU's lists of options, where commas are doubled. The path is absolute,
/// because QEMU takes other paths with a colon for network addresses.
fn option(file: &Path) -> Result<String, String> {
    let wrong = |error: &dyn std::fmt::Display| format!("the image {}: {error}", file.display());
    let path = file.canonicalize().map_err(|error| wrong(&error))?;
    let about = path.metadata().map_err(|error| wrong(&error))?;
    if !about.is_file() && !about.file_type().is_block_device() {
        return Err(wrong(&"neither a file nor a block device"));
    }
    if about.is_file() && about.len() == 0 {
        return Err(wrong(&"the file is empty"));
    }
    Ok(path.to_str().ok_or_else(|| wrong(&"the path is not UTF-8"))?.replace(',', ",,"))
}

/// Builds the arguments of QEMU. The images are only read: with `snapshot=on` QEMU writes to unlinked
/// temporary files.
fn arguments(trial: &Trial) -> Result<Vec<String>, String> {
    let memory = trial.memory.to_string();
    let mut list: Vec<String> = [
        ["-name", "guestlet-restore-test"],
        ["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"],
        ["-machine", if cfg!(target_arch = "x86_64") { "q35" } else { "virt" }],
        ["-cpu", "max"],
        ["-smp", "2"],
        ["-m", &memory],
        ["-display", "none"],
        ["-nic", "none"],
        // A clone without a bootable disk restarts, which ends QEMU.
        ["-boot", "reboot-timeout=1000"],
        ["-device", "virtio-rng-pci"],
        ["-device", "virtio-serial-pci"],
        ["-chardev", "socket,id=agent,fd=0"],
        ["-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0"],
    ]
    .concat()
    .into_iter()
    .map(str::to_owned)
    .collect();
    list.extend(["-nodefaults", "-no-user-config", "-no-reboot"].map(str::to_owned));
    for accelerator in trial.accelerator.as_deref().map_or_else(|| vec!["kvm", "tcg"], |one| vec![one]) {
        list.extend(["-accel", accelerator].map(str::to_owned));
    }
    for Image { format, file } in &trial.disks {
        let file = option(file)?;
        list.extend(["-drive".to_owned(), format!("if=virtio,snapshot=on,format={format},file={file}")]);
    }
    list.extend(trial.arguments.iter().cloned());
    Ok(list)
}

impl Machine {
    /// Starts QEMU.
    ///
    /// # Errors
    /// Fails if an image does not exist, or QEMU cannot be started.
    pub fn start(trial: &Trial) -> Result<Self, String> {
        let arguments = arguments(trial)?;
        let failed =
            |error: std::io::Error| format!("cannot start {} by setpriv: {error}", trial.qemu.display());
        let (agent, port) = UnixStream::pair().map_err(failed)?;
        let port = OwnedFd::from(port.into_std().map_err(failed)?);
        // The parent-death signal survives execve(2): if this program is killed, so is QEMU.
        let mut qemu = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", "sh", "-c", UNLESS_ALONE])
            .arg(std::process::id().to_string())
            .arg(&trial.qemu)
            .args(arguments)
            .stdin(Stdio::from(port))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(failed)?;
        Ok(Self { errors: qemu.stderr.take(), qemu, said: Vec::new(), agent, received: Vec::new() })
    }

    /// Ends QEMU, and waits for its end.
    ///
    /// # Errors
    /// Fails if it does not end.
    pub async fn end(mut self) -> Result<(), String> {
        let process = self.qemu.id().unwrap_or_default();
        let ended = timeout(END, self.qemu.kill()).await;
        let ended = ended.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()));
        ended.map_err(|error| format!("QEMU (process {process}) cannot be ended: {error}"))
    }

    /// Waits until the agent answers.
    ///
    /// # Errors
    /// Fails if the clone ends.
    pub async fn wait_agent(&mut self) -> Result<(), String> {
        for number in 1_u64.. {
            let sync = json!({ "execute": "guest-sync-delimited", "arguments": { "id": number } });
            self.send(&[&[DELIMITER], sync.to_string().as_bytes()].concat()).await?;
            let is_answer = |line: &[u8]| {
                let answer = line.rsplit(|byte| *byte == DELIMITER).next().unwrap_or_default();
                serde_json::from_slice::<Value>(answer).is_ok_and(|answer| answer["return"] == number)
            };
            // Answers to earlier requests may arrive first.
            let answered = async {
                while !is_answer(&self.line().await?) {}
                Ok(())
            };
            if let Ok(outcome) = timeout(SYNC, answered).await {
                return outcome;
            }
        }
        Ok(())
    }

    async fn send(&mut self, bytes: &[u8]) -> Result<(), String> {
        match self.agent.write_all(&[bytes, b"\n"].concat()).await {
            Ok(()) => Ok(()),
            Err(_) => Err(self.gone().await),
        }
    }

    /// Reads the next line from the agent. A partial line is kept if this future is dropped.
    async fn line(&mut self) -> Result<Vec<u8>, String> {
        loop {
            if let Some(length) = self.received.iter().position(|byte| *byte == b'\n') {
                let mut line: Vec<_> = self.received.drain(..=length).collect();
                line.pop();
                return Ok(line);
            }
            if self.received.len() > MOST_LINE {
                return Err("the agent in the clone answered with a line that is too long".to_owned());
            }
            select! {
                read = self.agent.read_buf(&mut self.received) => {
                    if !read.is_ok_and(|length| length > 0) {
                        return Err(self.gone().await);
                    }
                }
                () = listen(&mut self.errors, &mut self.said) => {}
            }
        }
    }

    /// Returns why the agent's port was closed.
    async fn gone(&mut self) -> String {
        let Ok(Ok(status)) = timeout(END, self.qemu.wait()).await else {
            return "QEMU has closed the port of the agent".to_owned();
        };
        let all = async {
            while self.errors.is_some() {
                listen(&mut self.errors, &mut self.said).await;
            }
        };
        // Another process may still hold the other end of the pipe.
        let _ = timeout(AGAIN, all).await;
        let said = String::from_utf8_lossy(&self.said);
        if said.trim().is_empty() {
            return format!(
                "the clone has ended ({status}): it does not boot, or has shut down or restarted"
            );
        }
        format!("QEMU has ended ({status}), and said: {}", tidy(said.trim()))
    }

    /// Sends a command to the agent, and returns its result.
    async fn ask(&mut self, command: &str, arguments: Value) -> Result<Value, Unproved> {
        let request = json!({ "execute": command, "arguments": arguments }).to_string();
        self.send(request.as_bytes()).await.map_err(Unproved::for_good)?;
        let line = self.line().await.map_err(Unproved::for_good)?;
        let mut answer: Value = serde_json::from_slice(&line)
            .map_err(|error| Unproved::for_good(format!("the clone's answer to {command}: {error}")))?;
        if answer.get("return").is_some() {
            return Ok(answer["return"].take());
        }
        let why = answer["error"]["desc"].as_str().unwrap_or("no reason is given");
        Err(Unproved::for_good(format!("the agent in the clone refuses {command}: {}", tidy(why))))
    }

    /// Freezes and thaws, and returns the receipt of that.
    ///
    /// # Errors
    /// Fails if the agent refuses, or does not answer.
    pub async fn receipt(&mut self) -> Result<Receipt, Unproved> {
        let before = self.receipts().await?;
        for command in ["guest-fsfreeze-freeze", "guest-fsfreeze-thaw"] {
            // A freeze also fails if it depends on a database, or a hook, that is still starting.
            let answer = self.ask(command, json!({})).await;
            answer.map_err(|unproved| Unproved { is_final: false, ..unproved })?;
        }
        // Receipts from before are the guest's own, or of earlier freezes. The new one is written after the answer
        // to the thaw.
        let id = loop {
            if let Some(id) = self.receipts().await?.into_iter().find(|id| !before.contains(id)) {
                break id;
            }
            sleep(AGAIN).await;
        };
        let shown = self.agent_says(&["receipts", "show", &id, "-o", "json"]).await?;
        let mut receipt: Receipt = serde_json::from_value(shown["receipt"].clone())
            .map_err(|error| Unproved::for_good(format!("the clone's receipt cannot be read: {error}")))?;
        receipt.tidy();
        Ok(receipt)
    }

    /// Returns the identifiers of all receipts in the clone.
    async fn receipts(&mut self) -> Result<BTreeSet<String>, Unproved> {
        let listed = self.agent_says(&["receipts", "ls", "-o", "json"]).await?;
        let ids = listed.as_array().into_iter().flatten().filter_map(|one| one["id"].as_str());
        Ok(ids.filter(|id| is_id(id)).map(str::to_owned).collect())
    }

    /// Runs the agent's program in the clone, and returns its output.
    async fn agent_says(&mut self, words: &[&str]) -> Result<Value, Unproved> {
        let arguments = json!({ "path": AGENT, "arg": words, "capture-output": true });
        let started = self.ask("guest-exec", arguments).await?;
        loop {
            let status = self.ask("guest-exec-status", json!({ "pid": started["pid"] })).await?;
            if status["exited"] != true {
                sleep(AGAIN).await;
                continue;
            }
            let command = format!("{AGENT} {} in the clone", words.join(" "));
            let text = |key: &str| STANDARD.decode_to_vec(status[key].as_str().unwrap_or_default());
            if status["exitcode"] != 0 {
                let said = text("err-data").unwrap_or_default();
                let said = tidy(String::from_utf8_lossy(&said).trim());
                return Err(Unproved::for_good(format!("{command} failed: {said}")));
            }
            let printed = text("out-data").ok().and_then(|text| serde_json::from_slice(&text).ok());
            return printed.ok_or_else(|| Unproved::for_good(format!("{command} printed unexpected output")));
        }
    }
}

/// Keeps the end of QEMU's output, so that QEMU never blocks on a full pipe. Never completes after the end of
/// the output.
async fn listen(errors: &mut Option<ChildStderr>, said: &mut Vec<u8>) {
    let Some(pipe) = errors else { return std::future::pending().await };
    if !pipe.read_buf(said).await.is_ok_and(|length| length > 0) {
        *errors = None;
    }
    said.drain(..said.len().saturating_sub(MOST_SAID));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trial(disk: &Path) -> Trial {
        Trial {
            disks: vec![format!("raw={}", disk.display()).parse().unwrap()],
            qemu: "/bin/false".into(),
            accelerator: None,
            memory: 512,
            arguments: vec!["-kernel".to_owned(), "k".to_owned()],
            within: Duration::ZERO,
        }
    }

    #[test]
    fn images_are_never_written_to_and_nothing_leads_out() {
        let directory = tempfile::tempdir().unwrap();
        let disk = directory.path().join("a,b");
        let words = |disk: &Path| arguments(&trial(disk)).map(|list| list.join(" "));
        assert!(words(&disk).unwrap_err().contains("No such file"));
        assert!(words(directory.path()).unwrap_err().contains("neither a file"));
        let file = std::fs::File::create(&disk).unwrap();
        assert!(words(&disk).unwrap_err().contains("is empty"));
        file.set_len(1).unwrap();
        let list = words(&disk).unwrap();
        assert!(list.contains("-drive if=virtio,snapshot=on,format=raw,file=/"), "{list}");
        assert!(list.contains("/a,,b"), "{list}");
        assert!(
            list.contains("-nic none") && list.contains("-nodefaults") && !list.contains("vsock"),
            "{list}"
        );
        assert!(list.ends_with("-kernel k"), "{list}");
    }

    #[tokio::test]
    async fn a_machine_that_ends_says_so() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1).unwrap();
        for (program, words) in [("/bin/false", "does not boot"), ("/nowhere/qemu", "not found")] {
            let trial = Trial { qemu: program.into(), ..trial(file.path()) };
            let mut machine = Machine::start(&trial).unwrap();
            let why = machine.wait_agent().await.unwrap_err();
            assert!(why.contains(words), "{why}");
            machine.end().await.unwrap();
        }
    }
}
