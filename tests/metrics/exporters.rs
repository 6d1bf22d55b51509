//! Exporters in guests, through the host half: Debian's node exporter for a real Prometheus, and some that nobody should meet.

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use serde_json::{Value, json};

use crate::host;
use crate::lab::{Lab, Sample};
use crate::prometheus::{Server, free_port, get, program, start_prometheus};

/// What lets the host half reach this through the guest.
fn grant(target: &str) -> String {
    format!(
        "[[grant]]\nhost = \"plain\"\nroles = [\"status\", \"metrics\", \"forward\"]\nforward = [\"{target}\"]\n"
    )
}

fn job(name: &str, target: &str, rest: &str) -> String {
    format!("[[scrape]]\njob = '{name}'\ntarget = '{target}'\n{rest}\n")
}

#[test]
fn prometheus_discovers_and_scrapes_the_exporter_of_a_guest() {
    let (port, target) = (free_port(), free_port());
    let host = host::Lab::new().set(&format!("metrics = '127.0.0.1:{target}'")).set(&job(
        "node",
        &port.to_string(),
        "vms = ['w*']\ninterval-seconds = 1\ntimeout-seconds = 30",
    ));
    let lab = Lab::made(&grant(&port.to_string()), "", host);
    let log = std::fs::File::create(lab.host.path("exporter.log")).unwrap();
    let address = format!("--web.listen-address=127.0.0.1:{port}");
    let _exporter = Server(program("prometheus-node-exporter").arg(address).stderr(log).spawn().unwrap());
    lab.host.until("the exporter answers", || get(port, "/metrics").is_some());

    let targets: Value = serde_json::from_str(&get(target, "/sd").unwrap()).unwrap();
    let labels = json!({
        "job": "node", "instance": "web", "__metrics_path__": "/guests/web/node/metrics", "__scrape_interval__": "1s",
        "__meta_guestlet_cluster": "", "__meta_guestlet_uuid": host::uuid(1),
    });
    // A client of HTTP/1.0 asks for it as `localhost`.
    assert_eq!(targets, json!([{ "targets": ["localhost"], "labels": labels }]));

    let discovered = format!(
        "- job_name: guests\n  http_sd_configs: [{{ url: 'http://127.0.0.1:{target}/sd', refresh_interval: 1s }}]\n"
    );
    let (_prometheus, prometheus) = start_prometheus(&lab.host.path(""), &discovered);
    let query = |query: &str| -> Option<Value> {
        let answer: Value =
            serde_json::from_str(&get(prometheus, &format!("/api/v1/query?query={query}"))?).unwrap();
        answer["data"]["result"].get(0).cloned()
    };
    lab.host.until("Prometheus has what the exporter says", || query("node_memory_MemTotal_bytes").is_some());
    let found = query("node_memory_MemTotal_bytes").unwrap();
    let metric =
        json!({ "__name__": "node_memory_MemTotal_bytes", "job": "node", "instance": "web", "vm": "web" });
    assert_eq!(found["metric"], metric);
    let own: Vec<_> = get(port, "/metrics").unwrap().lines().map(str::to_owned).collect();
    let total = own.iter().find_map(|line| line.strip_prefix("node_memory_MemTotal_bytes ")).unwrap();
    let number = |text: &str| text.parse::<f64>().unwrap();
    assert!((number(found["value"][1].as_str().unwrap()) - number(total)).abs() < 1.0, "{found} {total}");
    assert_eq!(query("up%7Bjob%3D%22node%22%7D").unwrap()["value"][1], "1");
}

/// Answers each client by what it asks for.
fn serve(path: &Path) {
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || answer(client));
        }
    });
}

fn answer(mut client: UnixStream) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        if client.read(&mut byte).unwrap_or_default() == 0 {
            return;
        }
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap();
    assert!(!head.contains("gzip") && head.contains("host: localhost\r\n"), "{head}");
    let path = head.split(' ').nth(1).unwrap();
    let good = "# TYPE temperature gauge\ntemperature{vm=\"db\",room=\"1\"} 21.5 1700000000000\n";
    let (status, more, body) = match path {
        "/good" => ("200 OK", "", good.to_owned()),
        "/many" => ("200 OK", "", "a 1\n".repeat(11)),
        "/html" => ("200 OK", "", "<html>\n".to_owned()),
        "/packed" => ("200 OK", "Content-Encoding: gzip\r\n", "\u{1f}".to_owned()),
        "/broken" => ("500 Internal Server Error", "", String::new()),
        "/huge" => {
            let _ = client.write_all(b"HTTP/1.1 200 OK\r\n\r\n");
            // Until the other end has had enough.
            while client.write_all(&b"a 1\n".repeat(4096)).is_ok() {}
            return;
        }
        "/never" => {
            let _ = client.read(&mut [0]);
            return;
        }
        path => panic!("{path}"),
    };
    let length = body.len();
    let _ = write!(client, "HTTP/1.1 {status}\r\n{more}Content-Length: {length}\r\n\r\n{body}");
}

#[test]
fn an_exporter_that_answers_too_much_or_nothing_costs_its_own_page() {
    let host = host::Lab::new();
    let (socket, other) = (host.path("exporter.sock"), host.path("other.sock"));
    serve(&socket);
    let target = format!("unix:{}", socket.display());
    let mut host = host;
    for (name, rest) in [
        ("good", ""),
        ("many", "max-series = 10"),
        ("html", ""),
        ("packed", ""),
        ("broken", ""),
        ("huge", "max-bytes = 65536"),
    ] {
        host = host.set(&job(
            name,
            &target,
            &format!("path = '/{name}'\nvms = ['web']\ntimeout-seconds = 60\n{rest}"),
        ));
    }
    host = host.set(&job("never", &target, "path = '/never'\ntimeout-seconds = 1")).set(&job(
        "denied",
        &format!("unix:{}", other.display()),
        "timeout-seconds = 60",
    ));
    let mut lab = Lab::made(&grant(&target), "", host);
    let page = |lab: &Lab, job: &str| lab.get(&format!("/guests/web/{job}/metrics"), "text/plain");

    let (head, body) = page(&lab, "good");
    assert!(
        head.starts_with("HTTP/1.1 200 ") && head.contains("text/plain; version=0.0.4"),
        "{head}\n{body}"
    );
    let expected = "# TYPE temperature gauge\ntemperature{vm=\"web\",exported_vm=\"db\",room=\"1\"} 21.5\n";
    assert_eq!(body, expected, "the guest does not speak for another one");
    for (job, words) in [
        ("many", "more than 10 series; scrape.max-series"),
        ("html", "line 1 is not in Prometheus' text format"),
        ("packed", "compressed"),
        ("broken", "answers 500"),
        ("huge", "more than 65536 bytes; scrape.max-bytes"),
        ("never", "not answered within 1 s"),
        ("denied", "add forward = ["),
    ] {
        let (head, body) = page(&lab, job);
        assert!(head.starts_with("HTTP/1.1 502 ") && body.contains(words), "{job}: {head}\n{body}");
        assert!(
            body.starts_with(&format!("the exporter of job {job} at unix:")) && body.lines().count() == 1,
            "{body}"
        );
    }
    for nothing in ["/guests/db/good/metrics", "/guests/web/other/metrics", "/guests/nobody/never/metrics"] {
        assert!(lab.get(nothing, "text/plain").0.starts_with("HTTP/1.1 404 "), "{nothing}");
    }
    // The guest answers as before, and it was counted what became of each.
    assert!(!lab.scrape("/guests/web/metrics").is_empty());
    let counted = lab.scrape("/host/metrics");
    let count = |job: &str, outcome: &str| {
        let is = |one: &&Sample| {
            let has = |label: &str, value: &str| one.labels.get(label).is_some_and(|found| found == value);
            one.name == "guestlet_host_scrapes_total" && has("scrape_job", job) && has("outcome", outcome)
        };
        counted.iter().find(is).unwrap_or_else(|| panic!("{job} {outcome}")).value
    };
    for (job, outcome) in [
        ("good", "answered"),
        ("many", "wrong"),
        ("packed", "wrong"),
        ("huge", "too-large"),
        ("never", "late"),
        ("denied", "denied"),
    ] {
        assert!((count(job, outcome) - 1.0).abs() < f64::EPSILON, "{job} {outcome}");
    }

    // Targets are those of the settings as they are now.
    let discovered = |lab: &Lab| -> Vec<String> {
        let targets: Vec<Value> = serde_json::from_str(&lab.get("/sd", "*/*").1).unwrap();
        targets.iter().map(|one| one["labels"]["__metrics_path__"].as_str().unwrap().to_owned()).collect()
    };
    let all = discovered(&lab);
    assert!(all.contains(&"/guests/db/never/metrics".to_owned()), "{all:?}");
    assert!(!all.contains(&"/guests/db/good/metrics".to_owned()) && all.len() == 10, "{all:?}");
    lab.host.edit("job = 'good'", "job = 'better'");
    lab.host.until("the edited settings are in force", || {
        discovered(&lab).contains(&"/guests/web/better/metrics".to_owned())
    });
    assert!(page(&lab, "good").0.starts_with("HTTP/1.1 404 "));
    assert!(page(&lab, "better").0.starts_with("HTTP/1.1 200 "));

    // Nothing answers any more.
    std::fs::remove_file(&socket).unwrap();
    let (head, body) = page(&lab, "better");
    assert!(head.starts_with("HTTP/1.1 502 "), "{head}\n{body}");
}
