//! Who holds a volume of a pool: its QEMU is asked, and its image [looked at](super::super::claim). What follows from that is
//! decided in [`authority`](super::super::super::authority).

use super::super::super::authority::{Open, Verdict, judge};
use super::super::super::volumes::{Holder, Place, VolumeError};
use super::super::claim::Use;
use super::Pools;
use super::store::Entry;

impl Pools {
    /// Who holds the volume of this entry.
    pub(super) async fn ask(&self, entry: &Entry) -> Result<Holder, VolumeError> {
        let (id, serial, image) = (&entry.record.id, entry.serial(), entry.image());
        // Without links, as QEMU is told it; as it is where that cannot be found out.
        let image = self.access.in_pool_of(id, move |_| Ok(image.canonicalize().unwrap_or(image))).await?;
        let remembered = match &entry.record.published {
            Some(published) => {
                let said = self.hotplug.ask(published.uuid(), serial, &image).await;
                Some((Place { uuid: published.uuid().to_owned(), vm: published.vm().to_owned() }, said))
            }
            None => None,
        };
        let remembered = remembered.as_ref().map(|(place, said)| (place, said));
        if let Verdict::Is(holder) = judge(remembered, None) {
            return Ok(holder);
        }
        let wanted = id.clone();
        let open = match self.access.in_pool_of(id, move |store| store.look(&wanted)).await? {
            None | Some(Use::Nobody(_)) => Open::Nobody,
            Some(Use::Somebody) => match self.hotplug.who_has(serial, &image).await {
                Some(place) => Open::By(place),
                None => Open::BySomebody(format!("its image {}", image.display())),
            },
            Some(Use::Untold(why)) => Open::Untold(format!("{}: {why}", image.display())),
        };
        match judge(remembered, Some(open)) {
            Verdict::Is(holder) => Ok(holder),
            Verdict::Look => Ok(Holder::Unknown("the image was looked at in vain".to_owned())),
        }
    }
}
