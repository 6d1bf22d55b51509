//! What clusters want of their load balancers, carried out: one step after the other for each thing that is to be done, and as many of
//! these beside each other as the [`queue`](super::queue) lets.
//!
//! ```text
//!  queue ──begin──▶ plan ──▶ step ──▶ API server ──▶ the object as it is now ──▶ plan ──▶ … ──▶ answered, end
//! ```
//!
//! A plan is made of what was heard of or written last, and its steps are refused if that is not what there is. Then it is looked
//! again: at once if something newer was heard of meanwhile, else a little later.

use std::collections::BTreeSet;
use std::time::Duration;

use super::super::meet::Failure;
use super::super::settings::Settings;
use super::super::wanted::{Service, Wanted};
use super::super::{Problem, Reply};
use super::balancers::{Asked, Begun, Key};
use super::plan::{Giving, Plan, Refusal, Step};
use super::queue::{Job, Outcome, What};
use super::{Done, Registry, object};
use crate::host::backends::kubevirt::balancers::{Balancer, Changed};
use crate::host::backends::volumes::VolumeError;
use crate::host::text;
use crate::wire::proto::v1;

/// How often one thing is looked at again before it is given up.
const TRIES: u32 = 12;
/// Between two looks, where somebody else has changed an object and nothing was heard of that yet.
const AGAIN: Duration = Duration::from_millis(200);

/// The reason where the API server, or a webhook behind it, does not let an object be.
const REFUSED: &str = "RefusedByHost";

impl Registry {
    /// Has something done for a cluster.
    pub(super) fn enqueue(&mut self, cluster: &str, job: Job) {
        self.cluster(cluster).queue.push(job);
        self.work(cluster);
    }

    /// What clusters may, and the networks of this one.
    pub(super) fn settings_of(&self, cluster: &str) -> Settings {
        let mut settings = Settings::clone(&self.settings.borrow());
        settings.of_clusters = [(cluster.to_owned(), self.members.networks(cluster))].into();
        settings
    }

    /// Begins what can be begun for a cluster.
    fn work(&mut self, cluster: &str) {
        loop {
            let Some(of) = self.clusters.get_mut(cluster) else { return };
            let Some(job) = of.queue.begin(|job| job.claims(&self.balancers, cluster)) else { return };
            self.look(cluster, job);
        }
    }

    /// Makes the next step of what is under way, if there is one. Else that is over.
    fn look(&mut self, cluster: &str, mut job: Job) {
        // Nothing was begun yet.
        if job.tries == 0 && job.is_given_up() || !self.is_wanted(cluster, &job) {
            self.cluster(cluster).queue.end(&mut job);
            return;
        }
        if job.tries == TRIES {
            let words = "the host's load balancers change too fast; repeat the call";
            return self.failed(cluster, job, Problem::Unavailable(words.to_owned()));
        }
        job.tries += 1;
        let (settings, beside) = (self.settings_of(cluster), self.cluster(cluster).queue.beside());
        let plan = Plan { balancers: &self.balancers, settings: &settings, cluster, beside };
        let next = match &job.what {
            What::Ensure(wanted, _) => plan.ensure(&job.service, wanted),
            What::Abandon(id) => Ok(Step::Remove(id.clone())),
            What::Release(_) | What::Remove(_) | What::Leave => match plan.release(&job.service) {
                Ok(Giving::Step(step)) => Ok(step),
                Ok(Giving::Early(key, id)) => {
                    let is_left = self.postpone((cluster.to_owned(), key), &job.service);
                    // A person knows that nobody will take it up.
                    if !(is_left && matches!(job.what, What::Remove(_))) {
                        return self.given(cluster, job, is_left);
                    }
                    Ok(Step::Remove(id))
                }
                Ok(Giving::UnderWay) => return self.given(cluster, job, false),
                Ok(Giving::Nothing) if job.is_proved => return self.given(cluster, job, true),
                Ok(Giving::Nothing) => return self.list_for(cluster, job, Duration::ZERO),
                Err(problem) => Err(Refusal::Problem(problem)),
            },
        };
        match next {
            Ok(Step::Done) => self.ensured(cluster, job, None),
            Ok(step) => self.make(cluster, job, step),
            Err(Refusal::Failure(failure)) => {
                let key: Key = (cluster.to_owned(), job.service.uid.clone());
                let has = self.balancers.count_asked(cluster);
                // No cluster has more remembered of it than it could have.
                match settings.check_count(cluster, has) {
                    Err(words) if !self.balancers.asked.contains_key(&key) => {
                        self.failed(cluster, job, Problem::Exhausted(words));
                    }
                    _ => self.ensured(cluster, job, Some(failure)),
                }
            }
            // What is under way beside it counts as if it made something, which is known when it is over.
            Err(Refusal::Problem(Problem::Exhausted(_))) if beside > 0 => {
                self.cluster(cluster).queue.put_back(job);
            }
            Err(Refusal::Problem(problem)) => self.failed(cluster, job, problem),
        }
    }

    /// The end of it, with a problem.
    fn failed(&mut self, cluster: &str, mut job: Job, problem: Problem) {
        self.cluster(cluster).queue.end(&mut job);
        job.fail(problem);
    }

    /// Whether it is wanted still, if nobody waits for it: what was asked for since, or is given back, counts.
    fn is_wanted(&self, cluster: &str, job: &Job) -> bool {
        let wanted = match &job.what {
            What::Ensure(wanted, None) => wanted,
            What::Abandon(id) => {
                return !self.members.has(cluster)
                    && self.balancers.get(id).is_some_and(|object| !object.is_going());
            }
            _ => return true,
        };
        let key: Key = (cluster.to_owned(), job.service.uid.clone());
        if let Some(asked) = self.balancers.asked.get(&key) {
            return asked.wanted == **wanted;
        }
        let own = self.balancers.keyed(&key).filter(|own| !own.is_going());
        own.is_some_and(|own| own.wanted.as_ref() == Some(wanted))
    }

    /// A Service has what it wants, or cannot have it.
    fn ensured(&mut self, cluster: &str, mut job: Job, failure: Option<Failure>) {
        self.cluster(cluster).queue.end(&mut job);
        let Job { service, what, backends, .. } = job;
        let What::Ensure(wanted, reply) = what else { return };
        if let Some(backends) = backends.filter(|_| wanted.check.is_some()) {
            self.cluster(cluster).probes.set_backends(&service.uid, backends);
        }
        let key: Key = (cluster.to_owned(), service.uid.clone());
        match failure {
            // It has what it wanted when nobody waits and nothing is missing.
            Some(_) if reply.is_none() && !self.balancers.asked.contains_key(&key) => {}
            Some(failure) => {
                let asked = Asked { service, wanted: *wanted, failure };
                self.balancers.asked.insert(key.clone(), asked);
            }
            None => drop(self.balancers.asked.remove(&key)),
        }
        self.show([key.clone()].into());
        if let Some(reply) = reply {
            let gone = || Problem::Unavailable("the load balancer is gone; repeat the call".to_owned());
            drop(reply.send(self.message(&key).ok_or_else(gone)));
        }
    }

    /// A Service has nothing any more, or something that is being given back.
    fn given(&mut self, cluster: &str, mut job: Job, is_gone: bool) {
        self.cluster(cluster).queue.end(&mut job);
        let key: Key = (cluster.to_owned(), job.service.uid.clone());
        let was_asked = self.balancers.asked.remove(&key).is_some();
        self.show([key].into());
        match job.what {
            What::Ensure(..) | What::Abandon(_) | What::Leave => {}
            What::Release(reply) => drop(reply.send(Ok(is_gone))),
            What::Remove(reply) if is_gone && job.tries == 1 && !was_asked => {
                let words =
                    format!("the cluster {cluster} has no load balancer of a Service {}", job.service.uid);
                drop(reply.send(Err(Problem::NotFound(words))));
            }
            What::Remove(reply) => drop(reply.send(Ok(()))),
        }
    }

    /// Asks what there is of a cluster, after a pause: a Service may share the address of any other one.
    fn list_for(&mut self, cluster: &str, job: Job, pause: Duration) {
        let begun = self.balancers.list_begins();
        let (api, done, of) = (self.api.clone(), self.done.clone(), cluster.to_owned());
        self.asking.children().spawn(async move {
            tokio::time::sleep(pause).await;
            let namespace = of.split('/').next().unwrap_or_default();
            let listed = api.balancers(namespace, object::selector(&of)).await;
            drop(done.send(Done::Step(of, Box::new(job), Outcome::Listed(listed, begun))).await);
        });
    }

    /// Looks again a little later.
    fn wait_for(&self, cluster: &str, job: Job) {
        let (done, of) = (self.done.clone(), cluster.to_owned());
        self.asking.children().spawn(async move {
            tokio::time::sleep(AGAIN).await;
            drop(done.send(Done::Step(of, Box::new(job), Outcome::Waited)).await);
        });
    }

    /// Makes a step.
    fn make(&self, cluster: &str, job: Job, step: Step) {
        let known = step.id().and_then(|id| self.balancers.get(id));
        let (read, version) = known.map(|known| (known.read.clone(), known.version())).unwrap_or_default();
        let (api, done, of) = (self.api.clone(), self.done.clone(), cluster.to_owned());
        self.asking.children().spawn(async move {
            let namespace = of.split('/').next().unwrap_or_default();
            let changed = match &step {
                Step::Done => Ok(Changed::Gone),
                Step::Make(object) => api.make_balancer(namespace, object).await,
                Step::Change(_, patch) => api.change_balancer(&read, patch.clone()).await,
                Step::Remove(_) => api.delete_balancer(&read).await,
            };
            let outcome = Outcome::Changed { changed, step, version };
            drop(done.send(Done::Step(of, Box::new(job), outcome)).await);
        });
    }

    /// Whether something newer is known of an object than this version of it.
    fn has_heard_since(&self, id: &str, version: u128) -> bool {
        self.balancers.get(id).is_none_or(|known| known.version() > version)
    }

    /// A step was made.
    pub(super) fn stepped(&mut self, cluster: &str, mut job: Job, outcome: Outcome) {
        let about = match outcome {
            Outcome::Waited => BTreeSet::new(),
            Outcome::Listed(Ok(all), begun) => {
                job.is_proved = true;
                self.balancers.listed(cluster, &begun, all)
            }
            Outcome::Changed { changed: Ok(changed), step, version } => match (changed, step.id()) {
                (Changed::Yes(object), _) => {
                    tracing::info!(cluster, name = object.metadata.name, "load balancer: {}", step.name());
                    self.balancers.put(*object)
                }
                (Changed::Gone, Some(id)) => self.balancers.drop(id),
                (Changed::Conflict, Some(id)) if !self.has_heard_since(id, version) => {
                    return self.wait_for(cluster, job);
                }
                // There is one of which nothing was heard yet.
                (Changed::Conflict, None) => return self.list_for(cluster, job, AGAIN),
                (Changed::Gone | Changed::Conflict, _) => BTreeSet::new(),
            },
            Outcome::Changed { changed: Err(VolumeError::Refused(words)), .. } => {
                let words = format!("the host cluster refuses it: {}", text::clean_words(&words));
                let failure = Failure::new(REFUSED, words.clone());
                if matches!(job.what, What::Ensure(..)) {
                    self.ensured(cluster, job, Some(failure));
                } else {
                    self.failed(cluster, job, Problem::Contradiction(words));
                }
                return self.work(cluster);
            }
            Outcome::Listed(Err(error), begun) => {
                self.balancers.list_failed(&begun);
                self.failed(cluster, job, unasked(cluster, &error));
                return self.work(cluster);
            }
            Outcome::Changed { changed: Err(error), .. } => {
                self.failed(cluster, job, unasked(cluster, &error));
                return self.work(cluster);
            }
        };
        self.show(about.clone());
        self.look(cluster, job);
        self.work(cluster);
        self.leave(&about);
        self.look_again(cluster, false);
    }

    /// Looks again at what a cluster could not have; also at what the host cluster itself has refused, which is tried for every
    /// such look: nothing that a guest does is a reason for it.
    pub(super) fn look_again(&mut self, cluster: &str, with_refused: bool) {
        if !self.members.has(cluster) {
            // Nobody would give back what it got now.
            let given_up: BTreeSet<Key> =
                self.balancers.asked_of(cluster).map(|(key, _)| key.clone()).collect();
            self.balancers.asked.retain(|(of, _), _| of != cluster);
            self.show(given_up);
            return;
        }
        let settings = self.settings_of(cluster);
        let plan = Plan { balancers: &self.balancers, settings: &settings, cluster, beside: 0 };
        let (mut again, mut other) = (Vec::new(), Vec::new());
        for (key, asked) in self.balancers.asked_of(cluster) {
            match plan.ensure(&asked.service, &asked.wanted) {
                Err(Refusal::Failure(failure)) if failure == asked.failure => {}
                _ if asked.failure.reason == REFUSED && !with_refused => {}
                Err(Refusal::Failure(failure)) => other.push((key.clone(), failure)),
                // What has come to contradict it is said when it is asked for again.
                Err(Refusal::Problem(_)) => {}
                Ok(_) => again.push((asked.service.clone(), asked.wanted.clone())),
            }
        }
        let changed: BTreeSet<Key> = other.iter().map(|(key, _)| key.clone()).collect();
        for (key, failure) in other {
            if let Some(asked) = self.balancers.asked.get_mut(&key) {
                asked.failure = failure;
            }
        }
        self.show(changed);
        for (service, wanted) in again {
            self.again(cluster, service, wanted);
        }
    }

    /// Has something done again that nobody waits for.
    pub(super) fn again(&mut self, cluster: &str, service: Service, wanted: Wanted) {
        // Only who leads writes; whoever comes to lead is asked by the clusters.
        let is_queued = self.cluster(cluster).queue.has_again(&service.uid);
        if self.api.is_changeable() && !is_queued {
            self.enqueue(cluster, Job::ensure(service, Box::new(wanted), None));
        }
    }

    /// All load balancers of a cluster, as the API server says now.
    pub(super) fn list(&mut self, cluster: String, reply: Reply<Result<Vec<v1::LoadBalancer>, Problem>>) {
        let (api, done) = (self.api.clone(), self.done.clone());
        let begun = self.balancers.list_begins();
        self.asking.children().spawn(async move {
            let namespace = cluster.split('/').next().unwrap_or_default();
            let listed = api.balancers(namespace, object::selector(&cluster)).await;
            drop(done.send(Done::Listed(cluster, listed, begun, reply)).await);
        });
    }

    /// They were listed.
    pub(super) fn listed(
        &mut self,
        cluster: &str,
        listed: Result<Vec<Balancer>, VolumeError>,
        begun: &Begun,
        reply: Reply<Result<Vec<v1::LoadBalancer>, Problem>>,
    ) {
        let answer = match listed {
            Ok(all) => {
                let about = self.balancers.listed(cluster, begun, all);
                self.show(about.clone());
                self.leave(&about);
                let keys = self.balancers.keys(Some(cluster));
                let keys = keys.iter().filter(|key| !self.balancers.is_left(key));
                Ok(keys.filter_map(|key| self.message(key)).collect())
            }
            Err(error) => {
                self.balancers.list_failed(begun);
                Err(unasked(cluster, &error))
            }
        };
        drop(reply.send(answer));
    }

    /// With other settings something may be had that could not be had before.
    pub(super) fn follow_settings(&mut self) {
        self.settings.mark_unchanged();
        let clusters: Vec<_> = self.clusters.keys().cloned().collect();
        for cluster in clusters {
            self.look_again(&cluster, true);
        }
    }
}

/// The API server did not answer, or not with what was asked for. What it says of itself is no guest's business.
fn unasked(cluster: &str, error: &VolumeError) -> Problem {
    tracing::warn!(cluster, "load balancers: {}", text::chain(error));
    Problem::Unavailable("the API of the host cluster cannot be reached now; repeat the call".to_owned())
}

impl Step {
    /// The object that it is about, if there is one already.
    fn id(&self) -> Option<&str> {
        match self {
            Self::Done | Self::Make(_) => None,
            Self::Change(id, _) | Self::Remove(id) => Some(id),
        }
    }

    /// As people are told of it.
    fn name(&self) -> &'static str {
        match self {
            Self::Done => "as it is",
            Self::Make(_) => "made",
            Self::Change(..) => "changed",
            Self::Remove(_) => "released",
        }
    }
}
