//! Load of a guest in the last minutes: as lines of small bars, and for programs. Pure, apart from the locale
//! that it reads.

use serde::Serialize;

use crate::metrics::recent::SPAN;
use crate::wire::proto::v1::{RecentMetrics, RecentPoint};

/// Characters of bars for terminals that show Unicode, and for others.
const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
const ASCII: [char; 8] = ['_', '.', ':', '-', '=', '+', '*', '#'];

/// Load of a guest between two samples.
#[derive(Debug, Serialize)]
pub struct Recent {
    seconds_ago: u32,
    seconds: u32,
    cpu_ratio: Option<f32>,
    memory_used_ratio: Option<f32>,
    waiting_ratio: Option<f32>,
}

impl From<RecentPoint> for Recent {
    fn from(point: RecentPoint) -> Self {
        let RecentPoint { seconds_ago, seconds, cpu_ratio, memory_used_ratio, waiting_ratio } = point;
        Self { seconds_ago, seconds, cpu_ratio, memory_used_ratio, waiting_ratio }
    }
}

/// Characters that bars are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bars([char; 8]);

impl Bars {
    /// Returns the characters that the locale of this process can show.
    pub fn of_locale() -> Self {
        let set = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        Self::of(&["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set).unwrap_or_default())
    }

    fn of(locale: &str) -> Self {
        let locale = locale.to_ascii_lowercase();
        Self(if locale.contains("utf-8") || locale.contains("utf8") { BLOCKS } else { ASCII })
    }

    /// Draws a ratio as bars over the last 15 minutes, with the newest on the right, and a space where it is
    /// unknown.
    pub fn line(
        self,
        recent: Option<&RecentMetrics>,
        ratio: impl Fn(&RecentPoint) -> Option<f32>,
        columns: u32,
    ) -> String {
        let points = recent.map_or(&[][..], |recent| &recent.points);
        let width = SPAN.as_secs_f64() / f64::from(columns.max(1));
        let bar = |column: u32| {
            // Part of this column that each point covers, in seconds ago.
            let (begin, end) = (width * f64::from(columns - column), width * f64::from(columns - column - 1));
            let (mut sum, mut covered) = (0.0, 0.0);
            for point in points {
                let (from, to) =
                    (f64::from(point.seconds_ago) + f64::from(point.seconds), f64::from(point.seconds_ago));
                let both = from.min(begin) - to.max(end);
                if let Some(ratio) = ratio(point).filter(|_| both > 0.0) {
                    sum += f64::from(ratio) * both;
                    covered += both;
                }
            }
            if covered <= 0.0 {
                return ' ';
            }
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 7")]
            let level = (sum / covered * 8.0).clamp(0.0, 7.0) as usize;
            self.0.get(level).copied().unwrap_or(' ')
        };
        (0..columns).map(bar).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(seconds_ago: u32, seconds: u32, cpu_ratio: f32) -> RecentPoint {
        RecentPoint { seconds_ago, seconds, cpu_ratio: Some(cpu_ratio), ..RecentPoint::default() }
    }

    #[test]
    fn bars_stand_where_something_is_known() {
        let recent = RecentMetrics {
            points: vec![
                point(600, 60, 1.0),
                point(120, 120, 0.5),
                point(0, 60, 0.0),
                point(60, 30, f32::NAN),
            ],
        };
        let cpu = |point: &RecentPoint| point.cpu_ratio.filter(|ratio| !ratio.is_nan());
        assert_eq!(Bars::of("de_DE.UTF-8").line(Some(&recent), cpu, 15), "    █      ▅▅ ▁");
        assert_eq!(Bars::of("C").line(Some(&recent), cpu, 15).trim_start(), "#      == _");
        assert_eq!(Bars::of("").line(Some(&recent), |_| None, 15), " ".repeat(15));
        assert_eq!(Bars::of("").line(None, cpu, 3), "   ");
        assert_eq!(Bars::of("").line(Some(&recent), cpu, 0), "");
    }

    #[test]
    fn a_locale_says_what_can_be_shown() {
        assert_eq!([Bars::of("C.utf8"), Bars::of("en_US.UTF-8")], [Bars(BLOCKS); 2]);
        assert_eq!([Bars::of(""), Bars::of("POSIX"), Bars::of("en_US.ISO-8859-1")], [Bars(ASCII); 3]);
    }
}
