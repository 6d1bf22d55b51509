//! Recent history of a guest: a few values for each step of the last minutes. They are taken from answers that
//! clients requested anyway. Pure.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::change::{Counters, memory_used_ratio};
use crate::wire::proto::v1::{CollectMetricsResponse, RecentMetrics, RecentPoint};

/// Time that the history covers.
pub const SPAN: Duration = Duration::from_secs(15 * 60);
/// Shortest duration of a step.
pub const STEP: Duration = Duration::from_secs(15);
/// Maximum number of steps.
const MOST: usize = 60;

/// One step; unknown values are absent.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Point {
    ended: Instant,
    took: Duration,
    cpu: Option<f32>,
    memory: Option<f32>,
    waiting: Option<f32>,
}

/// Recent history of one guest, the oldest step first.
#[derive(Debug, Default)]
pub struct Recent {
    points: VecDeque<Point>,
    /// Start of the next step: time and counters.
    last: Option<(Instant, Counters)>,
}

impl Recent {
    /// Takes an answer of the guest. It completes a step if enough time has passed since the last one.
    pub fn take(&mut self, now: Instant, answer: &CollectMetricsResponse) {
        let Some(counters) = Counters::of(answer) else { return };
        if let Some((then, before)) = &self.last {
            let took = now.saturating_duration_since(*then);
            if took < STEP && counters.is_same_boot(before) {
                return;
            }
            if took <= SPAN
                && let Some(change) = counters.since(before)
            {
                while self.points.len() >= MOST {
                    self.points.pop_front();
                }
                #[allow(clippy::cast_possible_truncation, reason = "a ratio, of which few digits are shown")]
                let short = |ratio: Option<f64>| ratio.map(|ratio| ratio as f32);
                self.points.push_back(Point {
                    ended: now,
                    took,
                    cpu: short(change.cpu_ratio),
                    memory: short(memory_used_ratio(answer)),
                    waiting: short(change.waiting_most()),
                });
            }
        }
        self.last = Some((now, counters));
    }

    /// Returns whether the last answer is so old that the whole history has expired.
    pub fn is_over(&self, now: Instant) -> bool {
        self.last.is_none_or(|(then, _)| now.saturating_duration_since(then) > SPAN)
    }

    /// Returns the history as it is sent; none if no step is complete.
    pub fn message(&self, now: Instant) -> Option<RecentMetrics> {
        let ago = |point: &Point| now.saturating_duration_since(point.ended);
        let whole = |time: Duration| u32::try_from(time.as_secs()).unwrap_or(u32::MAX);
        let points = self.points.iter().filter(|point| ago(point) <= SPAN).map(|point| RecentPoint {
            seconds_ago: whole(ago(point)),
            seconds: whole(point.took),
            cpu_ratio: point.cpu,
            memory_used_ratio: point.memory,
            waiting_ratio: point.waiting,
        });
        let points: Vec<_> = points.collect();
        (!points.is_empty()).then_some(RecentMetrics { points })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{Sample, message, table};

    fn answer(boot: &str, uptime: f64, busy: f64) -> CollectMetricsResponse {
        let one = Sample::new;
        message(&[
            one(&table::INFO, &[boot, "6.1"], 1.0),
            one(&table::UPTIME, &[], uptime),
            one(&table::MEMORY_TOTAL, &[], 100.0),
            one(&table::MEMORY_AVAILABLE, &[], 25.0),
            one(&table::CPU, &["user"], busy),
            one(&table::CPU, &["idle"], uptime - busy),
            one(&table::PRESSURE_WAITING, &["io"], uptime / 4.0),
            one(&table::PRESSURE_WAITING, &["cpu"], uptime / 8.0),
        ])
    }

    #[test]
    fn a_step_is_what_two_answers_say_that_are_far_enough_apart() {
        let (began, mut recent) = (Instant::now(), Recent::default());
        let at = |seconds: u64| began + Duration::from_secs(seconds);
        recent.take(at(0), &answer("a", 100.0, 10.0));
        recent.take(at(2), &answer("a", 102.0, 11.0));
        assert_eq!(recent.message(at(2)), None, "that is not a step yet");
        recent.take(at(20), &answer("a", 120.0, 20.0));
        let expected = RecentPoint {
            seconds_ago: 5,
            seconds: 20,
            cpu_ratio: Some(0.5),
            memory_used_ratio: Some(0.75),
            waiting_ratio: Some(0.25),
        };
        assert_eq!(recent.message(at(25)), Some(RecentMetrics { points: vec![expected] }));
        // A new boot starts a new step at once.
        recent.take(at(26), &answer("b", 1.0, 0.0));
        recent.take(at(50), &answer("b", 25.0, 24.0));
        let points = recent.message(at(50)).unwrap().points;
        assert_eq!(points.iter().map(|one| one.seconds).collect::<Vec<_>>(), [20, 24]);
        // After a long silence there is no answer to compare with, and steps that are too old are left out.
        assert!(!recent.is_over(at(60)) && recent.is_over(at(2000)));
        recent.take(at(2000), &answer("b", 1975.0, 24.0));
        assert_eq!(recent.message(at(2000)), None);
    }

    #[test]
    fn it_takes_no_more_than_8_kib_whatever_a_guest_says() {
        let (began, mut recent) = (Instant::now(), Recent::default());
        for step in 0..1000_u32 {
            let seconds = f64::from(step) * 15.0;
            recent.take(began + STEP * step, &answer("a", seconds, f64::MAX));
        }
        assert_eq!(recent.points.len(), MOST);
        assert!(recent.points.capacity() * size_of::<Point>() + size_of::<Recent>() <= 8192);
        let points = recent.message(began + STEP * 999).unwrap().points;
        assert!(points.iter().all(|one| one.cpu_ratio.is_none_or(|ratio| (0.0..=1.0).contains(&ratio))));
    }
}
