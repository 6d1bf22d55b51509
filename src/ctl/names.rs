//! Names and labels for the completion in shells.

use std::collections::BTreeSet;

use super::{Error, Where, client, cluster, words};
use crate::wire::proto::v1::VirtualMachine;

/// Returns the names of all VMs, as `ls` shows them.
///
/// # Errors
/// Fails if the daemon cannot be reached, or does not answer.
pub async fn vms(place: Where) -> Result<Vec<String>, Error> {
    Ok(known(place).await?.into_iter().map(|vm| vm.name).collect())
}

/// Returns the labels of all VMs as `key=value`, each of them once.
///
/// # Errors
/// Fails if the daemon cannot be reached, or does not answer.
pub async fn labels(place: Where) -> Result<BTreeSet<String>, Error> {
    Ok(known(place).await?.iter().flat_map(words::labels).collect())
}

async fn known(place: Where) -> Result<Vec<VirtualMachine>, Error> {
    match place {
        Where::Here(socket) => {
            client::with(socket, async |daemon| client::vms(&mut daemon.admin(), false).await).await
        }
        Where::Cluster(access) => Ok(cluster::vms(access.without_programs()?).await?),
    }
}
