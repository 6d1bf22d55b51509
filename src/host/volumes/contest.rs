//! Plugs volumes that others may plug as well, who ask nobody: of two that have plugged one at the same moment, this one gives way.
//!
//! ```text
//!  plugged ──nobody else has it──▶ told
//!     └──────somebody else does──▶ its guest is asked, then it is unplugged: being taken away, until nobody has it
//!                                  its guest uses it, or cannot be asked: it stays, and is asked again at the next attempt
//! ```

use std::time::Duration;

use super::{Asker, Keeper};
use crate::host::backends::volumes::{Plugged, Published, VolumeError};
use crate::host::disks::release;

impl Keeper {
    /// Plugs a volume into a VM of this present name. One that somebody else is then seen to have as well is unplugged again: its
    /// guest was not told of success, and two must not write to it.
    ///
    /// # Errors
    /// As the backend's, also if it was unplugged again.
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
            // Who else has it may keep it for long; that is waited for by repair.
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
