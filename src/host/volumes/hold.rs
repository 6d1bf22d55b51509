//! Who has a volume: it is published, unpublished, removed and made larger, one step after the other as `protocol`
//! decides them.

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

/// More steps than any request needs, unless somebody undoes each of them.
const MOST_STEPS: usize = 16;

/// How a node reaches a volume that it was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Given {
    /// As a disk.
    Disk(Plugged),
    /// Over the network.
    Share(Export),
}

/// Where the steps of a request have led.
enum End {
    /// There is nothing more to do.
    Done,
    /// There is no such volume.
    Gone,
    /// The last step is to be done, to this volume.
    Last(Box<Volume>, Next),
}

impl Keeper {
    /// Removes a volume that no VM has; success if there is none.
    ///
    /// # Errors
    /// If a VM has it or may have it, or it is another cluster's.
    pub async fn remove(&self, asker: &Asker, id: &str) -> Result<(), Problem> {
        let (by, id) = (asker.clone(), id.to_owned());
        self.begin(Operation::Remove, asker, move |keeper| async move {
            // Before a turn is taken: nobody keeps others from a volume that is none of his.
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

    /// Gives a volume to a VM of its cluster.
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
                    // A guest of that other program may have an agent that has to be upgraded, or none.
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

    /// Takes a volume away from the VM that has it, or only if it is that `node`; success if it has none.
    ///
    /// # Errors
    /// If its guest uses it, or it cannot be told whether a VM has it, unless that is `forced`; or it is another cluster's
    /// volume.
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
                    // Whoever names no node means whichever has it.
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

    /// Whether another program has plugged a volume, that is to be taken away, into this node. If nothing is remembered of the volume,
    /// that program may have told the cluster that the node has it: from there it is taken as any other.
    async fn recognise(&self, by: &Asker, volume: &Volume, node: Option<&str>) -> Result<bool, Problem> {
        let found = match (node, by) {
            (Some(node), _) => self.node(&volume.cluster, node).await?,
            // Guests always name one; people mean whichever it is.
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

    /// Forgets what was remembered of a volume only to take it away, if nothing of that was begun: it is that other program's as before,
    /// and must not be plugged again when that takes it away.
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

    /// The VM that has a volume because another program has plugged it there; that another VM has it is then forgotten.
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

    /// Makes a volume larger, also while a guest uses it; success if it is large enough. Returns its size.
    ///
    /// # Errors
    /// If no volume has such a size, or there is no room, or it cannot be told which VM has it.
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
            let size = grown.map_err(|error| keeper.logged(&by, "make a volume larger", &id, error))?;
            if more > 0 {
                let volume = Volume { size, ..*volume };
                keeper.tell(VolumeAction::Expanded, &volume, &by, vm.as_deref()).await;
            }
            Ok(size)
        })
        .await
    }

    /// Sees to it that a VM may have this volume beside those that it has. It counts from now on, until it is no longer
    /// among those that arrive.
    async fn admit(&self, vm: &Vm, arrival: &(String, String)) -> Result<(), Problem> {
        let mut arriving = self.0.arriving.lock().await;
        let uuid = &vm.ids.lasting;
        let mut has = self.0.volumes.of_vm(uuid).await?;
        let first = (uuid.clone(), String::new());
        has.extend(arriving.range(first..).take_while(|(of, _)| of == uuid).map(|(_, id)| id.clone()));
        let most = usize::try_from(vm.max_volumes).unwrap_or(usize::MAX);
        // As kubelet understands it, 0 is no limit. What it has already it may have again.
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

    /// Does one step after the other, to where nothing is left to do or the last step is the caller's.
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

    /// What the guest of a VM is told of a volume that is taken away.
    async fn side(
        &self,
        by: &Asker,
        place: &Place,
        request: Request<'_>,
    ) -> Result<Box<dyn GuestSide>, Problem> {
        // Where the list of VMs may be old, whoever unplugs looks itself whether there is a guest.
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
                    format!("the volume is published to this node already, {how}; unpublish it first");
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

    /// Whether a node's identifier means this VM; also one that is known no more.
    async fn is_node(&self, cluster: &str, node: &str, place: &Place) -> Result<bool, Problem> {
        let named = self.node(cluster, node).await?;
        let is_named = named.is_some_and(|named| named.vm.ids.lasting == place.uuid);
        Ok(is_named || place.uuid.eq_ignore_ascii_case(node) || place.vm == node)
    }

    /// The agent of the VM with this name.
    pub(super) fn agent(&self, vm: &str, by: &Asker) -> Agent {
        Agent::new(&self.0.fleet, vm, by.behalf())
    }

    /// The VM with this UUID, if it is known.
    async fn vm(&self, uuid: &str) -> Result<Option<Machine>, Problem> {
        Ok(self.0.fleet.find(Identity::Uuid(uuid.to_owned())).await?)
    }

    /// The VM of a cluster that a node's identifier means.
    pub(super) async fn node(&self, cluster: &str, node: &str) -> Result<Option<Machine>, Problem> {
        let identity = Identity::Node { cluster: cluster.to_owned(), node: node.to_owned() };
        Ok(self.0.fleet.find(identity).await?)
    }
}

/// Why a volume is not taken from the VM that has it, although that another one has it is forgotten.
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
