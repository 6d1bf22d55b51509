//! What each cluster may: how many volumes, of which classes, and which of its VMs may ask. Pure.

use std::collections::BTreeMap;

use super::problem::{Kind, Problem};
use crate::host::backends::volumes::{Class, Volume};

/// The policies of all clusters; one that is not named may do everything.
pub type Policies = BTreeMap<String, Policy>;

/// Volumes of a cluster for which nothing is said: no guest fills a host with empty ones.
const USUAL_VOLUMES: u64 = 4096;

/// What one cluster may. For which no bytes are said has at most as many in each class as there are of it in all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    /// Most volumes, if that is said.
    pub volumes: Option<u64>,
    /// Most bytes of all volumes together.
    pub bytes: Option<u64>,
    /// Storage classes; none: all.
    pub classes: Option<Vec<String>>,
    /// Names of VMs that may ask for volumes; none: all.
    pub controllers: Option<Vec<String>>,
}

/// What a cluster has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Volumes.
    pub volumes: u64,
    /// Bytes of them together.
    pub bytes: u64,
}

impl Policy {
    /// Whether the VM of this name may ask for volumes.
    pub fn has_controller(&self, vm: &str) -> bool {
        self.controllers.as_ref().is_none_or(|names| names.iter().any(|name| name == vm))
    }

    /// Most volumes.
    pub fn most_volumes(&self) -> u64 {
        self.volumes.unwrap_or(USUAL_VOLUMES)
    }

    fn allows(&self, class: &str) -> bool {
        self.classes.as_ref().is_none_or(|names| names.iter().any(|name| name == class))
    }

    /// The class of a volume to be: the one that is asked for, or the default, or the only one.
    ///
    /// # Errors
    /// If the cluster may not use it, or there is none of this name, which is the same to the cluster.
    pub fn class(&self, all: &[Class], asked: Option<&str>) -> Result<String, Problem> {
        let allowed: Vec<_> = all.iter().filter(|class| self.allows(&class.name)).collect();
        let names = || allowed.iter().map(|class| class.name.as_str()).collect::<Vec<_>>().join(", ");
        if allowed.is_empty() {
            return Err(Problem::new(
                Kind::Invalid,
                "this cluster may use no storage class of this host; see [[pool]] and [cluster] in the settings of \
                 guestlet-host",
            ));
        }
        let found = match (asked, allowed.as_slice()) {
            (Some(asked), _) => allowed.iter().find(|class| class.name == asked),
            (None, [only]) => Some(only),
            (None, _) => allowed.iter().find(|class| class.is_default),
        };
        found.map(|class| class.name.clone()).ok_or_else(|| {
            let problem = match asked {
                Some(asked) => format!(
                    "hostStorageClass {asked:?} is no storage class that this cluster may use; there are: {}",
                    names()
                ),
                None => format!("say which storage class with hostStorageClass; there are: {}", names()),
            };
            Problem::new(Kind::Invalid, problem)
        })
    }

    /// Whether a cluster that has so much, and so many bytes `in_class` with so many in all, may have a volume of `size`
    /// bytes more in it, or a volume so many bytes larger.
    ///
    /// # Errors
    /// If not, in words.
    pub fn admit(&self, cluster: &str, has: Usage, in_class: Bound, more: Usage) -> Result<(), Problem> {
        let most = self.most_volumes();
        if more.volumes > 0 && has.volumes.saturating_add(more.volumes) > most {
            let has = has.volumes;
            return Err(Problem::new(
                Kind::Exhausted,
                format!("quota: the cluster {cluster} has {has} volumes, and may have {most}"),
            ));
        }
        let Some(most) = self.bytes else { return in_class.admit(cluster, more.bytes) };
        if has.bytes.saturating_add(more.bytes) > most {
            let (has, more) = (has.bytes, more.bytes);
            return Err(Problem::new(
                Kind::Exhausted,
                format!(
                    "quota: the volumes of the cluster {cluster} have {has} bytes, {more} more are asked for, and \
                     they may have {most}"
                ),
            ));
        }
        Ok(())
    }

    /// How many bytes a cluster that has so much may have more.
    pub fn left(&self, has: Usage, in_class: Bound) -> u64 {
        if has.volumes >= self.most_volumes() {
            return 0;
        }
        self.bytes.map_or_else(|| in_class.left(), |most| most.saturating_sub(has.bytes))
    }
}

/// What a cluster may have in a class if nothing is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bound {
    /// Bytes of its volumes there.
    pub has: u64,
    /// Bytes that there are in all; 0 if that is not known.
    pub size: u64,
}

impl Bound {
    fn left(self) -> u64 {
        if self.size == 0 { u64::MAX } else { self.size.saturating_sub(self.has) }
    }

    fn admit(self, cluster: &str, more: u64) -> Result<(), Problem> {
        if more <= self.left() {
            return Ok(());
        }
        let Self { has, size } = self;
        Err(Problem::new(
            Kind::Exhausted,
            format!(
                "quota: the volumes of the cluster {cluster} in this storage class have {has} bytes, {more} more are asked \
                 for, and without max-bytes they may have as many as its file system, {size}"
            ),
        ))
    }
}

/// Volumes that are being made or made larger: their cluster and name, their class, and the size that they are to have.
pub type Reserved = BTreeMap<(String, String), (String, u64)>;

/// What a cluster has, with what it is about to have; of one class, or of all.
pub fn usage(volumes: &[Volume], reserved: &Reserved, cluster: &str, class: Option<&str>) -> Usage {
    let counts = |of: &str| class.is_none_or(|class| class == of);
    let mut sizes: BTreeMap<&str, u64> = BTreeMap::new();
    for volume in volumes.iter().filter(|volume| volume.cluster == cluster && counts(&volume.class)) {
        sizes.insert(&volume.name, volume.size);
    }
    for ((owner, name), (of, size)) in reserved {
        if owner == cluster && counts(of) {
            let known = sizes.entry(name).or_default();
            *known = (*known).max(*size);
        }
    }
    let volumes = u64::try_from(sizes.len()).unwrap_or(u64::MAX);
    Usage { volumes, bytes: sizes.values().fold(0, |sum, size| sum.saturating_add(*size)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn classes(names: &[(&str, bool)]) -> Vec<Class> {
        names
            .iter()
            .map(|(name, is_default)| Class { name: (*name).into(), is_default: *is_default })
            .collect()
    }

    #[test]
    fn the_class_is_one_that_the_cluster_may_use() {
        let all = classes(&[("fast", false), ("slow", true), ("secret", false)]);
        let some = Policy { classes: Some(vec!["fast".into(), "slow".into()]), ..Policy::default() };
        let one = Policy { classes: Some(vec!["secret".into()]), ..Policy::default() };
        let none = Policy { classes: Some(vec!["other".into()]), ..Policy::default() };
        for (policy, asked, expected) in [
            (&Policy::default(), None, Ok("slow")),
            (&Policy::default(), Some("secret"), Ok("secret")),
            (&some, Some("fast"), Ok("fast")),
            (&some, None, Ok("slow")),
            (
                &some,
                Some("secret"),
                Err("is no storage class that this cluster may use; there are: fast, slow"),
            ),
            (&one, None, Ok("secret")),
            (&none, None, Err("may use no storage class")),
        ] {
            match (policy.class(&all, asked), expected) {
                (Ok(found), Ok(expected)) => assert_eq!(found, expected),
                (Err(problem), Err(words)) => assert!(problem.to_string().contains(words), "{problem}"),
                (outcome, _) => panic!("{asked:?}: {outcome:?}"),
            }
        }
        let two = classes(&[("a", false), ("b", false)]);
        let problem = Policy::default().class(&two, None).unwrap_err().to_string();
        assert_eq!(problem, "say which storage class with hostStorageClass; there are: a, b");
    }

    #[test]
    fn what_is_about_to_be_counts_once() {
        let volume = |name: &str, size| Volume {
            id: String::new(),
            name: name.into(),
            cluster: "dev".into(),
            class: if name == "b" { "slow" } else { "fast" }.into(),
            size,
            claim: String::new(),
            published: None,
            sharers: None,
            problem: None,
        };
        let key = |cluster: &str, name: &str| (cluster.to_owned(), name.to_owned());
        let to_be = |size| ("fast".to_owned(), size);
        let reserved =
            [(key("dev", "a"), to_be(5)), (key("dev", "c"), to_be(7)), (key("prod", "d"), to_be(100))].into();
        let volumes = [volume("a", 3), volume("b", 2)];
        assert_eq!(usage(&volumes, &reserved, "dev", None), Usage { volumes: 3, bytes: 14 });
        assert_eq!(usage(&volumes, &reserved, "dev", Some("slow")), Usage { volumes: 1, bytes: 2 });
        assert_eq!(usage(&volumes, &reserved, "dev", Some("fast")), Usage { volumes: 2, bytes: 12 });
        let policy = Policy { volumes: Some(3), bytes: Some(10), ..Policy::default() };
        let has = Usage { volumes: 2, bytes: 9 };
        let none = Bound { has: 9, size: 9 };
        policy.admit("dev", has, none, Usage { volumes: 1, bytes: 1 }).unwrap();
        for more in [Usage { volumes: 2, bytes: 0 }, Usage { volumes: 0, bytes: 2 }] {
            assert_eq!(policy.admit("dev", has, none, more).unwrap_err().kind, Kind::Exhausted);
        }
        assert_eq!(policy.left(has, none), 1);
        // Nothing is said.
        let policy = Policy::default();
        let more = |bytes| Usage { volumes: 1, bytes };
        let some = Bound { has: 9, size: 12 };
        policy.admit("dev", has, some, more(3)).unwrap();
        assert_eq!(policy.admit("dev", has, some, more(4)).unwrap_err().kind, Kind::Exhausted);
        assert_eq!((policy.left(has, some), policy.left(has, none)), (3, 0));
        policy.admit("dev", has, Bound { has: 9, size: 0 }, more(1 << 40)).unwrap();
    }
}
