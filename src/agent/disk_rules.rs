//! Reloading of the rules for disks: the agent reads edited files again, and applies the rules if they are valid.
//!
//! ```text
//!  a file changes ──▶ wait until it is quiet ──▶ read, check ─valid──▶ in force ──▶ disk_rules::engine
//!        ▲                                           └─invalid──▶ old rules stay; the reason is logged
//!        └─────────────────────────────────────────────────────────────────────────────┘
//! ```

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::config::disk_rules::{DiskRule, load};
use crate::config::{Error, Problem};
use crate::guest::Guest;
use crate::guest::disk_rules::rule::{self, How, Matcher, Rule};
use crate::guest::disk_rules::{Rules, engine};
use crate::supervise::Supervisor;
use crate::sys::blocking;
use crate::sys::folder_news::FolderNews;

/// Time without changes before a file is read: editors write a file in several steps.
const QUIET: Duration = Duration::from_millis(100);
/// Maximum delay of reading, even if the files keep changing.
const PATIENCE: Duration = Duration::from_secs(2);

/// Starts the task that applies the rules of `folder` and the one that reloads them. Mounts made by rules are
/// recorded in `runtime_folder`. Invalid rules do not stop the agent.
pub fn start(folder: PathBuf, runtime_folder: &Path, guest: &Guest, supervisor: &mut Supervisor) {
    // Begin to watch before the first read, so that no change is missed.
    let news = FolderNews::begin(&folder);
    let (rules, followed) = watch::channel(Rules::default());
    let mut reader = Reader { folder, news, rules };
    reader.put(read(&reader.folder));
    let (shutdown, ending) = (supervisor.shutdown(), supervisor.shutdown());
    let work = engine::run(guest.clone(), followed, runtime_folder.to_owned());
    supervisor.spawn("disk rules", async move {
        match ending.run_until_cancelled(work).await {
            Some(Err(error)) => Err(error.into()),
            _ => Ok(()),
        }
    });
    supervisor.spawn("disk rules' files", reader.run(shutdown));
}

/// Task that reads edited rules and puts them in force.
struct Reader {
    folder: PathBuf,
    news: FolderNews,
    rules: watch::Sender<Rules>,
}

impl Reader {
    async fn run(mut self, shutdown: CancellationToken) -> anyhow::Result<()> {
        while let Some(changed) = shutdown.run_until_cancelled(self.news.changed()).await {
            changed.context("files are no longer watched")?;
            let quiet =
                async { while let Ok(Ok(())) = tokio::time::timeout(QUIET, self.news.changed()).await {} };
            drop(tokio::time::timeout(PATIENCE, quiet).await);
            let folder = self.folder.clone();
            let read = blocking::run(move || read(&folder)).await;
            self.put(read);
        }
        Ok(())
    }

    fn put(&mut self, read: Result<Vec<Rule>, Error>) {
        self.rules.send_modify(|rules| {
            rules.read += 1;
            match read {
                Ok(list) => {
                    if rules.read > 1 || !list.is_empty() {
                        tracing::info!("{} disk rules are in force", list.len());
                    }
                    (rules.list, rules.problem) = (Some(list.into()), None);
                }
                Err(error) => {
                    tracing::error!(
                        "the disk rules are invalid, and the previous ones stay in force: {error}"
                    );
                    rules.problem = Some(error.to_string());
                }
            }
        });
    }
}

fn read(folder: &Path) -> Result<Vec<Rule>, Error> {
    let check =
        |rule: &DiskRule| rule::check(&Rule::from(rule.clone())).map_err(|(key, text)| Problem { key, text });
    Ok(load(folder, check)?.into_iter().map(Rule::from).collect())
}

impl From<DiskRule> for Rule {
    fn from(rule: DiskRule) -> Self {
        let DiskRule { origin, serial, label, wwn, bus, partition, .. } = rule;
        Self {
            origin,
            matcher: Matcher { serial, label, wwn, bus, partition },
            how: How {
                mount_point: rule.mount_point,
                kind: rule.file_system,
                format: rule.format_if_blank,
                options: rule.options,
                owner: rule.owner,
                group: rule.group,
                mode: rule.mode,
                grow: rule.grow,
            },
        }
    }
}
