//! `guestctl metrics`: the measurements of a guest.

use std::collections::BTreeMap;
use std::pin::pin;
use std::time::Duration;

use serde::Serialize;
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use super::{SOON, answer};
use crate::ctl::Error;
use crate::ctl::client::Daemon;
use crate::ctl::print::Printer;
use crate::metrics::check::clean;
use crate::metrics::exposition::{self, Format};
use crate::metrics::table;
use crate::wire::proto::v1::{CollectMetricsRequest, CollectMetricsResponse};

/// Sample for programs.
#[derive(Debug, Serialize)]
struct Sample {
    name: String,
    labels: BTreeMap<&'static str, String>,
    value: f64,
}

/// Shows the measurements of the guest, once or repeatedly until the user stops it or the reader closes the
/// output. The guest measures only on request.
///
/// # Errors
/// Fails if the guest cannot be reached the first time, or the daemon ends.
pub async fn run(
    daemon: &Daemon,
    printer: &mut Printer,
    name: String,
    every: Option<Duration>,
) -> Result<(), Error> {
    let found = collect(daemon, &name).await?;
    let Some(every) = every else { return Ok(printer.value(&samples(&found), || page(&name, &found))?) };
    let mut ticks = interval_at(Instant::now() + every, every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut unread = pin!(Printer::unread());
    let mut found = Ok(found);
    loop {
        match &found {
            Ok(found) => printer.line(&samples(found), || page(&name, found).trim_end().to_owned())?,
            // The guest may be reachable again the next time.
            Err(error @ (Error::Call(_) | Error::Late(_))) => printer.note(&error.to_string()),
            Err(_) => return found.map(drop),
        }
        found = tokio::select! {
            () = &mut unread => return Ok(()),
            found = async { ticks.tick().await; collect(daemon, &name).await } => found,
        };
    }
}

async fn collect(daemon: &Daemon, name: &str) -> Result<CollectMetricsResponse, Error> {
    let request = CollectMetricsRequest { name: name.to_owned(), ..CollectMetricsRequest::default() };
    // A newer host half may send families that this version does not know.
    Ok(clean(answer(daemon.metrics().collect_metrics(request), name, SOON).await?))
}

fn page(name: &str, found: &CollectMetricsResponse) -> String {
    let mut text = String::new();
    exposition::guests(&mut text, Format::OpenMetrics, &[(name, found)]);
    exposition::end(&mut text, Format::OpenMetrics);
    text
}

fn samples(answer: &CollectMetricsResponse) -> Vec<Sample> {
    let mut all = Vec::new();
    for told in &answer.families {
        let Some((_, family)) = table::of_guest(&told.name) else { continue };
        for sample in &told.samples {
            let labels = family.labels.iter().copied().zip(sample.labels.iter().cloned()).collect();
            all.push(Sample { name: family.full_name(), labels, value: sample.value });
        }
    }
    all
}
