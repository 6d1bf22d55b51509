//! Plugs volumes that another program may plug as well, without coordination. If both have plugged a volume at the
//! same moment, this program gives way.
//!
//! ```text
//!  plugged ──nobody else has it──▶ reported
//!     └──────somebody else does──▶ its guest is asked, then it is unplugged: being unplugged, until nobody has it
//!                                  its guest uses it, or cannot be asked: it stays, and is asked again at the next attempt
//! ```

use std::time::Duration;

use super::{Asker, Keeper};
use crate::host::backends::volumes::{Plugged, Published, VolumeError};
use crate::host::disks::release;

impl Keeper {
    /// Plugs a volume into the VM that has this name now. If another VM or program is then seen to have the volume as
    /// well, it is unplugged again: success has not been reported to the guest yet, and two VMs must not write to one
    /// volume.
    ///
    /// # Errors
    /// The backend's errors, also if the volume was unplugged again.
    pub(super) async fn plug(
        &self,
        by: &Asker,
        id: &str,
        published: Published,
        vm: &str,
    ) -> Result<Plugged, VolumeError> {
        let plugged = self.0.volumes.plug(id, published, vm).await;
        if let Err(VolumeError::Contested(why)) = &plugged {
            let side = release::bounded(self.agent(vm, by));
            // The other holder may keep the volume for a long time, so only repair waits for that.
            match self.0.volumes.unplug(id, vm, Duration::ZERO, side).await {
                Ok(()) | Err(VolumeError::Waiting { .. }) => {
                    tracing::warn!(
                        volume = id,
                        vm,
                        why,
                        "a volume that another VM or program also has is unplugged again"
                    );
                }
                Err(error) => {
                    tracing::warn!(
                        volume = id,
                        vm,
                        why,
                        %error,
                        "a volume that another VM or program also has cannot be unplugged again, and both may write to it"
                    );
                }
            }
        }
        plugged
    }
}
