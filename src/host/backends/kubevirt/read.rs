//! A claim as it was read from the API server.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;

use super::names::Claim;
use crate::host::backends::volumes::Volume;

/// A claim of ours, as it was read.
pub(super) struct Read {
    pub(super) claim: Claim,
    pub(super) object: PersistentVolumeClaim,
    pub(super) volume: Volume,
}

impl Read {
    /// The name of its PersistentVolume; none before it is bound.
    pub(super) fn persistent_volume(&self) -> Option<&str> {
        let volume = self.object.spec.as_ref().and_then(|spec| spec.volume_name.as_deref());
        volume.filter(|name| !name.is_empty())
    }
}
