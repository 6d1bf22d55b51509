//! Names for shells that complete what is typed.

use super::{Error, Where, client, cluster};

/// The names of all VMs, as `ls` shows them.
///
/// # Errors
/// If nobody can be asked, or does not answer.
pub async fn vms(place: Where) -> Result<Vec<String>, Error> {
    let vms = match place {
        Where::Here(socket) => {
            client::with(socket, async |daemon| client::vms(&mut daemon.admin(), false).await).await?
        }
        Where::Cluster(access) => cluster::vms(access.without_programs()?).await?,
    };
    Ok(vms.into_iter().map(|vm| vm.name).collect())
}
