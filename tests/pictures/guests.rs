//! Guests, and how busy they are: files of /proc that count up as those of such a guest would.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::Duration;

/// A guest as its files show it.
pub struct Guest {
    pub name: &'static str,
    pub system: &'static str,
    pub address: &'static str,
    /// Of two processors, in percent.
    cpu: u64,
    /// In MiB.
    memory: u64,
    used: u64,
    /// Of the time, in percent, that something waits for processors, memory and disks.
    waiting: [u64; 3],
    /// In KiB a second.
    read: u64,
    written: u64,
}

pub const GUESTS: [Guest; 5] = [
    Guest {
        name: "web-1",
        system: "Debian GNU/Linux 12 (bookworm)",
        address: "192.0.2.11",
        cpu: 34,
        memory: 2048,
        used: 1130,
        waiting: [4, 0, 1],
        read: 120,
        written: 830,
    },
    Guest {
        name: "web-2",
        system: "Debian GNU/Linux 12 (bookworm)",
        address: "192.0.2.12",
        cpu: 29,
        memory: 2048,
        used: 1080,
        waiting: [3, 0, 1],
        read: 90,
        written: 760,
    },
    Guest {
        name: "db-1",
        system: "Rocky Linux 9.5 (Blue Onyx)",
        address: "192.0.2.21",
        cpu: 61,
        memory: 8192,
        used: 7410,
        waiting: [7, 12, 23],
        read: 18_400,
        written: 42_000,
    },
    Guest {
        name: "cache-1",
        system: "Alpine Linux v3.21",
        address: "192.0.2.31",
        cpu: 6,
        memory: 4096,
        used: 3350,
        waiting: [0, 1, 0],
        read: 0,
        written: 12,
    },
    Guest {
        name: "build-1",
        system: "Fedora Linux 42 (Cloud Edition)",
        address: "192.0.2.41",
        cpu: 97,
        memory: 16_384,
        used: 9200,
        waiting: [41, 0, 9],
        read: 5300,
        written: 9100,
    },
];

/// The files that stand in place of those of /proc and /etc, all in one directory.
pub const FILES: [(&str, &str); 8] = [
    ("stat", "/proc/stat"),
    ("meminfo", "/proc/meminfo"),
    ("diskstats", "/proc/diskstats"),
    ("cpu", "/proc/pressure/cpu"),
    ("memory", "/proc/pressure/memory"),
    ("io", "/proc/pressure/io"),
    ("os-release", "/etc/os-release"),
    ("osrelease", "/proc/sys/kernel/osrelease"),
];

impl Guest {
    /// The content of each of the files after that long. It always has as many bytes, so that it can be written in place.
    fn contents(&self, up: Duration) -> [String; 8] {
        let milliseconds = u64::try_from(up.as_millis()).unwrap();
        // Of processors: hundredths of seconds of both.
        let busy = milliseconds * self.cpu / 500;
        let idle = milliseconds * (100 - self.cpu) / 500;
        let half = |all: u64| format!("{:012} 0 0 {:012} 0 0 0 0 0 0", all / 2, idle / 2);
        let stat = format!("cpu  {busy:012} 0 0 {idle:012} 0 0 0 0 0 0\ncpu0 {0}\ncpu1 {0}\n", half(busy));
        let (total, free) = (self.memory << 10, (self.memory - self.used) << 10);
        let meminfo = format!("MemTotal: {total} kB\nMemFree: {free} kB\nMemAvailable: {free} kB\n");
        let sectors = |rate: u64| rate * milliseconds / 500;
        let disk = format!(
            " 254 0 vda {0:012} 0 {1:012} 0 {2:012} 0 {3:012} 0 0 0 0\n",
            sectors(self.read) / 64,
            sectors(self.read),
            sectors(self.written) / 64,
            sectors(self.written)
        );
        let pressure = |percent: u64| {
            let total = milliseconds * percent * 10;
            let line = format!("avg10={percent}.00 avg60={percent}.00 avg300={percent}.00 total={total:014}");
            format!("some {line}\nfull {line}\n")
        };
        let [cpu, memory, io] = self.waiting.map(pressure);
        let system = format!("NAME=\"{0}\"\nPRETTY_NAME=\"{0}\"\nID=linux\n", self.system);
        [stat, meminfo, disk, cpu, memory, io, system, "6.1.0-32-cloud-amd64\n".to_owned()]
    }

    pub fn write(&self, directory: &Path) {
        for ((name, _), content) in FILES.iter().zip(self.contents(Duration::from_secs(86400))) {
            std::fs::write(directory.join(name), content).unwrap();
        }
    }

    /// Counts up until the program ends.
    pub fn run(&self, directory: &Path) {
        let files: Vec<_> = FILES
            .iter()
            .map(|(name, _)| File::options().write(true).open(directory.join(name)).unwrap())
            .collect();
        let began = std::time::Instant::now();
        loop {
            let up = Duration::from_secs(86400) + began.elapsed();
            for (file, content) in files.iter().zip(self.contents(up)) {
                file.write_all_at(content.as_bytes(), 0).unwrap();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
