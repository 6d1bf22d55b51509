//! Many guests on one page, which Debian's Prometheus reads: all of each, and what is wrong with one is wrong with no other.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use guestlet::metrics::{MOST_OF_GUEST, MOST_SERIES};
use serde_json::Value;

use crate::crowd::{self, Crowd, Manner, name};
use crate::host;
use crate::prometheus::{free_port, get, start_prometheus};
use crate::soak::steps;

const LYING: usize = 1;
const SLOW: usize = 2;
const SILENT: usize = 3;

/// What Prometheus has, by VMs.
type ByVm = BTreeMap<String, f64>;

/// Answers of Prometheus to queries of one moment.
struct Moment {
    port: u16,
    time: String,
}

impl Moment {
    fn now(port: u16) -> Option<Self> {
        let found: Value = serde_json::from_str(&get(port, "/api/v1/query?query=time()")?).unwrap();
        Some(Self { port, time: found["data"]["result"][1].as_str()?.to_owned() })
    }

    fn of(&self, query: &str) -> ByVm {
        let query = query.bytes().map(|byte| format!("%{byte:02x}")).collect::<Vec<_>>().concat();
        let path = format!("/api/v1/query?time={}&query={query}", self.time);
        let answer: Value = serde_json::from_str(&get(self.port, &path).unwrap()).unwrap();
        let all = answer["data"]["result"].as_array().unwrap_or_else(|| panic!("{answer}"));
        let of_vm = |one: &Value| {
            let value = one["value"][1].as_str().unwrap().parse().unwrap();
            (one["metric"]["vm"].as_str().unwrap_or_default().to_owned(), value)
        };
        let found: ByVm = all.iter().map(of_vm).collect();
        assert_eq!(found.len(), all.len(), "each VM once: {query}");
        found
    }
}

/// What is not yet as it has to be, of all these guests.
fn missing(moment: &Moment, guests: usize) -> Option<String> {
    let up = moment.of("guestlet_guest_up");
    let series = moment.of("count by (vm) ({__name__=~\"guestlet_guest_.+\"})");
    let load = moment.of("guestlet_guest_load1");
    for number in 0..guests {
        let (name, silent) = (name(number), number == SLOW || number == SILENT);
        let found = [&up, &series, &load].map(|by_vm| by_vm.get(&name).copied());
        let own = f64::from(u32::try_from(number).unwrap());
        let (few, all) = (f64::from(2), f64::from(u32::try_from(MOST_OF_GUEST + 2).unwrap()));
        let is_so = match found {
            [Some(up), Some(series), load] if silent => (up, series, load) == (0.0, few, None),
            [Some(up), Some(series), _] if number == LYING => up >= 1.0 && series <= all,
            found => found == [Some(1.0), Some(all), Some(own)],
        };
        if !is_so {
            return Some(format!("{name}: up, series, load1: {found:?}"));
        }
    }
    // It is waited for, and counted: its series were not just left out.
    let late = moment.of("guestlet_host_guest_metrics_total{outcome=\"late\"}");
    if late.values().sum::<f64>() < 1.0 {
        return Some(format!("nobody was late: {late:?}"));
    }
    let others: Vec<_> = series.keys().filter(|vm| !(0..guests).any(|number| name(number) == **vm)).collect();
    assert!(others.is_empty(), "guests that nobody has: {others:?}");
    None
}

#[test]
fn prometheus_has_all_of_many_guests_and_what_is_wrong_with_one_is_wrong_with_no_other() {
    let guests = steps(50, 1000);
    let target = free_port();
    let lab = host::Lab::new();
    let mut manners = vec![Manner::Good; guests];
    manners[LYING] = Manner::Lying;
    manners[SLOW] = Manner::Slow;
    manners[SILENT] = Manner::Silent;
    let _crowd = Crowd::start(&lab.path(""), manners);
    let vms = crowd::listed(&lab.path(""), guests);
    let lab = lab.set(&format!("metrics = '127.0.0.1:{target}'")).set(&vms).start();
    let scrapes = format!(
        "- job_name: guestlet\n  scrape_interval: {}s\n  scrape_timeout: {0}s\n  static_configs: [{{ targets: ['127.0.0.1:{target}'] }}]\n",
        steps(5, 10)
    );
    let (_prometheus, port) = start_prometheus(&lab.path(""), &scrapes);
    // A machine that is busy may not give a scrape its time; one has to be in time, with everything of everybody.
    let end = Instant::now() + Duration::from_secs(steps(120, 600));
    let moment = loop {
        let now = Moment::now(port);
        let why = now.as_ref().map_or(Some("no Prometheus".to_owned()), |now| missing(now, guests));
        match (now, why) {
            (Some(now), None) => break now,
            (_, why) => assert!(Instant::now() < end, "{why:?}\n{}", lab.log()),
        }
        std::thread::sleep(Duration::from_secs(1));
    };
    assert_eq!(MOST_OF_GUEST + 2, MOST_SERIES);
    assert_eq!(moment.of("up{job=\"guestlet\"}").into_values().collect::<Vec<_>>(), [1.0]);
}
