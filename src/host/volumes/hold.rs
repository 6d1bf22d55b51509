//! Publishes, unpublishes, removes and expands volumes, one step after the other as `protocol` decides.

use super::super::backends::Vm;
use super::super::backends::disks::GuestSide;
use super::super::backends::volumes::{Export, Holder, Place, Plugged, Published, Usage, Volume};
use super::super::disks::release::{self, Agent};
use super::super::fleet::{Identity, Machine};
use super::super::metrics::operations::Operation;
use super::problem::{Kind, Problem};
use super::protocol::{Next, Refusal, Request, next};
use super::size::Range;
use super::turns::Thing;
use super::{Asker, Keeper, PATIENCE, share};
use crate::wire::proto::v1::{PowerState, VolumeAction};

/// Limit of steps, which is more than any request needs unless another program reverts each step.
const MOST_STEPS: usize = 16;

/// Access to a published volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Given {
    /// Disk that is plugged into the node's VM.
    Disk(Plugged),
    /// Share that the node mounts over the network.
    Share(Export),
}

/// Point that the steps of a request have reached.
enum End {
    /// The request is done.
    Done,
    /// The volume does not exist.
    Gone,
    /// This last step has to be done to the volume, by the caller.
    Last(Box<Volume>, Next),
}

impl Keeper {
    /// Removes a volume that no VM has. Succeeds if it does not exist.
    ///
    /// # Errors
    /// If a VM has it or may have it, or it belongs to another cluster.
    pub async fn remove(&self, asker: &Asker, id: &str) -> Result<(), Problem> {
        let (by, id) = (asker.clone(), id.to_owned());
        self.begin(Operation::Remove, asker, move |keeper| async move {
            // Checked before a turn is taken, so that no guest can block operations on a volume of another cluster.
            if keeper.find(&by, &id).await?.is_none() {
                return Ok(());
            }
            let _turn = keeper.0.turns.take(Thing::volume(&id))?;
            let Some(volume) = keeper.find(&by, &id).await? else { return Ok(()) };
            if let Some(problem) = share::in_use(&volume) {
                return Err(problem);
            }
            let is_listed = match &volume.published {
                Some(published) => keeper.vm(&published.uuid).await?.is_some(),
                None => false,
            };
            let End::Last(volume, _) = keeper.advance(&by, &id, Request::Remove { is_listed }).await? else {
                return Ok(());
            };
            let removed = keeper.0.volumes.remove(&id).await;
            removed.map_err(|error| keeper.logged(&by, "remove a volume", &id, error))?;
            keeper.tell(VolumeAction::Removed, &volume, &by, None).await;
            Ok(())
        })
        .await
    }

    /// Publishes a volume to a VM of its cluster.
    ///
    /// # Errors
    /// If another VM has it or may have it, or it cannot be plugged.
    pub async fn publish(
        &self,
        asker: &Asker,
        id: &str,
        node: &str,
        read_only: bool,
    ) -> Result<Given, Problem> {
        let (by, id, node) = (asker.clone(), id.to_owned(), node.to_owned());
        self.begin(Operation::Publish, asker, move |keeper| async move {
            let volume = keeper.get(&by, &id).await?;
            let _turn = keeper.0.turns.take(Thing::volume(&id))?;
            let found = keeper.node(&volume.cluster, &node).await?;
            let Machine { vm, power } = found.ok_or_else(|| Problem::no_node(&node))?;
            if volume.sharers.is_some() {
                return keeper.share(&by, &id, &vm, (node, read_only)).await.map(Given::Share);
            }
            let request = Request::Publish { uuid: &vm.ids.lasting, read_only };
            let End::Last(volume, _) = keeper.advance(&by, &id, request).await? else {
                return Err(Problem::no_volume(&id));
            };
            if power == PowerState::Off {
                return Err(Problem::new(Kind::Unavailable, format!("the node {node} is off")));
            }
            let published = Published {
                uuid: vm.ids.lasting.clone(),
                vm: vm.name.clone(),
                node,
                read_only,
                leaving: false,
            };
            let new = volume.published.as_ref() != Some(&published);
            let arrival = (vm.ids.lasting.clone(), id.clone());
            keeper.admit(&vm, &arrival).await?;
            let plugged = keeper.plug(&by, &id, published, &vm.name).await;
            keeper.0.arriving.lock().await.remove(&arrival);
            let plugged = plugged.map_err(|error| keeper.logged(&by, "plug a volume", &id, error))?;
            if new {
                keeper.tell(VolumeAction::Attached, &volume, &by, Some(&vm.name)).await;
            }
            if keeper.0.volumes.needs_the_guests_word() {
                let seen = keeper.agent(&vm.name, &by).find(&plugged.disk).await;
                seen.map_err(|why| {
                    let words =
                        "the volume is plugged, but its guest does not confirm that it sees it; repeat the call";
                    let detail = format!("{words}: {why}");
                    // The guest gets the details, since it may lack an agent, or have one that must be upgraded.
                    if plugged.disk.is_adopted {
                        return Problem::new(Kind::Unavailable, detail);
                    }
                    Problem::with_detail(Kind::Unavailable, words, detail)
                })?;
            }
            Ok(Given::Disk(plugged))
        })
        .await
    }

    /// Detaches a volume from the VM that has it or, if `node` is given, only from that one. Succeeds if no VM has it.
    ///
    /// # Errors
    /// If its guest uses it, or it is unknown whether a VM has it, unless `forced`; or if it belongs to another
    /// cluster.
    pub async fn unpublish(
        &self,
        asker: &Asker,
        id: &str,
        node: Option<&str>,
        forced: bool,
    ) -> Result<(), Problem> {
        let (by, id, node) = (asker.clone(), id.to_owned(), node.map(str::to_owned));
        self.begin(Operation::Unpublish, asker, move |keeper| async move {
            if keeper.find(&by, &id).await?.is_none() {
                return Ok(());
            }
            let _turn = keeper.0.turns.take(Thing::volume(&id))?;
            let Some(volume) = keeper.find(&by, &id).await? else { return Ok(()) };
            if volume.sharers.is_some() {
                return keeper.unshare(&by, &volume, node.as_deref()).await;
            }
            let is_there = keeper.recognise(&by, &volume, node.as_deref()).await?;
            let published = volume.published.as_ref();
            if let (Some(node), Some(published)) = (&node, published) {
                let is_its =
                    published.node == *node || keeper.is_node(&volume.cluster, node, &published.place()).await?;
                if !is_its {
                    let words = format!(
                        "a program other than guestlet has plugged the volume {id} into the node {node}, and has to unplug it"
                    );
                    return if is_there { Err(Problem::new(Kind::Precondition, words)) } else { Ok(()) };
                }
            }
            if !is_there && let Some(other) = keeper.concede(&by, &volume).await? {
                match (&node, published) {
                    // A request without a node means whichever VM has it.
                    (None, Some(published)) => return Err(overtaken(&volume, published, &other)),
                    (Some(_), Some(_)) => return Ok(()),
                    (Some(node), None) if !keeper.is_node(&volume.cluster, node, &other).await? => return Ok(()),
                    (_, None) => {}
                }
            }
            let taken = keeper.advance(&by, &id, Request::Unpublish { by_force: forced }).await;
            if taken.is_err() && is_there && published.is_none() {
                keeper.disown(&id).await;
            }
            taken?;
            if let Some(published) = published {
                keeper.tell(VolumeAction::Detached, &volume, &by, Some(&published.vm)).await;
            }
            Ok(())
        })
        .await
    }

    /// Reports whether another program has plugged a volume, which is to be unpublished, into this node. If the volume
    /// has no record, that program may have reported to the cluster that the node has it. The record is then written,
    /// and the volume is unpublished like any other.
    async fn recognise(&self, by: &Asker, volume: &Volume, node: Option<&str>) -> Result<bool, Problem> {
        let found = match (node, by) {
            (Some(node), _) => self.node(&volume.cluster, node).await?,
            // Guests always name a node. People may name none, and then mean whichever VM has the volume.
            (None, Asker::Guest { .. }) => None,
            (None, Asker::Person(_) | Asker::Host) if volume.published.is_some() => None,
            (None, Asker::Person(_) | Asker::Host) => match self.0.volumes.holder(&volume.id).await? {
                Holder::On(place) => self.vm(&place.uuid).await?,
                Holder::Off | Holder::Unknown(_) => None,
            },
        };
        let Some(Machine { vm, .. }) = found.filter(|found| found.vm.cluster == volume.cluster) else {
            return Ok(false);
        };
        let published = Published {
            uuid: vm.ids.lasting.clone(),
            vm: vm.name.clone(),
            node: node.unwrap_or(&vm.name).to_owned(),
            read_only: false,
            leaving: false,
        };
        let recognised = self.0.volumes.recognise(&volume.id, published).await;
        recognised.map_err(|error| self.logged(by, "look for a volume", &volume.id, error))
    }

    /// Removes a record that was written only for unplugging, if that has not begun. The disk belongs to the other
    /// program as before, and must not be plugged again when that program unplugs it.
    async fn disown(&self, id: &str) {
        let forgotten = async {
            let is_left = |volume: Volume| volume.published.is_some_and(|published| !published.leaving);
            if self.0.volumes.get(id).await?.is_some_and(is_left) {
                self.0.volumes.forget(id).await
            } else {
                Ok(())
            }
        };
        if let Err(error) = forgotten.await {
            tracing::warn!(
                volume = id,
                %error,
                "a volume that another program has plugged stays recorded as published; unpublish it again"
            );
        }
    }

    /// Returns the VM into which another program has plugged a volume. The record that another VM has it is then
    /// removed.
    async fn concede(&self, by: &Asker, volume: &Volume) -> Result<Option<Place>, Problem> {
        let conceded = self.0.volumes.concede(&volume.id).await;
        let other = conceded.map_err(|error| self.logged(by, "look for a volume", &volume.id, error))?;
        if let (Some(other), Some(published)) = (&other, &volume.published) {
            tracing::info!(
                volume = volume.id,
                vm = published.vm,
                other = other.vm,
                "the VM that had a volume no longer has it: another program has plugged it into another VM"
            );
            self.tell(VolumeAction::Detached, volume, by, Some(&published.vm)).await;
        }
        Ok(other)
    }

    /// Expands a volume, also while a guest uses it. Succeeds if it is already large enough. Returns its size.
    ///
    /// # Errors
    /// If no volume can have such a size, there is not enough space, or it is unknown which VM has the volume.
    pub async fn expand(&self, asker: &Asker, id: &str, range: Range) -> Result<u64, Problem> {
        let (by, id) = (asker.clone(), id.to_owned());
        self.begin(Operation::Expand, asker, move |keeper| async move {
            keeper.get(&by, &id).await?;
            let _turn = keeper.0.turns.take(Thing::volume(&id))?;
            let End::Last(volume, Next::Resize(place)) = keeper.advance(&by, &id, Request::Resize).await?
            else {
                return Err(Problem::no_volume(&id));
            };
            let size = range.grow(volume.size)?;
            let policy = keeper.policy(&volume.cluster);
            let more = size - volume.size;
            let key = (volume.cluster.clone(), volume.name.clone());
            if more > 0 {
                let usage = Usage { volumes: 0, bytes: more };
                keeper.reserve(&policy, &key, &volume.class, size, usage).await?;
            }
            let vm = place.map(|place| place.vm);
            let grown = keeper.0.volumes.grow(&id, size, vm.as_deref()).await;
            keeper.0.reserved.lock().await.remove(&key);
            let size = grown.map_err(|error| keeper.logged(&by, "expand a volume", &id, error))?;
            if more > 0 {
                let volume = Volume { size, ..*volume };
                keeper.tell(VolumeAction::Expanded, &volume, &by, vm.as_deref()).await;
            }
            Ok(size)
        })
        .await
    }

    /// Checks that a VM may have this volume in addition to those that it has. The volume counts from now on, until it
    /// is removed from `arriving`.
    async fn admit(&self, vm: &Vm, arrival: &(String, String)) -> Result<(), Problem> {
        let mut arriving = self.0.arriving.lock().await;
        let uuid = &vm.ids.lasting;
        let mut has = self.0.volumes.of_vm(uuid).await?;
        let first = (uuid.clone(), String::new());
        has.extend(arriving.range(first..).take_while(|(of, _)| of == uuid).map(|(_, id)| id.clone()));
        let most = usize::try_from(vm.max_volumes).unwrap_or(usize::MAX);
        // For kubelet, 0 means no limit. A volume that the VM has already may always be published again.
        if most > 0 && has.len() >= most && !has.contains(&arrival.1) {
            let words = format!(
                "the node {} has {} volumes, and may have at most {most}; see max-volumes of its [[vm]] in the settings of \
                 guestlet-host",
                vm.name,
                has.len()
            );
            return Err(Problem::new(Kind::Exhausted, words));
        }
        arriving.insert(arrival.clone());
        Ok(())
    }

    /// Carries out one step after the other, until nothing is left to do or the last step is left to the caller.
    async fn advance(&self, by: &Asker, id: &str, request: Request<'_>) -> Result<End, Problem> {
        let volumes = &self.0.volumes;
        let mut holder = None;
        for _ in 0..MOST_STEPS {
            let Some(volume) = self.find(by, id).await? else { return Ok(End::Gone) };
            let record = volume.published.as_ref();
            let step = next(request, record, holder.take().as_ref());
            match step {
                Next::Ask => holder = Some(volumes.holder(id).await?),
                Next::Plug | Next::Remove | Next::Resize(_) => return Ok(End::Last(Box::new(volume), step)),
                Next::Done => return Ok(End::Done),
                Next::Refuse(refusal) => return Err(self.refused(&volume, request, refusal).await?),
                Next::Forget => {
                    let vm = record.map_or("", |record| &record.vm);
                    if request == (Request::Unpublish { by_force: true }) {
                        tracing::warn!(
                            volume = id,
                            vm,
                            ?by,
                            "the record of a volume's VM is removed by force"
                        );
                    } else {
                        tracing::info!(volume = id, vm, "the VM that had a volume no longer has it");
                    }
                    volumes.forget(id).await?;
                }
                Next::Unplug(place) => {
                    let side = self.side(by, &place, request).await?;
                    let unplugged = volumes.unplug(id, &place.vm, PATIENCE, side).await;
                    unplugged.map_err(|error| self.logged(by, "unplug a volume", id, error))?;
                    return Ok(End::Done);
                }
                Next::TakeBack(place) => {
                    let side = self.side(by, &place, request).await?;
                    let taken = volumes.take_back(id, &place, PATIENCE, side).await;
                    taken.map_err(|error| self.logged(by, "take a volume back", id, error))?;
                }
            }
        }
        Err(Problem::new(
            Kind::Aborted,
            "another program reverts the changes to this volume; repeat the call",
        ))
    }

    /// Returns how the guest of a VM takes part in unplugging a volume.
    async fn side(
        &self,
        by: &Asker,
        place: &Place,
        request: Request<'_>,
    ) -> Result<Box<dyn GuestSide>, Problem> {
        // Where the list of VMs may be outdated, the backend checks by itself whether there is a guest.
        let is_off = self.vm(&place.uuid).await?.is_some_and(|vm| vm.power == PowerState::Off);
        if is_off && !self.0.volumes.needs_the_guests_word() {
            return Ok(release::nobody());
        }
        let agent = self.agent(&place.vm, by);
        Ok(match request {
            Request::Unpublish { by_force: true } => release::side(agent, true).0,
            _ => release::bounded(agent),
        })
    }

    async fn refused(
        &self,
        volume: &Volume,
        request: Request<'_>,
        refusal: Refusal,
    ) -> Result<Problem, Problem> {
        let id = &volume.id;
        Ok(match refusal {
            Refusal::Held(place) => {
                let holder = self.vm(&place.uuid).await?;
                let node = volume.published.as_ref().map_or(place.vm.as_str(), |published| &published.node);
                let is_near = holder.is_some_and(|holder| holder.vm.cluster == volume.cluster);
                let which = if is_near { format!("the node {node}") } else { "another node".to_owned() };
                let advice = match request {
                    Request::Publish { .. } => "it can be on one at a time",
                    _ => "unpublish it first",
                };
                Problem::new(Kind::Precondition, format!("the volume {id} is published to {which}; {advice}"))
            }
            Refusal::Published => {
                let node = volume.published.as_ref().map_or("", |published| &published.node);
                let words = format!("the volume {id} is published to the node {node}; unpublish it first");
                Problem::new(Kind::Precondition, words)
            }
            Refusal::Leaving => Problem::new(
                Kind::Aborted,
                "the volume is being unplugged from this node; unpublish it first",
            ),
            Refusal::Access { read_only } => {
                let how = if read_only { "read-only" } else { "writable" };
                let words =
                    format!("the volume is already published to this node, {how}; unpublish it first");
                Problem::new(Kind::Exists, words)
            }
            Refusal::Untold(why) => {
                let words =
                    "it is not known whether the node that had the volume still has it; repeat the call";
                let advice =
                    "if you know that the VM has ended, guestctl volumes detach --force removes that record";
                Problem::with_detail(
                    Kind::Unavailable,
                    words,
                    format!("{why}; the volume is assumed to be in use. {advice}"),
                )
            }
        })
    }

    /// Reports whether a node's identifier means this VM, even if the VM is no longer known.
    async fn is_node(&self, cluster: &str, node: &str, place: &Place) -> Result<bool, Problem> {
        let named = self.node(cluster, node).await?;
        let is_named = named.is_some_and(|named| named.vm.ids.lasting == place.uuid);
        Ok(is_named || place.uuid.eq_ignore_ascii_case(node) || place.vm == node)
    }

    /// Returns a client for the agent of the VM with this name.
    pub(super) fn agent(&self, vm: &str, by: &Asker) -> Agent {
        Agent::new(&self.0.fleet, vm, by.behalf())
    }

    /// Returns the VM with this UUID, if it is known.
    async fn vm(&self, uuid: &str) -> Result<Option<Machine>, Problem> {
        Ok(self.0.fleet.find(Identity::Uuid(uuid.to_owned())).await?)
    }

    /// Returns the VM of a cluster that a node identifier means.
    pub(super) async fn node(&self, cluster: &str, node: &str) -> Result<Option<Machine>, Problem> {
        let identity = Identity::Node { cluster: cluster.to_owned(), node: node.to_owned() };
        Ok(self.0.fleet.find(identity).await?)
    }
}

/// Returns the error after a request without a node: the record of the VM that no longer has the volume is
/// removed, but the volume is not taken from the VM that has it now.
fn overtaken(volume: &Volume, published: &Published, other: &Place) -> Problem {
    let words = "a program other than guestlet has plugged the volume into a node other than the one that it \
                 was published to";
    let detail = format!(
        "the VM {}, to which the volume {} was published, no longer has it, and that record is removed; a \
         program other than guestlet has plugged it into the VM {}. To unplug it there, repeat the call",
        published.vm, volume.id, other.vm
    );
    Problem::with_detail(Kind::Precondition, words, detail)
}
