//! Parser of the processor lines of /proc/stat.

/// Time that a processor has spent since boot, in ticks. Values that the kernel does not count are absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// Number of the processor.
    pub processor: u64,
    /// Time in user mode.
    pub user: u64,
    /// Programs of low priority.
    pub nice: u64,
    /// Time in the kernel.
    pub system: u64,
    /// Idle time.
    pub idle: u64,
    /// Idle time while a disk request was pending (iowait).
    pub waiting: Option<u64>,
    /// Time in interrupt handlers.
    pub interrupts: Option<u64>,
    /// Deferred work of interrupts.
    pub soft_interrupts: Option<u64>,
    /// Taken by the hypervisor.
    pub stolen: Option<u64>,
    /// Guests of this machine; part of `user`.
    pub guest: Option<u64>,
    /// Guests of low priority; part of `nice`.
    pub guest_nice: Option<u64>,
}

/// The times of each processor that is online.
pub fn processors(file: &str) -> Vec<Times> {
    file.lines().filter_map(line).collect()
}

fn line(line: &str) -> Option<Times> {
    let mut fields = line.split_ascii_whitespace();
    let processor = fields.next()?.strip_prefix("cpu")?.parse().ok()?;
    let mut next = || fields.next()?.parse::<u64>().ok();
    Some(Times {
        processor,
        user: next()?,
        nice: next()?,
        system: next()?,
        idle: next()?,
        waiting: next(),
        interrupts: next(),
        soft_interrupts: next(),
        stolen: next(),
        guest: next(),
        guest_nice: next(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_processors() {
        let file = "cpu  3 3 3 3 3 3 3 3 3 3\ncpu0 1 2 3 4 5 6 7 8 9 10\ncpu11 1 2 3 4\ncpu2 1 2 3\ncpux 1 2 3 4\nintr 5\n";
        let times = processors(file);
        assert_eq!(times.len(), 2);
        assert_eq!((times[0].processor, times[0].user, times[0].idle), (0, 1, 4));
        assert_eq!((times[0].waiting, times[0].guest_nice), (Some(5), Some(10)));
        assert_eq!((times[1].processor, times[1].idle, times[1].waiting), (11, 4, None));
    }
}
