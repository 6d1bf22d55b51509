//! Reported state of a VM that KubeVirt runs, and the events for its changes. Pure.

use std::sync::Arc;

use super::super::{Change, Ids, Vm};
use super::seen::Facts;
use crate::host::limits::Limits;
use crate::labels::Labels;
use crate::transport::dial::Dialer;
use crate::wire::proto::v1::PowerState;

/// State of a VM as reported by the backend.
#[derive(Debug, Clone, PartialEq)]
pub struct Told {
    /// Identity and limits of the VM.
    pub vm: Arc<Vm>,
    /// Power state.
    pub power: PowerState,
    /// Reason why the power state is unknown, for people.
    pub problem: String,
    /// Labels of the VM.
    pub labels: Arc<Labels>,
}

impl Told {
    /// Builds the state from these facts; `dial` reaches the VM's agent.
    pub fn new(facts: &Facts, dial: Dialer, max_volumes: u32, limits: &Arc<Limits>) -> Self {
        let vm = Arc::new(Vm {
            name: facts.name.clone(),
            ids: Ids {
                lasting: facts.lasting.clone(),
                dmi: facts.dmi.clone(),
                provider: format!("guestlet://{}", facts.lasting),
            },
            cluster: facts.cluster.clone(),
            dial,
            max_volumes,
            limits: Arc::clone(limits),
            // A VirtualMachineInstance shows no suspension: its phase stays Running, or is that of any other end.
            tells_suspension: false,
        });
        let labels = Arc::clone(&facts.labels);
        Self { vm, power: facts.power, problem: facts.problem.clone(), labels }
    }

    /// Reports whether this is the same VM: one that was created again under the same name counts as new.
    pub fn is_of_same(&self, other: &Self) -> bool {
        self.vm.ids.lasting == other.vm.ids.lasting
    }

    /// Returns the events that lead from the state `before`, of the same VM, to this one.
    pub fn changes(&self, before: Option<&Self>) -> Vec<Change> {
        let mut changes = Vec::new();
        if before.is_none_or(|before| before.vm != self.vm) {
            changes.push(Change::Present(Arc::clone(&self.vm)));
        }
        if before.is_none_or(|before| (before.power, &before.problem) != (self.power, &self.problem)) {
            let (name, problem) = (self.vm.name.clone(), self.problem.clone());
            changes.push(Change::Power { name, power: self.power, problem });
        }
        if before.map_or_else(|| !self.labels.is_empty(), |before| before.labels != self.labels) {
            let (name, labels) = (self.vm.name.clone(), Arc::clone(&self.labels));
            changes.push(Change::Labels { name, labels });
        }
        changes
    }
}
