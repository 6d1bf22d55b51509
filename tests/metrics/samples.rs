//! Samples as Prometheus reads them.

use std::collections::BTreeMap;

/// A sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub value: f64,
}

impl Sample {
    /// All of a page that Prometheus reads.
    pub fn of_page(page: &str) -> Vec<Self> {
        page.lines().filter(|line| !line.starts_with('#')).map(Self::of_line).collect()
    }

    /// `name{label="value",…} 1`, of which no value has a quotation mark.
    pub fn of_line(line: &str) -> Self {
        let (series, value) = line.rsplit_once(' ').unwrap();
        let value =
            if value == "+Inf" { f64::INFINITY } else { value.parse().unwrap_or_else(|_| panic!("{line}")) };
        let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
        let labels = labels.strip_suffix('}').unwrap_or_else(|| panic!("{line}"));
        let pair = |pair: &str| {
            let (label, value) = pair.split_once("=\"").unwrap_or_else(|| panic!("{line}"));
            (label.to_owned(), value.trim_end_matches('"').to_owned())
        };
        let labels = labels.split("\",").filter(|pair| !pair.is_empty()).map(pair).collect();
        Self { name: name.to_owned(), labels, value }
    }
}

/// The value of the one series with this name and these labels, others aside; without the beginning that all have.
#[track_caller]
pub fn value(samples: &[Sample], name: &str, labels: &[(&str, &str)]) -> f64 {
    let found = find(samples, name, labels);
    assert_eq!(found.len(), 1, "{name} {labels:?}: {found:?}");
    found[0].value
}

pub fn find<'s>(samples: &'s [Sample], name: &str, labels: &[(&str, &str)]) -> Vec<&'s Sample> {
    let is = |sample: &&Sample| {
        sample.name.strip_prefix("guestlet_guest_") == Some(name)
            && labels
                .iter()
                .all(|(label, value)| sample.labels.get(*label).map(String::as_str) == Some(value))
    };
    samples.iter().filter(is).collect()
}
