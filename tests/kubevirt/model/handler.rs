//! virt-handler and the domain: a launcher's domain starts, disks are plugged into it and unplugged, and it ends.

use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::attachers::say;
use super::controller::is_migrating;
use super::domain::Disk;
use super::kubelet::is_ready;
use super::objects::{
    Kind, bytes, claim_of, is_hotpluggable, items, key, name, named, text, uid, with_condition,
};
use super::pace::{Step, Turn};
use super::world::{Done, World};

/// A disk of a domain that runs.
pub struct Plug {
    disk: Disk,
    /// Where the journal has it.
    number: usize,
    state: State,
}

enum State {
    Plugging(Outcome),
    In,
    Unplugging(Outcome),
}

type Outcome = oneshot::Receiver<Result<(), String>>;

impl World {
    /// Whether the domain of an instance runs.
    pub(super) fn runs(&self, instance: &Value) -> bool {
        self.shared.domain_of(uid(instance)).is_some()
    }

    /// Whether a domain runs in a launcher.
    pub(super) fn runs_in(&self, launcher: &Value) -> bool {
        self.shared.runs_in(uid(launcher))
    }

    pub(super) async fn boot(&mut self, instance: &Value, launcher: &Value) -> Done {
        let node = text(&launcher["spec"]["nodeName"]).to_owned();
        if !self.runs(instance) {
            let may = self.shared.lives(&node) && is_ready(launcher);
            if !may || !self.bring_volumes(instance, launcher).await? {
                return Ok(());
            }
            if !self.may(Step::Boot, name(instance), uid(instance)) {
                return Ok(());
            }
            self.shared.begin(uid(instance), uid(launcher), &node);
            for volume in items(&instance["spec"]["volumes"]).filter(|volume| !is_hotpluggable(volume)) {
                if let Some(disk) = self.disk(instance, volume) {
                    let number = self.shared.journal().takes(disk.clone());
                    let whose = (uid(instance).to_owned(), disk.volume.clone());
                    self.plugs.insert(whose, Plug { disk, number, state: State::In });
                }
            }
        }
        let mut entries = self.entries(instance, launcher);
        for (entry, letter) in
            entries.iter_mut().filter(|entry| entry["hotplugVolume"].is_null()).zip('a'..='z')
        {
            entry["target"] = json!(format!("vd{letter}"));
        }
        let conditions = with_condition(instance, "Ready", "True", "");
        let status = json!({ "phase": "Running", "volumeStatus": entries, "conditions": conditions });
        self.patch_status(Kind::Vmi, instance, &status).await.map(drop)
    }

    /// Brings the hot-plugged volumes of an instance that is to start to its launcher; whether all are there, which its domain
    /// waits for.
    async fn bring_volumes(&mut self, instance: &Value, launcher: &Value) -> Done<bool> {
        if !items(&instance["spec"]["volumes"]).any(is_hotpluggable) {
            return Ok(true);
        }
        let mut entries = self.entries(instance, launcher);
        for entry in entries.iter_mut().filter(|entry| entry["phase"] == "AttachedToNode") {
            self.handle(instance, entry).await?;
        }
        if json!(entries) != instance["status"]["volumeStatus"] {
            self.patch_status(Kind::Vmi, instance, &json!({ "volumeStatus": entries })).await?;
        }
        let Some(instance) = self.get(Kind::Vmi, &key(instance)) else { return Ok(false) };
        self.attach_volumes(&instance, launcher).await?;
        let came = entries.iter().filter(|entry| entry["hotplugVolume"].is_object());
        Ok(!entries.is_empty() && came.into_iter().all(|entry| entry["phase"] == "MountedToPod"))
    }

    /// Brings a running instance's volumes to what its spec says.
    pub(super) async fn tend(&mut self, instance: &Value, launcher: &Value) -> Done {
        let lives = self.shared.lives(text(&instance["status"]["nodeName"]));
        if lives && !self.runs(instance) {
            // It has ended by itself, or its node was off meanwhile.
            self.stop(instance);
            return self.patch_status(Kind::Vmi, instance, &json!({ "phase": "Failed" })).await.map(drop);
        }
        let instance = &self.judge(instance).await?;
        let mut entries = self.entries(instance, launcher);
        let mut told = Ok(());
        if lives {
            for entry in &mut entries {
                if entry["hotplugVolume"].is_object() {
                    let done = self.handle(instance, entry).await;
                    told = told.and(done);
                }
                self.resize(instance, entry).await;
            }
        }
        if json!(entries) != instance["status"]["volumeStatus"] && !(entries.is_empty() && is_blank(instance))
        {
            self.patch_status(Kind::Vmi, instance, &json!({ "volumeStatus": entries })).await?;
        }
        told?;
        let Some(instance) = self.get(Kind::Vmi, &key(instance)) else { return Ok(()) };
        self.attach_volumes(&instance, launcher).await
    }

    async fn handle(&mut self, instance: &Value, entry: &mut Value) -> Done {
        let volume = text(&entry["name"]).to_owned();
        let claim = text(&entry["persistentVolumeClaimInfo"]["claimName"]).to_owned();
        let wanted = named(&instance["spec"]["volumes"], &volume).cloned();
        let pod = text(&entry["hotplugVolume"]["attachPodUID"]).to_owned();
        let whose = (uid(instance).to_owned(), volume.clone());
        let outcome = self.outcome(&whose);
        let id = format!("{}-{volume}-{pod}", uid(instance));
        match (text(&entry["phase"]), wanted) {
            ("AttachedToNode", Some(_)) if !pod.is_empty() => {
                if self.may(Step::Mount, &claim, &id) {
                    say(
                        entry,
                        "MountedToPod",
                        "VolumeMountedToPod",
                        "the volume is mounted for the launcher",
                    );
                }
                Ok(())
            }
            ("MountedToPod", Some(_)) if self.is_in(&whose) => {
                let target = self.free_target(instance, entry);
                entry["target"] = json!(target);
                say(entry, "Ready", "VolumeReady", "the volume is plugged");
                Ok(())
            }
            ("MountedToPod", Some(volume)) => match outcome {
                Some(Err(error)) => self.tell(Kind::Vmi, instance, "SyncFailed", &error).await,
                _ => self.plug(instance, &volume, &claim, &id).await,
            },
            ("Ready" | "MountedToPod", None) => match outcome {
                Some(Err(error)) => self.tell(Kind::Vmi, instance, "SyncFailed", &error).await,
                _ if self.plugs.contains_key(&whose) => self.unplug(instance, &whose, &claim, &id).await,
                _ => {
                    entry["target"] = json!("");
                    if self.may(Step::Unmount, &claim, &id) {
                        say(entry, "UnMountedFromPod", "VolumeUnMountedFromPod", "the volume is unmounted");
                    }
                    Ok(())
                }
            },
            _ => Ok(()),
        }
    }

    /// Whether the domain has a disk, on which nothing is being done.
    fn is_in(&self, whose: &(String, String)) -> bool {
        self.plugs.get(whose).is_some_and(|plug| matches!(plug.state, State::In))
    }

    /// How an operation has ended that was begun on a disk, once.
    fn outcome(&mut self, whose: &(String, String)) -> Option<Result<(), String>> {
        let plug = self.plugs.get_mut(whose)?;
        let (State::Plugging(outcome) | State::Unplugging(outcome)) = &mut plug.state else { return None };
        let result = outcome.try_recv().ok()?;
        let stays =
            matches!((&plug.state, &result), (State::Plugging(_), Ok(())) | (State::Unplugging(_), Err(_)));
        if stays {
            plug.state = State::In;
        } else {
            self.shared.journal().lets_go(plug.number);
            self.plugs.remove(whose);
        }
        Some(result)
    }

    async fn plug(&mut self, instance: &Value, volume: &Value, claim: &str, id: &str) -> Done {
        let whose = (uid(instance).to_owned(), text(&volume["name"]).to_owned());
        if self.plugs.contains_key(&whose) || is_migrating(instance) {
            return Ok(());
        }
        match self.turn(Step::Plug, claim, id) {
            Turn::Wait => return Ok(()),
            Turn::Fail(message) => return self.tell(Kind::Vmi, instance, "SyncFailed", &message).await,
            Turn::Go => {}
        }
        let Some(disk) = self.disk(instance, volume) else { return Ok(()) };
        let number = self.shared.journal().takes(disk.clone());
        let (done, outcome) = oneshot::channel();
        let (domain, shared, plugged) = (self.domain.clone(), self.shared.clone(), disk.clone());
        tokio::spawn(async move {
            let _ = done.send(domain.plug(&plugged).await);
            shared.changed.notify_one();
        });
        self.plugs.insert(whose, Plug { disk, number, state: State::Plugging(outcome) });
        Ok(())
    }

    async fn unplug(&mut self, instance: &Value, whose: &(String, String), claim: &str, id: &str) -> Done {
        if !self.is_in(whose) || is_migrating(instance) {
            return Ok(());
        }
        match self.turn(Step::Unplug, claim, id) {
            Turn::Wait => return Ok(()),
            Turn::Fail(message) => return self.tell(Kind::Vmi, instance, "SyncFailed", &message).await,
            Turn::Go => {}
        }
        let plug = self.plugs.get_mut(whose).expect("it was looked for");
        let (done, outcome) = oneshot::channel();
        let (domain, shared, disk) = (self.domain.clone(), self.shared.clone(), plug.disk.clone());
        tokio::spawn(async move {
            let _ = done.send(domain.unplug(&disk).await);
            shared.changed.notify_one();
        });
        plug.state = State::Unplugging(outcome);
        Ok(())
    }

    /// A domain sees that a volume has grown.
    async fn resize(&mut self, instance: &Value, entry: &mut Value) {
        let size = bytes(&entry["persistentVolumeClaimInfo"]["capacity"]["storage"]);
        let whose = (uid(instance).to_owned(), text(&entry["name"]).to_owned());
        let Some(plug) = self.plugs.get_mut(&whose).filter(|plug| matches!(plug.state, State::In)) else {
            return;
        };
        if size > plug.disk.bytes {
            plug.disk.bytes = size;
            self.domain.resize(&plug.disk).await;
        }
        entry["size"] = json!(plug.disk.bytes);
    }

    /// The domain of an instance ends, with all that is plugged into it.
    pub(super) fn stop(&mut self, instance: &Value) {
        self.shared.end(uid(instance));
        self.plugs.retain(|(whose, _), plug| {
            if whose == uid(instance) {
                self.shared.journal().lets_go(plug.number);
            }
            whose != uid(instance)
        });
    }

    /// A volume as the disk that its domain has.
    fn disk(&self, instance: &Value, volume: &Value) -> Option<Disk> {
        let claim = claim_of(volume)?;
        let disk = named(&instance["spec"]["domain"]["devices"]["disks"], text(&volume["name"]))?;
        let is_lun = disk["lun"].is_object();
        let kind = if is_lun { &disk["lun"] } else { &disk["disk"] };
        let capacity = &self.claim_beside(instance, claim)?["status"]["capacity"]["storage"];
        Some(Disk {
            vm: key(instance),
            instance: uid(instance).to_owned(),
            node: text(&instance["status"]["nodeName"]).to_owned(),
            volume: text(&volume["name"]).to_owned(),
            claim: claim.to_owned(),
            persistent_volume: self.volume_of(instance, claim)?.to_owned(),
            serial: if is_lun { String::new() } else { text(&disk["serial"]).to_owned() },
            bus: kind["bus"].as_str().unwrap_or("scsi").to_owned(),
            is_lun,
            is_read_only: volume["persistentVolumeClaim"]["readOnly"] == true || kind["readonly"] == true,
            bytes: bytes(capacity),
        })
    }

    /// The next name of a disk that the domain has not got.
    fn free_target(&self, instance: &Value, entry: &Value) -> String {
        let whose = (uid(instance).to_owned(), text(&entry["name"]).to_owned());
        let is_virtio = self.plugs.get(&whose).is_some_and(|plug| plug.disk.bus == "virtio");
        let prefix = if is_virtio { "vd" } else { "sd" };
        let known = &instance["status"]["volumeStatus"];
        let is_free = |target: &String| items(known).all(|entry| entry["target"] != target.as_str());
        let mut targets = (0..).map(|number| format!("{prefix}{}", letters(number)));
        targets.find(is_free).expect("there is no end of names")
    }

    /// All domains on a node have ended, without anybody having told the cluster.
    pub(super) fn lose(&mut self, node: &str) {
        self.plugs.retain(|_, plug| {
            if plug.disk.node == node {
                self.shared.journal().lets_go(plug.number);
            }
            plug.disk.node != node
        });
    }

    /// The disks of an instance are on another node now.
    pub(super) fn moved(&mut self, instance: &Value, node: &str) {
        for ((whose, _), plug) in &mut self.plugs {
            if whose == uid(instance) {
                node.clone_into(&mut plug.disk.node);
            }
        }
    }
}

fn is_blank(instance: &Value) -> bool {
    items(&instance["status"]["volumeStatus"]).next().is_none()
}

/// `a` to `z`, `aa` and so on.
fn letters(number: u32) -> String {
    let last = char::from_u32(u32::from('a') + number % 26).expect("a letter");
    match number / 26 {
        0 => last.to_string(),
        rest => letters(rest - 1) + &last.to_string(),
    }
}
