//! Maps each request of the admin API to its verb and its object. Each request has one entry here, so that no
//! method can be admitted without one.

use crate::access::verb::{self, Verb};
use crate::wire::proto::v1::{
    AcceptKeyRequest, AttachDiskRequest, AttachVolumeRequest, CreateVolumeRequest, DetachDiskRequest,
    DetachVolumeRequest, ExpandVolumeRequest, ForgetKeyRequest, GetHostStatusRequest,
    GetTrustBootstrapRequest, GetVirtualMachineRequest, ListAddressPoolsRequest, ListAttachedDisksRequest,
    ListClusterLoadBalancersRequest, ListDiskVolumesRequest, ListKeysRequest, ListVirtualMachineDisksRequest,
    ListVirtualMachinesRequest, ListVolumesRequest, PingVirtualMachineRequest,
    RemoveClusterLoadBalancerRequest, RemoveDiskVolumeRequest, RemoveVolumeRequest, ResizeDiskRequest,
    RotateGuestKeyRequest, RotateHostKeyRequest, WatchVirtualMachinesRequest, attach_disk_request::Source,
};

/// Object of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Object<'r> {
    /// Whatever the caller may see; the answer is limited to that.
    Seen,
    /// Host half itself, and so all VMs.
    Host,
    /// VM with this name.
    Machine(&'r str),
    /// Volume that is to be created, in this cluster.
    Cluster(&'r str),
    /// Volume with this identifier.
    Volume(&'r str),
    /// Volume, and the VM that it is to be attached to.
    VolumeTo {
        /// Identifier of the volume.
        volume: &'r str,
        /// Name or UUID of the VM.
        vm: &'r str,
    },
}

/// Request of the admin API.
pub trait Asked {
    /// Returns the verb of the request.
    fn verb(&self) -> &'static Verb;

    /// Returns the object of the request, against which the rules are checked.
    fn object(&self) -> Object<'_>;

    /// Returns the disk or volume that the request is for, as the audit record names it; empty if it is for none.
    fn subject(&self) -> String {
        String::new()
    }
}

/// Returns the VM with this name, or everything that the caller may see if the name is empty.
fn machine_or_seen(name: &str) -> Object<'_> {
    if name.is_empty() { Object::Seen } else { Object::Machine(name) }
}

/// Implements `Asked` for a request: its verb, its object, and optionally its subject.
macro_rules! asked {
    ($request:ty, $verb:expr, $object:expr $(, $subject:expr)?) => {
        impl Asked for $request {
            fn verb(&self) -> &'static Verb {
                let verb: fn(&$request) -> &'static Verb = $verb;
                verb(self)
            }

            fn object(&self) -> Object<'_> {
                let object: fn(&$request) -> Object<'_> = $object;
                object(self)
            }

            $(fn subject(&self) -> String {
                let subject: fn(&$request) -> String = $subject;
                subject(self)
            })?
        }
    };
}

asked!(ListVirtualMachinesRequest, |_| &verb::LS, |_| Object::Seen);
asked!(GetVirtualMachineRequest, |_| &verb::INFO, |asked| Object::Machine(&asked.name));
asked!(WatchVirtualMachinesRequest, |_| &verb::WATCH, |asked| machine_or_seen(&asked.name));
asked!(PingVirtualMachineRequest, |_| &verb::PING, |asked| Object::Machine(&asked.name));
asked!(ListVirtualMachineDisksRequest, |_| &verb::DISKS, |asked| Object::Machine(&asked.name));
asked!(GetHostStatusRequest, |_| &verb::STATUS, |_| Object::Seen);
asked!(
    AttachDiskRequest,
    |asked| match asked.source {
        Some(Source::File(_)) => &verb::DISK_ATTACH_FILE,
        _ => &verb::DISK_ATTACH,
    },
    |asked| Object::Machine(&asked.name),
    |asked| match &asked.source {
        Some(Source::File(file)) => format!("{} ({file})", asked.serial),
        _ => asked.serial.clone(),
    }
);
asked!(DetachDiskRequest, |_| &verb::DISK_DETACH, |asked| Object::Machine(&asked.name), |asked| forced(
    &asked.serial,
    asked.force
));
asked!(ResizeDiskRequest, |_| &verb::DISK_RESIZE, |asked| Object::Machine(&asked.name), |asked| asked
    .serial
    .clone());
asked!(ListDiskVolumesRequest, |_| &verb::DISK_VOLUMES, |asked| machine_or_seen(&asked.name));
asked!(RemoveDiskVolumeRequest, |_| &verb::DISK_RM, |asked| Object::Machine(&asked.name), |asked| asked
    .serial
    .clone());
asked!(ListAttachedDisksRequest, |_| &verb::DISK_LS, |asked| Object::Machine(&asked.name));
asked!(ListVolumesRequest, |_| &verb::VOLUMES_LS, |_| Object::Seen);
asked!(
    CreateVolumeRequest,
    |_| &verb::VOLUMES_CREATE,
    |asked| Object::Cluster(&asked.cluster),
    |asked| format!("{}/{}", asked.cluster, asked.name)
);
asked!(
    AttachVolumeRequest,
    |_| &verb::VOLUMES_ATTACH,
    |asked| Object::VolumeTo { volume: &asked.volume_id, vm: &asked.vm },
    |asked| asked.volume_id.clone()
);
asked!(DetachVolumeRequest, |_| &verb::VOLUMES_DETACH, |asked| Object::Volume(&asked.volume_id), |asked| {
    forced(&asked.volume_id, asked.force)
});
asked!(ExpandVolumeRequest, |_| &verb::VOLUMES_EXPAND, |asked| Object::Volume(&asked.volume_id), |asked| {
    asked.volume_id.clone()
});
asked!(RemoveVolumeRequest, |_| &verb::VOLUMES_RM, |asked| Object::Volume(&asked.volume_id), |asked| asked
    .volume_id
    .clone());

asked!(ListClusterLoadBalancersRequest, |_| &verb::LB_LS, |_| Object::Seen);
asked!(
    RemoveClusterLoadBalancerRequest,
    |_| &verb::LB_RM,
    |asked| Object::Cluster(&asked.cluster),
    |asked| format!("{}/{}", asked.cluster, asked.service_uid)
);
asked!(ListAddressPoolsRequest, |_| &verb::POOLS, |_| Object::Host);

asked!(ListKeysRequest, |_| &verb::TRUST_LS, |asked| machine_or_seen(&asked.name));
asked!(AcceptKeyRequest, |_| &verb::TRUST_ACCEPT, |asked| Object::Machine(&asked.name), |asked| asked
    .key
    .clone());
asked!(
    ForgetKeyRequest,
    |_| &verb::TRUST_FORGET,
    |asked| if asked.unlisted { Object::Host } else { Object::Machine(&asked.name) },
    |asked| if asked.unlisted { "all that are not listed".to_owned() } else { String::new() }
);
asked!(RotateGuestKeyRequest, |_| &verb::TRUST_ROTATE, |asked| Object::Machine(&asked.name));
asked!(RotateHostKeyRequest, |_| &verb::TRUST_ROTATE_HOST, |_| Object::Host, |asked| {
    if asked.finish { "finish".to_owned() } else { String::new() }
});
asked!(GetTrustBootstrapRequest, |_| &verb::TRUST_BOOTSTRAP, |asked| Object::Machine(&asked.name), |asked| {
    if asked.with_token { "with a token".to_owned() } else { String::new() }
});

fn forced(what: &str, is_forced: bool) -> String {
    format!("{what}{}", if is_forced { " (by force)" } else { "" })
}
