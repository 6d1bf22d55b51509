//! Validates requests as far as this is possible without looking at volumes. Pure.

use std::collections::HashMap;

use super::super::backends::volumes::Volume;
use super::super::volumes::problem::{Kind, Problem};
use crate::labels::HOST;
use crate::wire::proto::csi::volume_capability::access_mode::Mode;
use crate::wire::proto::csi::volume_capability::{AccessType, MountVolume};
use crate::wire::proto::csi::{Topology, TopologyRequirement, VolumeCapability};

/// Longest identifier in bytes, as CSI limits it.
const LONGEST: usize = 128;
/// Longest identifier of a node in bytes, as CSI limits it.
const LONGEST_NODE: usize = 256;
/// Bytes of all entries of one map together, as CSI limits them; also of all mount options.
const MAP: usize = 4096;
/// Entries of one map, and mount options: an entry of two bytes takes a hundred in memory.
const ENTRIES: usize = 128;
/// Error for block volumes that are requested for many nodes.
const ONLY_FILES: &str =
    "a block volume can be on one node at a time: for many nodes, request volumeMode Filesystem";

/// Capabilities in one request.
const CAPABILITIES: usize = 64;

/// Parameter with the storage class of the host for a new volume.
const CLASS: &str = "hostStorageClass";
/// Prefix of the parameters that the external provisioner adds.
const PROVISIONER: &str = "csi.storage.k8s.io/";

/// Parsed parameters of a new volume.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Parameters {
    /// Requested storage class of the host, if any.
    pub class: Option<String>,
    /// Namespace and name of the claim that it is for; may be empty.
    pub claim: String,
}

fn invalid<T>(problem: impl Into<String>) -> Result<T, Problem> {
    Err(Problem::new(Kind::Invalid, problem))
}

fn text(what: &str, text: &str, most: usize) -> Result<(), Problem> {
    match text.len() {
        0 => invalid(format!("{what} is missing")),
        length if length > most => invalid(format!("{what} has {length} bytes; at most {most} are allowed")),
        _ => Ok(()),
    }
}

/// Validates the identifier of a volume.
///
/// # Errors
/// If it is missing, or too long.
pub fn volume_id(id: &str) -> Result<(), Problem> {
    text("volume_id", id, LONGEST)
}

/// Validates the identifier of a node.
///
/// # Errors
/// If it is missing, or too long.
pub fn node_id(id: &str) -> Result<(), Problem> {
    text("node_id", id, LONGEST_NODE)
}

/// Refuses a field that this host does not support.
///
/// # Errors
/// If the field is set.
pub fn without(what: &str, is_there: bool) -> Result<(), Problem> {
    if is_there { invalid(format!("{what} is not supported by this host")) } else { Ok(()) }
}

/// Checks that a map is small enough to be kept in memory while a call waits.
///
/// # Errors
/// If it is too large.
pub fn is_small(map: &HashMap<String, String>) -> Result<(), Problem> {
    let bytes = map.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>();
    if bytes > MAP || map.len() > ENTRIES {
        return invalid(format!(
            "a map has {} entries of {bytes} bytes; at most {ENTRIES} of {MAP} are allowed",
            map.len()
        ));
    }
    Ok(())
}

/// Checks that there are capabilities, and not too many.
///
/// # Errors
/// If there are none or too many.
pub fn present(capabilities: &[VolumeCapability]) -> Result<(), Problem> {
    match capabilities.len() {
        0 => invalid("volume_capabilities is missing"),
        count if count > CAPABILITIES => invalid(format!("there are {count} volume_capabilities")),
        _ => Ok(()),
    }
}

/// Number of nodes that are to have a volume at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// One node: the volume is a disk.
    Alone,
    /// Many nodes: the volume is a share.
    Shared,
}

/// Combines the capabilities that a volume needs. If any of them is for many nodes, the volume is a share, which
/// serves a single node as well.
///
/// # Errors
/// If no volume can have them all, or none are given.
pub fn capabilities(capabilities: &[VolumeCapability]) -> Result<Use, Problem> {
    present(capabilities)?;
    let mut all = Use::Alone;
    for one in capabilities {
        if capability(one)? == Use::Shared {
            all = Use::Shared;
        }
    }
    if all == Use::Shared && capabilities.iter().any(is_block) {
        return invalid(ONLY_FILES);
    }
    Ok(all)
}

/// Checks that a volume can be used as requested.
///
/// # Errors
/// If it cannot, with advice.
pub fn fits(volume: &Volume, asked: &VolumeCapability) -> Result<(), Problem> {
    match (&volume.sharers, capability(asked)?) {
        (Some(_), _) if is_block(asked) => invalid(ONLY_FILES),
        (None, Use::Shared) => invalid(format!(
            "the volume {} is a disk, which one node has at a time; for many nodes, create a volume whose \
             claim requests ReadWriteMany or ReadOnlyMany",
            volume.id
        )),
        _ => Ok(()),
    }
}

/// Reports whether many nodes are to have the volume, but only for reading.
pub fn is_read_only_share(capability: &VolumeCapability) -> bool {
    capability.access_mode.as_ref().is_some_and(|mode| mode.mode() == Mode::MultiNodeReaderOnly)
}

/// Validates a capability, and returns whether it is for one node or many.
///
/// # Errors
/// If no volume can be used like this.
pub fn capability(capability: &VolumeCapability) -> Result<Use, Problem> {
    match &capability.access_type {
        None => return invalid("volume_capability: access_type is missing"),
        Some(AccessType::Block(_)) => {}
        Some(AccessType::Mount(MountVolume { fs_type, mount_flags, volume_mount_group })) => {
            let options = mount_flags.iter().map(String::len).sum::<usize>();
            if fs_type.len() > LONGEST
                || volume_mount_group.len() > LONGEST
                || options > MAP
                || mount_flags.len() > ENTRIES
            {
                return invalid("volume_capability: access_type.mount is too long");
            }
        }
    }
    let Some(mode) = &capability.access_mode else {
        return invalid("volume_capability: access_mode is missing");
    };
    match mode.mode() {
        Mode::SingleNodeWriter
        | Mode::SingleNodeReaderOnly
        | Mode::SingleNodeSingleWriter
        | Mode::SingleNodeMultiWriter => Ok(Use::Alone),
        Mode::Unknown => invalid("volume_capability: access_mode is unknown"),
        Mode::MultiNodeReaderOnly | Mode::MultiNodeSingleWriter | Mode::MultiNodeMultiWriter => {
            if is_block(capability) { invalid(ONLY_FILES) } else { Ok(Use::Shared) }
        }
    }
}

/// Reports whether a volume is to be used as a block device.
pub fn is_block(capability: &VolumeCapability) -> bool {
    matches!(capability.access_type, Some(AccessType::Block(_)))
}

/// Returns the topology of a new volume of this host. It is empty if the cluster requests none, which is the case
/// if its nodes have reported none.
///
/// # Errors
/// If the volume is requested on other hosts only, or the name of this host is unknown.
pub fn placed(
    requirement: Option<&TopologyRequirement>,
    host: impl FnOnce() -> Result<String, Problem>,
) -> Result<Vec<Topology>, Problem> {
    let Some(TopologyRequirement { requisite, preferred }) = requirement else { return Ok(Vec::new()) };
    // According to CSI, `preferred` is a subset of `requisite` if that is given.
    let wanted = if requisite.is_empty() { preferred } else { requisite };
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    let host = host()?;
    if !wanted.iter().any(|topology| is_here(topology, &host)) {
        let words = format!(
            "the volume is requested on other hosts, but volumes of this host can be used on {HOST}={host} \
             only: have it created by a provisioner whose agent is on one of those hosts, or let pods run \
             here, and bind volumes when the \
             first pod comes (WaitForFirstConsumer)"
        );
        return Err(Problem::new(Kind::Exhausted, words));
    }
    Ok(vec![Topology { segments: [(HOST.to_owned(), host)].into() }])
}

/// Reports whether a topology means the VMs of this host.
pub fn is_here(topology: &Topology, host: &str) -> bool {
    topology.segments.get(HOST).is_some_and(|named| named == host)
}

/// Parses the parameters of a new volume.
///
/// # Errors
/// If one of them is unknown, or they are too long.
pub fn parameters(parameters: &HashMap<String, String>) -> Result<Parameters, Problem> {
    if parameters.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>() > MAP {
        return invalid(format!("parameters have more than {MAP} bytes"));
    }
    let unknown = parameters.keys().find(|key| *key != CLASS && !key.starts_with(PROVISIONER));
    if let Some(unknown) = unknown {
        return invalid(format!("unknown parameter {unknown:?}; use {CLASS}"));
    }
    let of = |key: &str| parameters.get(&format!("{PROVISIONER}{key}")).filter(|value| !value.is_empty());
    let claim = match (of("pvc/namespace"), of("pvc/name")) {
        (Some(namespace), Some(name)) => format!("{namespace}/{name}"),
        (None, Some(name)) => name.clone(),
        (_, None) => String::new(),
    };
    Ok(Parameters { class: parameters.get(CLASS).filter(|class| !class.is_empty()).cloned(), claim })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::proto::csi::volume_capability::{AccessMode, BlockVolume};

    fn one(mode: Mode) -> VolumeCapability {
        VolumeCapability {
            access_type: Some(AccessType::Block(BlockVolume {})),
            access_mode: Some(AccessMode { mode: mode.into() }),
        }
    }

    #[test]
    fn capabilities_of_one_node() {
        let alone = [one(Mode::SingleNodeWriter), one(Mode::SingleNodeMultiWriter)];
        assert_eq!(capabilities(&alone), Ok(Use::Alone));
        let many = |mode: Mode| VolumeCapability {
            access_type: Some(AccessType::Mount(MountVolume::default())),
            ..one(mode)
        };
        for mode in [Mode::MultiNodeReaderOnly, Mode::MultiNodeSingleWriter, Mode::MultiNodeMultiWriter] {
            assert_eq!(capabilities(&[many(mode), many(Mode::SingleNodeWriter)]), Ok(Use::Shared));
        }
        let mount = |fs_type: &str, flag: &str| {
            let mount_flags = vec![flag.to_owned()];
            let mount = MountVolume { fs_type: fs_type.to_owned(), mount_flags, ..MountVolume::default() };
            VolumeCapability { access_type: Some(AccessType::Mount(mount)), ..one(Mode::SingleNodeWriter) }
        };
        capability(&mount("ext4", "noatime")).unwrap();
        let long = "x".repeat(5000);
        for (wrong, words) in [
            (vec![], "volume_capabilities is missing"),
            (
                vec![VolumeCapability { access_type: None, ..one(Mode::SingleNodeWriter) }],
                "access_type is missing",
            ),
            (
                vec![VolumeCapability { access_mode: None, ..one(Mode::SingleNodeWriter) }],
                "access_mode is missing",
            ),
            (vec![one(Mode::Unknown)], "access_mode is unknown"),
            (
                vec![one(Mode::SingleNodeWriter), one(Mode::MultiNodeMultiWriter)],
                "a block volume can be on one node at a time",
            ),
            (
                vec![one(Mode::SingleNodeWriter), many(Mode::MultiNodeMultiWriter)],
                "a block volume can be on one node at a time",
            ),
            (vec![mount(&long, "")], "too long"),
            (vec![mount("", &long)], "too long"),
            (vec![one(Mode::SingleNodeWriter); 65], "there are 65"),
        ] {
            let problem = capabilities(&wrong).unwrap_err();
            assert!(problem.kind == Kind::Invalid && problem.to_string().contains(words), "{problem}");
        }
    }

    #[test]
    fn a_disk_is_for_one_node_and_a_share_has_files() {
        let volume = |sharers| Volume {
            id: "v".into(),
            name: String::new(),
            cluster: String::new(),
            class: String::new(),
            size: 0,
            claim: String::new(),
            published: None,
            sharers,
            problem: None,
        };
        let (disk, share) = (volume(None), volume(Some(Vec::new())));
        let files = |mode: Mode| VolumeCapability {
            access_type: Some(AccessType::Mount(MountVolume::default())),
            ..one(mode)
        };
        fits(&disk, &one(Mode::SingleNodeWriter)).unwrap();
        fits(&disk, &files(Mode::SingleNodeWriter)).unwrap();
        fits(&share, &files(Mode::SingleNodeWriter)).unwrap();
        fits(&share, &files(Mode::MultiNodeReaderOnly)).unwrap();
        for (volume, asked, words) in [
            (&disk, files(Mode::MultiNodeMultiWriter), "the volume v is a disk"),
            (&share, one(Mode::SingleNodeWriter), "request volumeMode Filesystem"),
        ] {
            let problem = fits(volume, &asked).unwrap_err();
            assert!(problem.kind == Kind::Invalid && problem.to_string().contains(words), "{problem}");
        }
        assert!(is_read_only_share(&files(Mode::MultiNodeReaderOnly)));
        assert!(!is_read_only_share(&files(Mode::SingleNodeReaderOnly)));
    }

    #[test]
    fn a_volume_is_reached_from_its_host_alone() {
        let at = |pairs: &[(&str, &str)]| {
            let pairs = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
            Topology { segments: pairs.collect() }
        };
        let (here, there) = (at(&[(HOST, "one")]), at(&[(HOST, "two")]));
        let zoned = at(&[(HOST, "one"), ("topology.kubernetes.io/zone", "a")]);
        let zone = at(&[("topology.kubernetes.io/zone", "a")]);
        for (requisite, preferred, is_placed) in [
            (vec![there.clone(), here.clone()], vec![there.clone()], true),
            (vec![zoned], vec![], true),
            (vec![], vec![there.clone(), here.clone()], true),
            (vec![there.clone()], vec![here.clone()], false),
            (vec![], vec![there], false),
            (vec![zone], vec![], false),
            (vec![Topology::default()], vec![], false),
        ] {
            let requirement = TopologyRequirement { requisite, preferred };
            match placed(Some(&requirement), || Ok("one".to_owned())) {
                Ok(places) => assert!(is_placed && places == [here.clone()], "{requirement:?}: {places:?}"),
                Err(problem) => assert!(!is_placed && problem.kind == Kind::Exhausted, "{requirement:?}"),
            }
        }
        for nothing in [None, Some(&TopologyRequirement::default())] {
            assert_eq!(placed(nothing, || unreachable!("nobody asks")), Ok(vec![]));
        }
    }

    #[test]
    fn parameters_that_are_known() {
        let map = |pairs: &[(&str, &str)]| {
            pairs
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect::<HashMap<_, _>>()
        };
        let all = map(&[
            ("hostStorageClass", "fast"),
            ("csi.storage.k8s.io/pvc/name", "data"),
            ("csi.storage.k8s.io/pvc/namespace", "shop"),
            ("csi.storage.k8s.io/pv/name", "pvc-1"),
        ]);
        let expected = Parameters { class: Some("fast".into()), claim: "shop/data".into() };
        assert_eq!(parameters(&all), Ok(expected));
        assert_eq!(parameters(&map(&[("hostStorageClass", "")])), Ok(Parameters::default()));
        let unknown = parameters(&map(&[("hostClass", "fast")])).unwrap_err().to_string();
        assert_eq!(unknown, "unknown parameter \"hostClass\"; use hostStorageClass");
        let long = "x".repeat(5000);
        assert!(parameters(&map(&[("hostStorageClass", &long)])).is_err());
    }
}
