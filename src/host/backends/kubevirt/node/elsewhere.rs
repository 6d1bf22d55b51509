//! Refuses operations that are not the node's: disks and volumes are plugged by the controller role, which may
//! change VMs, and consoles are provided by KubeVirt itself.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::host::backends::consoles::{self, ConsoleError, Consoles};
use crate::host::backends::disks::{
    Answer, AttachedDisk, Detached, DiskError, DiskVolume, Disks, GuestSide, NewDisk,
};
use crate::host::backends::volumes::{
    Capacity, Class, Coming, Holder, NewVolume, Place, Plugged, Published, Room, Usages, Volume, VolumeError,
    Volumes,
};

/// Advice in the error.
const WORDS: &str = "disks of a Kubernetes cluster's VMs are plugged by KubeVirt: volumes are claims; claim them in the guest's \
                     cluster, or ask the controller of guestlet (docs/kubevirt.md), or use virtctl addvolume";

/// Refuses all operations on disks and volumes: in this backend another program is responsible for them.
#[derive(Debug, Clone, Copy)]
pub struct Elsewhere;

fn no_disk<T: Send + 'static>() -> Answer<T> {
    Box::pin(async { Err(DiskError::NoHypervisor(WORDS.to_owned())) })
}

fn no_volume<T>() -> Result<T, VolumeError> {
    Err(VolumeError::Elsewhere(WORDS.to_owned()))
}

impl Disks for Elsewhere {
    fn attach(&self, _: &str, _: NewDisk) -> Answer<AttachedDisk> {
        no_disk()
    }

    fn detach(&self, _: &str, _: String, _: Duration, _: Box<dyn GuestSide>) -> Answer<Detached> {
        no_disk()
    }

    fn resize(&self, _: &str, _: String, _: u64) -> Answer<AttachedDisk> {
        no_disk()
    }

    fn list(&self, _: &str) -> Answer<Vec<AttachedDisk>> {
        no_disk()
    }

    fn volumes(&self, _: Option<&str>) -> Answer<Vec<DiskVolume>> {
        no_disk()
    }

    fn remove_volume(&self, _: &str, _: &str) -> Answer<bool> {
        no_disk()
    }
}

impl Consoles for Elsewhere {
    fn open(&self, vm: &str) -> consoles::Answer {
        let (namespace, name) = vm.split_once('/').unwrap_or(("default", vm));
        let words = format!(
            "the consoles of a Kubernetes cluster's VMs are KubeVirt's: kubectl guestlet console --namespace {namespace} {name}"
        );
        Box::pin(async move { Err(ConsoleError::Elsewhere(words)) })
    }
}

#[tonic::async_trait]
impl Volumes for Elsewhere {
    fn classes(&self) -> Vec<Class> {
        Vec::new()
    }

    fn rooms(&self) -> Vec<Room> {
        Vec::new()
    }

    async fn capacity(&self, _: &str) -> Result<Capacity, VolumeError> {
        no_volume()
    }

    async fn part(&self, _: Option<&str>, _: &str, _: usize) -> Result<Vec<Volume>, VolumeError> {
        no_volume()
    }

    async fn named(&self, _: &str, _: &str) -> Result<Option<Volume>, VolumeError> {
        no_volume()
    }

    async fn usage(&self, _: &str, _: &str, _: &[Coming]) -> Result<Usages, VolumeError> {
        no_volume()
    }

    async fn of_vm(&self, _: &str) -> Result<BTreeSet<String>, VolumeError> {
        no_volume()
    }

    async fn get(&self, _: &str) -> Result<Option<Volume>, VolumeError> {
        no_volume()
    }

    async fn create(&self, _: NewVolume) -> Result<Volume, VolumeError> {
        no_volume()
    }

    async fn holder(&self, _: &str) -> Result<Holder, VolumeError> {
        no_volume()
    }

    async fn remove(&self, _: &str) -> Result<(), VolumeError> {
        no_volume()
    }

    async fn grow(&self, _: &str, _: u64, _: Option<&str>) -> Result<u64, VolumeError> {
        no_volume()
    }

    async fn plug(&self, _: &str, _: Published, _: &str) -> Result<Plugged, VolumeError> {
        no_volume()
    }

    async fn unplug(&self, _: &str, _: &str, _: Duration, _: Box<dyn GuestSide>) -> Result<(), VolumeError> {
        no_volume()
    }

    async fn take_back(
        &self,
        _: &str,
        _: &Place,
        _: Duration,
        _: Box<dyn GuestSide>,
    ) -> Result<(), VolumeError> {
        no_volume()
    }

    async fn forget(&self, _: &str) -> Result<(), VolumeError> {
        no_volume()
    }

    async fn places(&self, _: &str) -> Result<Option<usize>, VolumeError> {
        no_volume()
    }

    async fn plugged(&self, _: &str) -> Result<BTreeSet<String>, VolumeError> {
        no_volume()
    }

    fn serial(&self, _: &str) -> Option<String> {
        None
    }
}
