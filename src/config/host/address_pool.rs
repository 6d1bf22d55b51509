//! An `[[address-pool]]` table: addresses for load balancers of clusters.

use serde::Deserialize;
use toml::Spanned;

use super::super::Error;
use super::Source;
use super::vm::{Taken, check_name};
use crate::access::Pattern;
use crate::addresses::{Range, Subnet};

/// Maximum length of a pool's name, in bytes.
const LONGEST_NAME: usize = 63;
/// Maximum length of an interface's name in the kernel, in bytes.
const LONGEST_INTERFACE: usize = 15;
/// Maximum number of ranges of one pool.
const MOST_RANGES: usize = 64;
/// Default reserved ports of a pool without an interface: the host's own programs may listen at its addresses.
const USUAL_RESERVED: &[u16] = &[22];

/// Settings of one address pool, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddressPoolSettings {
    /// Unique name: letters a–z, digits, `-` and `.`, at most 63 bytes.
    pub name: String,
    /// Addresses of the pool; no two ranges of all pools overlap.
    pub ranges: Vec<Range>,
    /// Network of the addresses, if set.
    pub network: Option<String>,
    /// Names of the clusters that may use the pool; none: all.
    pub clusters: Option<Vec<Pattern>>,
    /// Priority: of the pools that match, the one with the greatest number is tried first.
    pub priority: u32,
    /// Subnets that the host half may forward to; if empty, it forwards nothing from the addresses of this pool.
    pub forward_to: Vec<Subnet>,
    /// Interface of the host to which the host half adds an address while it forwards from it, if set.
    pub interface: Option<String>,
    /// Ports that are not given to load balancers while the host half forwards from these addresses.
    pub reserved_ports: Vec<u16>,
}

/// Table `[[address-pool]]`, unchecked.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct AddressPoolFragment {
    name: Option<Spanned<String>>,
    ranges: Option<Spanned<Vec<Spanned<String>>>>,
    network: Option<Spanned<String>>,
    clusters: Option<Spanned<Vec<Spanned<String>>>>,
    #[serde(default)]
    priority: u32,
    #[serde(default)]
    forward_to: Vec<Spanned<String>>,
    interface: Option<Spanned<String>>,
    reserved_ports: Option<Vec<u16>>,
}

pub(super) fn check<'a>(
    source: &'a Source,
    pool: &Spanned<AddressPoolFragment>,
    others: &[AddressPoolSettings],
    taken: &mut Taken<'a>,
) -> Result<AddressPoolSettings, Error> {
    let fragment = pool.get_ref();
    let missing = |key: &str, why: &str| source.wrong(pool, format!("[[address-pool]] has no {key}; {why}"));
    let name = fragment.name.as_ref().ok_or_else(|| missing("name", "give it a name"))?;
    check_name(name.get_ref()).map_err(|problem| source.wrong(name, problem))?;
    if name.get_ref().len() > LONGEST_NAME {
        return Err(source.wrong(name, format!("name has more than {LONGEST_NAME} bytes")));
    }
    source.unique(taken, "address-pool", name, name.get_ref())?;
    let ranges = fragment
        .ranges
        .as_ref()
        .ok_or_else(|| missing("ranges", "load balancers get addresses from them"))?;
    let ranges = check_ranges(source, ranges, others)?;
    if let Some(network) = &fragment.network {
        check_name(network.get_ref())
            .map_err(|problem| source.wrong(network, format!("network: {problem}")))?;
    }
    let mut forward_to = Vec::new();
    for text in &fragment.forward_to {
        let subnet = Subnet::parse(text.get_ref())
            .map_err(|problem| source.wrong(text, format!("forward-to: {problem}")))?;
        forward_to.push(subnet);
    }
    if let Some(interface) = &fragment.interface {
        check_interface(source, interface, forward_to.is_empty())?;
    }
    let usual = if fragment.interface.is_some() { &[] } else { USUAL_RESERVED };
    Ok(AddressPoolSettings {
        name: name.get_ref().clone(),
        ranges,
        network: fragment.network.as_ref().map(|network| network.get_ref().clone()),
        clusters: clusters(source, fragment.clusters.as_ref())?,
        priority: fragment.priority,
        forward_to,
        interface: fragment.interface.as_ref().map(|interface| interface.get_ref().clone()),
        reserved_ports: fragment.reserved_ports.clone().unwrap_or_else(|| usual.to_vec()),
    })
}

/// Checks the ranges of a pool. No two ranges of any pools may overlap, because their common addresses would be
/// given away twice.
fn check_ranges(
    source: &Source,
    ranges: &Spanned<Vec<Spanned<String>>>,
    others: &[AddressPoolSettings],
) -> Result<Vec<Range>, Error> {
    let mut found: Vec<Range> = Vec::new();
    for text in ranges.get_ref() {
        let range = Range::parse(text.get_ref())
            .map_err(|problem| source.wrong(text, format!("ranges: {problem}")))?;
        if let Some(other) = found.iter().find(|other| other.overlaps(&range)) {
            return Err(source.wrong(text, format!("ranges: {range} and {other} overlap; change one")));
        }
        let of = |pool: &&AddressPoolSettings| pool.ranges.iter().any(|other| other.overlaps(&range));
        if let Some(other) = others.iter().find(of) {
            let problem = format!("ranges: {range} overlaps the address pool {:?}; change one", other.name);
            return Err(source.wrong(text, problem));
        }
        found.push(range);
    }
    if found.is_empty() || found.len() > MOST_RANGES {
        return Err(source.wrong(ranges, format!("ranges must have 1 to {MOST_RANGES} entries")));
    }
    Ok(found)
}

/// Checks the name of an interface, which is passed to the kernel.
fn check_interface(
    source: &Source,
    interface: &Spanned<String>,
    forwards_nothing: bool,
) -> Result<(), Error> {
    let name = interface.get_ref();
    let strange = |one: char| one.is_whitespace() || one.is_control() || one == '/' || one == ':';
    if name.is_empty() || name.len() > LONGEST_INTERFACE || name.contains(strange) {
        return Err(source
            .wrong(interface, format!("interface = {name:?} cannot be the name of a network interface")));
    }
    if forwards_nothing {
        let problem = "interface has an effect only where the host forwards; add forward-to, or remove it";
        return Err(source.wrong(interface, problem.to_owned()));
    }
    Ok(())
}

fn clusters(
    source: &Source,
    found: Option<&Spanned<Vec<Spanned<String>>>>,
) -> Result<Option<Vec<Pattern>>, Error> {
    let Some(list) = found else { return Ok(None) };
    let mut patterns = Vec::new();
    for name in list.get_ref() {
        let text = name.get_ref();
        let pattern =
            text.parse().map_err(|problem| source.wrong(name, format!("clusters: {text:?} {problem}")))?;
        patterns.push(pattern);
    }
    if patterns.is_empty() {
        let problem = "clusters is empty, so no cluster gets an address of the pool; leave it out for all";
        return Err(source.wrong(list, problem.to_owned()));
    }
    Ok(Some(patterns))
}
