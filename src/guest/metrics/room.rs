//! Distribution of the limited number of series among the kinds of things.

use crate::guest::metrics::{Things, put, whole};
use crate::metrics::{Sample, table};

/// Returns at most the allowed number of samples: those of the machine as a whole, and then one thing of each kind
/// in turn, so that a machine with a thousand mounts still reports its disks and units. Adds the number of things
/// that were left out.
pub(super) fn fit<const KINDS: usize>(
    mut samples: Vec<Sample>,
    most: usize,
    kinds: [(&'static str, Things); KINDS],
) -> Vec<Sample> {
    let mut left = most.saturating_sub(samples.len() + KINDS);
    let mut kinds = kinds.map(|(name, things)| (name, things.into_iter().peekable()));
    let mut is_full = [false; KINDS];
    while is_full.contains(&false) {
        for ((_, things), is_full) in kinds.iter_mut().zip(&mut is_full) {
            match things.next_if(|thing| !*is_full && thing.len() <= left) {
                Some(thing) => {
                    left -= thing.len();
                    samples.extend(thing);
                }
                None => *is_full = true,
            }
        }
    }
    for (name, things) in kinds {
        put(&mut samples, &table::LEFT_OUT, &[name], whole(things.count() as u64));
    }
    samples
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::MOST_OF_GUEST;

    fn things(count: usize, series: usize) -> Things {
        let one = Sample { family: &table::DISK_READS, labels: vec![String::new()], value: 0.0 };
        vec![vec![one; series]; count]
    }

    fn left_out(samples: &[Sample]) -> Vec<f64> {
        let found = samples.iter().filter(|sample| sample.family == &table::LEFT_OUT);
        found.map(|sample| sample.value).collect()
    }

    #[test]
    #[allow(clippy::float_cmp)]
    fn no_kind_takes_the_room_of_the_others() {
        let samples = fit(
            Vec::new(),
            MOST_OF_GUEST,
            [("a", things(1000, 5)), ("b", things(2, 7)), ("c", things(0, 1))],
        );
        assert!(samples.len() <= MOST_OF_GUEST && samples.len() > MOST_OF_GUEST - 5, "{}", samples.len());
        let [a, b, c] = left_out(&samples)[..] else { panic!() };
        assert_eq!((a, b, c), (974.0, 0.0, 0.0));
        let few = fit(Vec::new(), MOST_OF_GUEST, [("a", things(3, 5)), ("b", things(2, 7))]);
        assert_eq!((few.len(), left_out(&few)), (31, vec![0.0, 0.0]));
        let fewer = fit(Vec::new(), 15, [("a", things(3, 5)), ("b", things(2, 7))]);
        assert_eq!((fewer.len(), left_out(&fewer)), (14, vec![2.0, 1.0]), "no more than are wanted");
    }
}
