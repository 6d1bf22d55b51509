//! Names for the completion in shells.

use super::{Error, Where, client, cluster};

/// Returns the names of all VMs, as `ls` shows them.
///
/// # Errors
/// Fails if the daemon cannot be reached, or does not answer.
pub async fn vms(place: Where) -> Result<Vec<String>, Error> {
    let vms = match place {
        Where::Here(socket) => {
            client::with(socket, async |daemon| client::vms(&mut daemon.admin(), false).await).await?
        }
        Where::Cluster(access) => cluster::vms(access.without_programs()?).await?,
    };
    Ok(vms.into_iter().map(|vm| vm.name).collect())
}
