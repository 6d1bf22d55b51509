//! Calls of the admin API about volumes, and where a volume is mounted in its guest.

use tonic::Status;

use super::problem::{Kind, Problem};
use super::size::Range;
use super::{Asker, Keeper, Wanted, share};
use crate::host::backends::volumes::{self, Published};
use crate::host::caller::Behalf;
use crate::host::fleet::Known;
use crate::wire::proto::v1::{
    AttachVolumeRequest, CreateVolumeRequest, DetachVolumeRequest, ExpandVolumeRequest, GuestState, IoError,
    IoOperation, ListVolumesRequest, ListVolumesResponse, RemoveVolumeRequest, RemoveVolumeResponse, Volume,
    VolumeHolder,
};

impl Keeper {
    /// Lists all volumes, or those of one cluster.
    ///
    /// # Errors
    /// If the volumes cannot be read.
    pub async fn list_for_people(&self, request: ListVolumesRequest) -> Result<ListVolumesResponse, Status> {
        let cluster = Some(request.cluster.as_str()).filter(|cluster| !cluster.is_empty());
        let volumes = self.0.volumes.list(cluster).await.map_err(for_people)?;
        let mut shown = Vec::new();
        for volume in &volumes {
            shown.push(self.show(volume).await);
        }
        Ok(ListVolumesResponse { volumes: shown })
    }

    /// Creates a volume of a cluster.
    ///
    /// # Errors
    /// The errors of [`Keeper::create`].
    pub async fn create_for_people(
        &self,
        behalf: Behalf,
        request: CreateVolumeRequest,
    ) -> Result<Volume, Status> {
        let person = Asker::Person(behalf);
        let CreateVolumeRequest { cluster, name, size, class } = request;
        if cluster.is_empty() {
            return Err(Problem::new(Kind::Invalid, "specify the cluster of the volume").for_host());
        }
        let class = Some(class).filter(|class| !class.is_empty());
        let range = Range { required: size, limit: 0 };
        let wanted = Wanted { name, class, range, claim: String::new(), is_share: false };
        let made = self.create(&person, &cluster, wanted).await.map_err(Problem::for_host)?;
        Ok(self.show(&made).await)
    }

    /// Attaches a volume to a VM.
    ///
    /// # Errors
    /// The errors of [`Keeper::publish`].
    pub async fn attach_for_people(
        &self,
        behalf: Behalf,
        request: AttachVolumeRequest,
    ) -> Result<Volume, Status> {
        let person = Asker::Person(behalf);
        let AttachVolumeRequest { volume_id, vm, read_only } = request;
        self.publish(&person, &volume_id, &vm, read_only).await.map_err(Problem::for_host)?;
        self.show_by_id(&volume_id).await
    }

    /// Detaches a volume from its VM.
    ///
    /// # Errors
    /// The errors of [`Keeper::unpublish`]; and if the volume does not exist.
    pub async fn detach_for_people(
        &self,
        behalf: Behalf,
        request: DetachVolumeRequest,
    ) -> Result<Volume, Status> {
        let person = Asker::Person(behalf);
        let DetachVolumeRequest { volume_id, force } = request;
        let volume = self.get(&person, &volume_id).await.map_err(Problem::for_host)?;
        if let Some(problem) = share::in_use(&volume).filter(|_| !force) {
            return Err(problem.for_host());
        }
        self.unpublish(&person, &volume_id, None, force).await.map_err(Problem::for_host)?;
        self.show_by_id(&volume_id).await
    }

    /// Expands a volume.
    ///
    /// # Errors
    /// The errors of [`Keeper::expand`].
    pub async fn expand_for_people(
        &self,
        behalf: Behalf,
        request: ExpandVolumeRequest,
    ) -> Result<Volume, Status> {
        let person = Asker::Person(behalf);
        let ExpandVolumeRequest { volume_id, size } = request;
        let range = Range { required: size, limit: 0 };
        self.expand(&person, &volume_id, range).await.map_err(Problem::for_host)?;
        self.show_by_id(&volume_id).await
    }

    /// Removes a volume.
    ///
    /// # Errors
    /// The errors of [`Keeper::remove`].
    pub async fn remove_for_people(
        &self,
        behalf: Behalf,
        request: RemoveVolumeRequest,
    ) -> Result<RemoveVolumeResponse, Status> {
        self.remove(&Asker::Person(behalf), &request.volume_id).await.map_err(Problem::for_host)?;
        Ok(RemoveVolumeResponse {})
    }

    async fn show_by_id(&self, id: &str) -> Result<Volume, Status> {
        let volume = self.get(&Asker::Host, id).await.map_err(Problem::for_host)?;
        Ok(self.show(&volume).await)
    }

    async fn show(&self, volume: &volumes::Volume) -> Volume {
        let (holder, failed) = match volume.published.clone() {
            Some(published) => self.holder_of(published, &self.names(&volume.id)).await,
            None => (None, None),
        };
        Volume {
            id: volume.id.clone(),
            name: super::super::text::clean(&volume.name),
            cluster: volume.cluster.clone(),
            class: volume.class.clone(),
            size: volume.size,
            claim: super::super::text::clean(&volume.claim),
            holder,
            problem: failed.or_else(|| volume.problem.clone()).unwrap_or_default(),
            serial: self.0.volumes.serial(&volume.id).unwrap_or_default(),
            sharers: volume.sharers.iter().flatten().map(sharer).collect(),
        }
    }

    /// Returns the problem of a volume, if any: an I/O error where it is plugged, or a problem of the volume itself.
    pub async fn problem(&self, volume: &volumes::Volume) -> Option<String> {
        let failed = match &volume.published {
            // Its device in the guest is not looked up: that would search all disks of the VM for each volume of a list.
            Some(published) => {
                failure(self.holding(published).await.as_ref(), published, &self.names(&volume.id))
            }
            None => None,
        };
        failed.or_else(|| volume.problem.clone())
    }

    /// Returns all names by which a guest may know a volume: serial numbers and others.
    fn names(&self, id: &str) -> Vec<String> {
        self.0.volumes.serial(id).into_iter().chain(self.0.volumes.other_names(id)).collect()
    }

    /// Returns the state of the VM that has a volume.
    async fn holding(&self, published: &Published) -> Option<Known> {
        let found = self.0.fleet.get(published.vm.clone()).await.ok().flatten();
        found.filter(|found| found.view.uuid == published.uuid)
    }

    /// Describes the VM that has a volume, which its guest knows by one of these names, and returns the I/O error
    /// there, if any.
    async fn holder_of(
        &self,
        published: Published,
        names: &[String],
    ) -> (Option<VolumeHolder>, Option<String>) {
        let found = self.holding(&published).await;
        let failed = failure(found.as_ref(), &published, names);
        let Published { uuid, vm, read_only, leaving, .. } = published;
        let state = found.and_then(|found| found.state);
        let (device, mount_points) = state.map(|state| place(&state, names)).unwrap_or_default();
        let mut pods: Vec<_> = mount_points.iter().filter_map(|path| pod(path)).map(str::to_owned).collect();
        pods.dedup();
        (Some(VolumeHolder { vm, uuid, read_only, leaving, device, mount_points, pods }), failed)
    }
}

fn sharer(sharer: &volumes::Sharer) -> VolumeHolder {
    let volumes::Sharer { uuid, vm, read_only, .. } = sharer.clone();
    VolumeHolder { uuid, vm, read_only, ..VolumeHolder::default() }
}

/// Returns the I/O error of a volume in its VM, which knows the volume by one of these names, if there is one.
fn failure(found: Option<&Known>, published: &Published, names: &[String]) -> Option<String> {
    let errors = found.map(|found| found.view.io_errors.as_slice()).unwrap_or_default();
    errors.iter().find(|error| names.contains(&error.disk)).map(|error| failed(error, &published.vm))
}

/// Describes an I/O error of a volume, and its consequence for the VM.
fn failed(error: &IoError, vm: &str) -> String {
    let what = match (error.no_space, error.operation()) {
        (true, _) => "there is no space left on the host for what its guest writes",
        (false, IoOperation::Read) => "it cannot be read",
        (false, IoOperation::Write) => "it cannot be written",
        (false, IoOperation::Unspecified) => "it cannot be read or written",
    };
    let reason = if error.reason.is_empty() { String::new() } else { format!(" ({})", error.reason) };
    let stopped =
        if error.stopped { format!("; the VM {vm} is paused until it is resumed") } else { String::new() };
    format!("{what}{reason}{stopped}")
}

fn for_people(error: volumes::VolumeError) -> Status {
    Problem::from(error).for_host()
}

/// Returns the guest's device name of a disk, and its mount points.
fn place(state: &GuestState, names: &[String]) -> (String, Vec<String>) {
    let has =
        |disk: &&crate::wire::proto::v1::Disk| disk.serials.iter().any(|one| names.contains(&one.value));
    let Some(disk) = state.disks.iter().find(has) else { return Default::default() };
    let mounted = state.file_systems.iter().filter(|mounted| mounted.source == disk.file);
    let mut points: Vec<_> = mounted.map(|mounted| mounted.mount_point.clone()).collect();
    points.sort_by_key(|point| pod(point).map(str::to_owned));
    (disk.name.clone(), points)
}

/// Returns the UID of the pod for which kubelet has mounted a volume at this path:
/// `<root>/pods/<uid>/volumes/kubernetes.io~csi/<volume>/mount`, or for a raw block volume
/// `<root>/plugins/kubernetes.io/csi/volumeDevices/publish/<volume>/<uid>`.
fn pod(mount_point: &str) -> Option<&str> {
    if let Some((_, rest)) = mount_point.split_once("/volumeDevices/publish/") {
        return rest.split_once('/').map(|(_, uid)| uid).filter(|uid| !uid.is_empty() && !uid.contains('/'));
    }
    let (_, rest) = mount_point.split_once("/pods/")?;
    let (uid, rest) = rest.split_once('/')?;
    (!uid.is_empty() && rest.starts_with("volumes/kubernetes.io~csi/")).then_some(uid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::proto::v1::{Disk, MountedFileSystem, SerialNumber};

    #[test]
    fn a_volume_is_found_in_its_guest() {
        let disk = |name: &str, serial: &str| Disk {
            name: name.into(),
            file: format!("/dev/{name}"),
            serials: vec![SerialNumber { value: serial.into(), source: String::new() }],
            ..Disk::default()
        };
        let mounted = |source: &str, mount_point: &str| MountedFileSystem {
            source: source.into(),
            mount_point: mount_point.into(),
            r#type: String::new(),
        };
        let pod = "/var/lib/kubelet/pods/0a1b/volumes/kubernetes.io~csi/pvc-1/mount";
        let state = GuestState {
            disks: vec![disk("sda", "other"), disk("sdb", "abc")],
            file_systems: vec![
                mounted("/dev/sda", "/"),
                mounted("/dev/sdb", pod),
                mounted("/dev/sdb", "/var/lib/kubelet/plugins/x/globalmount"),
            ],
            ..GuestState::default()
        };
        let (name, points) = place(&state, &["none".to_owned(), "abc".to_owned()]);
        assert_eq!((name.as_str(), points.len()), ("sdb", 2));
        assert_eq!(points.iter().filter_map(|point| super::pod(point)).collect::<Vec<_>>(), ["0a1b"]);
        assert_eq!(place(&state, &["none".to_owned()]), Default::default());
        assert_eq!(super::pod("/pods/x/etc-hosts"), None);
        let device = "/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices/publish/pvc-1/0a1b";
        assert_eq!(super::pod(device), Some("0a1b"));
        assert_eq!(super::pod("/x/volumeDevices/publish/pvc-1"), None);
    }
}
