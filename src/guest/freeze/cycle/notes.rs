//! Notes of the keeper, from which the receipt is made at the end.

use std::collections::BTreeMap;

use crate::guest::freeze::By;
use crate::guest::freeze::cycle::{Cycle, Waiting};
use crate::guest::freeze::end::{End, Spoiled};
use crate::guest::freeze::receipts::inventory::Inventory;
use crate::guest::freeze::receipts::{self, Told};
use crate::receipt::judge::judge;
use crate::receipt::{Caller, Cut, NotFrozen, Receipt, Volume};
use crate::sys::block_stack::Device;
use crate::sys::root::Root;

/// Notes for the receipt.
pub(super) struct Notes {
    /// Receipt as far as it is known.
    pub receipt: Receipt,
    /// File systems that could not be frozen: the reason, and whether somebody else holds them frozen.
    pub passed_over: BTreeMap<Device, (&'static str, bool)>,
    /// File systems that did not stay frozen, each with the reason.
    pub lost: BTreeMap<Device, String>,
    /// Reason why the file systems were never all frozen at one time.
    pub failure: Option<String>,
}

impl Notes {
    pub(super) fn new(root: &Root, caller: Caller) -> Self {
        let receipt = receipts::begin(root, caller);
        Self { receipt, passed_over: BTreeMap::new(), lost: BTreeMap::new(), failure: None }
    }

    pub(super) fn opened(&mut self, inventory: Inventory) {
        let Inventory { volumes, not_frozen, left_out } = inventory;
        self.receipt.volumes = volumes;
        self.receipt.not_frozen = not_frozen;
        self.receipt.left_out = left_out;
    }
}

fn number(device: Device) -> String {
    format!("{}:{}", device.0, device.1)
}

impl Cycle {
    /// Records a request for a thaw.
    pub(super) fn note(&mut self, answer: Waiting, by: By, cut: Option<Cut>) {
        self.waiting.push(answer);
        self.by = by;
        let receipt = &mut self.notes.receipt;
        if receipt.times.thaw_asked.is_none() {
            receipt.times.thaw_asked = Some(receipts::now());
            receipt.cut = cut;
        }
    }

    /// Returns how this freeze ended, and a description of the problems, which is empty if there are none.
    pub(super) fn outcome(&self, spoiled: Option<&Spoiled>) -> (End, String) {
        let (end, why) = match (spoiled, &self.notes.failure) {
            (Some(spoiled), _) => (spoiled.end, Some(spoiled.reason.clone())),
            (None, Some(failure)) => (End::Failed, Some(failure.clone())),
            (None, None) => (End::Asked, None),
        };
        (end, why.into_iter().chain(self.problems.iter().cloned()).collect::<Vec<_>>().join("; "))
    }

    /// Completes the receipt of this freeze, which has ended, and passes it to the clerk. Returns none if the
    /// freeze was refused before it began, or had nothing to freeze.
    pub(super) fn receipt(&mut self, spoiled: Option<&Spoiled>) -> Option<Told> {
        if !self.anew || (self.frozen.is_empty() && self.notes.failure.is_none()) {
            return None;
        }
        let mut receipt = std::mem::take(&mut self.notes.receipt);
        let (end, problem) = self.outcome(spoiled);
        end.word().clone_into(&mut receipt.end.how);
        receipt.end.problem = problem;
        self.look_through(&mut receipt);
        if !self.applications.is_empty() {
            receipt.applications = self.applications_told();
        }
        judge(&mut receipt);
        let told = Told::from(&receipt);
        tracing::info!("receipt {}{}", receipt.words(), because(&told.reasons));
        if let Some(clerk) = &self.guest.freezer.0.clerk {
            clerk.take(&receipt);
        }
        Some(told)
    }

    /// Records the outcome for each file system.
    fn look_through(&self, receipt: &mut Receipt) {
        let devices: BTreeMap<String, (usize, Device)> = self
            .targets
            .iter()
            .enumerate()
            .map(|(place, target)| (number(target.device), (place, target.device)))
            .collect();
        for (device, (place, _)) in &devices {
            if !receipt.volumes.iter().any(|volume| volume.device == *device) {
                let mount_point = self.targets.get(*place).map(|target| target.mount_point.clone());
                let (mount_point, device) = (mount_point.unwrap_or_default(), device.clone());
                receipt.volumes.push(Volume { mount_point, device, ..Volume::default() });
            }
        }
        let mut volumes = Vec::new();
        for mut volume in std::mem::take(&mut receipt.volumes) {
            let Some((place, device)) = devices.get(&volume.device) else {
                "it is no longer mounted".clone_into(&mut volume.problem);
                volumes.push(volume);
                continue;
            };
            if let Some((reason, is_held)) = self.notes.passed_over.get(device) {
                let Volume { mount_point, kind, .. } = volume;
                let reason = (*reason).to_owned();
                receipt.not_frozen.push(NotFrozen { mount_point, kind, reason, is_held: *is_held });
                continue;
            }
            if !self.sure {
                "it is not known whether it was frozen".clone_into(&mut volume.problem);
            } else if let Some(lost) = self.notes.lost.get(device) {
                volume.problem.clone_from(lost);
            } else if !self.frozen.contains(place) {
                "it was not frozen".clone_into(&mut volume.problem);
            }
            volumes.push(volume);
        }
        receipt.volumes = volumes;
    }
}

/// Returns the reasons for the level, to be appended to it.
fn because(reasons: &[String]) -> String {
    if reasons.is_empty() { String::new() } else { format!(" ({})", reasons.join("; ")) }
}
