//! `guestctl metrics`.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{SOON, answer};
use crate::ctl::Error;
use crate::ctl::client::Daemon;
use crate::ctl::print::Printer;
use crate::metrics::check::clean;
use crate::metrics::exposition::{self, Format};
use crate::metrics::table;
use crate::wire::proto::v1::{CollectMetricsRequest, CollectMetricsResponse};

/// What programs read of a sample.
#[derive(Debug, Serialize)]
struct Sample {
    name: String,
    labels: BTreeMap<&'static str, String>,
    value: f64,
}

/// Shows what the guest measures.
///
/// # Errors
/// If the guest cannot be asked.
pub async fn run(daemon: &Daemon, printer: &mut Printer, name: String) -> Result<(), Error> {
    let request = CollectMetricsRequest { name: name.clone() };
    // A host half that is newer may tell more.
    let found = clean(answer(daemon.metrics().collect_metrics(request), &name, SOON).await?);
    Ok(printer.value(&samples(&found), || {
        let mut text = String::new();
        exposition::guests(&mut text, Format::OpenMetrics, &[(&name, &found)]);
        exposition::end(&mut text, Format::OpenMetrics);
        text
    })?)
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
