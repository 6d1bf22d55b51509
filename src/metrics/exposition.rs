//! Exposition of samples for Prometheus: OpenMetrics 1.0, or the older text format 0.0.4.

use std::fmt::Write as _;

use super::{Family, table};
use crate::wire::proto::v1::CollectMetricsResponse;

/// Exposition format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// The text format 0.0.4.
    Text,
}

impl Format {
    /// Chooses the format for a client that accepts these media types.
    pub fn accepted(accept: &str) -> Self {
        if accept.contains("application/openmetrics-text") { Self::OpenMetrics } else { Self::Text }
    }

    /// Returns the media type for the `Content-Type` header.
    pub fn media_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// Writes the answers of guests, with the names of their VMs; each family occurs once, as the formats require. The
/// answers have to be clean ([`super::check::clean`]), and therefore in the order of the table.
pub fn guests(text: &mut String, format: Format, guests: &[(&str, &CollectMetricsResponse)]) {
    let mut cursors = vec![0; guests.len()];
    for family in table::FAMILIES {
        let name = family.full_name();
        let mut has_head = false;
        for ((vm, answer), cursor) in guests.iter().zip(&mut cursors) {
            let Some(found) = answer.families.get(*cursor).filter(|found| found.name == family.name) else {
                continue;
            };
            *cursor += 1;
            if !has_head {
                head(text, format, family);
                has_head = true;
            }
            for sample in &found.samples {
                let _ = write!(text, "{name}{{vm=\"{}\"", Escaped(vm));
                for (label, value) in family.labels.iter().zip(&sample.labels) {
                    let _ = write!(text, ",{label}=\"{}\"", Escaped(value));
                }
                let _ = writeln!(text, "}} {}", sample.value);
            }
        }
    }
}

fn head(text: &mut String, format: Format, family: &Family) {
    let name = match format {
        // In OpenMetrics, the family of a counter is named without its suffix.
        Format::OpenMetrics => format!("{}{}", super::PREFIX, family.name),
        Format::Text => family.full_name(),
    };
    // Writing to a String cannot fail.
    let _ = writeln!(text, "# HELP {name} {}\n# TYPE {name} {}", family.help, family.kind.word());
    if format == Format::OpenMetrics && !family.unit.is_empty() {
        let _ = writeln!(text, "# UNIT {name} {}", family.unit);
    }
}

/// Writes the end of an exposition.
pub fn end(text: &mut String, format: Format) {
    if format == Format::OpenMetrics {
        text.push_str("# EOF\n");
    }
}

/// Converts a text in the text format to this format; only the `HELP` and `TYPE` lines of counters differ.
pub fn convert(text: &str, format: Format) -> String {
    if format == Format::Text {
        return text.to_owned();
    }
    let mut converted = String::with_capacity(text.len());
    for line in text.lines() {
        let mut words = line.splitn(4, ' ');
        let is_head = words.next() == Some("#") && matches!(words.next(), Some("HELP" | "TYPE"));
        match words.next().and_then(|name| name.strip_suffix("_total")).filter(|_| is_head) {
            Some(short) => {
                let long = format!(" {short}_total ");
                converted.push_str(&line.replacen(&long, &format!(" {short} "), 1));
            }
            None => converted.push_str(line),
        }
        converted.push('\n');
    }
    converted
}

/// Formatter that escapes the value of a label for use between quotation marks.
pub(super) struct Escaped<'t>(pub &'t str);

impl std::fmt::Display for Escaped<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for one in self.0.chars() {
            match one {
                '\\' => formatter.write_str("\\\\")?,
                '"' => formatter.write_str("\\\"")?,
                '\n' => formatter.write_str("\\n")?,
                one => formatter.write_char(one)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{Sample, message};

    fn answers() -> [CollectMetricsResponse; 2] {
        let one = Sample::new;
        let first = [
            one(&table::DISK_READ_BYTES, &["vd\"a\\"], 1_099_511_627_776.0),
            one(&table::LOAD_1, &[], 0.25),
            one(&table::DISK_READ_BYTES, &["vdb"], 2.0),
        ];
        [message(&first), message(&[one(&table::LOAD_1, &[], 1.0), one(&table::TEMPERATURE, &["cpu"], -1.5)])]
    }

    #[test]
    fn families_are_whole_and_their_heads_as_each_format_has_them() {
        let [first, second] = answers();
        let all = [("a", &first), ("ns/b", &second)];
        let mut text = String::new();
        guests(&mut text, Format::OpenMetrics, &all);
        end(&mut text, Format::OpenMetrics);
        let expected = "# HELP guestlet_guest_load1 Load average of 1 minute.\n\
            # TYPE guestlet_guest_load1 gauge\n\
            guestlet_guest_load1{vm=\"a\"} 0.25\n\
            guestlet_guest_load1{vm=\"ns/b\"} 1\n\
            # HELP guestlet_guest_disk_read_bytes Bytes read.\n\
            # TYPE guestlet_guest_disk_read_bytes counter\n\
            # UNIT guestlet_guest_disk_read_bytes bytes\n\
            guestlet_guest_disk_read_bytes_total{vm=\"a\",device=\"vd\\\"a\\\\\"} 1099511627776\n\
            guestlet_guest_disk_read_bytes_total{vm=\"a\",device=\"vdb\"} 2\n\
            # HELP guestlet_guest_temperature_celsius Reading of a sensor.\n\
            # TYPE guestlet_guest_temperature_celsius gauge\n\
            # UNIT guestlet_guest_temperature_celsius celsius\n\
            guestlet_guest_temperature_celsius{vm=\"ns/b\",sensor=\"cpu\"} -1.5\n\
            # EOF\n";
        assert_eq!(text, expected);
        let mut text = String::new();
        guests(&mut text, Format::Text, &all);
        end(&mut text, Format::Text);
        assert!(text.contains("# TYPE guestlet_guest_disk_read_bytes_total counter\n"), "{text}");
        assert!(!text.contains("# UNIT") && !text.contains("# EOF"), "{text}");
    }

    #[test]
    fn the_heads_of_counters_are_converted() {
        let text = "# HELP a_total All.\n# TYPE a_total counter\na_total 1\n# TYPE b histogram\nb_count 2\n";
        let expected = "# HELP a All.\n# TYPE a counter\na_total 1\n# TYPE b histogram\nb_count 2\n";
        assert_eq!(convert(text, Format::OpenMetrics), expected);
        assert_eq!(convert(text, Format::Text), text);
    }

    #[test]
    fn who_accepts_openmetrics_gets_it() {
        let prometheus = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        assert_eq!(Format::accepted(prometheus), Format::OpenMetrics);
        for other in ["", "*/*", "text/plain;version=0.0.4"] {
            assert_eq!(Format::accepted(other), Format::Text);
        }
    }
}
