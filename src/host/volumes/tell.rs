//! Log lines and events about operations on volumes.

use super::super::backends::volumes::Volume;
use super::super::text;
use super::problem::Problem;
use super::{Asker, Keeper};
use crate::wire::proto::v1::virtual_machine_event::Kind;
use crate::wire::proto::v1::{VolumeAction, VolumeChanged};

impl Keeper {
    /// Logs the full reason of a failure, which guests do not get, and returns the problem. A guest that repeats a
    /// failing call does not fill the log.
    pub(super) fn logged(&self, by: &Asker, what: &str, about: &str, error: impl Into<Problem>) -> Problem {
        let problem = error.into();
        let (about, words) = (text::clean(about), format!("cannot {what}: {}", problem.words_for_host()));
        match by {
            Asker::Guest { vm, .. } => self.0.fleet.log().warn(vm, &about, &words),
            Asker::Person(_) | Asker::Host => tracing::warn!(about, "{words}"),
        }
        problem
    }

    /// Logs and reports an operation on a volume, with the party that requested it and the VM that has or had the
    /// volume.
    pub(super) async fn tell(&self, action: VolumeAction, volume: &Volume, by: &Asker, vm: Option<&str>) {
        let (asker, by) = match by {
            Asker::Guest { vm, .. } => (vm.as_str(), vm.as_str()),
            Asker::Person(_) | Asker::Host => ("", "host"),
        };
        let name = vm.unwrap_or(asker).to_owned();
        let what = action.as_str_name();
        tracing::info!(volume = volume.id, cluster = volume.cluster, vm, by, what, "volume");
        let changed = VolumeChanged {
            action: action.into(),
            volume_id: volume.id.clone(),
            name: text::clean(&volume.name),
            cluster: volume.cluster.clone(),
            class: volume.class.clone(),
            bytes: volume.size,
            claim: text::clean(&volume.claim),
            by: by.to_owned(),
        };
        // Fails only if the fleet has ended: then nobody watches.
        self.0.fleet.note(name, Kind::VolumeChanged(changed)).await.ok();
    }
}
