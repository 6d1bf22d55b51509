//! Carries out the requests of clusters for load balancers: one step after the other for each job, with as many
//! jobs at a time as the [`queue`](super::queue) permits.
//!
//! ```text
//!  queue ──begin──▶ plan ──▶ step ──▶ API server ──▶ the object as it is now ──▶ plan ──▶ … ──▶ answered, end
//! ```
//!
//! A plan is based on what was last read or written. The API server refuses its step if the object has changed
//! since. Then the job is planned again: at once if a newer version has been reported meanwhile, else a little
//! later.

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

/// Number of plans of one job after which it is given up.
const TRIES: u32 = 12;
/// Pause before the next plan if another program has changed an object and the change has not been reported yet.
const AGAIN: Duration = Duration::from_millis(200);

/// Reason if the API server, or a webhook behind it, rejects an object.
const REFUSED: &str = "RefusedByHost";

impl Registry {
    /// Adds a job to the queue of a cluster, and begins what can begin.
    pub(super) fn enqueue(&mut self, cluster: &str, job: Job) {
        self.cluster(cluster).queue.push(job);
        self.work(cluster);
    }

    /// Returns the policies of clusters, with the networks of this one.
    pub(super) fn settings_of(&self, cluster: &str) -> Settings {
        let mut settings = Settings::clone(&self.settings.borrow());
        settings.of_clusters = [(cluster.to_owned(), self.members.networks(cluster))].into();
        settings
    }

    /// Begins all jobs of a cluster that can begin.
    fn work(&mut self, cluster: &str) {
        loop {
            let Some(of) = self.clusters.get_mut(cluster) else { return };
            let Some(job) = of.queue.begin(|job| job.claims(&self.balancers, cluster)) else { return };
            self.look(cluster, job);
        }
    }

    /// Makes the next step of a job, or ends the job if there is none.
    fn look(&mut self, cluster: &str, mut job: Job) {
        // A job may be dropped only before its first step, since an interrupted one would leave things half done.
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
                    // A person who removes it after the waiting time knows that Harvester will not take it up.
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
                // The number of remembered requests of a cluster is limited like that of its load balancers.
                match settings.check_count(cluster, has) {
                    Err(words) if !self.balancers.asked.contains_key(&key) => {
                        self.failed(cluster, job, Problem::Exhausted(words));
                    }
                    _ => self.ensured(cluster, job, Some(failure)),
                }
            }
            // Jobs under way count as if each created a load balancer. The final decision has to wait until they are done.
            Err(Refusal::Problem(Problem::Exhausted(_))) if beside > 0 => {
                self.cluster(cluster).queue.put_back(job);
            }
            Err(Refusal::Problem(problem)) => self.failed(cluster, job, problem),
        }
    }

    /// Ends a job with a problem.
    fn failed(&mut self, cluster: &str, mut job: Job, problem: Problem) {
        self.cluster(cluster).queue.end(&mut job);
        job.fail(problem);
    }

    /// Reports whether a job is still wanted. A retry is obsolete if the Service has requested something else since,
    /// or has released its load balancer. Deletion is obsolete if the cluster has VMs again.
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

    /// Ends a job whose Service now has what it requested or, with a `failure`, cannot have it.
    fn ensured(&mut self, cluster: &str, mut job: Job, failure: Option<Failure>) {
        self.cluster(cluster).queue.end(&mut job);
        let Job { service, what, backends, .. } = job;
        let What::Ensure(wanted, reply) = what else { return };
        if let Some(backends) = backends.filter(|_| wanted.check.is_some()) {
            self.cluster(cluster).probes.set_backends(&service.uid, backends);
        }
        let key: Key = (cluster.to_owned(), service.uid.clone());
        match failure {
            // A retry failed, but no request is pending: the Service already has what it requested.
            Some(_) if reply.is_none() && !self.balancers.asked.contains_key(&key) => {}
            Some(failure) => {
                let asked = Asked { service, wanted: *wanted, failure };
                self.balancers.asked.insert(key.clone(), asked);
            }
            None => drop(self.balancers.asked.remove(&key)),
        }
        self.show([key.clone()].into());
        if let Some(reply) = reply {
            let gone = || Problem::Unavailable("the load balancer was deleted; repeat the call".to_owned());
            drop(reply.send(self.message(&key).ok_or_else(gone)));
        }
    }

    /// Ends a job whose Service no longer has a load balancer (`is_gone`), or has one that is being released.
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

    /// Lists all load balancers of a cluster after a pause. All are needed, since a Service may share the address of
    /// any.
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

    /// Plans a job again after a pause.
    fn wait_for(&self, cluster: &str, job: Job) {
        let (done, of) = (self.done.clone(), cluster.to_owned());
        self.asking.children().spawn(async move {
            tokio::time::sleep(AGAIN).await;
            drop(done.send(Done::Step(of, Box::new(job), Outcome::Waited)).await);
        });
    }

    /// Carries out a step in a task of its own, which reports the outcome.
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

    /// Reports whether an object has a newer known version than this one, or no longer exists.
    fn has_heard_since(&self, id: &str, version: u128) -> bool {
        self.balancers.get(id).is_none_or(|known| known.version() > version)
    }

    /// Takes in the outcome of a step.
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
                // An object of this name exists that has not been reported yet.
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

    /// Retries requests of a cluster that could not be satisfied. Those that the host cluster itself has refused are
    /// retried only if `with_refused`, since each retry is a call to it and no guest may cause that.
    pub(super) fn look_again(&mut self, cluster: &str, with_refused: bool) {
        if !self.members.has(cluster) {
            // A cluster without VMs must not get anything, since nobody would release it.
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
                // A contradiction that has arisen meanwhile is reported when the cluster repeats the request.
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

    /// Retries a request for which no caller waits.
    pub(super) fn again(&mut self, cluster: &str, service: Service, wanted: Wanted) {
        // Only the leader writes. A new leader gets the requests again from the clusters.
        let is_queued = self.cluster(cluster).queue.has_again(&service.uid);
        if self.api.is_changeable() && !is_queued {
            self.enqueue(cluster, Job::ensure(service, Box::new(wanted), None));
        }
    }

    /// Lists all load balancers of a cluster as the API server has them now, and answers the request later.
    pub(super) fn list(&mut self, cluster: String, reply: Reply<Result<Vec<v1::LoadBalancer>, Problem>>) {
        let (api, done) = (self.api.clone(), self.done.clone());
        let begun = self.balancers.list_begins();
        self.asking.children().spawn(async move {
            let namespace = cluster.split('/').next().unwrap_or_default();
            let listed = api.balancers(namespace, object::selector(&cluster)).await;
            drop(done.send(Done::Listed(cluster, listed, begun, reply)).await);
        });
    }

    /// Takes in a list, and answers the request for it.
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

    /// Follows a change of the settings, which may make other requests possible.
    pub(super) fn follow_settings(&mut self) {
        self.settings.mark_unchanged();
        let clusters: Vec<_> = self.clusters.keys().cloned().collect();
        for cluster in clusters {
            self.look_again(&cluster, true);
        }
    }
}

/// Logs that the API server did not answer as expected, and returns the error for the guest, which must not see
/// the details.
fn unasked(cluster: &str, error: &VolumeError) -> Problem {
    tracing::warn!(cluster, "load balancers: {}", text::chain(error));
    Problem::Unavailable("the API of the host cluster cannot be reached now; repeat the call".to_owned())
}

impl Step {
    /// Returns the object that the step changes or deletes.
    fn id(&self) -> Option<&str> {
        match self {
            Self::Done | Self::Make(_) => None,
            Self::Change(id, _) | Self::Remove(id) => Some(id),
        }
    }

    /// Returns the word for the step in the log.
    fn name(&self) -> &'static str {
        match self {
            Self::Done => "as it is",
            Self::Make(_) => "made",
            Self::Change(..) => "changed",
            Self::Remove(_) => "released",
        }
    }
}
