//! The `[load-balancers]` table: where the addresses of clusters are recorded, which program sets up forwarding,
//! and when the addresses of a deleted cluster are released.

use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;
use toml::Spanned;

use super::super::Error;
use super::{Role, Source};

/// Default directory of the records.
const RECORDS: &str = "/var/lib/guestlet-host/load-balancers";
/// Default path of nft(8), which is where distributions install it.
const NFT: &str = "/usr/sbin/nft";

/// Time without VMs after which a cluster counts as deleted: long enough for a cluster that is restored from a
/// backup.
const RELEASE_AFTER: Duration = Duration::from_secs(86_400);

/// Settings for all load balancers, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadBalancerSettings {
    /// Directory of the records.
    pub state_dir: PathBuf,
    /// Path of nft(8), which sets the kernel's forwarding rules.
    pub nft: PathBuf,
    /// Time without any VM of a cluster after which its addresses are released; without it, an administrator releases
    /// them.
    pub release_after: Option<Duration>,
}

impl LoadBalancerSettings {
    /// Returns the defaults for a role. Only a controller learns from an API that a cluster has no VMs. On a machine,
    /// only the administrator knows whether the settings name all VMs of a cluster, so nothing is released there by
    /// default.
    pub(super) fn usual(role: Role) -> Self {
        let release_after = (role == Role::Controller).then_some(RELEASE_AFTER);
        Self { state_dir: RECORDS.into(), nft: NFT.into(), release_after }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub(super) struct LoadBalancersFragment {
    state_dir: Option<Spanned<PathBuf>>,
    nft: Option<Spanned<PathBuf>>,
    release_after_seconds: Option<u32>,
}

/// Merges the settings of this fragment into those before.
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
    if let Some(seconds) = found.release_after_seconds {
        settings.release_after = (seconds > 0).then(|| Duration::from_secs(seconds.into()));
    }
    Ok(())
}
