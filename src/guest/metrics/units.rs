//! Memory use, processor use and memory pressure of systemd's units, from their control groups (version 2). Single
//! processes are not examined.

use std::collections::{BTreeMap, BTreeSet};

use crate::guest::metrics::{Things, machine, put, whole};
use crate::metrics::table;
use crate::sys::root::Root;

/// Mount points of version 2: alone, or beside version 1.
const MOUNTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
/// Slices whose units are reported one by one; any other slice is reported as a whole.
const OPENED: [&str; 2] = ["system.slice", "machine.slice"];
/// Suffixes of the units whose control groups contain processes.
const SUFFIXES: [&str; 3] = [".service", ".scope", ".slice"];
/// Maximum number of units that are examined, and of entries of a directory that are read.
const MOST: usize = 256;
const MOST_ENTRIES: usize = 4096;
/// Maximum number of units that are reported.
const TOLD: usize = 10;
/// Maximum number of bytes read from a file.
const MOST_BYTES: u64 = 64 * 1024;

/// Usage of each unit at the last measurement: microseconds of processor time, and seconds of waiting for memory.
#[derive(Debug, Default)]
pub(super) struct Before(BTreeMap<String, (u64, f64)>);

/// Measurements of one unit.
#[derive(Debug, Clone, PartialEq)]
struct Unit {
    name: String,
    directory: String,
    memory: Option<u64>,
    /// Processor time in microseconds.
    cpu: Option<u64>,
    /// Seconds for which some process of the unit waited for memory.
    waited: Option<f64>,
}

/// Returns the series of the units that use most memory, and of those that have used most processor time or waited
/// most since the last measurement.
pub(super) fn samples(root: &Root, before: &mut Before) -> Things {
    let Some(mount) = MOUNTS.into_iter().find(|at| root.path(&format!("{at}/cgroup.controllers")).exists())
    else {
        return Things::new();
    };
    let mut found = directories(root, mount, "");
    found.retain(|(name, _)| !OPENED.contains(&name.as_str()));
    for slice in OPENED {
        found.extend(directories(root, mount, slice));
    }
    let mut names = BTreeSet::new();
    found.retain(|(name, _)| names.insert(name.clone()));
    found.truncate(MOST);
    let units: Vec<_> = found.into_iter().map(|(name, directory)| unit(root, name, directory)).collect();
    let chosen = chosen(&units, before);
    before.0 = units.iter().map(|one| (one.name.clone(), one.used())).collect();
    chosen.into_iter().map(|unit| series(root, unit)).filter(|series| !series.is_empty()).collect()
}

/// Returns the names of the units below a slice, with their directories.
fn directories(root: &Root, mount: &str, slice: &str) -> Vec<(String, String)> {
    let directory = format!("{mount}/{slice}");
    let entries = std::fs::read_dir(root.path(&directory)).into_iter().flatten().take(MOST_ENTRIES).flatten();
    let name = |entry: std::fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        let is_unit = SUFFIXES.iter().any(|suffix| name.ends_with(suffix));
        let path = format!("{}/{name}", directory.trim_end_matches('/'));
        is_unit.then_some((name, path))
    };
    entries.filter_map(name).collect()
}

fn file(root: &Root, directory: &str, name: &str) -> Option<String> {
    let bytes = root.read_at_most(&format!("{directory}/{name}"), MOST_BYTES).ok()?;
    String::from_utf8(bytes).ok()
}

/// Returns the number after a name.
fn named(file: &str, name: &str) -> Option<u64> {
    file.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

fn unit(root: &Root, name: String, directory: String) -> Unit {
    let read = |name| file(root, &directory, name);
    let memory = read("memory.current").and_then(|file| file.trim().parse().ok());
    let cpu = read("cpu.stat").and_then(|file| named(&file, "usage_usec"));
    let waited = read("memory.pressure").and_then(|file| machine::waited(&file, "some"));
    Unit { name, directory, memory, cpu, waited }
}

impl Unit {
    fn used(&self) -> (u64, f64) {
        (self.cpu.unwrap_or_default(), self.waited.unwrap_or_default())
    }
}

/// Selects units by the three criteria in turn, each unit once.
fn chosen<'u>(units: &'u [Unit], before: &Before) -> Vec<&'u Unit> {
    let since = |unit: &Unit| {
        let (cpu, waited) = unit.used();
        let (cpu_then, waited_then) = before.0.get(&unit.name).copied().unwrap_or_default();
        // A counter that is lower than before belongs to a restarted unit: all of it counts.
        let cpu = cpu.checked_sub(cpu_then).unwrap_or(cpu);
        (cpu, if waited >= waited_then { waited - waited_then } else { waited })
    };
    let mut orders = [units.iter().collect::<Vec<_>>(), units.iter().collect(), units.iter().collect()];
    orders[0].sort_by_key(|unit| std::cmp::Reverse(unit.memory));
    orders[1].sort_by_cached_key(|unit| std::cmp::Reverse(since(unit).0));
    orders[2].sort_by(|one, other| since(other).1.total_cmp(&since(one).1));
    let mut names = BTreeSet::new();
    let in_turns = (0..units.len()).flat_map(|place| orders.iter().map(move |order| order[place]));
    in_turns.filter(|unit| names.insert(unit.name.as_str())).take(TOLD).collect()
}

fn series(root: &Root, unit: &Unit) -> Vec<crate::metrics::Sample> {
    let mut samples = Vec::new();
    if let Some(memory) = unit.memory {
        put(&mut samples, &table::UNIT_MEMORY, &[&unit.name], whole(memory));
    }
    if let Some(cpu) = unit.cpu {
        put(&mut samples, &table::UNIT_CPU, &[&unit.name], whole(cpu) / 1e6);
    }
    let events = file(root, &unit.directory, "memory.events").and_then(|file| named(&file, "oom_kill"));
    if let Some(kills) = events {
        put(&mut samples, &table::UNIT_OOM_KILLS, &[&unit.name], whole(kills));
    }
    for resource in machine::RESOURCES {
        let waited = match resource {
            "memory" => unit.waited,
            _ => file(root, &unit.directory, &format!("{resource}.pressure"))
                .and_then(|file| machine::waited(&file, "some")),
        };
        if let Some(waited) = waited {
            put(&mut samples, &table::UNIT_PRESSURE, &[&unit.name, resource], waited);
        }
    }
    samples
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;
    use crate::guest::metrics::told;

    fn make(root: &Root, directory: &str, files: &[(&str, &str)]) {
        let directory = root.path(&format!("/sys/fs/cgroup/{directory}"));
        std::fs::create_dir_all(&directory).unwrap();
        for (name, text) in files {
            std::fs::write(directory.join(name), text).unwrap();
        }
    }

    #[test]
    fn units_are_found_and_what_they_do_not_say_is_absent() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        assert!(samples(&root, &mut Before::default()).is_empty(), "without version 2 there are none");
        make(&root, "", &[("cgroup.controllers", "")]);
        let waited = "some avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=1\n";
        make(
            &root,
            "system.slice/web.service",
            &[
                ("memory.current", "4096\n"),
                ("cpu.stat", "usage_usec 2500000\nuser_usec 1\n"),
                ("memory.pressure", waited),
                ("memory.events", "low 0\noom 1\noom_kill 1\n"),
            ],
        );
        make(&root, "system.slice/dev-x.mount", &[("memory.current", "1\n")]);
        make(
            &root,
            "system.slice/broken.service",
            &[("memory.current", "max\n"), ("cpu.stat", "usage_usec\n")],
        );
        make(&root, "user.slice/user-0.slice", &[("memory.current", "1\n")]);
        make(&root, "user.slice", &[("memory.current", "8192\n")]);
        let found: Vec<_> = samples(&root, &mut Before::default()).iter().map(|unit| told(unit)).collect();
        let expected = [
            vec!["unit_memory_bytes user.slice 8192".to_owned()],
            vec![
                "unit_memory_bytes web.service 4096".to_owned(),
                "unit_cpu_seconds web.service 2.5".to_owned(),
                "unit_oom_kills web.service 1".to_owned(),
                "unit_pressure_waiting_seconds web.service memory 1.5".to_owned(),
            ],
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn who_works_now_comes_before_who_has_worked_long_ago() {
        let unit = |name: &str, memory, cpu| Unit {
            name: name.into(),
            directory: String::new(),
            memory: Some(memory),
            cpu: Some(cpu),
            waited: None,
        };
        let mut units: Vec<_> =
            (0..100).map(|number| unit(&format!("u{number}"), number, 1_000_000)).collect();
        let before = Before(units.iter().map(|unit| (unit.name.clone(), unit.used())).collect());
        units[3].cpu = Some(1_000_500);
        units[5].waited = Some(0.5);
        let names: Vec<_> = chosen(&units, &before).into_iter().map(|unit| unit.name.as_str()).collect();
        assert_eq!(names[..3], ["u99", "u3", "u5"]);
        assert_eq!(names.len(), TOLD);
    }

    #[test]
    fn of_ten_thousand_units_so_many_are_looked_at() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        make(&root, "", &[("cgroup.controllers", "")]);
        for number in 0..2 * MOST {
            make(&root, &format!("system.slice/u{number}.service"), &[("memory.current", "1\n")]);
        }
        let mut before = Before::default();
        assert_eq!(samples(&root, &mut before).len(), TOLD);
        assert_eq!(before.0.len(), MOST);
    }
}
