//! Access rules of guestlet-host: which users of a host may call which verbs on which VMs. Pure.
//!
//! A rule names users or groups, the verbs that they may use ([`verb`]), and the VMs that it covers ([`pattern`]).
//! Anything that no rule allows is denied; rules only add up. The code that authenticates the caller decides who
//! bypasses the rules (root, and the user that guestlet-host runs as).
//!
//! A volume is covered by its cluster and the VM that it is attached to. For a volume that no VM has, the VM's
//! name is empty.

pub mod pattern;
pub mod verb;

use std::collections::BTreeSet;

pub use pattern::Pattern;
pub use verb::{Role, Verb};

/// Access rule: one `[[access]]` table of the settings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rule {
    /// Names or numeric IDs of users.
    pub users: Vec<String>,
    /// Names or numeric IDs of groups, whose members the rule applies to as well.
    pub groups: Vec<String>,
    /// Classes of verbs that the rule allows.
    pub roles: BTreeSet<Role>,
    /// Single verbs that the rule allows, by their words, such as `disk attach`.
    pub verbs: BTreeSet<&'static str>,
    /// Names of the VMs that the rule covers; none: all.
    pub vms: Option<Vec<Pattern>>,
    /// Names of the VMs' clusters that the rule covers; none: all.
    pub clusters: Option<Vec<Pattern>>,
}

/// Complete set of access rules. A request is allowed if at least one of them allows it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rules(Vec<Rule>);

/// User of the host, with the attributes that rules refer to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Person {
    /// Numeric user ID; rules may name a user by it.
    pub uid: u32,
    /// Login name, if the user has one.
    pub name: Option<String>,
    /// Groups that the rules name and that the user is a member of, spelled as in the rules.
    pub groups: BTreeSet<String>,
}

impl Rule {
    /// Returns whether the rule names this user, by number, by name or through a group.
    fn is_of(&self, person: &Person) -> bool {
        let uid = person.uid.to_string();
        self.users.iter().any(|user| *user == uid || Some(user) == person.name.as_ref())
            || self.groups.iter().any(|group| person.groups.contains(group))
    }

    fn has(&self, verb: &Verb) -> bool {
        self.roles.contains(&verb.role) || self.verbs.contains(verb.words)
    }

    fn covers(&self, vm: &str, cluster: &str) -> bool {
        let matches = |patterns: &Option<Vec<Pattern>>, name: &str| {
            patterns.as_ref().is_none_or(|patterns| patterns.iter().any(|pattern| pattern.matches(name)))
        };
        matches(&self.vms, vm) && matches(&self.clusters, cluster)
    }
}

impl Rules {
    /// Creates the set from the rules of the settings.
    pub fn new(rules: Vec<Rule>) -> Self {
        Self(rules)
    }

    /// Returns whether there are no rules, so that only callers who bypass them have access.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Iterates over the rules.
    pub fn iter(&self) -> impl Iterator<Item = &Rule> {
        self.0.iter()
    }

    /// Returns the groups that the rules name, each once.
    pub fn groups(&self) -> Vec<String> {
        let groups: BTreeSet<_> = self.0.iter().flat_map(|rule| &rule.groups).collect();
        groups.into_iter().cloned().collect()
    }

    /// Returns whether this user may use the verb on at least one object, whichever it is.
    pub fn admit(&self, person: &Person, verb: &Verb) -> bool {
        self.0.iter().any(|rule| rule.has(verb) && rule.is_of(person))
    }

    /// Returns whether this user may use the verb on the VM of this name, or on a volume attached to it, in this
    /// cluster.
    pub fn allow(&self, person: &Person, verb: &Verb, vm: &str, cluster: &str) -> bool {
        self.0.iter().any(|rule| rule.has(verb) && rule.covers(vm, cluster) && rule.is_of(person))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn patterns(names: &[&str]) -> Vec<Pattern> {
        names.iter().map(|name| name.parse().unwrap()).collect()
    }

    fn person(uid: u32, name: &str, groups: &[&str]) -> Person {
        let groups = groups.iter().map(|group| (*group).to_owned()).collect();
        Person { uid, name: Some(name).filter(|name| !name.is_empty()).map(str::to_owned), groups }
    }

    #[test]
    fn what_no_rule_allows_is_denied() {
        let rules = Rules::new(vec![
            Rule {
                users: vec!["alice".into()],
                verbs: [verb::PING.words].into(),
                vms: Some(patterns(&["web-*"])),
                ..Rule::default()
            },
            Rule {
                groups: vec!["vm-operators".into()],
                users: vec!["1007".into()],
                roles: [Role::Read].into(),
                clusters: Some(patterns(&["dev"])),
                ..Rule::default()
            },
        ]);
        let alice = person(1000, "alice", &[]);
        let cases = [
            (&alice, &verb::PING, "web-1", "dev", true),
            (&alice, &verb::PING, "db-1", "dev", false),
            (&alice, &verb::INFO, "web-1", "dev", false),
            (&alice, &verb::PING, "", "", false),
            (&person(1001, "bob", &["vm-operators"]), &verb::INFO, "db-1", "dev", true),
            (&person(1001, "bob", &["vm-operators"]), &verb::INFO, "db-1", "", false),
            (&person(1001, "bob", &["vm-operators"]), &verb::DISK_ATTACH, "db-1", "dev", false),
            (&person(1001, "bob", &["others"]), &verb::INFO, "db-1", "dev", false),
            (&person(1007, "", &[]), &verb::INFO, "db-1", "dev", true),
            (&person(1000, "", &[]), &verb::PING, "web-1", "dev", false),
        ];
        for (number, (person, verb, vm, cluster, expected)) in cases.into_iter().enumerate() {
            assert_eq!(rules.allow(person, verb, vm, cluster), expected, "case {number}");
        }
        assert!(rules.admit(&alice, &verb::PING) && !rules.admit(&alice, &verb::INFO));
        assert_eq!(rules.groups(), ["vm-operators"]);
    }

    fn any_rule() -> impl Strategy<Value = Rule> {
        let names = |words: &'static [&'static str]| {
            vec(prop::sample::select(words), 0..3)
                .prop_map(|names| names.into_iter().map(str::to_owned).collect::<Vec<_>>())
        };
        let patterns = || {
            let some = vec(prop::sample::select(&["*", "a", "a*", "*b", "c"][..]), 1..3);
            prop::option::of(some.prop_map(|names| names.iter().map(|name| name.parse().unwrap()).collect()))
        };
        let verbs = vec(prop::sample::select(verb::VERBS), 0..3);
        let roles = vec(prop::sample::select(Role::ALL), 0..2);
        (names(&["alice", "bob", "7"]), names(&["ops", "dev"]), roles, verbs, patterns(), patterns())
            .prop_map(|(users, groups, roles, verbs, vms, clusters)| Rule {
                users,
                groups,
                roles: roles.into_iter().collect(),
                verbs: verbs.into_iter().map(|verb| verb.words).collect(),
                vms,
                clusters,
            })
    }

    proptest! {
        /// An additional rule takes nothing from any user, and gives nothing to users whom it does not name.
        #[test]
        fn rules_add_up(
            rules in vec(any_rule(), 0..4),
            more in any_rule(),
            uid in 6_u32..9,
            name in prop::option::of(prop::sample::select(&["alice", "bob", "carol"][..])),
            groups in vec(prop::sample::select(&["ops", "dev", "other"][..]), 0..2),
            verb in prop::sample::select(verb::VERBS),
            vm in prop::sample::select(&["", "a", "ab", "b", "c"][..]),
            cluster in prop::sample::select(&["", "a", "c"][..]),
        ) {
            let who = person(uid, name.unwrap_or_default(), &groups);
            let before = Rules::new(rules.clone());
            let after = Rules::new(rules.into_iter().chain([more.clone()]).collect());
            let (had, has) = (before.allow(&who, verb, vm, cluster), after.allow(&who, verb, vm, cluster));
            prop_assert!(!had || has, "it takes something away");
            prop_assert!(had || !has || more.is_of(&who), "it gives to somebody else");
            prop_assert!(!has || after.admit(&who, verb), "admitted to one thing is admitted at all");
        }
    }
}
