//! Claim as it was read from the API server.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;

use super::names::Claim;
use crate::host::backends::volumes::Volume;

/// Claim of guestlet's, with the volume that it represents.
pub(super) struct Read {
    pub(super) claim: Claim,
    pub(super) object: PersistentVolumeClaim,
    pub(super) volume: Volume,
}

impl Read {
    /// Returns the name of its PersistentVolume; `None` before it is bound.
    pub(super) fn persistent_volume(&self) -> Option<&str> {
        let volume = self.object.spec.as_ref().and_then(|spec| spec.volume_name.as_deref());
        volume.filter(|name| !name.is_empty())
    }
}
