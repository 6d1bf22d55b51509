//! Shares: volumes that many nodes have at a time, and mount over the network. Nothing is plugged, so no node has
//! to let go of a share before another one gets it, and `protocol` does not apply. A share has to be served for as
//! long as any node may mount it; the backend ensures this ([`Shares`]).
//!
//! ```text
//!  publish ───▶ the node is recorded   ──▶ the share is served ──▶ where
//!  unpublish ─▶ its record is removed  ──▶ after the last one, the share is no longer served
//!  find ──────▶ is the node recorded?  ──▶ where, as it is now
//! ```

use super::super::backends::Vm;
use super::super::backends::volumes::{Export, Sharer, Shares, Volume};
use super::problem::{Kind, Problem};
use super::{Asker, Keeper};
use crate::wire::proto::v1::VolumeAction;

impl Keeper {
    /// Returns the backend's shares.
    ///
    /// # Errors
    /// If the backend does not support shares.
    pub(super) fn shares(&self) -> Result<&dyn Shares, Problem> {
        self.0.volumes.shares().ok_or_else(|| {
            let words = "volumes of this host are disks, which one node has at a time: ReadWriteMany and ReadOnlyMany are \
                         served on Harvester only";
            Problem::new(Kind::Invalid, words)
        })
    }

    /// Reports whether the backend supports shares.
    pub fn has_shares(&self) -> bool {
        self.0.volumes.shares().is_some()
    }

    /// Permits a VM, which its cluster knows as `node`, to mount a share, perhaps read-only.
    pub(super) async fn share(
        &self,
        by: &Asker,
        id: &str,
        vm: &Vm,
        (node, read_only): (String, bool),
    ) -> Result<Export, Problem> {
        let volume = self.get(by, id).await?;
        let sharer = Sharer { uuid: vm.ids.lasting.clone(), vm: vm.name.clone(), node, read_only };
        let before = volume.sharers.iter().flatten().find(|one| one.uuid == sharer.uuid);
        if before.is_some_and(|before| before.read_only != read_only) {
            let how = if read_only { "writable" } else { "read-only" };
            let words = format!("the volume is already published to this node, {how}; unpublish it first");
            return Err(Problem::new(Kind::Exists, words));
        }
        let is_new = before.is_none();
        let export = self.shares()?.share(id, sharer).await;
        let export = export.map_err(|error| self.logged(by, "serve a share", id, error))?;
        if is_new {
            self.tell(VolumeAction::Attached, &volume, by, Some(&vm.name)).await;
        }
        Ok(export)
    }

    /// Returns where a share is served that this node may mount. Changes nothing and does not wait: a node from which
    /// the share was unpublished does not get it back by asking.
    ///
    /// # Errors
    /// If the node may not mount it, or it is not served now.
    pub async fn find_share(&self, asker: &Asker, id: &str, node: &str) -> Result<Export, Problem> {
        let volume = self.get(asker, id).await?;
        let found = self.node(&volume.cluster, node).await?.ok_or_else(|| Problem::no_node(node))?;
        let has = |sharer: &Sharer| sharer.uuid == found.vm.ids.lasting;
        if !volume.sharers.iter().flatten().any(has) {
            let words = format!("the volume {id} is not published to the node {node}, or is not a share");
            return Err(Problem::new(Kind::NotFound, words));
        }
        let export = self.shares()?.find(id).await;
        export.map_err(|error| self.logged(asker, "find a share", id, error))
    }

    /// Ends the permission of a node, or of all nodes if `node` is `None`, to mount a share.
    pub(super) async fn unshare(
        &self,
        by: &Asker,
        volume: &Volume,
        node: Option<&str>,
    ) -> Result<(), Problem> {
        let named = match node {
            Some(node) => self.node(&volume.cluster, node).await?.map(|found| found.vm.ids.lasting.clone()),
            None => None,
        };
        let is_meant = |sharer: &&Sharer| {
            let is_called = |node: &str| {
                sharer.uuid.eq_ignore_ascii_case(node) || sharer.node == node || sharer.vm == node
            };
            node.is_none_or(is_called) || named.as_ref() == Some(&sharer.uuid)
        };
        let meant: Vec<_> = volume.sharers.iter().flatten().filter(is_meant).collect();
        // Done even if no sharer matches: an earlier attempt may have ended half-way.
        let uuids = match node {
            None => vec![None],
            Some(_) => meant.iter().map(|sharer| Some(sharer.uuid.as_str())).collect(),
        };
        let uuids = if uuids.is_empty() { vec![Some("")] } else { uuids };
        for uuid in uuids {
            let ended = self.shares()?.unshare(&volume.id, uuid).await;
            ended.map_err(|error| self.logged(by, "end a share", &volume.id, error))?;
        }
        for sharer in meant {
            self.tell(VolumeAction::Detached, volume, by, Some(&sharer.vm)).await;
        }
        Ok(())
    }
}

/// Returns the problem that nodes may mount a share, if any may.
pub(super) fn in_use(volume: &Volume) -> Option<Problem> {
    let nodes: Vec<_> = volume.sharers.iter().flatten().map(|sharer| sharer.node.as_str()).collect();
    if nodes.is_empty() {
        return None;
    }
    let words = format!(
        "the volume {} is published to {} nodes, such as {}; unpublish it first",
        volume.id,
        nodes.len(),
        nodes.iter().take(3).copied().collect::<Vec<_>>().join(", ")
    );
    Some(Problem::new(Kind::Precondition, words))
}
