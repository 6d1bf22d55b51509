//! The `[load-balancers]` table: where it is kept which addresses clusters have, and which program forwards from them.

use std::path::PathBuf;

use serde::Deserialize;
use toml::Spanned;

use super::super::Error;
use super::Source;

/// Where records are unless told otherwise.
const RECORDS: &str = "/var/lib/guestlet-host/load-balancers";
/// Where distributions have nft(8).
const NFT: &str = "/usr/sbin/nft";

/// What holds for all load balancers, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadBalancerSettings {
    /// The directory of their records.
    pub state_dir: PathBuf,
    /// The program that gives the kernel the rules by which it forwards.
    pub nft: PathBuf,
}

impl Default for LoadBalancerSettings {
    fn default() -> Self {
        Self { state_dir: RECORDS.into(), nft: NFT.into() }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub(super) struct LoadBalancersFragment {
    state_dir: Option<Spanned<PathBuf>>,
    nft: Option<Spanned<PathBuf>>,
}

/// Takes what this fragment sets.
pub(super) fn check(
    source: &Source,
    found: &LoadBalancersFragment,
    settings: &mut LoadBalancerSettings,
) -> Result<(), Error> {
    if let Some(path) = &found.state_dir {
        settings.state_dir = source.absolute("load-balancers.state-dir", path)?;
    }
    if let Some(path) = &found.nft {
        settings.nft = source.absolute("load-balancers.nft", path)?;
    }
    Ok(())
}
