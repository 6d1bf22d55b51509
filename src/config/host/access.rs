//! An `[[access]]` table: permissions of some users of the host. The tables of all fragments add up.

use std::collections::BTreeSet;

use serde::Deserialize;
use toml::Spanned;

use super::super::Error;
use super::Source;
use crate::access::{Pattern, Role, Rule, verb};

/// Word that stands for all roles.
const ALL: &str = "all";

/// Table `[[access]]`, unchecked.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct AccessFragment {
    users: Option<Vec<Spanned<String>>>,
    groups: Option<Vec<Spanned<String>>>,
    roles: Option<Vec<Spanned<String>>>,
    verbs: Option<Vec<Spanned<String>>>,
    vms: Option<Spanned<Vec<Spanned<String>>>>,
    clusters: Option<Spanned<Vec<Spanned<String>>>>,
}

/// Checks a table and returns its rule. Every rule also allows the status of the host half, which guestctl
/// requests by itself.
pub(super) fn check(source: &Source, table: &Spanned<AccessFragment>) -> Result<Rule, Error> {
    let found = table.get_ref();
    let mut rule = Rule {
        users: names(source, "users", found.users.as_deref())?,
        groups: names(source, "groups", found.groups.as_deref())?,
        roles: roles(source, found.roles.as_deref().unwrap_or_default())?,
        verbs: verbs(source, found.verbs.as_deref().unwrap_or_default())?,
        vms: patterns(source, "vms", found.vms.as_ref())?,
        clusters: patterns(source, "clusters", found.clusters.as_ref())?,
    };
    if rule.users.is_empty() && rule.groups.is_empty() {
        let problem = "[[access]] applies to nobody; set users or groups".to_owned();
        return Err(source.wrong(table, problem));
    }
    if rule.roles.is_empty() && rule.verbs.is_empty() {
        let problem = "[[access]] allows nothing; set roles or verbs".to_owned();
        return Err(source.wrong(table, problem));
    }
    rule.verbs.insert(verb::STATUS.words);
    Ok(rule)
}

/// Checks the names of users or groups. They need not exist yet: the name service may learn of them later.
fn names(source: &Source, key: &str, found: Option<&[Spanned<String>]>) -> Result<Vec<String>, Error> {
    let mut names = Vec::new();
    for name in found.unwrap_or_default() {
        let text = name.get_ref();
        if text.is_empty() || text.contains(|one: char| one.is_control() || one == ':' || one == '*') {
            let problem = format!("{key} has {text:?}, which cannot be a name; write a name or a number");
            return Err(source.wrong(name, problem));
        }
        names.push(text.clone());
    }
    Ok(names)
}

fn roles(source: &Source, found: &[Spanned<String>]) -> Result<BTreeSet<Role>, Error> {
    let mut roles = BTreeSet::new();
    for name in found {
        let text = name.get_ref();
        if text == ALL {
            roles.extend(Role::ALL);
            continue;
        }
        let Some(role) = Role::ALL.iter().find(|role| role.name() == text) else {
            let known: Vec<_> = Role::ALL.iter().map(|role| role.name()).chain([ALL]).collect();
            let problem = format!("roles has the unknown role {text:?}; the roles are {}", known.join(", "));
            return Err(source.wrong(name, problem));
        };
        roles.insert(*role);
    }
    Ok(roles)
}

fn verbs(source: &Source, found: &[Spanned<String>]) -> Result<BTreeSet<&'static str>, Error> {
    let mut verbs = BTreeSet::new();
    for name in found {
        let text = name.get_ref();
        let Some(verb) = verb::VERBS.iter().find(|verb| verb.words == text) else {
            let known: Vec<_> = verb::VERBS.iter().map(|verb| verb.words).collect();
            let problem = format!("verbs has the unknown verb {text:?}; the verbs are {}", known.join(", "));
            return Err(source.wrong(name, problem));
        };
        verbs.insert(verb.words);
    }
    Ok(verbs)
}

/// Parses names and patterns; none if there is no list.
pub(super) fn patterns(
    source: &Source,
    key: &str,
    found: Option<&Spanned<Vec<Spanned<String>>>>,
) -> Result<Option<Vec<Pattern>>, Error> {
    let Some(list) = found else { return Ok(None) };
    let mut patterns = Vec::new();
    for name in list.get_ref() {
        let text = name.get_ref();
        let pattern =
            text.parse().map_err(|problem| source.wrong(name, format!("{key}: {text:?} {problem}")))?;
        patterns.push(pattern);
    }
    if patterns.is_empty() {
        return Err(source
            .wrong(list, format!("{key} is empty, so the rule covers nothing; leave it out to cover all")));
    }
    Ok(Some(patterns))
}
