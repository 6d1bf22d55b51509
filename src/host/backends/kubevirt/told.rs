//! What is told of a VM that KubeVirt runs, and what of it changes. Pure.

use std::sync::Arc;

use super::super::{Change, Ids, Vm};
use super::seen::Facts;
use crate::host::limits::Limits;
use crate::transport::dial::Dialer;
use crate::wire::proto::v1::PowerState;

/// What is told of a VM.
#[derive(Debug, Clone, PartialEq)]
pub struct Told {
    /// The VM.
    pub vm: Arc<Vm>,
    /// Whether it runs.
    pub power: PowerState,
    /// Why that is not known, in words for people.
    pub problem: String,
}

impl Told {
    /// Of the VM with these facts, whose agent is reached so.
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
            // A VirtualMachineInstance shows neither: its phase stays Running, or is that of any end.
            tells_suspension: false,
        });
        Self { vm, power: facts.power, problem: facts.problem.clone() }
    }

    /// Whether it is of the same VM: one that was made again under the same name is new in every respect.
    pub fn is_of_same(&self, other: &Self) -> bool {
        self.vm.ids.lasting == other.vm.ids.lasting
    }

    /// What of it is another than was told before of the same VM.
    pub fn changes(&self, before: Option<&Self>) -> Vec<Change> {
        let mut changes = Vec::new();
        if before.is_none_or(|before| before.vm != self.vm) {
            changes.push(Change::Present(Arc::clone(&self.vm)));
        }
        if before.is_none_or(|before| (before.power, &before.problem) != (self.power, &self.problem)) {
            let (name, problem) = (self.vm.name.clone(), self.problem.clone());
            changes.push(Change::Power { name, power: self.power, problem });
        }
        changes
    }
}
