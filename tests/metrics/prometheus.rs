//! Debian's Prometheus reads what the host half serves, and its exporter says the same of this machine.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::host::{self, DEADLINE};
use crate::lab::{Lab, Sample, find, value};

const RULES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/prometheus/guestlet.rules.yml");
const TESTS_OF_RULES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/metrics/rules.yml");

/// One of Debian's programs, which `make setup` unpacks; `PROMETHEUS` names their directory.
pub fn program(name: &str) -> Command {
    let folder = std::env::var_os("PROMETHEUS").expect("PROMETHEUS must name a directory; make test sets it");
    let path = PathBuf::from(folder).join(name);
    assert!(path.is_file(), "{} is no file", path.display());
    Command::new(path)
}

/// Ends when it is dropped.
pub struct Server(pub Child);

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// The body of what is there; none as long as nobody listens.
pub fn get(port: u16, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    head.contains(" 200 ").then(|| body.to_owned())
}

#[test]
fn promtool_finds_nothing_wrong_with_metrics_and_rules() {
    let lab = Lab::new();
    let (_, body) = lab.get("/metrics", "text/plain");
    let mut command = program("promtool");
    command.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(body.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    for words in [["check", "rules", RULES], ["test", "rules", TESTS_OF_RULES]] {
        let output = program("promtool").args(words).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }
}

/// Prometheus, which scrapes this, and its port.
pub fn start_prometheus(folder: &Path, scrapes: &str) -> (Server, u16) {
    let port = free_port();
    let settings = format!(
        "global: {{ scrape_interval: 1s, evaluation_interval: 1s }}\nrule_files: ['{RULES}']\nscrape_configs:\n\
         {scrapes}"
    );
    std::fs::write(folder.join("prometheus.yml"), settings).unwrap();
    let log = std::fs::File::create(folder.join("prometheus.log")).unwrap();
    let child = program("prometheus")
        .arg(format!("--config.file={}", folder.join("prometheus.yml").display()))
        .arg(format!("--storage.tsdb.path={}", folder.join("prometheus").display()))
        .arg(format!("--web.listen-address=127.0.0.1:{port}"))
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap();
    (Server(child), port)
}

#[test]
fn prometheus_scrapes_all_guests_from_one_target() {
    let target = free_port();
    let lab = Lab::made("", "", host::Lab::new().set(&format!("metrics = '127.0.0.1:{target}'")));
    let scrapes =
        format!("- job_name: guestlet\n  static_configs: [{{ targets: ['127.0.0.1:{target}'] }}]\n");
    let (_prometheus, port) = start_prometheus(&lab.host.path(""), &scrapes);
    let query = |query: &str| -> Option<Value> {
        let answer: Value =
            serde_json::from_str(&get(port, &format!("/api/v1/query?query={query}"))?).unwrap();
        Some(answer["data"]["result"].clone())
    };
    lab.host.until("both guests are known", || {
        query("guestlet_guest_memory_total_bytes").is_some_and(|found| found.as_array().unwrap().len() == 2)
    });
    let found = query("guestlet_guest_up%7Bvm%3D%22web%22%7D").unwrap();
    assert_eq!(found[0]["value"][1], "1", "{found}");
    let targets: Value = serde_json::from_str(&get(port, "/api/v1/targets").unwrap()).unwrap();
    let target = &targets["data"]["activeTargets"][0];
    assert_eq!((&target["health"], &target["lastError"]), (&"up".into(), &"".into()), "{targets}");
    // The type is known by its name in OpenMetrics.
    let types: Value = serde_json::from_str(&get(port, "/api/v1/metadata").unwrap()).unwrap();
    assert_eq!(types["data"]["guestlet_guest_disk_read_bytes"][0]["type"], "counter", "{types}");
    lab.host.until("rules are evaluated, and none fails", || {
        let rules: Value = serde_json::from_str(&get(port, "/api/v1/rules").unwrap()).unwrap();
        let rules = rules["data"]["groups"][0]["rules"].as_array().unwrap().clone();
        rules.len() > 10 && rules.iter().all(|rule| rule["health"] == "ok")
    });
}

/// The sum over all processors, as guestlet tells it.
fn of_mode(samples: &[Sample], mode: &str) -> f64 {
    let of_it = |one: &&Sample| one.name == "node_cpu_seconds_total" && one.labels["mode"] == mode;
    samples.iter().filter(of_it).map(|one| one.value).sum()
}

fn theirs(samples: &[Sample], name: &str, labels: &[(&str, &str)]) -> f64 {
    let is = |one: &&Sample| {
        let has = |(label, value): &(&str, &str)| one.labels.get(*label).is_some_and(|known| known == value);
        one.name == name && labels.iter().all(has)
    };
    samples.iter().find(is).unwrap_or_else(|| panic!("{name} {labels:?}")).value
}

/// Ours, theirs, and whether it only goes up: then ours, which is asked for between two of theirs, is between them.
const SAME: [(&str, &str, bool); 19] = [
    ("memory_total_bytes", "node_memory_MemTotal_bytes", false),
    ("memory_available_bytes", "node_memory_MemAvailable_bytes", false),
    ("memory_cached_bytes", "node_memory_Cached_bytes", false),
    ("memory_buffers_bytes", "node_memory_Buffers_bytes", false),
    ("memory_slab_reclaimable_bytes", "node_memory_SReclaimable_bytes", false),
    ("swap_total_bytes", "node_memory_SwapTotal_bytes", false),
    ("files_max", "node_filefd_maximum", false),
    ("oom_kills_total", "node_vmstat_oom_kill", true),
    ("major_page_faults_total", "node_vmstat_pgmajfault", true),
    ("context_switches_total", "node_context_switches_total", true),
    ("forks_total", "node_forks_total", true),
    ("pressure_waiting_seconds_total cpu", "node_pressure_cpu_waiting_seconds_total", true),
    ("pressure_waiting_seconds_total memory", "node_pressure_memory_waiting_seconds_total", true),
    ("pressure_waiting_seconds_total io", "node_pressure_io_waiting_seconds_total", true),
    ("pressure_stalled_seconds_total memory", "node_pressure_memory_stalled_seconds_total", true),
    ("pressure_stalled_seconds_total io", "node_pressure_io_stalled_seconds_total", true),
    ("cpu_seconds_total user", "user", true),
    ("cpu_seconds_total system", "system", true),
    ("cpu_seconds_total steal", "steal", true),
];

/// Those of each disk, interface and file system.
const SAME_OF_THINGS: [(&str, &str, &str, bool); 11] = [
    ("disk_reads_total", "node_disk_reads_completed_total", "device", true),
    ("disk_read_bytes_total", "node_disk_read_bytes_total", "device", true),
    ("disk_written_bytes_total", "node_disk_written_bytes_total", "device", true),
    ("disk_busy_seconds_total", "node_disk_io_time_seconds_total", "device", true),
    ("network_received_bytes_total", "node_network_receive_bytes_total", "device", true),
    ("network_sent_packets_total", "node_network_transmit_packets_total", "device", true),
    ("filesystem_size_bytes", "node_filesystem_size_bytes", "mountpoint", false),
    ("filesystem_available_bytes", "node_filesystem_avail_bytes", "mountpoint", false),
    ("filesystem_inodes", "node_filesystem_files", "mountpoint", false),
    ("filesystem_inodes_free", "node_filesystem_files_free", "mountpoint", false),
    ("filesystem_readonly", "node_filesystem_readonly", "mountpoint", false),
];

#[test]
fn node_exporter_says_the_same() {
    let lab = Lab::new();
    let port = free_port();
    let log = std::fs::File::create(lab.host.path("exporter.log")).unwrap();
    let address = format!("--web.listen-address=127.0.0.1:{port}");
    let child = program("prometheus-node-exporter").arg(address).stderr(log).spawn().unwrap();
    let _exporter = Server(child);
    lab.host.until("the exporter answers", || get(port, "/metrics").is_some());
    let exported = || -> Vec<Sample> {
        let body = get(port, "/metrics").unwrap();
        body.lines().filter(|line| line.starts_with("node_")).map(Sample::of_line).collect()
    };
    // What goes up and down differs by what happens meanwhile: of a few rounds one has to fit.
    let mut differ = Vec::new();
    for _ in 0..20 {
        let (before, ours, after) = (exported(), lab.metrics("web"), exported());
        differ.clear();
        let mut compare = |what: String, is_counter: bool, ours: f64, before: f64, after: f64| {
            let (low, high) = (before.min(after), before.max(after));
            // Theirs are sums of what has been rounded to hundredths of a second.
            let jitter = if is_counter { 0.05 } else { 0.02 * high };
            if !(low - jitter..=high + jitter).contains(&ours) {
                differ.push(format!("{what}: {before} {ours} {after}"));
            }
        };
        for (name, other, is_counter) in SAME {
            let (name, word) = name.split_once(' ').unwrap_or((name, ""));
            let label = if name == "cpu_seconds_total" { "mode" } else { "resource" };
            let labels = [(label, word)];
            let own = value(&ours, name, if word.is_empty() { &[] } else { &labels });
            let other_of = |samples: &[Sample]| match label {
                "mode" => of_mode(samples, other),
                _ => theirs(samples, other, &[]),
            };
            compare(format!("{name} {word}"), is_counter, own, other_of(&before), other_of(&after));
        }
        for (name, other, label, is_counter) in SAME_OF_THINGS {
            let all = find(&ours, name, &[]);
            assert!(!all.is_empty() || label != "mountpoint", "{name}");
            for one in all {
                let labels = [(label, one.labels[label].as_str())];
                let (before, after) = (theirs(&before, other, &labels), theirs(&after, other, &labels));
                compare(format!("{name} {labels:?}"), is_counter, one.value, before, after);
            }
        }
        if differ.is_empty() {
            return;
        }
    }
    panic!("{differ:#?}");
}
