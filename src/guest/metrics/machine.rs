//! Parsers of files in /proc about the machine as a whole: each takes the text of a file, and adds its samples.

use crate::guest::metrics::{put, text, whole};
use crate::metrics::{Family, Sample, table};
use crate::sys::root::Root;

/// Resources for which the kernel measures pressure (PSI).
pub(super) const RESOURCES: [&str; 3] = ["cpu", "memory", "io"];

/// Columns of the CPU lines in /proc/stat, in their order.
const MODES: [&str; 8] = ["user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal"];

/// Adds the boot ID and the kernel release.
pub(super) fn info(root: &Root, samples: &mut Vec<Sample>) {
    let boot = text(root, "/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let release = text(root, "/proc/sys/kernel/osrelease").unwrap_or_default();
    if !boot.trim().is_empty() {
        put(samples, &table::INFO, &[boot.trim(), release.trim()], 1.0);
    }
}

/// Parses /proc/uptime, such as `123.45 678.90`: seconds since boot, and idle seconds of all processors.
pub(super) fn uptime(file: &str, samples: &mut Vec<Sample>) {
    let seconds = file.split_ascii_whitespace().next().and_then(|word| word.parse::<f64>().ok());
    if let Some(seconds) = seconds.filter(|seconds| seconds.is_finite() && *seconds >= 0.0) {
        put(samples, &table::UPTIME, &[], seconds);
    }
}

/// Returns the number after a name, in a file whose lines have a name and a number each.
fn named(file: &str, name: &str) -> Option<u64> {
    file.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next()? == name).then(|| words.next()?.parse().ok())?
    })
}

/// Parses /proc/vmstat, with lines such as `oom_kill 0`; `page` is the size of a page in bytes.
pub(super) fn vmstat(file: &str, page: u64, samples: &mut Vec<Sample>) {
    let rows: [(&str, &'static Family, u64); 4] = [
        ("oom_kill", &table::OOM_KILLS, 1),
        ("pswpin", &table::SWAP_IN, page),
        ("pswpout", &table::SWAP_OUT, page),
        ("pgmajfault", &table::MAJOR_FAULTS, 1),
    ];
    for (name, family, factor) in rows {
        if let Some(number) = named(file, name).and_then(|number| number.checked_mul(factor)) {
            put(samples, family, &[], whole(number));
        }
    }
}

/// Parses /proc/meminfo, with lines such as `MemTotal:       16318340 kB`.
pub(super) fn meminfo(file: &str, samples: &mut Vec<Sample>) {
    let rows: [(&str, &'static Family); 11] = [
        ("MemTotal:", &table::MEMORY_TOTAL),
        ("MemAvailable:", &table::MEMORY_AVAILABLE),
        ("MemFree:", &table::MEMORY_FREE),
        ("Buffers:", &table::MEMORY_BUFFERS),
        ("Cached:", &table::MEMORY_CACHED),
        ("Shmem:", &table::MEMORY_SHARED),
        ("SReclaimable:", &table::MEMORY_SLAB_RECLAIMABLE),
        ("SUnreclaim:", &table::MEMORY_SLAB_UNRECLAIMABLE),
        ("Dirty:", &table::MEMORY_DIRTY),
        ("SwapTotal:", &table::SWAP_TOTAL),
        ("SwapFree:", &table::SWAP_FREE),
    ];
    for (name, family) in rows {
        if let Some(bytes) = named(file, name).and_then(|kib| kib.checked_mul(1024)) {
            put(samples, family, &[], whole(bytes));
        }
    }
}

/// Returns the total in seconds from one line of a pressure file: `some avg10=0.00 avg60=0.00 avg300=0.00
/// total=29802767`
pub(super) fn waited(file: &str, kind: &str) -> Option<f64> {
    let line = file.lines().find(|line| line.split_ascii_whitespace().next() == Some(kind))?;
    let total = line.split_ascii_whitespace().find_map(|word| word.strip_prefix("total="))?;
    Some(whole(total.parse::<u64>().ok()?) / 1e6)
}

/// Parses a file of /proc/pressure. For processors, "full" is defined for control groups only, and left out.
pub(super) fn pressure(file: &str, resource: &str, samples: &mut Vec<Sample>) {
    if let Some(seconds) = waited(file, "some") {
        put(samples, &table::PRESSURE_WAITING, &[resource], seconds);
    }
    if let Some(seconds) = waited(file, "full").filter(|_| resource != "cpu") {
        put(samples, &table::PRESSURE_STALLED, &[resource], seconds);
    }
}

/// Parses /proc/loadavg, such as `3.32 1.68 1.56 2/345 6789`.
pub(super) fn load(file: &str, samples: &mut Vec<Sample>) {
    let averages = file.split_ascii_whitespace().map(|word| word.parse::<f64>().ok());
    for (family, average) in [&table::LOAD_1, &table::LOAD_5, &table::LOAD_15].into_iter().zip(averages) {
        if let Some(average) = average.filter(|average| average.is_finite() && *average >= 0.0) {
            put(samples, family, &[], average);
        }
    }
}

/// Parses /proc/stat; `tick` is the number of its ticks per second.
pub(super) fn stat(file: &str, tick: u64, samples: &mut Vec<Sample>) {
    let is_processor = |line: &&str| {
        let number = line.split_ascii_whitespace().next().and_then(|word| word.strip_prefix("cpu"));
        number.is_some_and(|number| number.parse::<u32>().is_ok())
    };
    let processors = file.lines().filter(is_processor).count() as u64;
    if processors > 0 {
        put(samples, &table::CPUS, &[], whole(processors));
    }
    let times = file.lines().find_map(|line| line.strip_prefix("cpu "));
    let times = times.into_iter().flat_map(str::split_ascii_whitespace).map(str::parse::<u64>);
    for (mode, time) in MODES.into_iter().zip(times) {
        if let Ok(time) = time {
            put(samples, &table::CPU, &[mode], whole(time) / whole(tick));
        }
    }
    let rows: [(&str, &'static Family); 4] = [
        ("ctxt", &table::CONTEXT_SWITCHES),
        ("processes", &table::FORKS),
        ("procs_running", &table::PROCESSES_RUNNING),
        ("procs_blocked", &table::PROCESSES_BLOCKED),
    ];
    for (name, family) in rows {
        if let Some(number) = named(file, name) {
            put(samples, family, &[], whole(number));
        }
    }
}

/// Parses /proc/sys/fs/file-nr, such as `1234 0 9223372036854775807`: open files, unused ones of these, and the
/// maximum.
pub(super) fn files(file: &str, samples: &mut Vec<Sample>) {
    let mut numbers = file.split_ascii_whitespace().map(|word| word.parse::<u64>().ok());
    let (open, most) = (numbers.next().flatten(), numbers.nth(1).flatten());
    for (family, number) in [(&table::FILES_OPEN, open), (&table::FILES_MAX, most)] {
        if let Some(number) = number {
            put(samples, family, &[], whole(number));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::guest::metrics::told;

    fn of(read: impl FnOnce(&mut Vec<Sample>)) -> Vec<String> {
        let mut samples = Vec::new();
        read(&mut samples);
        told(&samples)
    }

    #[test]
    fn captured_files() {
        let memory = "MemTotal:       24684084 kB\nMemFree:         1032 kB\nMemAvailable:   18001 kB\nCached:   x kB\nSwapCached: 5 kB\nSwapTotal:             0 kB\n";
        let expected = [
            "memory_total_bytes 25276502016",
            "memory_available_bytes 18433024",
            "memory_free_bytes 1056768",
            "swap_total_bytes 0",
        ];
        assert_eq!(of(|samples| meminfo(memory, samples)), expected);
        let virtual_memory =
            "nr_free_pages 100\npgmajfault 17\npswpin 2\npswpout 18446744073709551615\noom_kill 3\n";
        assert_eq!(
            of(|samples| vmstat(virtual_memory, 4096, samples)),
            ["oom_kills 3", "swap_in_bytes 8192", "major_page_faults 17"]
        );
        let waiting = "some avg10=0.00 avg60=0.00 avg300=0.00 total=29802767\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=9260586\n";
        assert_eq!(
            of(|samples| pressure(waiting, "memory", samples)),
            ["pressure_waiting_seconds memory 29.802767", "pressure_stalled_seconds memory 9.260586"]
        );
        assert_eq!(of(|samples| pressure(waiting, "cpu", samples)).len(), 1);
        assert!(of(|samples| pressure("some avg10=0.00\nfull total=-1\n", "io", samples)).is_empty());
        let processors = "cpu  100 0 250 4000 5 0 7 1 0 0\ncpu0 50 0 125 2000 2 0 3 0 0 0\ncpu1 50 0 125 2000 3 0 4 1 0 0\nintr 9 0 1\nctxt 77\nbtime 1\nprocesses 12\nprocs_running 2\nprocs_blocked 0\n";
        let told = of(|samples| stat(processors, 100, samples));
        assert_eq!(
            told[..4],
            ["cpus 2", "cpu_seconds user 1", "cpu_seconds nice 0", "cpu_seconds system 2.5"]
        );
        assert_eq!(
            told[9..],
            ["context_switches 77", "forks 12", "processes_running 2", "processes_blocked 0"]
        );
        assert_eq!(
            of(|samples| files("1234\t0\t9223372036854775807\n", samples)),
            ["files_open 1234", "files_max 9223372036854776000"]
        );
        assert_eq!(
            of(|samples| load("0.52 0.58 0.59 1/2 3\n", samples)),
            ["load1 0.52", "load5 0.58", "load15 0.59"]
        );
        assert_eq!(of(|samples| uptime("12.25 99\n", samples)), ["uptime_seconds 12.25"]);
        assert!(
            of(|samples| uptime("inf 1\n", samples)).is_empty()
                && of(|samples| load("nan", samples)).is_empty()
        );
    }

    proptest! {
        #[test]
        fn any_text_will_do(text in "(cpu[0-9]{0,2}|oom_kill|pswpin|MemTotal:|some|full|total=|[0-9]{1,25}|-1|nan|inf| |\n|\\PC){0,60}") {
            let mut samples = Vec::new();
            for parse in [meminfo, load, files, uptime] {
                parse(&text, &mut samples);
            }
            vmstat(&text, 4096, &mut samples);
            stat(&text, 100, &mut samples);
            pressure(&text, "io", &mut samples);
            prop_assert!(samples.len() < 60);
            prop_assert!(samples.iter().all(|sample| sample.value.is_finite() && sample.value >= 0.0));
        }
    }
}
