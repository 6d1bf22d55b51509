//! Which VM has an image open, as its QEMU says. That one cannot be asked proves nothing.

use std::path::Path;
use std::sync::Arc;

use super::super::super::authority::Said;
use super::super::super::disks::DiskError;
use super::super::super::volumes::Place;
use super::super::link::Standing;
use super::seen::Seen;
use super::{Hotplug, Vm, naming};

impl Hotplug {
    /// Asks the QEMU of the VM with this UUID whether it has the disk, or the image, which has no links in its path.
    pub async fn ask(&self, uuid: &str, serial: &str, image: &Path) -> Said {
        let vm = self.vms.borrow().values().flatten().find(|vm| vm.uuid == uuid).cloned();
        match vm {
            Some(vm) => vm.says(|seen| has(seen, serial, image)).await,
            None => Said::Unlisted,
        }
    }

    /// A VM that says that it has the disk, or the image.
    pub async fn who_has(&self, serial: &str, image: &Path) -> Option<Place> {
        self.who(|seen| has(seen, serial, image)).await
    }

    /// A VM of which this is so.
    pub(super) async fn who(&self, has: impl Fn(&Seen) -> bool) -> Option<Place> {
        let vms: Vec<Arc<Vm>> = self.vms.borrow().values().flatten().cloned().collect();
        for vm in vms {
            if matches!(vm.says(&has).await, Said::Has(_)) {
                return Some(Place { uuid: vm.uuid.clone(), vm: vm.name.clone() });
            }
        }
        None
    }
}

impl Vm {
    /// Whether it says that it has what is looked for.
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
            // It may have ended just now.
            Err(error) => match self.link.standing().await {
                Standing::Absent if matches!(error, DiskError::Unreachable(_)) => {
                    Said::Absent { ended: self.link.has_ended() }
                }
                _ => Said::Silent(error.to_string()),
            },
        }
    }
}

/// Whether there is a device or a block node that is the disk, or has the image.
fn has(seen: &Seen, serial: &str, image: &Path) -> bool {
    let name = naming::name(serial);
    seen.devices.contains_key(&name) || seen.nodes.contains_key(&name) || has_file(seen, image)
}

/// Whether there is a block node that has the image.
pub(super) fn has_file(seen: &Seen, image: &Path) -> bool {
    let image = image.to_string_lossy();
    seen.nodes.values().any(|node| node.file == image)
        || seen.disks.iter().any(|disk| disk.node.file == image)
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
        let disk = Disk { device: "x".into(), serial: "y".into(), node: node("", "/pools/fast/a.raw") };
        assert!(has(&Seen { disks: vec![disk], ..Seen::default() }, "a", image));
    }
}
