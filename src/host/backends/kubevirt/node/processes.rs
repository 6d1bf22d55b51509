//! Finds a process of a pod, through which the pod's network namespace can be entered.
//!
//! One walk over /proc serves all callers within [`FRESH`]: after a restart, a thousand guests may be dialled
//! at once.

use std::collections::HashMap;
use std::io;
use std::time::{Duration, Instant};

use tokio::sync::{Mutex, Semaphore};

use crate::sys::process::Process;
use crate::sys::root::Root;
use crate::sys::{blocking, net_namespace, pod_cgroup};

/// Time for which a walk over /proc is trusted about pods that it has not found.
const FRESH: Duration = Duration::from_secs(1);
/// Maximum number of threads that are in namespaces at a time.
const MOST_THREADS: usize = 32;

/// Processes of the pods on this node.
#[derive(Debug)]
pub struct Processes {
    root: Root,
    found: Mutex<Found>,
    threads: Semaphore,
}

/// Result of the last walk: the oldest process of each pod. That is the one that holds the pod's namespaces,
/// and no process in the pod can have started before it.
#[derive(Debug, Default)]
struct Found {
    at: Option<Instant>,
    pods: HashMap<String, Process>,
}

impl Processes {
    /// Creates a lookup of processes on the machine with this root.
    pub fn new(root: Root) -> Self {
        Self { root, found: Mutex::default(), threads: Semaphore::new(MOST_THREADS) }
    }

    /// Returns a process of the pod with this UID; a process that started within the last second may be missed.
    ///
    /// # Errors
    /// If /proc cannot be read.
    pub async fn of_pod(&self, uid: &str) -> io::Result<Option<Process>> {
        let mut found = self.found.lock().await;
        if let Some(process) = found.pods.get(uid)
            && Process::with_number(&self.root, process.number).as_ref() == Some(process)
            && pod(&self.root, process.number).as_deref() == Some(uid)
        {
            return Ok(Some(*process));
        }
        if found.at.is_none_or(|at| at.elapsed() >= FRESH) {
            let root = self.root.clone();
            let pods = blocking::run(move || walk(&root)).await?;
            *found = Found { at: Some(Instant::now()), pods };
            return Ok(found.pods.get(uid).copied());
        }
        // The process found by the last walk has ended since.
        found.pods.remove(uid);
        Ok(None)
    }

    /// Runs `work` in the network namespace of `process`.
    ///
    /// # Errors
    /// Those of [`net_namespace::inside`].
    pub async fn inside<T: Send + 'static>(
        &self,
        process: Process,
        work: impl FnOnce(&Root) -> T + Send + 'static,
    ) -> io::Result<T> {
        let _thread = self.threads.acquire().await;
        let root = self.root.clone();
        net_namespace::inside(self.root.clone(), process, move || work(&root)).await
    }
}

fn walk(root: &Root) -> io::Result<HashMap<String, Process>> {
    let mut pods: HashMap<String, Process> = HashMap::new();
    for number in Process::numbers(root)? {
        let Some(pod) = pod(root, number) else { continue };
        let Some(process) = Process::with_number(root, number) else { continue };
        let first = pods.entry(pod).or_insert(process);
        if (process.started, process.number) < (first.started, first.number) {
            *first = process;
        }
    }
    Ok(pods)
}

fn pod(root: &Root, number: u32) -> Option<String> {
    let groups = root.read(&format!("/proc/{number}/cgroup")).ok()?;
    pod_cgroup::pod(&String::from_utf8_lossy(&groups))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const A: &str = "aaaaaaaa-0000-4000-8000-000000000001";
    const B: &str = "bbbbbbbb-0000-4000-8000-000000000002";

    #[allow(clippy::disallowed_methods)]
    fn lay_out(root: &Path, number: u32, started: u64, pod: &str) {
        let folder = root.join(format!("proc/{number}"));
        std::fs::create_dir_all(&folder).unwrap();
        let stat = format!("{number} (a) S 1 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 {started} 9 10\n");
        std::fs::write(folder.join("stat"), stat).unwrap();
        let groups = format!("0::/kubepods/burstable/pod{pod}/c0\n");
        std::fs::write(folder.join("cgroup"), groups).unwrap();
    }

    async fn number(processes: &Processes, pod: &str) -> Option<u32> {
        processes.of_pod(pod).await.unwrap().map(|process| process.number)
    }

    #[tokio::test]
    async fn a_pod_is_entered_by_the_process_that_started_first() {
        let root = tempfile::tempdir().unwrap();
        for (number, started, pod) in [(7, 30, A), (8, 20, A), (9, 20, A), (10, 10, B)] {
            lay_out(root.path(), number, started, pod);
        }
        std::fs::create_dir_all(root.path().join("proc/sys")).unwrap();
        let processes = Processes::new(Root::at(root.path()));
        assert_eq!(number(&processes, A).await, Some(8));
        assert_eq!(number(&processes, B).await, Some(10));
        assert_eq!(number(&processes, "cccccccc-0000-4000-8000-000000000003").await, None);
    }

    #[tokio::test]
    async fn a_number_that_is_another_process_now_is_not_taken_for_the_pod() {
        let root = tempfile::tempdir().unwrap();
        lay_out(root.path(), 7, 30, A);
        let processes = Processes::new(Root::at(root.path()));
        assert_eq!(number(&processes, A).await, Some(7));
        // A process of another pod now has its PID.
        lay_out(root.path(), 7, 40, B);
        assert_eq!(number(&processes, A).await, None);
        // A different pod with the same PID and start time must not be taken for the same.
        lay_out(root.path(), 7, 30, B);
        assert_eq!(number(&processes, A).await, None);
    }

    #[tokio::test]
    async fn one_walk_serves_all_that_ask_at_once() {
        let root = tempfile::tempdir().unwrap();
        lay_out(root.path(), 7, 30, A);
        let processes = Processes::new(Root::at(root.path()));
        assert_eq!(number(&processes, B).await, None);
        lay_out(root.path(), 8, 31, B);
        // The last walk is recent: pods that it found are answered from it, and pods that it did not find are looked
        // for later.
        assert_eq!(number(&processes, A).await, Some(7));
        let fresh = processes.found.lock().await.at.unwrap();
        let found = number(&processes, B).await;
        let looked_again = processes.found.lock().await.at.unwrap() != fresh;
        assert_eq!(found.is_some(), looked_again);
        processes.found.lock().await.at = None;
        assert_eq!(number(&processes, B).await, Some(8));
    }
}
