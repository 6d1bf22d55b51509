//! Quotas and permissions of each cluster: how many volumes, of which classes, and which of its VMs may ask. Pure.

use std::collections::BTreeMap;

use super::problem::{Kind, Problem};
use crate::host::backends::volumes::{Class, Coming, Usage};

/// Policies by the names of clusters. A cluster that is not named has only the usual limits.
pub type Policies = BTreeMap<String, Policy>;

/// Limit for a cluster without one in the settings, so that no guest fills a host with empty volumes.
const USUAL_VOLUMES: u64 = 4096;

/// Policy of one cluster. Without a limit in bytes, it may use as much of each class as the class has in all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    /// Largest number of volumes, if it is configured.
    pub volumes: Option<u64>,
    /// Most bytes of all volumes together, if configured.
    pub bytes: Option<u64>,
    /// Storage classes that it may use; `None`: all.
    pub classes: Option<Vec<String>>,
    /// Names of the VMs that may request volumes; `None`: all.
    pub controllers: Option<Vec<String>>,
}

impl Policy {
    /// Reports whether the VM of this name may request volumes.
    pub fn has_controller(&self, vm: &str) -> bool {
        self.controllers.as_ref().is_none_or(|names| names.iter().any(|name| name == vm))
    }

    /// Returns the largest number of volumes, by default `USUAL_VOLUMES`.
    pub fn most_volumes(&self) -> u64 {
        self.volumes.unwrap_or(USUAL_VOLUMES)
    }

    fn allows(&self, class: &str) -> bool {
        self.classes.as_ref().is_none_or(|names| names.iter().any(|name| name == class))
    }

    /// Chooses the class of a new volume: the requested one, else the only one that is allowed, else the default.
    ///
    /// # Errors
    /// If the cluster may not use the class, or it does not exist, which the error does not distinguish.
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
                    "hostStorageClass {asked:?} is not a storage class that this cluster may use; it may use: {}",
                    names()
                ),
                None => format!("choose a storage class with hostStorageClass; this cluster may use: {}", names()),
            };
            Problem::new(Kind::Invalid, problem)
        })
    }

    /// Checks that a cluster that already `has` so much may have `more` volumes or bytes. `in_class` is its usage of
    /// the class, which limits it if the policy sets no limit in bytes.
    ///
    /// # Errors
    /// The exceeded quota, as a message for people.
    pub fn admit(&self, cluster: &str, has: Usage, in_class: Bound, more: Usage) -> Result<(), Problem> {
        let most = self.most_volumes();
        if more.volumes > 0 && has.volumes.saturating_add(more.volumes) > most {
            let has = has.volumes;
            return Err(Problem::new(
                Kind::Exhausted,
                format!("quota: the cluster {cluster} has {has} volumes, and may have at most {most}"),
            ));
        }
        let Some(most) = self.bytes else { return in_class.admit(cluster, more.bytes) };
        if has.bytes.saturating_add(more.bytes) > most {
            let (has, more) = (has.bytes, more.bytes);
            return Err(Problem::new(
                Kind::Exhausted,
                format!(
                    "quota: the volumes of the cluster {cluster} have {has} bytes, {more} more are \
                     requested, and at most {most} are allowed"
                ),
            ));
        }
        Ok(())
    }

    /// Returns how many more bytes a cluster that already `has` so much may use.
    pub fn left(&self, has: Usage, in_class: Bound) -> u64 {
        if has.volumes >= self.most_volumes() {
            return 0;
        }
        self.bytes.map_or_else(|| in_class.left(), |most| most.saturating_sub(has.bytes))
    }
}

/// Usage and size of a class, which is the limit for a cluster without a quota in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bound {
    /// Bytes of the cluster's volumes in the class.
    pub has: u64,
    /// Size of the class in bytes; 0 if it is unknown.
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
                "quota: the volumes of the cluster {cluster} in this storage class have {has} bytes, {more} \
                 more are requested, and without max-bytes the limit is the size of its file system, {size}"
            ),
        ))
    }
}

/// Space reserved for volumes that are being created or expanded: class and future size, by cluster and name.
#[derive(Debug, Default)]
pub struct Reserved(BTreeMap<(String, String), (String, u64)>);

impl Reserved {
    /// Reserves space for the volume of a cluster and name, in place of any earlier reservation for it.
    pub fn insert(&mut self, key: (String, String), class: String, size: u64) {
        self.0.insert(key, (class, size));
    }

    /// Removes a reservation: the volume has been created or expanded, or that has failed.
    pub fn remove(&mut self, key: &(String, String)) {
        self.0.remove(key);
    }

    /// Returns the reservations of a cluster. There are as many as operations that need space are under way.
    pub fn of(&self, cluster: &str) -> Vec<Coming> {
        let its =
            self.0.range((cluster.to_owned(), String::new())..).take_while(|((of, _), _)| of == cluster);
        let coming = its.map(|((_, name), (class, size))| Coming {
            name: name.clone(),
            class: class.clone(),
            size: *size,
        });
        coming.collect()
    }
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
                Err("is not a storage class that this cluster may use; it may use: fast, slow"),
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
        assert_eq!(problem, "choose a storage class with hostStorageClass; this cluster may use: a, b");
    }

    #[test]
    fn room_is_set_aside_for_a_name_once() {
        let key = |cluster: &str, name: &str| (cluster.to_owned(), name.to_owned());
        let coming = |name: &str, class: &str, size| Coming { name: name.into(), class: class.into(), size };
        let mut reserved = Reserved::default();
        for (cluster, name, size) in [("dev", "a", 5), ("dev-2", "d", 100), ("dev", "c", 7), ("dev", "a", 6)]
        {
            reserved.insert(key(cluster, name), "fast".into(), size);
        }
        assert_eq!(reserved.of("dev"), [coming("a", "fast", 6), coming("c", "fast", 7)]);
        assert_eq!(reserved.of("dev-2"), [coming("d", "fast", 100)]);
        reserved.remove(&key("dev", "a"));
        reserved.remove(&key("dev", "d"));
        assert_eq!(reserved.of("dev"), [coming("c", "fast", 7)]);
        assert_eq!(reserved.of("de"), []);
    }

    #[test]
    fn a_cluster_has_no_more_than_its_quota() {
        let policy = Policy { volumes: Some(3), bytes: Some(10), ..Policy::default() };
        let has = Usage { volumes: 2, bytes: 9 };
        let none = Bound { has: 9, size: 9 };
        policy.admit("dev", has, none, Usage { volumes: 1, bytes: 1 }).unwrap();
        for more in [Usage { volumes: 2, bytes: 0 }, Usage { volumes: 0, bytes: 2 }] {
            assert_eq!(policy.admit("dev", has, none, more).unwrap_err().kind, Kind::Exhausted);
        }
        assert_eq!(policy.left(has, none), 1);
        // The policy sets no limits.
        let policy = Policy::default();
        let more = |bytes| Usage { volumes: 1, bytes };
        let some = Bound { has: 9, size: 12 };
        policy.admit("dev", has, some, more(3)).unwrap();
        assert_eq!(policy.admit("dev", has, some, more(4)).unwrap_err().kind, Kind::Exhausted);
        assert_eq!((policy.left(has, some), policy.left(has, none)), (3, 0));
        policy.admit("dev", has, Bound { has: 9, size: 0 }, more(1 << 40)).unwrap();
    }
}
