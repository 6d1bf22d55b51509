//! Temperatures, where the kernel shows sensors.

use std::collections::{BTreeMap, BTreeSet};

use crate::guest::metrics::{Things, gpus, numbered, put, whole};
use crate::metrics::table;
use crate::sys::root::Root;

const HARDWARE: &str = "/sys/class/hwmon";
const ZONES: &str = "/sys/class/thermal";
/// Maximum number of chips and zones, of inputs of a chip, and of all sensors.
const MOST_CHIPS: usize = 16;
const MOST_INPUTS: usize = 16;
const MOST: usize = 32;
/// Range of plausible temperatures in thousandths of a degree: a value outside comes from a broken sensor.
const POSSIBLE: std::ops::Range<i64> = -100_000..300_000;

/// Returns one series for each sensor; thermal zones are used only where no other sensor exists.
pub(super) fn samples(root: &Root) -> Things {
    let (mut found, mut names) = (Vec::new(), BTreeMap::new());
    for chip in numbered(root, HARDWARE, "hwmon", MOST_CHIPS) {
        let chip = format!("{HARDWARE}/{chip}");
        // Reading the chip of a suspended GPU would wake it.
        if gpus::sleeps(root, &format!("{chip}/device")) {
            continue;
        }
        let name = unique(root.line(&format!("{chip}/name")), &mut names);
        for number in 1..=MOST_INPUTS {
            let input = format!("{chip}/temp{number}");
            let label = root.line(&format!("{input}_label"));
            let label = if label.is_empty() { format!("temp{number}") } else { label };
            found.extend(sensor(root, &format!("{input}_input"), &format!("{name}/{label}")));
        }
    }
    if found.is_empty() {
        for zone in numbered(root, ZONES, "thermal_zone", MOST_CHIPS) {
            let zone = format!("{ZONES}/{zone}");
            let name = unique(root.line(&format!("{zone}/type")), &mut names);
            found.extend(sensor(root, &format!("{zone}/temp"), &name));
        }
    }
    // Labels of one chip need not differ, but series must.
    let mut names = BTreeSet::new();
    found.retain(|(name, _)| names.insert(name.clone()));
    found.truncate(MOST);
    let one = |(name, degrees): (String, f64)| {
        let mut samples = Vec::new();
        put(&mut samples, &table::TEMPERATURE, &[&name], degrees);
        samples
    };
    found.into_iter().map(one).collect()
}

/// Tells chips of the same kind apart, as of two NVMe disks: the second `nvme` is `nvme-2`.
fn unique(name: String, seen: &mut BTreeMap<String, usize>) -> String {
    let count = seen.entry(name.clone()).or_insert(0);
    *count += 1;
    if *count == 1 { name } else { format!("{name}-{count}") }
}

/// Reads a temperature in thousandths of a degree, such as `45000`.
fn sensor(root: &Root, file: &str, name: &str) -> Option<(String, f64)> {
    let shown = root.line(file).parse::<i64>().ok().filter(|shown| POSSIBLE.contains(shown))?;
    let degrees = whole(shown.unsigned_abs()) / 1000.0;
    Some((name.to_owned(), if shown < 0 { -degrees } else { degrees }))
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;
    use crate::guest::metrics::told;

    #[test]
    fn chips_and_else_zones() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        let write = |path: &str, text: &str| {
            let path = root.path(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let all = || samples(&root).iter().flat_map(|sensor| told(sensor)).collect::<Vec<_>>();
        assert!(all().is_empty());
        write("/sys/class/thermal/thermal_zone0/type", "acpitz\n");
        write("/sys/class/thermal/thermal_zone0/temp", "27800\n");
        write("/sys/class/thermal/cooling_device0/type", "fan\n");
        assert_eq!(all(), ["temperature_celsius acpitz 27.8"]);
        write("/sys/class/hwmon/hwmon1/name", "k10temp\n");
        write("/sys/class/hwmon/hwmon1/temp1_input", "45125\n");
        write("/sys/class/hwmon/hwmon1/temp1_label", "Tctl\n");
        write("/sys/class/hwmon/hwmon1/temp2_input", "-5500\n");
        write("/sys/class/hwmon/hwmon1/temp3_input", "999999999\n");
        write("/sys/class/hwmon/hwmon1/temp4_input", "none\n");
        assert_eq!(
            all(),
            ["temperature_celsius k10temp/Tctl 45.125", "temperature_celsius k10temp/temp2 -5.5"]
        );
        write("/sys/class/hwmon/hwmon1/device/power/runtime_status", "suspended\n");
        assert_eq!(all(), ["temperature_celsius acpitz 27.8"], "what sleeps is not asked");
        write("/sys/class/hwmon/hwmon1/device/power/runtime_status", "unsupported\n");
        assert_eq!(all().len(), 2);
        for number in [2, 10, 3] {
            write(&format!("/sys/class/hwmon/hwmon{number}/name"), "nvme\n");
            write(&format!("/sys/class/hwmon/hwmon{number}/temp1_input"), &format!("{number}000\n"));
        }
        assert_eq!(
            all()[2..],
            [
                "temperature_celsius nvme/temp1 2",
                "temperature_celsius nvme-2/temp1 3",
                "temperature_celsius nvme-3/temp1 10"
            ]
        );
    }
}
