//! Names of a volume: in its guest cluster, as a claim of the host cluster, in VMs, and in guests. Pure. Each
//! name is computed from the previous one, so no mapping has to be stored.
//!
//! ```text
//!  name in the guest cluster   pvc-6f0c…                   any text of 1 to 128 bytes
//!  claim                       namespace / guestlet-91e4…  a UUID made from the cluster and that name
//!  identifier                  namespace.guestlet-91e4…    stored in the guest cluster's PersistentVolume
//!  serial number               91e4…                       36 bytes, which a SCSI disk shows in full
//!  volume in a VM's spec       guestlet-disk-91e4…         the prefix marks it as guestlet's
//! ```
//!
//! A claim that Harvester's driver created keeps its name, which is also its name in the guest cluster. Its
//! serial number and its volume name in a VM's spec are made from a hash of that name
//! ([`adopted`](super::adopted)).
//!
//! The name of a claim is a hash because the name of the volume comes from a guest: a guest must not be able to
//! choose the name of a claim that belongs, or will belong, to another owner, and two clusters in one namespace
//! must not collide. Names for people are in the labels and annotations of the claim
//! ([`claims`](super::claims)).

use std::fmt::Write as _;

use ring::digest::{SHA256, digest};

/// Prefix of guestlet's volume names in VMs. It differs from the prefix of claims, because an administrator who
/// plugs a claim by hand usually names the volume after the claim.
pub const PREFIX: &str = "guestlet-disk-";
/// Prefix of the names of the claims that guestlet creates.
const CLAIM: &str = "guestlet-";

/// Namespace and name of a claim.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Claim {
    /// Namespace of its guest cluster's VMs.
    pub namespace: String,
    /// Name within the namespace.
    pub name: String,
}

impl Claim {
    /// Returns the claim that an identifier refers to; `None` if it does not have the form of one.
    pub fn of_id(id: &str) -> Option<Self> {
        let (namespace, name) = id.split_once('.')?;
        let is_one = is_label(namespace) && is_subdomain(name);
        is_one.then(|| Self { namespace: namespace.to_owned(), name: name.to_owned() })
    }

    /// Returns the claim for the volume with this name in a cluster, `namespace/name`.
    pub fn of_name(cluster: &str, name: &str) -> Self {
        let namespace = cluster.split('/').next().unwrap_or_default().to_owned();
        // Cluster names never contain NUL, so the two parts cannot be confused.
        let name = format!("{CLAIM}{}", uuid_of(&format!("{cluster}\0{name}")));
        Self { namespace, name }
    }

    /// Reports whether the name has the form that [`Claim::of_name`] generates.
    pub fn is_made(&self) -> bool {
        self.name.strip_prefix(CLAIM).is_some_and(is_uuid)
    }

    /// Returns the identifier of the volume: namespace and name, joined by a dot.
    pub fn id(&self) -> String {
        format!("{}.{}", self.namespace, self.name)
    }

    /// Returns the serial number of its disk: the UUID in its name, or one that is made from its name.
    pub fn serial(&self) -> String {
        let uuid = self.name.strip_prefix(CLAIM);
        uuid.filter(|uuid| is_uuid(uuid)).map_or_else(|| uuid_of(&self.name), str::to_owned)
    }

    /// Returns the text of page 83h that the disk shows if its volume in the VM is named after the claim and has no
    /// serial number, as with Harvester's driver: QEMU's name of the drive, which libvirt derives from KubeVirt's
    /// name of the disk.
    pub fn alias(&self) -> String {
        format!("drive-ua-{}", self.name)
    }

    /// Returns the volume's name in a VM's spec.
    pub fn volume(&self) -> String {
        format!("{PREFIX}{}", self.serial())
    }
}

/// Reports whether a name is an RFC 1123 label, such as the name of a namespace.
pub fn is_label(name: &str) -> bool {
    let inside = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=63).contains(&name.len())
        && name.bytes().all(inside)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

/// Reports whether a name is an RFC 1123 subdomain, such as the name of a claim.
pub fn is_subdomain(name: &str) -> bool {
    name.len() <= 253 && name.split('.').all(is_label)
}

/// Reports whether a text is a UUID in lower case.
fn is_uuid(text: &str) -> bool {
    let hexadecimal = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let fits = |(at, byte): (usize, u8)| match at {
        8 | 13 | 18 | 23 => byte == b'-',
        _ => hexadecimal(byte),
    };
    text.len() == 36 && text.bytes().enumerate().all(fits)
}

/// Returns a UUID that depends only on the text (version 8 of RFC 9562, from SHA-256).
fn uuid_of(text: &str) -> String {
    let hash = digest(&SHA256, text.as_bytes());
    let mut uuid = String::with_capacity(36);
    for (at, byte) in hash.as_ref().iter().take(16).enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            uuid.push('-');
        }
        let byte = match at {
            6 => byte & 0x0f | 0x80,
            8 => byte & 0x3f | 0x80,
            _ => *byte,
        };
        // Writing to a string cannot fail.
        let _ = write!(uuid, "{byte:02x}");
    }
    uuid
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_name_follows_from_the_one_before() {
        // The first 16 bytes of the SHA-256 of "dev/shop\0pvc-1", with the version and variant of a UUID. They must
        // never change, because volumes are found by them.
        let uuid = "57f6747b-3ea5-8f3c-a0ca-e9b69770fc41";
        let claim = Claim::of_name("dev/shop", "pvc-1");
        assert_eq!((claim.namespace.as_str(), claim.id()), ("dev", format!("dev.guestlet-{uuid}")));
        assert_eq!(Claim::of_id(&claim.id()), Some(claim.clone()));
        assert_eq!(claim.serial(), uuid);
        assert_eq!(claim.volume(), format!("guestlet-disk-{uuid}"));
    }

    #[test]
    fn no_guest_chooses_the_name_of_a_claim() {
        let made = Claim::of_name("dev/shop", "a");
        for (cluster, name) in [("dev/shop", "b"), ("dev/bank", "a"), ("test/shop", "a"), ("dev/sho", "pa")] {
            assert_ne!(Claim::of_name(cluster, name).name, made.name, "{cluster} {name}");
        }
        for name in ["root-disk", "pvc-6f0c2a0e-0b7a-4b8e-9a55-0a1b2c3d4e5f", &made.name] {
            let claim = Claim::of_name("dev/bank", name);
            assert!(claim.is_made() && claim.name != name && claim.name != made.name, "{claim:?}");
        }
        for name in ["root-disk", "guestlet-", "guestlet-6f0c", "pvc-6f0c2a0e-0b7a-4b8e-9a55-0a1b2c3d4e5f"] {
            let claim = Claim { namespace: "dev".to_owned(), name: name.to_owned() };
            assert!(!claim.is_made(), "{name}");
        }
    }

    #[test]
    fn any_text_can_be_the_name_of_a_volume() {
        let long = "a".repeat(128);
        for name in ["data.v1", "Ü b", "-", &long, "pvc-6F0C", "a..b", "pvc-not-a-uuid"] {
            let claim = Claim::of_name(&format!("{}/shop", "n".repeat(63)), name);
            assert_eq!(Claim::of_id(&claim.id()), Some(claim.clone()), "{name}");
            assert!(claim.id().len() <= 128 && is_uuid(&claim.serial()), "{name}: {claim:?}");
            assert!(is_label(&claim.volume()), "{name}");
            // The same as when it is parsed from the identifier.
            assert_eq!(Claim::of_id(&claim.id()).unwrap().serial(), claim.serial());
        }
    }

    #[test]
    fn what_is_no_identifier_of_ours_is_none() {
        for id in ["", "a", ".", "a.", ".a", "A.b", "a/b.c", "a.b_c", "a.b/../c", "-a.b", "a.b..c"] {
            assert_eq!(Claim::of_id(id), None, "{id:?}");
        }
    }
}
