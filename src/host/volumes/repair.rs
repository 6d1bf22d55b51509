//! Finds volumes that are not where their records say, and restores that.
//!
//! ```text
//!  recorded: a VM has it ──but QEMU has no such disk──▶ plugged again       (the VM was restarted, or it was unplugged)
//!  recorded: leaving     ──and QEMU has no such disk──▶ its image is closed, and its record removed
//!                                                                           (this program ended in between)
//!  recorded: another, or no VM ──but QEMU has it──▶ unplugged               (forgotten by force, or plugged late)
//! ```
//!
//! A VM is checked when it is back or its agent is. All VMs are checked regularly.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::sync::broadcast::error::RecvError;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::turns::Thing;
use super::{Asker, Keeper, PATIENCE};
use crate::host::backends::volumes::{Place, VolumeError};
use crate::host::disks::release;
use crate::host::fleet::{Identity, Machine, Watched};
use crate::wire::proto::v1::virtual_machine_event::Kind;
use crate::wire::proto::v1::{PowerState, VirtualMachineEvent, VolumeAction};

/// Interval at which all VMs are checked.
const INTERVAL: Duration = Duration::from_secs(30);

impl Keeper {
    /// Checks and repairs until `shutdown`.
    pub async fn repair(self, shutdown: CancellationToken) {
        shutdown.run_until_cancelled(self.watch()).await;
    }

    async fn watch(self) {
        let mut ticks = tokio::time::interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let Ok(Some(Watched { mut coming, .. })) = self.0.fleet.watch(None, None).await else {
            return std::future::pending().await;
        };
        loop {
            let vm = tokio::select! {
                _ = ticks.tick() => None,
                event = coming.recv() => match event {
                    Ok(event) if is_back(&event) => Some(event.name.clone()),
                    Ok(_) => continue,
                    Err(RecvError::Lagged(_)) => None,
                    Err(RecvError::Closed) => return std::future::pending().await,
                },
            };
            self.look(vm.as_deref()).await;
        }
    }

    /// Checks one VM, or all of them concurrently.
    async fn look(&self, name: Option<&str>) {
        if let Some(shares) = self.0.volumes.shares().filter(|_| name.is_none())
            && let Err(error) = shares.repair().await
        {
            tracing::debug!(%error, "cannot check whether shares are served as they should be");
        }
        let is_any = async {
            if name.is_none() && self.0.complaints.are_any() {
                let volumes = self.0.volumes.list(None).await?;
                let is_there =
                    |id: &str| volumes.binary_search_by(|volume| volume.id.as_str().cmp(id)).is_ok();
                self.0.complaints.keep(is_there);
            }
            Ok::<_, VolumeError>(!self.0.volumes.part(None, "", 1).await?.is_empty())
        };
        match is_any.await {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => {
                return tracing::debug!(%error, "cannot check whether volumes are where they should be");
            }
        }
        let vms = match name {
            // A look-up rather than a search, since a guest causes this whenever it comes back.
            Some(name) => self.0.fleet.find(Identity::Name(name.to_owned())).await.map(Vec::from_iter),
            None => self.0.fleet.machines().await,
        };
        for Machine { vm, power } in vms.unwrap_or_default() {
            if power == PowerState::Off {
                continue;
            }
            let has = match self.0.volumes.of_vm(&vm.ids.lasting).await {
                Ok(has) => has,
                Err(error) => {
                    tracing::debug!(vm = vm.name, %error, "cannot read which volumes a VM should have");
                    continue;
                }
            };
            if has.is_empty() && !self.0.volumes.may_have(&vm.name) {
                continue;
            }
            let Ok(turn) = self.0.turns.take(Thing::Vm(vm.name.clone())) else { continue };
            let keeper = self.clone();
            self.0.tasks.children().spawn(async move {
                keeper.compare(&vm.name, &vm.ids.lasting, &has).await;
                drop(turn);
            });
        }
    }

    /// Compares the volumes of one VM with the recorded ones, `has`, and repairs what differs.
    async fn compare(&self, vm: &str, uuid: &str, has: &BTreeSet<String>) {
        // Only this look is limited: a repair may take minutes, and must not delay looks at other VMs.
        let place = if self.are_of_one_host() { None } else { self.0.looks.acquire().await.ok() };
        let plugged = self.0.volumes.plugged(vm).await;
        drop(place);
        let plugged = match plugged {
            Ok(plugged) => plugged,
            Err(error) => return tracing::debug!(vm, %error, "cannot read which volumes a VM has"),
        };
        for id in has.difference(&plugged) {
            // An operation on the volume is under way.
            let Ok(_turn) = self.0.turns.take(Thing::volume(id)) else { continue };
            self.mend(id, vm, uuid).await;
        }
        for id in plugged.difference(has) {
            let Ok(_turn) = self.0.turns.take(Thing::volume(id)) else { continue };
            self.take_back(id, vm, uuid).await;
        }
    }

    /// Unplugs a volume from a VM that must not have it, if that is still so.
    async fn take_back(&self, id: &str, vm: &str, uuid: &str) {
        let Ok(Some(volume)) = self.0.volumes.get(id).await else { return };
        let is_its = volume.published.as_ref().is_some_and(|published| published.uuid == uuid);
        if is_its || !self.0.volumes.plugged(vm).await.is_ok_and(|plugged| plugged.contains(id)) {
            return;
        }
        tracing::debug!(volume = id, vm, "a VM has a volume that it should not have; unplugging it");
        let agent = self.agent(vm, &Asker::Host);
        let place = Place { uuid: uuid.to_owned(), vm: vm.to_owned() };
        let taken = self.0.volumes.take_back(id, &place, PATIENCE, release::bounded(agent)).await;
        match taken {
            Ok(()) => {
                self.0.complaints.settle(id);
                tracing::warn!(
                    volume = id,
                    vm,
                    "a VM had a volume that it should not have; it was unplugged"
                );
                self.tell(VolumeAction::Detached, &volume, &Asker::Host, Some(vm)).await;
            }
            Err(error) => {
                self.complain(id, vm, &format!("cannot unplug a volume that a VM should not have: {error}"));
            }
        }
    }

    /// Plugs a volume that its VM lacks or, if the volume is leaving, completes that; unless things have changed
    /// meanwhile.
    async fn mend(&self, id: &str, vm: &str, uuid: &str) {
        let Ok(Some(volume)) = self.0.volumes.get(id).await else { return };
        let Some(published) = volume.published.clone().filter(|published| published.uuid == uuid) else {
            return;
        };
        if !self.0.volumes.plugged(vm).await.is_ok_and(|plugged| !plugged.contains(id)) {
            return;
        }
        let (leaving, outcome) = if published.leaving {
            // The disk no longer exists, but its block nodes and image may still be open.
            let side = release::bounded(self.agent(vm, &Asker::Host));
            (true, self.0.volumes.unplug(id, vm, PATIENCE, side).await)
        } else {
            (false, self.plug(&Asker::Host, id, published, vm).await.map(drop))
        };
        match outcome {
            Ok(()) => {
                self.0.complaints.settle(id);
                let action = if leaving { VolumeAction::Detached } else { VolumeAction::Reattached };
                self.tell(action, &volume, &Asker::Host, Some(vm)).await;
            }
            Err(error) => {
                let words = "a volume is missing in its VM, and cannot be plugged again";
                self.complain(id, vm, &format!("{words}: {error}"));
            }
        }
    }

    /// Warns about a problem with a volume, once until the problem changes.
    fn complain(&self, id: &str, vm: &str, words: &str) {
        if self.0.complaints.is_new(id, words) {
            tracing::warn!(volume = id, vm, "{words}");
        } else {
            tracing::debug!(volume = id, vm, "{words}");
        }
    }
}

/// Reports whether an event means that a VM is back, and so may have lost its disks.
fn is_back(event: &VirtualMachineEvent) -> bool {
    match &event.kind {
        Some(Kind::PowerChanged(change)) => change.power() == PowerState::Running,
        Some(Kind::SessionOpened(_)) => true,
        _ => false,
    }
}
