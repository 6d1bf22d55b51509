//! The `[load-balancers]` table: where it is kept which addresses clusters have, which program forwards from them, and when what is left
//! of a cluster is given back.

use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;
use toml::Spanned;

use super::super::Error;
use super::{Role, Source};

/// Where records are unless told otherwise.
const RECORDS: &str = "/var/lib/guestlet-host/load-balancers";
/// Where distributions have nft(8).
const NFT: &str = "/usr/sbin/nft";

/// Seconds without VMs after which a cluster is taken to be gone: long enough for one that is restored from a backup.
const RELEASE_AFTER: Duration = Duration::from_secs(86_400);

/// What holds for all load balancers, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadBalancerSettings {
    /// The directory of their records.
    pub state_dir: PathBuf,
    /// The program that gives the kernel the rules by which it forwards.
    pub nft: PathBuf,
    /// How long no VM of a cluster has to have existed until what it has is given back; none: that is left to people.
    pub release_after: Option<Duration>,
}

impl LoadBalancerSettings {
    /// What holds where nothing is said. Only a controller can be told by an API that a cluster has no VMs; that the settings of a
    /// machine name all VMs of a cluster is for its administrator to say.
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
    if let Some(seconds) = found.release_after_seconds {
        settings.release_after = (seconds > 0).then(|| Duration::from_secs(seconds.into()));
    }
    Ok(())
}
