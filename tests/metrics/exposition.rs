//! A reader of OpenMetrics that takes nothing for granted.

use std::collections::BTreeSet;

/// Panics if this is none.
pub fn check(text: &str) {
    let body = text.strip_suffix("# EOF\n").unwrap_or_else(|| panic!("no end: {text}"));
    let (mut families, mut series) = (BTreeSet::new(), BTreeSet::new());
    let (mut family, mut kind) = ("", "");
    for line in body.lines() {
        if let Some(head) = line.strip_prefix("# ") {
            let mut words = head.splitn(3, ' ');
            let [what, name, rest] = [(); 3].map(|()| words.next().unwrap_or_else(|| panic!("{line}")));
            match what {
                "HELP" => {
                    assert!(families.insert(name), "in two pieces: {line}");
                    (family, kind) = (name, "");
                }
                "TYPE" => kind = rest,
                "UNIT" => assert!(name.ends_with(&format!("_{rest}")), "{line}"),
                _ => panic!("{line}"),
            }
            assert_eq!(name, family, "{line}");
            continue;
        }
        let name = line.split(['{', ' ']).next().unwrap();
        let suffixes: &[&str] = match kind {
            "counter" => &["_total"],
            "histogram" => &["_bucket", "_sum", "_count"],
            "gauge" => &[""],
            _ => panic!("{kind:?}: {line}"),
        };
        assert!(suffixes.iter().any(|suffix| name == format!("{family}{suffix}")), "{family} {kind}: {line}");
        let (labels, value) = line.rsplit_once(' ').unwrap();
        assert!(value.parse::<f64>().is_ok_and(|value| !value.is_nan()), "{line}");
        assert!(series.insert(labels), "twice: {line}");
    }
    assert!(families.len() > 50, "{}", families.len());
}
