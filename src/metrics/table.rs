//! Table of all metrics of guests, one row each: the source of docs/metrics.md, agents' answers and `/metrics`.

use super::{Family, Kind};

/// Defines the table. A row has the constant, the kind, the name, the unit, the labels, the help text and the
/// source.
macro_rules! families {
    ($($constant:ident $kind:ident $name:literal $unit:literal [$($label:literal),*] $help:literal $source:literal;)*) => {
        $(
            #[doc = $help]
            #[allow(clippy::doc_markdown, reason = "Prometheus shows it as well, and knows no Markdown")]
            pub static $constant: Family = Family {
                name: $name,
                kind: Kind::$kind,
                unit: $unit,
                labels: &[$($label),*],
                help: $help,
                source: $source,
            };
        )*

        /// Every family, the most important ones first.
        pub static FAMILIES: &[&Family] = &[$(&$constant),*];
    };
}

families! {
    UP Gauge "up" "" [] "1 if the agent is connected and answers in time, otherwise 0; absent for a VM that is off or has no vsock." "";
    VM_INFO Gauge "vm_info" "" ["uuid", "cluster"] "1; the VM as the host half knows it." "";
    VM_POWER Gauge "vm_power_state" "" ["state"] "1 for the state that the VM is in (running, paused, off), and 0 for the other two (QMP: query-status)." "";
    VM_CPUS Gauge "vm_cpus" "" [] "Virtual processors that the VM has (query-cpus-fast)." "";
    VM_MEMORY Gauge "vm_memory_bytes" "bytes" [] "Memory that the VM was given, with what was hot-plugged (query-memory-size-summary)." "";
    VM_BALLOON Gauge "vm_balloon_bytes" "bytes" [] "Memory that the balloon leaves to the VM; absent if it has no balloon (query-balloon)." "";
    VM_DISKS_LEFT_OUT Gauge "vm_disks_left_out" "" [] "Disks of the VM left out because of limits." "";
    VM_DISK_READS Counter "vm_disk_reads" "" ["qdev", "serial"] "Read requests completed by QEMU for a disk of the VM (query-blockstats)." "";
    VM_DISK_WRITES Counter "vm_disk_writes" "" ["qdev", "serial"] "Write requests completed by it." "";
    VM_DISK_READ_BYTES Counter "vm_disk_read_bytes" "bytes" ["qdev", "serial"] "Bytes that were read for the VM." "";
    VM_DISK_WRITTEN_BYTES Counter "vm_disk_written_bytes" "bytes" ["qdev", "serial"] "Bytes that were written for the VM." "";
    VM_DISK_READ_TIME Counter "vm_disk_read_time_seconds" "seconds" ["qdev", "serial"] "Total time taken by read requests on the host." "";
    VM_DISK_WRITE_TIME Counter "vm_disk_write_time_seconds" "seconds" ["qdev", "serial"] "Total time taken by write requests on the host." "";
    INFO Gauge "info" "" ["boot_id", "kernel"] "1; counters start again from 0 with each boot_id." "/proc/sys/kernel, uname(2)";
    UPTIME Gauge "uptime_seconds" "seconds" [] "Since the boot." "/proc/uptime";
    FROZEN Gauge "filesystems_frozen" "" [] "1 while file systems are frozen, or being frozen, through guestlet." "the agent";
    UNITS_FAILED Gauge "units_failed" "" [] "Failed systemd units." "systemd (D-Bus)";
    OOM_KILLS Counter "oom_kills" "" [] "Processes killed by the kernel's out-of-memory killer." "/proc/vmstat";
    MEMORY_TOTAL Gauge "memory_total_bytes" "bytes" [] "Usable memory." "/proc/meminfo";
    MEMORY_AVAILABLE Gauge "memory_available_bytes" "bytes" [] "Memory available to programs without swapping (MemAvailable)." "/proc/meminfo";
    MEMORY_FREE Gauge "memory_free_bytes" "bytes" [] "Unused memory." "/proc/meminfo";
    MEMORY_BUFFERS Gauge "memory_buffers_bytes" "bytes" [] "Buffers of block devices." "/proc/meminfo";
    MEMORY_CACHED Gauge "memory_cached_bytes" "bytes" [] "The page cache, including shared memory." "/proc/meminfo";
    MEMORY_SHARED Gauge "memory_shared_bytes" "bytes" [] "Shared memory and tmpfs (Shmem)." "/proc/meminfo";
    MEMORY_SLAB_RECLAIMABLE Gauge "memory_slab_reclaimable_bytes" "bytes" [] "Kernel slab caches that can be reclaimed." "/proc/meminfo";
    MEMORY_SLAB_UNRECLAIMABLE Gauge "memory_slab_unreclaimable_bytes" "bytes" [] "Kernel slab memory that cannot be reclaimed." "/proc/meminfo";
    MEMORY_DIRTY Gauge "memory_dirty_bytes" "bytes" [] "Memory waiting to be written to disks." "/proc/meminfo";
    SWAP_TOTAL Gauge "swap_total_bytes" "bytes" [] "Swap space." "/proc/meminfo";
    SWAP_FREE Gauge "swap_free_bytes" "bytes" [] "Unused swap space." "/proc/meminfo";
    SWAP_IN Counter "swap_in_bytes" "bytes" [] "Memory read from swap." "/proc/vmstat";
    SWAP_OUT Counter "swap_out_bytes" "bytes" [] "Memory written to swap." "/proc/vmstat";
    MAJOR_FAULTS Counter "major_page_faults" "" [] "Page faults that had to wait for a disk." "/proc/vmstat";
    PRESSURE_WAITING Counter "pressure_waiting_seconds" "seconds" ["resource"] "Time in which at least one task waited for cpu, memory or io (PSI, some)." "/proc/pressure";
    PRESSURE_STALLED Counter "pressure_stalled_seconds" "seconds" ["resource"] "Time in which all tasks that had work to do waited for memory or io (PSI, full)." "/proc/pressure";
    LOAD_1 Gauge "load1" "" [] "Load average of 1 minute." "/proc/loadavg";
    LOAD_5 Gauge "load5" "" [] "Load average of 5 minutes." "/proc/loadavg";
    LOAD_15 Gauge "load15" "" [] "Load average of 15 minutes." "/proc/loadavg";
    CPUS Gauge "cpus" "" [] "Online processors." "/proc/stat";
    CPU Counter "cpu_seconds" "seconds" ["mode"] "Time of all processors together: user, nice, system, idle, iowait, irq, softirq, steal." "/proc/stat";
    CONTEXT_SWITCHES Counter "context_switches" "" [] "Context switches." "/proc/stat";
    FORKS Counter "forks" "" [] "Processes and threads started." "/proc/stat";
    PROCESSES_RUNNING Gauge "processes_running" "" [] "Running or runnable tasks." "/proc/stat";
    PROCESSES_BLOCKED Gauge "processes_blocked" "" [] "Tasks waiting for a disk." "/proc/stat";
    FILES_OPEN Gauge "files_open" "" [] "Open files in the kernel's table." "/proc/sys/fs/file-nr";
    FILES_MAX Gauge "files_max" "" [] "Limit of open files." "/proc/sys/fs/file-nr";
    CONNTRACK Gauge "conntrack_entries" "" [] "Connections tracked by netfilter." "/proc/sys/net/netfilter";
    CONNTRACK_MAX Gauge "conntrack_entries_max" "" [] "Limit of connections tracked by netfilter." "/proc/sys/net/netfilter";
    CLOCK_SYNCHRONIZED Gauge "clock_synchronized" "" [] "1 if the clock is synchronised, as reported to the kernel." "adjtimex(2)";
    CLOCK_OFFSET Gauge "clock_offset_seconds" "seconds" [] "Offset of the clock, as reported to the kernel by what synchronises it." "adjtimex(2)";
    CLOCK_MAX_ERROR Gauge "clock_max_error_seconds" "seconds" [] "Maximum error of the clock." "adjtimex(2)";
    UNRESPONSIVE Gauge "filesystems_unresponsive" "" [] "File systems that did not report their usage in time; these have no other series." "statvfs(3)";
    LEFT_OUT Gauge "left_out" "" ["kind"] "File systems, disks, interfaces, units, sensors and GPUs left out because of limits." "the agent";
    UNIT_FAILED Gauge "unit_failed" "" ["unit"] "1; a unit that has failed, ten at most." "systemd (D-Bus)";
    FS_SIZE Gauge "filesystem_size_bytes" "bytes" ["mountpoint", "fstype"] "Size of a file system." "statvfs(3)";
    FS_AVAILABLE Gauge "filesystem_available_bytes" "bytes" ["mountpoint", "fstype"] "Space available to users other than root." "statvfs(3)";
    FS_INODES Gauge "filesystem_inodes" "" ["mountpoint", "fstype"] "Inodes; absent if the file system has no fixed number." "statvfs(3)";
    FS_INODES_FREE Gauge "filesystem_inodes_free" "" ["mountpoint", "fstype"] "Free inodes." "statvfs(3)";
    FS_READ_ONLY Gauge "filesystem_readonly" "" ["mountpoint", "fstype"] "1 if it is mounted read-only, or the kernel reports that it made it so after an error; many kernels do not report that for ext4, whose errors are counted." "/proc/self/mountinfo";
    FS_ERRORS Counter "filesystem_errors" "" ["mountpoint", "fstype"] "Errors recorded in it since it was last checked (ext4)." "/sys/fs/ext4";
    DISK_INFO Gauge "disk_info" "" ["device", "serial"] "1; the serial number of a disk, which identifies it among those of the hypervisor; absent for a disk without one." "the monitor of disks";
    DISK_READS Counter "disk_reads" "" ["device"] "Read requests completed by a disk." "/proc/diskstats";
    DISK_WRITES Counter "disk_writes" "" ["device"] "Write requests completed by it." "/proc/diskstats";
    DISK_READ_BYTES Counter "disk_read_bytes" "bytes" ["device"] "Bytes read." "/proc/diskstats";
    DISK_WRITTEN_BYTES Counter "disk_written_bytes" "bytes" ["device"] "Bytes written." "/proc/diskstats";
    DISK_READ_TIME Counter "disk_read_time_seconds" "seconds" ["device"] "Total time taken by read requests." "/proc/diskstats";
    DISK_WRITE_TIME Counter "disk_write_time_seconds" "seconds" ["device"] "Total time taken by write requests." "/proc/diskstats";
    DISK_BUSY Counter "disk_busy_seconds" "seconds" ["device"] "Time in which the disk was busy." "/proc/diskstats";
    NET_RECEIVED Counter "network_received_bytes" "bytes" ["device"] "Bytes received by an interface." "/proc/net/dev";
    NET_SENT Counter "network_sent_bytes" "bytes" ["device"] "Bytes sent by it." "/proc/net/dev";
    NET_RECEIVED_PACKETS Counter "network_received_packets" "" ["device"] "Packets received by it." "/proc/net/dev";
    NET_SENT_PACKETS Counter "network_sent_packets" "" ["device"] "Packets sent by it." "/proc/net/dev";
    NET_RECEIVE_ERRORS Counter "network_receive_errors" "" ["device"] "Receive errors." "/proc/net/dev";
    NET_SEND_ERRORS Counter "network_send_errors" "" ["device"] "Transmit errors." "/proc/net/dev";
    NET_RECEIVE_DROPPED Counter "network_receive_dropped" "" ["device"] "Received packets that were dropped." "/proc/net/dev";
    NET_SEND_DROPPED Counter "network_send_dropped" "" ["device"] "Outgoing packets that were dropped." "/proc/net/dev";
    UNIT_MEMORY Gauge "unit_memory_bytes" "bytes" ["unit"] "Memory of a unit, including its page cache, for up to ten units that use the most memory, have used the most processor time lately, or wait the most." "cgroups, version 2";
    UNIT_CPU Counter "unit_cpu_seconds" "seconds" ["unit"] "Processor time of a unit." "cgroups, version 2";
    UNIT_PRESSURE Counter "unit_pressure_waiting_seconds" "seconds" ["unit", "resource"] "Time in which at least one task of a unit waited for cpu, memory or io." "cgroups, version 2";
    UNIT_OOM_KILLS Counter "unit_oom_kills" "" ["unit"] "Processes of a unit killed by the kernel's out-of-memory killer." "cgroups, version 2";
    TEMPERATURE Gauge "temperature_celsius" "celsius" ["sensor"] "Reading of a sensor." "/sys/class/hwmon, /sys/class/thermal";
    GPU_SUSPENDED Gauge "gpu_suspended" "" ["gpu", "driver"] "1 while a GPU of amdgpu, i915 or xe has suspended itself. It is not woken: its other series are absent then." "/sys/class/drm";
    GPU_BUSY Gauge "gpu_busy_ratio" "ratio" ["gpu"] "Utilisation of a GPU just now, as its driver reports it (amdgpu)." "/sys/class/drm";
    GPU_MEMORY_TOTAL Gauge "gpu_memory_total_bytes" "bytes" ["gpu"] "Memory of the GPU itself, its VRAM (amdgpu)." "/sys/class/drm";
    GPU_MEMORY_USED Gauge "gpu_memory_used_bytes" "bytes" ["gpu"] "Used part of that memory (amdgpu)." "/sys/class/drm";
    GPU_IDLE Counter "gpu_idle_seconds" "seconds" ["gpu", "gt"] "Time in which the engines of a GPU were powered down because they were idle (i915 and xe: RC6), for each GT." "/sys/class/drm";
}

/// Finds a metric that guests may report, by its name; with its place in the table.
pub fn of_guest(name: &str) -> Option<(usize, &'static Family)> {
    let mut all = FAMILIES.iter().copied().enumerate();
    all.find(|(_, family)| family.name == name && family.is_of_guest())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const MARK: &str =
        "<!-- Written from src/metrics/table.rs from here on: UPDATE_DOCS=1 cargo test --lib metrics:: -->\n";

    #[test]
    fn names_say_their_units() {
        let names: BTreeSet<_> = FAMILIES.iter().map(|family| family.name).collect();
        assert_eq!(names.len(), FAMILIES.len(), "a name is there twice");
        for family in FAMILIES {
            let name = family.name;
            assert!(family.unit.is_empty() || name.ends_with(&format!("_{}", family.unit)), "{name}");
            assert!(!name.ends_with("_total") && family.labels.iter().all(|label| *label != "vm"), "{name}");
            assert!(
                name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
            );
            assert!(family.help.ends_with('.') && !family.help.contains(['"', '\\', '\n', '|']), "{name}");
        }
    }

    fn page() -> String {
        let mut text = String::from(
            "| metric | type | unit | labels beside `vm` | what it tells | read from |\n|---|---|---|---|---|---|\n",
        );
        for family in FAMILIES {
            let labels: Vec<_> = family.labels.iter().map(|label| format!("`{label}`")).collect();
            let source = if family.is_of_guest() { family.source } else { "guestlet-host" };
            let row = [
                format!("`{}`", family.full_name()),
                family.kind.word().to_owned(),
                family.unit.to_owned(),
                labels.join(", "),
                family.help.to_owned(),
                source.to_owned(),
            ];
            text.extend(["| ", &row.join(" | "), " |\n"]);
        }
        text
    }

    #[test]
    #[allow(clippy::disallowed_methods)]
    fn the_page_in_docs_is_the_table() {
        let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/metrics.md");
        let found = std::fs::read_to_string(&file).unwrap();
        let (by_hand, written) = found.split_once(MARK).expect("docs/metrics.md has the mark");
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(&file, format!("{by_hand}{MARK}{}", page())).unwrap();
            return;
        }
        assert_eq!(written, page(), "UPDATE_DOCS=1 cargo test --lib metrics:: writes docs/metrics.md anew");
    }

    /// Guards against alerting rules about metrics that do not exist: such a rule would never fire.
    #[test]
    #[allow(clippy::disallowed_methods)]
    fn rules_are_about_metrics_that_there_are() {
        let file =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/prometheus/guestlet.rules.yml");
        let text = std::fs::read_to_string(file).unwrap();
        let names: BTreeSet<_> = FAMILIES.iter().map(|family| family.full_name()).collect();
        let is_of_name = |one: char| one.is_ascii_alphanumeric() || one == '_';
        let words =
            text.split(|one| !is_of_name(one)).filter(|word| word.starts_with(crate::metrics::PREFIX));
        let used: BTreeSet<_> = words.map(str::to_owned).collect();
        assert!(used.len() > 10, "{used:?}");
        assert!(used.is_subset(&names), "{:?}", used.difference(&names));
    }
}
