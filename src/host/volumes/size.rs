//! Sizes of volumes: chooses a size within a requested range. Pure.

use super::problem::{Kind, Problem};

/// Size of a volume if the request gives none: 1 GiB.
const USUAL: u64 = 1 << 30;
/// Size of the smallest volume: 10 MiB.
pub const SMALLEST: u64 = 10 << 20;
/// Size of the largest volume: 64 TiB.
const LARGEST: u64 = 64 << 40;
/// Sizes are rounded up to multiples of this, if the limit permits: 2 MiB.
const STEP: u64 = 2 << 20;
/// Sizes are always multiples of this.
const SECTOR: u64 = 512;

/// Acceptable sizes in bytes; 0 is no bound.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Range {
    /// Smallest acceptable size; 0: no bound.
    pub required: u64,
    /// Largest acceptable size; 0: no bound.
    pub limit: u64,
}

impl Range {
    /// Validates a capacity range as CSI represents it.
    ///
    /// # Errors
    /// If a bound is negative, or the limit is less than the required size.
    pub fn new(required: i64, limit: i64) -> Result<Self, Problem> {
        let invalid = |problem: &str| Problem::new(Kind::Invalid, format!("capacity_range: {problem}"));
        let number = |number: i64| u64::try_from(number).map_err(|_| invalid("a size is negative"));
        let range = Self { required: number(required)?, limit: number(limit)? };
        if range.limit > 0 && range.limit < range.required {
            return Err(invalid("limit_bytes is less than required_bytes"));
        }
        Ok(range)
    }

    /// Reports whether a size is within the range.
    pub fn has(self, size: u64) -> bool {
        size >= self.required && (self.limit == 0 || size <= self.limit)
    }

    /// Chooses the size of a new volume.
    ///
    /// # Errors
    /// If no volume can have such a size.
    pub fn choose(self) -> Result<u64, Problem> {
        let wanted = match self.required {
            0 if self.limit > 0 => USUAL.min(self.limit / SECTOR * SECTOR).max(SMALLEST),
            0 => USUAL,
            required => required.max(SMALLEST),
        };
        self.round(wanted)
    }

    /// Chooses the new size of a volume that has `size` now.
    ///
    /// # Errors
    /// If no volume can have such a size.
    pub fn grow(self, size: u64) -> Result<u64, Problem> {
        if self.has(size) {
            return Ok(size);
        }
        self.round(self.required.max(size))
    }

    fn round(self, wanted: u64) -> Result<u64, Problem> {
        let up = |step: u64| wanted.checked_next_multiple_of(step);
        let fits = |size: &u64| self.has(*size) && *size <= LARGEST;
        [up(STEP), up(SECTOR)].into_iter().flatten().find(fits).ok_or_else(|| {
            let Self { required, limit } = self;
            let limit = if limit > 0 { format!(" and at most {limit}") } else { String::new() };
            Problem::new(
                Kind::OutOfRange,
                format!(
                    "no size of a volume is at least {required} bytes{limit}: sizes are {SMALLEST} to \
                     {LARGEST}, in multiples of {SECTOR}, and volumes cannot shrink"
                ),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: i64 = 1 << 20;

    #[test]
    fn sizes_of_new_volumes() {
        let size = |required, limit| {
            Range::new(required, limit).and_then(Range::choose).map_err(|problem| problem.kind)
        };
        for (required, limit, expected) in [
            (0, 0, Ok(1 << 30)),
            (1, 0, Ok(10 << 20)),
            (5 * MIB, 0, Ok(10 << 20)),
            (11 * MIB, 0, Ok(12 << 20)),
            (11 * MIB, 11 * MIB, Ok(11 << 20)),
            (0, 20 * MIB + 5, Ok(20 << 20)),
            (0, 64 << 40, Ok(1 << 30)),
            (64 << 40, 0, Ok(64 << 40)),
            ((64 << 40) + 1, 0, Err(Kind::OutOfRange)),
            (i64::MAX, 0, Err(Kind::OutOfRange)),
            (11 * MIB + 1, 11 * MIB + 1, Err(Kind::OutOfRange)),
            (0, 5 * MIB, Err(Kind::OutOfRange)),
            (-1, 0, Err(Kind::Invalid)),
            (2, 1, Err(Kind::Invalid)),
        ] {
            assert_eq!(size(required, limit), expected, "{required} {limit}");
        }
    }

    #[test]
    fn sizes_of_volumes_that_grow() {
        let size = |required, limit| {
            Range::new(required, limit).unwrap().grow(20 << 20).map_err(|problem| problem.kind)
        };
        for (required, limit, expected) in [
            (5 * MIB, 0, Ok(20 << 20)),
            (21 * MIB, 0, Ok(22 << 20)),
            (0, 10 * MIB, Err(Kind::OutOfRange)),
            (0, 0, Ok(20 << 20)),
        ] {
            assert_eq!(size(required, limit), expected, "{required} {limit}");
        }
    }

    proptest! {
        #[test]
        fn a_size_is_in_its_range(required in 0..i64::MAX, limit in 0..i64::MAX) {
            if let Ok(range) = Range::new(required, limit)
                && let Ok(size) = range.choose()
            {
                prop_assert!(range.has(size) && size % SECTOR == 0 && (SMALLEST..=LARGEST).contains(&size));
            }
        }
    }
}
