//! Parser of /proc/diskstats, the kernel's Documentation/admin-guide/iostats.rst: what every disk and partition
//! has read and written since it is there.

/// Reads, or writes, or discards.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Transfers {
    /// Requests that were completed.
    pub count: u64,
    /// Requests that were merged with an adjacent one; absent for partitions before kernel 2.6.25.
    pub merged: Option<u64>,
    /// Sectors of 512 bytes.
    pub sectors: u64,
    /// Milliseconds that all requests took, added up; absent for partitions before kernel 2.6.25.
    pub milliseconds: Option<u64>,
}

/// Requests in progress, of all types together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Activity {
    /// Requests that are not completed.
    pub in_progress: u64,
    /// Milliseconds with at least one of them.
    pub milliseconds: u64,
    /// Milliseconds of each request that was not completed, added.
    pub weighted_milliseconds: u64,
}

/// Requests to bring what was written to the medium.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Flushes {
    /// Requests that were completed.
    pub count: u64,
    /// Milliseconds that all of them took together.
    pub milliseconds: u64,
}

/// The counters of one disk or partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Statistics {
    /// Major and minor number.
    pub number: (u64, u64),
    /// Kernel name, such as `vda1`.
    pub name: String,
    /// Completed reads.
    pub reads: Transfers,
    /// Completed writes.
    pub writes: Transfers,
    /// Current activity; absent for partitions before kernel 2.6.25.
    pub activity: Option<Activity>,
    /// Discards (requests that released sectors); absent before Linux 4.18.
    pub discards: Option<Transfers>,
    /// Flushes; absent before Linux 5.5.
    pub flushes: Option<Flushes>,
}

/// Parses the lines of the file, in their order. Lines of another form are skipped.
pub fn parse(file: &str) -> Vec<Statistics> {
    file.lines().filter_map(line).collect()
}

fn line(line: &str) -> Option<Statistics> {
    let mut fields = line.split_ascii_whitespace();
    let number = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    let name = fields.next()?.to_owned();
    let mut counters = [0; 17];
    let mut count = 0;
    for (counter, field) in counters.iter_mut().zip(fields) {
        let Ok(value) = field.parse() else { break };
        *counter = value;
        count += 1;
    }
    let at = |place: usize| counters.get(place).copied().unwrap_or_default();
    let transfers = |first: usize| Transfers {
        count: at(first),
        merged: Some(at(first + 1)),
        sectors: at(first + 2),
        milliseconds: Some(at(first + 3)),
    };
    let short = |first: usize| Transfers { count: at(first), sectors: at(first + 1), ..Transfers::default() };
    let activity = Activity { in_progress: at(8), milliseconds: at(9), weighted_milliseconds: at(10) };
    Some(match count {
        11.. => Statistics {
            number,
            name,
            reads: transfers(0),
            writes: transfers(4),
            activity: Some(activity),
            discards: (count >= 15).then(|| transfers(11)),
            flushes: (count >= 17).then(|| Flushes { count: at(15), milliseconds: at(16) }),
        },
        4 => Statistics {
            number,
            name,
            reads: short(0),
            writes: short(2),
            activity: None,
            discards: None,
            flushes: None,
        },
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// From Linux 6.1, 4.18 and 2.6.24, with a broken one.
    const CAPTURED: &str = " 254       0 vda 443110 32105 25246858 1474332 80026 106124 55291128 330379 1 103712 1814857 \
        25418 63 7041592 8879 12968 1266\n   8       1 sda1 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15\n   3    1 hda1 10 20 30 40\n\
        8 2 sda2 1 2 3 4 5\nbroken\n";

    #[test]
    fn captured_lines() {
        let [vda, sda1, hda1] = <[Statistics; 3]>::try_from(parse(CAPTURED)).unwrap();
        assert_eq!((vda.number, vda.name.as_str()), ((254, 0), "vda"));
        let reads = Transfers {
            count: 443_110,
            merged: Some(32105),
            sectors: 25_246_858,
            milliseconds: Some(1_474_332),
        };
        assert_eq!(vda.reads, reads);
        assert_eq!(vda.writes.sectors, 55_291_128);
        assert_eq!(vda.activity.unwrap().weighted_milliseconds, 1_814_857);
        assert_eq!(vda.discards.unwrap().sectors, 7_041_592);
        assert_eq!(vda.flushes, Some(Flushes { count: 12968, milliseconds: 1266 }));
        assert_eq!(sda1.discards.unwrap().milliseconds, Some(15));
        assert_eq!(sda1.flushes, None);
        assert_eq!(hda1.reads, Transfers { count: 10, sectors: 20, ..Transfers::default() });
        assert_eq!(hda1.writes, Transfers { count: 30, sectors: 40, ..Transfers::default() });
        assert_eq!(hda1.activity, None);
    }

    proptest! {
        #[test]
        fn any_text_will_do(text: String) {
            prop_assert!(parse(&text).len() <= text.len());
        }
    }
}
