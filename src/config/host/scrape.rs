//! A `[[scrape]]` table: exporters in guests whose metrics this host serves. The tables of all fragments add up.

use std::time::Duration;

use serde::Deserialize;
use toml::Spanned;

use super::super::Error;
use super::vm::Taken;
use super::{Source, access};
use crate::access::Pattern;
use crate::text::target::Target;

/// Maximum length of a job's name, and of a path, in bytes.
const LONGEST_JOB: usize = 63;
const LONGEST_PATH: usize = 255;
/// Defaults of the optional keys.
const PATH: &str = "/metrics";
const TIMEOUT: u32 = 5;
const MAX_BYTES: u32 = 4 << 20;
const MAX_SERIES: u32 = 5000;

/// Settings of one scrape job, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScrapeSettings {
    /// Name of the job in Prometheus: unique, letters, digits, `-`, `_` and `.`.
    pub job: String,
    /// Address on which the exporter listens in the guest.
    pub target: Target,
    /// HTTP path of the metrics.
    pub path: String,
    /// Names of the VMs that have the exporter.
    pub vms: Vec<Pattern>,
    /// Scrape interval for Prometheus, if set.
    pub interval: Option<Duration>,
    /// Time in which an exporter has to answer.
    pub timeout: Duration,
    /// Maximum size of its answer, in bytes.
    pub max_bytes: usize,
    /// Maximum number of samples in its answer.
    pub max_series: usize,
}

/// Table `[[scrape]]`, unchecked.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct ScrapeFragment {
    job: Option<Spanned<String>>,
    target: Option<Spanned<String>>,
    path: Option<Spanned<String>>,
    vms: Option<Spanned<Vec<Spanned<String>>>>,
    interval_seconds: Option<Spanned<u32>>,
    timeout_seconds: Option<Spanned<u32>>,
    max_bytes: Option<Spanned<u32>>,
    max_series: Option<Spanned<u32>>,
}

pub(super) fn check<'a>(
    source: &'a Source,
    table: &Spanned<ScrapeFragment>,
    taken: &mut Taken<'a>,
) -> Result<ScrapeSettings, Error> {
    let found = table.get_ref();
    let missing = |key: &str, why: &str| source.wrong(table, format!("[[scrape]] has no {key}; {why}"));
    let job = found.job.as_ref().ok_or_else(|| missing("job", "Prometheus calls it so"))?;
    let is_one = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if !(1..=LONGEST_JOB).contains(&job.get_ref().len()) || !job.get_ref().bytes().all(is_one) {
        let problem = format!(
            "job {:?} is not a valid name; use letters, digits, -, _ and ., at most {LONGEST_JOB}",
            job.get_ref()
        );
        return Err(source.wrong(job, problem));
    }
    source.unique(taken, "job", job, job.get_ref())?;
    let target = found.target.as_ref();
    let target = target.ok_or_else(|| {
        missing("target", "write where the exporter listens in the guest, such as \"9100\"")
    })?;
    let parsed = target
        .get_ref()
        .parse::<Target>()
        .map_err(|error| source.wrong(target, format!("target = {error}")))?;
    let path = match &found.path {
        None => PATH.to_owned(),
        Some(path) => {
            let text = path.get_ref();
            let is_good = text.starts_with('/') && text.len() <= LONGEST_PATH && !text.contains('#');
            if !is_good || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
                let problem = format!(
                    "path = {text:?}: write one like {PATH}, of at most {LONGEST_PATH} ASCII characters"
                );
                return Err(source.wrong(path, problem));
            }
            text.clone()
        }
    };
    let all = || "*".parse::<Pattern>().into_iter().collect();
    let vms = access::patterns(source, "vms", found.vms.as_ref())?.unwrap_or_else(all);
    let number =
        |key: &str, value: &Option<Spanned<u32>>, usual: u32, range: std::ops::RangeInclusive<u32>| {
            let Some(value) = value else { return Ok(usual) };
            let number = *value.get_ref();
            if range.contains(&number) {
                return Ok(number);
            }
            let problem = format!("scrape.{key} = {number}: use {} to {}", range.start(), range.end());
            Err(source.wrong(value, problem))
        };
    let size = |number: u32| usize::try_from(number).unwrap_or(usize::MAX);
    let seconds = |number: u32| Duration::from_secs(number.into());
    let interval = number("interval-seconds", &found.interval_seconds, 0, 1..=3600)?;
    Ok(ScrapeSettings {
        job: job.get_ref().clone(),
        target: parsed,
        path,
        vms,
        interval: (interval > 0).then(|| seconds(interval)),
        timeout: seconds(number("timeout-seconds", &found.timeout_seconds, TIMEOUT, 1..=60)?),
        max_bytes: size(number("max-bytes", &found.max_bytes, MAX_BYTES, 1024..=16 << 20)?),
        max_series: size(number("max-series", &found.max_series, MAX_SERIES, 1..=50_000)?),
    })
}
