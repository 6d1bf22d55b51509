//! What clusters want of their load balancers, carried out: one step after the other for a cluster, and clusters beside each other.
//!
//! ```text
//!  Ensure, Release ──▶ queue of the cluster ──plan──▶ step ──API server──▶ the object as it is now ──plan──▶ … ──▶ answered
//!  what could not be had, and can now ──▶ │
//! ```
//!
//! A plan is made of what was heard of or written last, and its steps are refused if that is not what there is. Then it is looked
//! again a little later.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use super::super::meet::Failure;
use super::super::settings::Settings;
use super::super::wanted::{Service, Wanted};
use super::super::{Problem, Reply};
use super::balancers::{Asked, Begun, Key};
use super::object::Object;
use super::plan::{Giving, Plan, Refusal, Step};
use super::{Done, Registry, object};
use crate::host::backends::kubevirt::balancers::{Balancer, Changed};
use crate::host::backends::volumes::VolumeError;
use crate::host::text;
use crate::wire::proto::v1;

/// How often one thing is looked at again before it is given up.
const TRIES: u32 = 12;
/// Between two looks, where somebody else has changed an object.
const AGAIN: Duration = Duration::from_millis(200);

/// The reason where the API server, or a webhook behind it, does not let an object be.
const REFUSED: &str = "RefusedByHost";

/// One thing that is to be done.
pub struct Job {
    service: Service,
    what: What,
    tries: u32,
    /// It was listed that nothing is left.
    is_proved: bool,
}

/// What is to be done, and who waits for it.
enum What {
    Ensure(Box<Wanted>, Option<Reply<Result<v1::LoadBalancer, Problem>>>),
    Release(Reply<Result<bool, Problem>>),
    Remove(Reply<Result<(), Problem>>),
    /// The object of this namespace and name goes, whoever shares its address: its cluster is gone.
    Abandon(String),
    /// It is given back now that Harvester has taken it up. Nobody waits.
    Leave,
}

/// What is to be done for a cluster.
#[derive(Default)]
pub struct Queue {
    jobs: VecDeque<Job>,
    /// A step of the first one is being made.
    is_busy: bool,
}

impl Queue {
    /// Whether it is to be done already that this object goes, whose cluster is gone.
    pub(super) fn has_abandoned(&self, id: &str) -> bool {
        self.jobs.iter().any(|job| matches!(&job.what, What::Abandon(other) if other == id))
    }
}

/// What became of a step.
pub enum Outcome {
    /// Of a change.
    Changed(Result<Changed, VolumeError>, Step),
    /// What there is of a cluster.
    Listed(Result<Vec<Balancer>, VolumeError>, Begun),
}

impl Job {
    /// A Service wants this.
    pub fn ensure(
        service: Service,
        wanted: Box<Wanted>,
        reply: Option<Reply<Result<v1::LoadBalancer, Problem>>>,
    ) -> Self {
        Self { service, what: What::Ensure(wanted, reply), tries: 0, is_proved: false }
    }

    /// A Service wants nothing any more.
    pub fn release(service: Service, reply: Reply<Result<bool, Problem>>) -> Self {
        Self { service, what: What::Release(reply), tries: 0, is_proved: false }
    }

    /// A person gives back what a Service has.
    pub fn remove(uid: String, reply: Reply<Result<(), Problem>>) -> Self {
        let service = Service { namespace: String::new(), name: String::new(), uid };
        // Whose it is nobody has said, so that nothing can be listed of it.
        Self { service, what: What::Remove(reply), tries: 0, is_proved: true }
    }

    /// The object with this identifier goes, which is this Service's: its cluster is gone.
    pub fn abandon(id: String, service: Service) -> Self {
        Self { service, what: What::Abandon(id), tries: 0, is_proved: true }
    }

    fn is_again(&self, key: &str) -> bool {
        self.service.uid == key && matches!(self.what, What::Ensure(_, None))
    }

    /// Whoever waited for it has gone.
    fn is_given_up(&self) -> bool {
        match &self.what {
            What::Ensure(_, None) | What::Abandon(_) | What::Leave => false,
            What::Ensure(_, Some(reply)) => reply.is_closed(),
            What::Release(reply) => reply.is_closed(),
            What::Remove(reply) => reply.is_closed(),
        }
    }

    /// The end of it, with a problem.
    fn fail(self, problem: Problem) {
        // Who asked may have gone.
        match self.what {
            What::Ensure(_, None) | What::Abandon(_) | What::Leave => {}
            What::Ensure(_, Some(reply)) => drop(reply.send(Err(problem))),
            What::Release(reply) => drop(reply.send(Err(problem))),
            What::Remove(reply) => drop(reply.send(Err(problem))),
        }
    }
}

/// What becomes of a job that was looked at.
enum Look {
    /// A step is being made.
    Busy,
    /// It is over.
    Over,
}

impl Registry {
    /// Has something done for a cluster.
    pub(super) fn enqueue(&mut self, cluster: &str, job: Job) {
        self.cluster(cluster).queue.jobs.push_back(job);
        self.work(cluster);
    }

    /// What clusters may, and the networks of this one.
    pub(super) fn settings_of(&self, cluster: &str) -> Settings {
        let mut settings = Settings::clone(&self.settings.borrow());
        settings.of_clusters = [(cluster.to_owned(), self.members.networks(cluster))].into();
        settings
    }

    /// Does what is to be done for a cluster, as far as that needs no answer of the API server.
    fn work(&mut self, cluster: &str) {
        while !self.cluster(cluster).queue.is_busy {
            let Some(job) = self.cluster(cluster).queue.jobs.pop_front() else { return };
            if matches!(self.look(cluster, job), Look::Busy) {
                return;
            }
        }
    }

    fn look(&mut self, cluster: &str, mut job: Job) -> Look {
        // Nothing was begun yet.
        if job.tries == 0 && job.is_given_up() || !self.is_wanted(cluster, &job) {
            return Look::Over;
        }
        if job.tries == TRIES {
            let words = "the host's load balancers change too fast; repeat the call";
            job.fail(Problem::Unavailable(words.to_owned()));
            return Look::Over;
        }
        job.tries += 1;
        let settings = self.settings_of(cluster);
        let plan = Plan { balancers: &self.balancers, settings: &settings, cluster };
        let next = match &job.what {
            What::Ensure(wanted, _) => plan.ensure(&job.service, wanted),
            What::Abandon(id) => Ok(Step::Remove(id.clone())),
            What::Release(_) | What::Remove(_) | What::Leave => match plan.release(&job.service) {
                Ok(Giving::Step(step)) => Ok(step),
                Ok(Giving::Early(key)) => {
                    self.balancers.leaving.insert((cluster.to_owned(), key), job.service.clone());
                    return self.given(cluster, job, false);
                }
                Ok(Giving::UnderWay) => return self.given(cluster, job, false),
                Ok(Giving::Nothing) if job.is_proved => return self.given(cluster, job, true),
                Ok(Giving::Nothing) => return self.list_for(cluster, job),
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
                        job.fail(Problem::Exhausted(words));
                        Look::Over
                    }
                    _ => self.ensured(cluster, job, Some(failure)),
                }
            }
            Err(Refusal::Problem(problem)) => {
                job.fail(problem);
                Look::Over
            }
        }
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
    fn ensured(&mut self, cluster: &str, job: Job, failure: Option<Failure>) -> Look {
        let Job { service, what, .. } = job;
        let What::Ensure(wanted, reply) = what else { return Look::Over };
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
        Look::Over
    }

    /// A Service has nothing any more, or something that is being given back.
    fn given(&mut self, cluster: &str, job: Job, is_gone: bool) -> Look {
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
        Look::Over
    }

    /// Gives back what is to go, of these load balancers, and was taken up meanwhile.
    pub(super) fn leave(&mut self, about: &BTreeSet<Key>) {
        for key in about {
            let Some(service) = self.balancers.leaving.get(key).cloned() else { continue };
            if self.balancers.keyed(key).is_none_or(Object::is_taken_up) {
                self.balancers.leaving.remove(key);
                self.enqueue(&key.0, Job { service, what: What::Leave, tries: 0, is_proved: true });
            }
        }
    }

    /// Asks what there is of a cluster: a Service may share the address of any other one.
    fn list_for(&mut self, cluster: &str, job: Job) -> Look {
        let begun = self.balancers.list_begins();
        let (api, done, of) = (self.api.clone(), self.done.clone(), cluster.to_owned());
        self.cluster(cluster).queue.is_busy = true;
        self.asking.children().spawn(async move {
            let namespace = of.split('/').next().unwrap_or_default();
            let listed = api.balancers(namespace, object::selector(&of)).await;
            drop(done.send(Done::Step(of, Box::new(job), Outcome::Listed(listed, begun))).await);
        });
        Look::Busy
    }

    /// Makes a step.
    fn make(&mut self, cluster: &str, job: Job, step: Step) -> Look {
        let id = match &step {
            Step::Done | Step::Make(_) => String::new(),
            Step::Change(id, _) | Step::Remove(id) => id.clone(),
        };
        let read = self.balancers.get(&id).map(|object| object.read.clone()).unwrap_or_default();
        let (api, done, of) = (self.api.clone(), self.done.clone(), cluster.to_owned());
        self.cluster(cluster).queue.is_busy = true;
        self.asking.children().spawn(async move {
            let namespace = of.split('/').next().unwrap_or_default();
            let changed = match &step {
                Step::Done => Ok(Changed::Gone),
                Step::Make(object) => api.make_balancer(namespace, object).await,
                Step::Change(_, patch) => api.change_balancer(&read, patch.clone()).await,
                Step::Remove(_) => api.delete_balancer(&read).await,
            };
            if matches!(changed, Ok(Changed::Conflict)) {
                tokio::time::sleep(AGAIN).await;
            }
            drop(done.send(Done::Step(of, Box::new(job), Outcome::Changed(changed, step))).await);
        });
        Look::Busy
    }

    /// A step was made.
    pub(super) fn stepped(&mut self, cluster: &str, mut job: Job, outcome: Outcome) {
        self.cluster(cluster).queue.is_busy = false;
        let about = match outcome {
            Outcome::Listed(Ok(all), begun) => {
                job.is_proved = true;
                self.balancers.listed(cluster, &begun, all)
            }
            // There is one of which nothing was heard yet.
            Outcome::Changed(Ok(Changed::Conflict), Step::Make(_)) => {
                self.list_for(cluster, job);
                return;
            }
            Outcome::Changed(Ok(changed), step) => match (&step, changed) {
                (_, Changed::Yes(object)) => {
                    tracing::info!(cluster, name = object.metadata.name, "load balancer: {}", step.name());
                    self.balancers.put(*object)
                }
                (Step::Change(id, _) | Step::Remove(id), Changed::Gone) => self.balancers.drop(id),
                (_, Changed::Gone | Changed::Conflict) => [].into(),
            },
            Outcome::Changed(Err(VolumeError::Refused(words)), _) => {
                let words = format!("the host cluster refuses it: {}", text::clean_words(&words));
                let failure = Failure::new(REFUSED, words.clone());
                if matches!(job.what, What::Ensure(..)) {
                    self.ensured(cluster, job, Some(failure));
                } else {
                    job.fail(Problem::Contradiction(words));
                }
                return self.work(cluster);
            }
            Outcome::Listed(Err(error), begun) => {
                self.balancers.list_failed(&begun);
                job.fail(unasked(cluster, &error));
                return self.work(cluster);
            }
            Outcome::Changed(Err(error), _) => {
                job.fail(unasked(cluster, &error));
                return self.work(cluster);
            }
        };
        self.show(about.clone());
        self.cluster(cluster).queue.jobs.push_front(job);
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
        let plan = Plan { balancers: &self.balancers, settings: &settings, cluster };
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
        let is_queued = self.cluster(cluster).queue.jobs.iter().any(|job| job.is_again(&service.uid));
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
                Ok(keys.iter().filter_map(|key| self.message(key)).collect())
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
    Problem::Unavailable("the API of the host cluster cannot be asked now; repeat the call".to_owned())
}

impl Step {
    /// As people are told of it.
    fn name(&self) -> &'static str {
        match self {
            Self::Done => "as it is",
            Self::Make(_) => "made",
            Self::Change(..) => "changed",
            Self::Remove(_) => "given back",
        }
    }
}
