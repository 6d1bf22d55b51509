//! Finds the VM that has an image open, by querying its QEMU. A QEMU that cannot be queried proves nothing.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::timeout;

use super::super::super::authority::Said;
use super::super::super::disks::DiskError;
use super::super::super::volumes::Place;
use super::super::link::Standing;
use super::seen::Seen;
use super::{Hotplug, Vm, naming};
use crate::supervise::Scope;

/// Timeout for all VMs together to report whether they have what is searched for.
const TO_SAY: Duration = Duration::from_secs(5);

impl Hotplug {
    /// Queries the QEMU of the VM with this UUID whether it has the disk or the image. The path of the image must
    /// be free of links.
    pub async fn ask(&self, uuid: &str, serial: &str, image: &Path) -> Said {
        let vm = self.vms.borrow().values().flatten().find(|vm| vm.uuid == uuid).cloned();
        match vm {
            Some(vm) => vm.says(|seen| has(seen, serial, image)).await,
            None => Said::Unlisted,
        }
    }

    /// Returns a VM that reports that it has the disk or the image.
    pub async fn who_has(&self, serial: &str, image: &Path) -> Option<Place> {
        let (serial, image) = (serial.to_owned(), image.to_owned());
        self.who(move |seen| has(seen, &serial, &image)).await
    }

    /// Returns the name under which QEMU of the VM with this name has the image open, if it has. The path of the
    /// image must be free of links.
    ///
    /// # Errors
    /// If QEMU does not answer.
    pub async fn has_open(&self, vm: &str, image: &Path) -> Result<Option<String>, DiskError> {
        let vm = self.vm(vm)?;
        Ok(opened_as(&Seen::read(&vm.link).await?, image))
    }

    /// Returns a VM for which `has` is true. All VMs are queried at once, and late answers are ignored.
    pub(super) async fn who(&self, has: impl Fn(&Seen) -> bool + Send + Sync + 'static) -> Option<Place> {
        let vms: Vec<Arc<Vm>> = self.vms.borrow().values().flatten().cloned().collect();
        let (has, scope) = (Arc::new(has), Scope::new());
        let (tells, mut told) = mpsc::channel(1);
        for vm in vms {
            let (has, tells) = (Arc::clone(&has), tells.clone());
            scope.children().spawn(async move {
                if let Said::Has(name) = vm.says(|seen| has(seen)).await {
                    // Another VM may have answered first.
                    drop(tells.send(Place { uuid: vm.uuid.clone(), vm: name }).await);
                }
            });
        }
        drop(tells);
        timeout(TO_SAY, told.recv()).await.ok().flatten()
    }
}

impl Vm {
    /// Determines whether the VM reports that it has what is searched for.
    pub(super) async fn says(&self, has: impl Fn(&Seen) -> bool) -> Said {
        match self.link.standing().await {
            Standing::Connected => {}
            Standing::Absent => return Said::Absent { ended: self.link.has_ended() },
            Standing::Silent(words) => return Said::Silent(words),
            Standing::Untried => return Said::Unlisted,
        }
        match Seen::read(&self.link).await {
            Ok(seen) if has(&seen) => Said::Has(self.name.clone()),
            Ok(_) => Said::HasNot,
            // QEMU may have ended just now.
            Err(error) => match self.link.standing().await {
                Standing::Absent if matches!(error, DiskError::Unreachable(_)) => {
                    Said::Absent { ended: self.link.has_ended() }
                }
                _ => Said::Silent(error.to_string()),
            },
        }
    }
}

/// Reports whether a device or block node is the disk, or has the image open.
fn has(seen: &Seen, serial: &str, image: &Path) -> bool {
    let name = naming::name(serial);
    seen.devices.contains_key(&name) || seen.nodes.contains_key(&name) || has_file(seen, image)
}

/// Reports whether a block node has the image open.
pub(super) fn has_file(seen: &Seen, image: &Path) -> bool {
    opened_as(seen, image).is_some()
}

/// Describes the disk, or else the block node, that has the image open.
fn opened_as(seen: &Seen, image: &Path) -> Option<String> {
    let image = image.to_string_lossy();
    let disk = seen.disks.iter().find(|disk| disk.node.file == image);
    let node = seen.nodes.values().find(|node| node.file == image);
    disk.map(|disk| format!("behind the disk {}", disk.identifier()))
        .or_else(|| node.map(|node| format!("as the block node {}", node.name)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::seen::{Disk, Node};
    use super::*;

    #[test]
    fn an_image_is_had_by_name_and_by_file() {
        let image = Path::new("/pools/fast/a.raw");
        let node = |name: &str, file: &str| -> Node {
            serde_json::from_value(json!({
                "node-name": name, "file": file, "drv": "raw", "ro": false, "image": {"virtual-size": 512},
            }))
            .unwrap()
        };
        let with = |node: Node| Seen { nodes: [(node.name.clone(), node)].into(), ..Seen::default() };
        assert!(!has(&Seen::default(), "a", image));
        assert!(!has(&with(node("other", "/pools/fast/b.raw")), "a", image));
        assert!(has(&with(node("other", "/pools/fast/a.raw")), "a", image), "under another name");
        assert!(has(&with(node(&naming::name("a"), "json:{}")), "a", image));
        let device = [(naming::name("a"), "scsi-hd".to_owned())].into();
        assert!(has(&Seen { devices: device, ..Seen::default() }, "a", image));
        assert_eq!(
            opened_as(&with(node("other", "/pools/fast/a.raw")), image).unwrap(),
            "as the block node other"
        );
        let disk = Disk { device: "x".into(), serial: "y".into(), node: node("", "/pools/fast/a.raw") };
        let seen = Seen { disks: vec![disk], ..Seen::default() };
        assert!(has(&seen, "a", image));
        assert_eq!(opened_as(&seen, image).unwrap(), "behind the disk x");
    }
}
