//! Checks of a guest's answer: a guest may lie about itself, but neither about other guests nor at any length.

use std::collections::{BTreeMap, BTreeSet};

use super::{Kind, MAX_LABEL, MOST_OF_GUEST, table};
use crate::wire::proto::v1::{CollectMetricsResponse, MetricFamily, MetricSample};

/// Cleans an answer as [`clean_to`] does, with the number of series that a guest may have.
pub fn clean(answer: CollectMetricsResponse) -> CollectMetricsResponse {
    clean_to(answer, MOST_OF_GUEST)
}

/// Keeps the part of an answer that agrees with the table: known families with the right number of labels and
/// valid values. Each series occurs once, the families are in the order of the table, and at most `most` series
/// are kept.
pub fn clean_to(answer: CollectMetricsResponse, most: usize) -> CollectMetricsResponse {
    let mut found = BTreeMap::new();
    let mut left = most;
    for MetricFamily { name, samples } in answer.families {
        let Some((place, family)) = table::of_guest(&name).filter(|(place, _)| !found.contains_key(place))
        else {
            continue;
        };
        let mut known = BTreeSet::new();
        let can_be = |one: &MetricSample| {
            let has_labels = one.labels.len() == family.labels.len();
            has_labels && one.value.is_finite() && (family.kind == Kind::Gauge || one.value >= 0.0)
        };
        let samples = samples.into_iter().filter(can_be).filter_map(|MetricSample { labels, value }| {
            let labels: Vec<_> = labels.iter().map(|text| label(text)).collect();
            known.insert(labels.clone()).then_some(MetricSample { labels, value })
        });
        let samples: Vec<_> = samples.take(left).collect();
        left -= samples.len();
        if !samples.is_empty() {
            found.insert(place, MetricFamily { name, samples });
        }
    }
    CollectMetricsResponse { families: found.into_values().collect() }
}

/// Cleans the value of a label: replaces hidden characters, and truncates it.
pub fn label(text: &str) -> String {
    let mut clean = String::new();
    for one in text.chars() {
        let one = if is_hidden(one) { '\u{fffd}' } else { one };
        if clean.len() + one.len_utf8() > MAX_LABEL {
            break;
        }
        clean.push(one);
    }
    clean
}

/// Returns whether a character is a control character, or reorders or hides the text around it.
fn is_hidden(one: char) -> bool {
    one.is_control()
        || matches!(one, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sample(labels: &[&str], value: f64) -> MetricSample {
        MetricSample { labels: labels.iter().map(|&label| label.to_owned()).collect(), value }
    }

    fn family(name: &str, samples: Vec<MetricSample>) -> MetricFamily {
        MetricFamily { name: name.into(), samples }
    }

    #[test]
    fn what_the_table_has_stays_and_the_rest_goes() {
        let answer = CollectMetricsResponse {
            families: vec![
                family(
                    "disk_reads",
                    vec![sample(&["a\nb"], 1.0), sample(&["a\u{fffd}b"], 2.0), sample(&["c"], -1.0)],
                ),
                family("load1", vec![sample(&[], 0.5), sample(&[], 0.7), sample(&["x"], 1.0)]),
                // Provided by the host half, and not accepted from a guest.
                family("up", vec![sample(&[], 1.0)]),
                family("vm_cpus", vec![sample(&[], 64.0)]),
                family("load5", vec![sample(&[], f64::NAN), sample(&[], f64::INFINITY)]),
                family("load1", vec![sample(&[], 9.0)]),
                family("clock_offset_seconds", vec![sample(&[], -0.25)]),
                family("nonsense", vec![sample(&[], 1.0)]),
            ],
        };
        let expected = vec![
            family("load1", vec![sample(&[], 0.5)]),
            family("clock_offset_seconds", vec![sample(&[], -0.25)]),
            family("disk_reads", vec![sample(&["a\u{fffd}b"], 1.0)]),
        ];
        assert_eq!(clean(answer).families, expected);
    }

    #[test]
    fn a_guest_has_no_more_series_than_it_may() {
        let many = (0..10_000).map(|number| sample(&[&number.to_string()], 1.0)).collect();
        let families = vec![family("disk_reads", many), family("load1", vec![sample(&[], 1.0)])];
        let kept = clean(CollectMetricsResponse { families });
        assert_eq!(kept.families.iter().map(|one| one.samples.len()).sum::<usize>(), MOST_OF_GUEST);
        assert_eq!(clean_to(kept, 7).families.iter().map(|one| one.samples.len()).sum::<usize>(), 7);
    }

    proptest! {
        #[test]
        fn any_label_is_short_and_visible(text: String) {
            let text = text.repeat(8);
            let clean = label(&text);
            prop_assert!(clean.len() <= MAX_LABEL && !clean.chars().any(is_hidden));
            prop_assert!(clean.chars().count() == text.chars().count() || clean.len() > MAX_LABEL - 4);
        }
    }
}
