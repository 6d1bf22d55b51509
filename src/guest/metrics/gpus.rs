//! GPUs, as far as their drivers report in sysfs: amdgpu, i915 and xe. NVIDIA's driver reports nothing there.
//!
//! Reading most of these files wakes a GPU that has suspended itself, so none of them is read while it is
//! suspended.

use crate::guest::metrics::{Things, flag, numbered, put, whole};
use crate::metrics::{Family, Sample, table};
use crate::sys::root::Root;

const CARDS: &str = "/sys/class/drm";
const DRIVERS: [&str; 3] = ["amdgpu", "i915", "xe"];
/// Maximum number of GPUs, and of parts of one (graphics and media each, of up to two tiles).
const MOST: usize = 16;
const MOST_PARTS: usize = 4;
/// Maximum number of bytes read from a file: more than any number has.
const MOST_BYTES: u64 = 32;
/// Upper bounds of plausible values: bytes of memory, and milliseconds of idle time (some hundred years).
const MOST_MEMORY: u64 = 1 << 50;
const MOST_IDLE: u64 = 1 << 42;

/// Returns the samples of each GPU whose driver reports any.
pub(super) fn samples(root: &Root) -> Things {
    let cards = numbered(root, CARDS, "card", MOST).into_iter();
    let cards = cards.map(|name| card(root, &name).unwrap_or_default());
    cards.filter(|samples| !samples.is_empty()).collect()
}

/// Returns whether a device has suspended itself, or is about to.
pub(super) fn sleeps(root: &Root, device: &str) -> bool {
    status(root, device).starts_with("suspend")
}

/// Returns the runtime power status: `active`, `suspended`, `suspending`, `resuming`, `error`, `unsupported`;
/// empty if it cannot be read.
fn status(root: &Root, device: &str) -> String {
    root.line(&format!("{device}/power/runtime_status"))
}

fn card(root: &Root, name: &str) -> Option<Vec<Sample>> {
    let directory = format!("{CARDS}/{name}");
    let device = format!("{directory}/device");
    let driver = std::fs::read_link(root.path(&format!("{device}/driver"))).ok()?;
    let driver = driver.file_name()?.to_str().filter(|driver| DRIVERS.contains(driver))?;
    let mut samples = Vec::new();
    let is_awake = match status(root, &device).as_str() {
        "active" | "unsupported" => true,
        "suspended" | "suspending" => false,
        // In any other state reading might wake the GPU.
        _ => return None,
    };
    put(&mut samples, &table::GPU_SUSPENDED, &[name, driver], flag(!is_awake));
    match driver {
        _ if !is_awake => {}
        "amdgpu" => amdgpu(root, &device, name, &mut samples),
        "i915" => {
            let before = [format!("{directory}/power/rc6_residency_ms")];
            let parts = (0..MOST_PARTS).map(|part| format!("{directory}/gt/gt{part}/rc6_residency_ms"));
            // Before Linux 5.18 there was one file for all parts together.
            if !idle(root, parts, name, &mut samples) {
                idle(root, before.into_iter(), name, &mut samples);
            }
        }
        _ => {
            // The numbers of parts continue from one tile to the next.
            let parts = (0..MOST_PARTS).map(|part| {
                let at = |tile| format!("{device}/tile{tile}/gt{part}/gtidle/idle_residency_ms");
                if root.path(&at(1)).exists() { at(1) } else { at(0) }
            });
            idle(root, parts, name, &mut samples);
        }
    }
    Some(samples)
}

fn amdgpu(root: &Root, device: &str, name: &str, samples: &mut Vec<Sample>) {
    let file = |file: &str, most: u64| number(root, &format!("{device}/{file}"), most);
    if let Some(percent) = file("gpu_busy_percent", 100) {
        put(samples, &table::GPU_BUSY, &[name], whole(percent) / 100.0);
    }
    let Some(total) = file("mem_info_vram_total", MOST_MEMORY).filter(|total| *total > 0) else { return };
    let memory: [(&'static Family, _); 2] = [
        (&table::GPU_MEMORY_TOTAL, Some(total)),
        (&table::GPU_MEMORY_USED, file("mem_info_vram_used", total)),
    ];
    for (family, bytes) in memory {
        if let Some(bytes) = bytes {
            put(samples, family, &[name], whole(bytes));
        }
    }
}

/// Adds the idle time of each part. Returns whether any was found.
fn idle(root: &Root, files: impl Iterator<Item = String>, name: &str, samples: &mut Vec<Sample>) -> bool {
    let before = samples.len();
    for (part, file) in files.enumerate() {
        if let Some(milliseconds) = number(root, &file, MOST_IDLE) {
            let part = format!("gt{part}");
            put(samples, &table::GPU_IDLE, &[name, &part], whole(milliseconds) / 1000.0);
        }
    }
    samples.len() > before
}

/// Reads a file that consists of one number and a line break. A number without the line break may be cut off, and
/// is refused.
fn number(root: &Root, path: &str, most: u64) -> Option<u64> {
    let bytes = root.read_at_most(path, MOST_BYTES).ok()?;
    let digits = std::str::from_utf8(&bytes).ok()?.strip_suffix('\n')?;
    digits.parse().ok().filter(|number| *number <= most)
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::guest::metrics::told;

    struct Machine {
        _directory: tempfile::TempDir,
        root: Root,
    }

    impl Machine {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let root = Root::at(directory.path());
            Self { _directory: directory, root }
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.root.path(&format!("{CARDS}/{path}"));
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }

        /// Adds a GPU with this driver that is awake.
        fn gpu(&self, card: &str, driver: &str) {
            self.write(&format!("{card}/device/power/runtime_status"), "active\n");
            let link = self.root.path(&format!("{CARDS}/{card}/device/driver"));
            std::os::unix::fs::symlink(format!("../../../bus/pci/drivers/{driver}"), link).unwrap();
        }

        fn told(&self) -> Vec<String> {
            samples(&self.root).iter().flat_map(|gpu| told(gpu)).collect()
        }
    }

    #[test]
    fn each_driver_tells_what_it_has() {
        let machine = Machine::new();
        assert!(machine.told().is_empty());
        machine.gpu("card10", "amdgpu");
        machine.write("card10/device/gpu_busy_percent", "37\n");
        machine.write("card10/device/mem_info_vram_total", "17163091968\n");
        machine.write("card10/device/mem_info_vram_used", "27705344\n");
        machine.gpu("card2", "i915");
        machine.write("card2/gt/gt0/rc6_residency_ms", "1234567\n");
        machine.write("card2/gt/gt1/rc6_residency_ms", "1500\n");
        machine.write("card2/power/rc6_residency_ms", "9\n");
        machine.gpu("card3", "i915");
        machine.write("card3/power/rc6_residency_ms", "250\n");
        machine.gpu("card4", "xe");
        machine.write("card4/device/tile0/gt0/gtidle/idle_residency_ms", "7000\n");
        machine.write("card4/device/tile1/gt1/gtidle/idle_residency_ms", "8000\n");
        for (other, driver) in [("card0", "virtio-pci"), ("card1", "nvidia")] {
            machine.gpu(other, driver);
            machine.write(&format!("{other}/device/gpu_busy_percent"), "1\n");
        }
        machine.write("card2-HDMI-A-1/status", "connected\n");
        machine.write("version", "drm 1.1.0\n");
        let expected = [
            "gpu_suspended card2 i915 0",
            "gpu_idle_seconds card2 gt0 1234.567",
            "gpu_idle_seconds card2 gt1 1.5",
            "gpu_suspended card3 i915 0",
            "gpu_idle_seconds card3 gt0 0.25",
            "gpu_suspended card4 xe 0",
            "gpu_idle_seconds card4 gt0 7",
            "gpu_idle_seconds card4 gt1 8",
            "gpu_suspended card10 amdgpu 0",
            "gpu_busy_ratio card10 0.37",
            "gpu_memory_total_bytes card10 17163091968",
            "gpu_memory_used_bytes card10 27705344",
        ];
        assert_eq!(machine.told(), expected);
    }

    /// Reading the files of a suspended GPU would wake it: the test would see their values, because the files exist.
    #[test]
    fn a_gpu_that_sleeps_is_not_read() {
        let machine = Machine::new();
        machine.gpu("card0", "amdgpu");
        machine.write("card0/device/gpu_busy_percent", "37\n");
        for (status, expected) in [
            ("active\n", &["gpu_suspended card0 amdgpu 0", "gpu_busy_ratio card0 0.37"][..]),
            ("unsupported\n", &["gpu_suspended card0 amdgpu 0", "gpu_busy_ratio card0 0.37"]),
            ("suspended\n", &["gpu_suspended card0 amdgpu 1"]),
            ("suspending\n", &["gpu_suspended card0 amdgpu 1"]),
            ("resuming\n", &[]),
            ("error\n", &[]),
            ("", &[]),
        ] {
            machine.write("card0/device/power/runtime_status", status);
            assert_eq!(machine.told(), expected, "{status}");
        }
    }

    #[test]
    fn what_is_cut_off_or_absurd_is_absent() {
        let machine = Machine::new();
        machine.gpu("card0", "amdgpu");
        let bad = ["", "\n", "3", "101\n", "-1\n", "7 \n", "1\n2\n", "18446744073709551616\n", "busy\n"];
        for text in bad.into_iter().chain(["9".repeat(5000).as_str()]) {
            machine.write("card0/device/gpu_busy_percent", text);
            machine.write("card0/device/mem_info_vram_total", "100\n");
            machine.write("card0/device/mem_info_vram_used", text);
            let expected = ["gpu_suspended card0 amdgpu 0", "gpu_memory_total_bytes card0 100"];
            assert_eq!(machine.told(), expected, "{text:?}");
        }
        machine.write("card0/device/mem_info_vram_total", "0\n");
        machine.write("card0/device/mem_info_vram_used", "0\n");
        assert_eq!(machine.told(), ["gpu_suspended card0 amdgpu 0"]);
    }

    proptest! {
        #[test]
        fn any_bytes_will_do(bytes: Vec<u8>, most: u64) {
            let directory = tempfile::tempdir().unwrap();
            std::fs::write(directory.path().join("x"), &bytes).unwrap();
            if let Some(number) = number(&Root::at(directory.path()), "/x", most) {
                prop_assert!(number <= most && bytes.ends_with(b"\n"));
            }
        }
    }
}
