//! Directory of the records: opened when it is needed, and retried if that fails.

use std::sync::Arc;

use super::super::Problem;
use super::super::book::Book;
use super::super::forward::plan::{Given, Plan};
use super::super::record::Record;
use super::super::store::{Loaded, Store};
use super::Desk;
use crate::sys::blocking;

impl Desk {
    /// Opens the directory if there are pools, load balancers of an earlier run, or a request for one (`wanted`).
    pub(super) async fn open_if_needed(&mut self, wanted: bool) {
        if matches!(self.store, Some(Ok(_))) {
            return;
        }
        let path = self.parts.state_dir.clone();
        let needed = wanted || !self.settings.pools.is_empty();
        let opened = blocking::run(move || {
            if !needed && !path.is_dir() {
                return None;
            }
            let load = || {
                let store = Store::open(&path)?;
                let (loaded, marked) = (store.load()?, store.marked()?);
                Ok::<_, std::io::Error>((store, loaded, marked))
            };
            Some(load().map_err(|error| {
                format!("the directory {} (load-balancers.state-dir) cannot be used: {error}", path.display())
            }))
        });
        match opened.await {
            None => {}
            Some(Err(problem)) => {
                if self.store.as_ref().is_none_or(|known| known.as_ref().err() != Some(&problem)) {
                    tracing::error!("load balancers cannot be created: {problem}");
                }
                self.store = Some(Err(problem));
            }
            Some(Ok((store, loaded, marked))) => self.begin(store, loaded, marked),
        }
    }

    fn begin(&mut self, store: Store, loaded: Loaded, marked: Option<Given>) {
        let read: Vec<_> = loaded.records.iter().map(|record| record.id.clone()).collect();
        self.book = Book::new(loaded.records, loaded.damaged);
        self.marked = marked;
        for (id, damaged) in self.book.damaged() {
            let what = match &damaged.addresses {
                Some(_) => "its addresses stay reserved",
                None => "it is not known which addresses it holds, so no address is assigned",
            };
            let (file, problem) = (store.file(id), &damaged.problem);
            tracing::error!(
                "the record {} cannot be used: {problem}; {what}; restore or remove it",
                file.display()
            );
        }
        tracing::info!(count = read.len(), "earlier load balancers");
        for id in read {
            let Some(record) = self.book.get(&id).filter(|record| record.is_kept()) else { continue };
            self.of_before.insert(id.clone());
            if record.asked.is_some() {
                let again = super::super::meet::Failure::new("Pending", "it is tried again");
                self.failures.insert(id, again);
            }
        }
        self.store = Some(Ok(Arc::new(store)));
        self.unsettle_all();
    }

    /// Returns the open directory of the records.
    pub(super) async fn store(&mut self) -> Result<Arc<Store>, Problem> {
        self.open_if_needed(true).await;
        match &self.store {
            Some(Ok(store)) => Ok(Arc::clone(store)),
            // A guest must not see paths of the host; the log has them.
            _ => Err(Problem::Unavailable("the host cannot read or write its load balancers now".to_owned())),
        }
    }

    /// Writes a record, and adds it to the book once it is on the disk.
    pub(super) async fn keep(&mut self, record: Record) -> Result<(), Problem> {
        let store = self.store().await?;
        let written = record.clone();
        match blocking::run(move || store.keep(&written)).await {
            Ok(()) => {
                self.book.put(record);
                Ok(())
            }
            Err(error) => {
                tracing::error!(id = record.id, %error, "cannot record a load balancer");
                self.book.doubt(&record);
                Err(Problem::Unavailable("the host cannot write its load balancers now".to_owned()))
            }
        }
    }

    /// Removes records that are no longer needed. If one cannot be removed, it is tried again the next time.
    pub(super) async fn forget(&mut self, cluster: &str) {
        let Ok(store) = self.store().await else { return };
        for id in self.book.forgettable(cluster) {
            let (store, name) = (Arc::clone(&store), id.clone());
            match blocking::run(move || store.remove(&name)).await {
                Ok(()) => self.book.remove(&id),
                Err(error) => return tracing::warn!(id, %error, "a record cannot be removed"),
            }
        }
    }

    /// Notes on the disk that the kernel is about to get rules, and interfaces these addresses. Without this note they
    /// would stay for ever if the next run has no settings that forward anything.
    pub(super) async fn mark(&mut self, plan: &Plan) -> bool {
        let mut given = self.marked.clone().unwrap_or_default();
        for (name, addresses) in plan.given_to() {
            given.entry(name).or_default().extend(addresses);
        }
        self.note(Some(given)).await
    }

    /// Reduces the note to what is in force once a plan is: removed addresses are dropped from it, and the note is
    /// deleted if nothing is to be forwarded.
    pub(super) async fn unmark(&mut self) {
        let in_force = self.parts.in_force.borrow().number;
        if self.marked.is_none() || self.plan.number == 0 || in_force < self.plan.number {
            return;
        }
        let is_over = self.plan.plan.is_empty() && !self.settings.forwards();
        let given = self.plan.plan.given_to();
        self.note(Some(given).filter(|_| !is_over)).await;
    }

    async fn note(&mut self, marked: Option<Given>) -> bool {
        if self.marked == marked {
            return true;
        }
        let Ok(store) = self.store().await else { return false };
        let written = marked.clone();
        if let Err(error) = blocking::run(move || store.mark(written.as_ref())).await {
            tracing::error!(%error, "cannot record what is forwarded; nothing else is forwarded until that is done");
            return false;
        }
        self.marked = marked;
        true
    }
}
