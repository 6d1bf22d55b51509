//! Owns every task of a program: nothing else spawns.
//!
//! * A [`Supervisor`] holds the long-lived tasks that an assembly starts, each with a name. A task that ends
//!   before shutdown is a fault and ends the process (systemd starts it again).
//! * A [`Scope`] holds the short-lived children of one such task, for example the handlers of one
//!   connection. Dropping the scope ends them all at their next await.
//!
//! ```text
//! running ──signal──▶ draining ──all tasks ended──▶ done (Ok)
//!    │                   └──deadline──▶ done (remaining tasks are named and aborted)
//!    └──a task ended──▶ draining ──…──▶ done (Err names the task)
//! ```

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use futures_util::FutureExt as _;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tokio::task::{Id, JoinError, JoinSet};
use tokio_util::sync::{CancellationToken, DropGuard};

/// Boxed future. Otherwise each future around it would need room for one more, and the event loop's code would be
/// compiled again for each task.
type Task<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The long-lived tasks of one process.
#[derive(Debug, Default)]
pub struct Supervisor {
    tasks: JoinSet<anyhow::Result<()>>,
    names: Vec<(Id, &'static str)>,
    shutdown: CancellationToken,
}

impl Supervisor {
    /// Creates a supervisor without tasks.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the token that is cancelled when the process has to end. Every task gets a clone.
    pub fn shutdown(&self) -> CancellationToken {
        self.shutdown.clone()
    }

    /// Starts a long-lived task. It has to run until [`Supervisor::shutdown`] is cancelled and to end soon
    /// after that; ending earlier, with or without an error, ends the process.
    pub fn spawn<F>(&mut self, name: &'static str, task: F)
    where
        F: Future<Output = anyhow::Result<()>> + Send + 'static,
    {
        let task: Task<anyhow::Result<()>> = Box::pin(task);
        let id = self.tasks.spawn(task).id();
        self.names.push((id, name));
    }

    /// Runs until `stop` completes or a task ends, then drains: cancels the token and gives the tasks
    /// `deadline` to end.
    ///
    /// # Errors
    /// If a task ended by itself or panicked, with its name.
    pub async fn run(mut self, stop: impl Future<Output = ()>, deadline: Duration) -> anyhow::Result<()> {
        let outcome = tokio::select! {
            () = stop => Ok(()),
            Some(ended) = self.tasks.join_next_with_id() => Err(self.fault(ended)),
        };
        self.shutdown.cancel();
        if tokio::time::timeout(deadline, self.drain()).await.is_err() {
            let late: Vec<_> = self.names.iter().map(|(_, name)| *name).collect();
            tracing::warn!(tasks = late.join(", "), "tasks did not end in time and were dropped");
        }
        outcome
    }

    async fn drain(&mut self) {
        while let Some(ended) = self.tasks.join_next_with_id().await {
            match ended {
                Ok((id, Ok(()))) => drop(self.take_name(id)),
                ended => tracing::warn!("{:#}", self.fault(ended)),
            }
        }
    }

    fn take_name(&mut self, id: Id) -> &'static str {
        match self.names.iter().position(|(known, _)| *known == id) {
            Some(at) => self.names.swap_remove(at).1,
            None => "unknown",
        }
    }

    fn fault(&mut self, ended: Result<(Id, anyhow::Result<()>), JoinError>) -> anyhow::Error {
        match ended {
            Ok((id, Ok(()))) => anyhow!("task {:?} ended by itself", self.take_name(id)),
            Ok((id, Err(error))) => error.context(format!("task {:?} failed", self.take_name(id))),
            Err(error) => anyhow!("task {:?} panicked: {error}", self.take_name(error.id())),
        }
    }
}

/// Completes at the first SIGTERM, SIGINT or SIGHUP.
///
/// # Errors
/// If the handlers cannot be installed.
pub fn termination() -> anyhow::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot handle SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot handle SIGINT")?;
    let mut hangup = signal(SignalKind::hangup()).context("cannot handle SIGHUP")?;
    Ok(async move {
        let name = tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
            _ = hangup.recv() => "SIGHUP",
        };
        tracing::info!("{name}: stopping");
    })
}

/// Runs `work` on its own thread and runtime, so that it does not hold up other tasks. Completes when the work has
/// ended by itself, or could not be started. Dropping this future aborts the work.
pub async fn apart<F: Future<Output = ()>>(name: &'static str, work: impl FnOnce() -> F + Send + 'static) {
    let stop = CancellationToken::new();
    let (_stopping, (ended, end)) = (stop.clone().drop_guard(), oneshot::channel::<()>());
    let on_thread = move || {
        // Dropped whichever way the thread ends, which completes `end`.
        let _ended = ended;
        match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => drop(runtime.block_on(stop.run_until_cancelled(work()))),
            Err(error) => tracing::error!("{name}: a runtime cannot be started: {error}"),
        }
    };
    match std::thread::Builder::new().name(name.to_owned()).spawn(on_thread) {
        Ok(_) => drop(end.await),
        Err(error) => tracing::error!("{name}: a thread cannot be started: {error}"),
    }
}

/// Owner of short-lived tasks: when it is dropped, they end at their next await.
#[derive(Debug)]
pub struct Scope {
    children: Children,
    _cancel: DropGuard,
}

/// Handle for starting tasks that belong to a [`Scope`].
#[derive(Debug, Clone)]
pub struct Children(CancellationToken);

impl Scope {
    /// Creates a scope without tasks.
    pub fn new() -> Self {
        let token = CancellationToken::new();
        Self { children: Children(token.clone()), _cancel: token.drop_guard() }
    }

    /// Returns a handle for starting tasks in this scope.
    pub fn children(&self) -> Children {
        self.children.clone()
    }
}

impl Default for Scope {
    fn default() -> Self {
        Self::new()
    }
}

impl Children {
    /// Starts `task`; it is dropped as soon as the scope is.
    #[allow(clippy::disallowed_methods, reason = "this is the place that spawns")]
    pub fn spawn<F>(&self, task: F)
    where
        F: Future + Send + 'static,
    {
        let token = self.0.clone();
        // Mapped, because an async block that awaits the task would have room for it twice.
        let task: Task<()> = Box::pin(task.map(drop));
        drop(tokio::spawn(async move {
            let _: Option<()> = token.run_until_cancelled(task).await;
        }));
    }

    /// Starts `work`, which continues if the returned future is dropped. That future completes with the output; with
    /// none if the work panicked, or the scope ended before it.
    pub fn run_to_end<F>(&self, work: F) -> impl Future<Output = Option<F::Output>> + use<F>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        let (answer, answered) = oneshot::channel();
        self.spawn(work.map(|outcome| drop(answer.send(outcome))));
        answered.map(Result::ok)
    }

    /// Starts `task` in the same way. If it panics, the future that `after` returns takes its place, in the same task.
    pub fn spawn_or<F, A>(&self, task: F, after: impl FnOnce() -> A + Send + 'static)
    where
        F: Future + Send + 'static,
        A: Future<Output = ()> + Send + 'static,
    {
        let mut task: Task<()> = Box::pin(task.map(drop));
        self.spawn(async move {
            let has_panicked = std::future::poll_fn(|context| {
                // A task that has panicked is never polled again, only dropped, so it may be in an inconsistent state.
                match catch_unwind(AssertUnwindSafe(|| task.as_mut().poll(context))) {
                    Ok(polled) => polled.map(|()| false),
                    Err(_) => Poll::Ready(true),
                }
            });
            if has_panicked.await {
                drop(task);
                // Boxed, because a panic is rare.
                Box::pin(after()).await;
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_task_that_ends_by_itself_ends_the_process_with_its_name() {
        let mut supervisor = Supervisor::new();
        let shutdown = supervisor.shutdown();
        supervisor.spawn("patient", async move {
            shutdown.cancelled().await;
            Ok(())
        });
        supervisor.spawn("brief", async { Err(anyhow!("disk on fire")) });
        let error = supervisor.run(std::future::pending(), Duration::from_secs(5)).await.unwrap_err();
        assert_eq!(format!("{error:#}"), "task \"brief\" failed: disk on fire");
    }

    #[tokio::test]
    async fn work_goes_on_without_whoever_waits_for_it() {
        let scope = Scope::new();
        let (begin, start) = oneshot::channel();
        let (end, ended) = oneshot::channel();
        let outcome = scope.children().run_to_end(async move {
            start.await.unwrap();
            end.send(()).unwrap();
        });
        drop(outcome);
        begin.send(()).unwrap();
        ended.await.unwrap();

        assert_eq!(scope.children().run_to_end(async { 7 }).await, Some(7));
        assert_eq!(scope.children().run_to_end(async { panic!("oh") }).await, None::<()>);
        let endless = scope.children().run_to_end(std::future::pending::<()>());
        drop(scope);
        assert_eq!(endless.await, None);
    }

    #[tokio::test]
    async fn a_panic_ends_the_process() {
        let mut supervisor = Supervisor::new();
        supervisor.spawn("clumsy", async { panic!("oh") });
        let error = supervisor.run(std::future::pending(), Duration::from_secs(5)).await.unwrap_err();
        assert!(format!("{error:#}").contains("\"clumsy\" panicked"), "{error:#}");
    }

    #[tokio::test]
    async fn a_signal_drains_and_the_deadline_ends_what_hangs() {
        let mut supervisor = Supervisor::new();
        supervisor.spawn("stuck", std::future::pending());
        supervisor.run(async {}, Duration::from_millis(20)).await.unwrap();
    }

    #[tokio::test]
    async fn work_apart_is_on_a_thread_of_its_own_and_ends_with_who_wanted_it() {
        let (send, thread) = oneshot::channel();
        apart("test", move || async move { send.send(std::thread::current().id()).unwrap() }).await;
        assert_ne!(thread.await.unwrap(), std::thread::current().id());

        let (alive, gone) = oneshot::channel::<()>();
        let (begin, start) = oneshot::channel();
        let endless = apart("test", move || async move {
            let _alive = alive;
            begin.send(()).unwrap();
            std::future::pending::<()>().await;
        });
        tokio::select! {
            () = endless => panic!("it has no end"),
            started = start => started.unwrap(),
        }
        gone.await.unwrap_err();
    }

    #[tokio::test]
    async fn a_task_that_panics_is_followed_by_what_is_to_come_after_it() {
        let scope = Scope::new();
        let (held, gone) = oneshot::channel::<()>();
        let (give, given) = oneshot::channel();
        let task = async move {
            let _held = held;
            tokio::task::yield_now().await;
            panic!("oh");
        };
        scope.children().spawn_or(task, move || async move {
            give.send(gone.await.is_err()).unwrap();
        });
        assert!(given.await.unwrap(), "the task is dropped before");

        let (give, given) = oneshot::channel::<()>();
        scope.children().spawn_or(async {}, move || async move { give.send(()).unwrap() });
        assert!(given.await.is_err(), "one that ends well is followed by nothing");
    }

    #[tokio::test]
    async fn dropping_a_scope_ends_its_children() {
        let scope = Scope::new();
        let (held, mut gone) = tokio::sync::mpsc::channel::<()>(1);
        scope.children().spawn(async move {
            let _held = held;
            std::future::pending::<()>().await;
        });
        tokio::task::yield_now().await;
        drop(scope);
        assert_eq!(gone.recv().await, None);
    }
}
