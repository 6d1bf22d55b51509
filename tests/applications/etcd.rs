//! A real etcd under load: what was acknowledged before it was held is in every snapshot.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::authority::Authority;
use super::stand::{Client, Disk, Load, PATIENCE, Running, as_user, is_outside, rounds, run, until};

/// The network is the test's own.
const PORT: u16 = 2379;
const COPY: u16 = 3379;
const WRITERS: usize = 3;

struct Member {
    process: Running,
    port: u16,
    log: PathBuf,
}

impl Member {
    /// The programs are put where every user sees them.
    fn bring() {
        let folder = std::env::var("KUBERNETES_BIN_DIR")
            .expect("KUBERNETES_BIN_DIR must name the directory of etcd; make test sets it");
        run(&format!("cp {folder}/etcd /mnt/etcd"));
    }

    fn start(disk: &Disk, port: u16, more: &[&str]) -> Self {
        let is_tls = more.contains(&"--cert-file");
        let scheme = if is_tls { "https" } else { "http" };
        let (clients, peers) =
            (format!("{scheme}://127.0.0.1:{port}"), format!("http://127.0.0.1:{}", port + 1));
        let mut command = as_user("/mnt/etcd");
        command.arg("--data-dir").arg(disk.path().join("etcd")).args(["--listen-client-urls", &clients]);
        command.args(["--advertise-client-urls", &clients, "--listen-peer-urls", &peers]);
        command.args([
            "--initial-advertise-peer-urls",
            &peers,
            "--initial-cluster",
            &format!("default={peers}"),
        ]);
        command.args(more);
        let log = Path::new("/mnt").join(format!("{port}.log"));
        let mut process = Running::start(&mut command, &log);
        until("etcd does not answer", || {
            assert!(!process.has_ended(), "{}", std::fs::read_to_string(&log).unwrap_or_default());
            let mut session = Session::open(port)?;
            if is_tls { Some(()) } else { session.ask("/v3/maintenance/status", &json!({})).map(drop) }
        });
        Self { process, port, log }
    }

    fn client(&self) -> Client {
        Client::start("etcd", &format!("http://127.0.0.1:{}", self.port))
    }

    fn load(&self) -> Load {
        Load::start(WRITERS, |writer| {
            let mut session = Session::open(self.port).unwrap();
            // One key of each writer is always the newest number, and each number has a key.
            move |number| {
                let put = |key: String| json!({"requestPut": {"key": encode(&key), "value": encode(&number.to_string())}});
                let both =
                    json!({"success": [put(format!("{writer}/{number}")), put(format!("newest/{writer}"))]});
                session.ask("/v3/kv/txn", &both).is_some()
            }
        })
    }
}

/// A connection that shares nothing with the client that is tested.
struct Session(TcpStream);

impl Session {
    fn open(port: u16) -> Option<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Some(Self(stream))
    }

    fn ask(&mut self, path: &str, body: &Value) -> Option<Value> {
        let body = body.to_string();
        write!(
            self.0,
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .ok()?;
        let mut bytes = Vec::new();
        let mut buffer = [0; 4096];
        loop {
            let text = String::from_utf8_lossy(&bytes);
            if let Some((head, body)) = text.split_once("\r\n\r\n")
                && let Some(length) = head.lines().find_map(|line| line.strip_prefix("Content-Length: "))
                && body.len() >= length.parse().unwrap()
            {
                return head.starts_with("HTTP/1.1 200").then(|| serde_json::from_str(body).unwrap());
            }
            match self.0.read(&mut buffer).ok()? {
                0 => return None,
                read => bytes.extend(&buffer[..read]),
            }
        }
    }

    /// How many keys there are between two.
    fn count(&mut self, from: &str, to: &str) -> u64 {
        let range = json!({"key": encode(from), "range_end": encode(to), "count_only": true});
        let answer = self.ask("/v3/kv/range", &range).unwrap();
        answer["count"].as_str().map_or(0, |count| count.parse().unwrap())
    }

    /// The value of a key.
    fn value(&mut self, key: &str) -> String {
        let answer = self.ask("/v3/kv/range", &json!({"key": encode(key)})).unwrap();
        decode(answer["kvs"][0]["value"].as_str().unwrap_or_default())
    }
}

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

fn encode(text: &str) -> String {
    let digit = |number: u32| char::from(DIGITS[number as usize & 63]);
    let three = |bytes: &[u8]| {
        let number =
            bytes.iter().fold(0, |number, byte| number << 8 | u32::from(*byte)) << (8 * (3 - bytes.len()));
        let mut digits: Vec<_> = [18, 12, 6, 0].map(|bits| digit(number >> bits)).to_vec();
        digits[bytes.len() + 1..].fill('=');
        digits
    };
    text.as_bytes().chunks(3).flat_map(three).collect()
}

fn decode(text: &str) -> String {
    let digits = text.bytes().filter_map(|byte| DIGITS.iter().position(|digit| *digit == byte));
    let (mut bytes, mut number, mut bits) = (Vec::new(), 0_usize, 0);
    for digit in digits {
        (number, bits) = (number << 6 | digit, bits + 6);
        if bits >= 8 {
            bits -= 8;
            bytes.push(u8::try_from(number >> bits & 0xff).unwrap());
        }
    }
    String::from_utf8(bytes).unwrap()
}

fn number(value: &Value) -> u64 {
    value.as_str().unwrap_or_else(|| panic!("{value}")).parse().unwrap()
}

#[test]
fn every_snapshot_of_an_etcd_has_what_was_acknowledged() {
    if is_outside() {
        return;
    }
    Member::bring();
    let disk = Disk::new("live", 512);
    let member = Member::start(&disk, PORT, &[]);
    let load = member.load();
    for _ in 0..rounds() {
        load.goes_on();
        let acknowledged = load.acknowledged();
        let mut client = member.client();
        let held = client.hold();
        let positions = &held["positions"];
        assert!(held["version"].as_str().unwrap().starts_with("etcd 3."), "{held}");
        for position in ["cluster", "member", "revision", "raft-index", "raft-term", "db-size"] {
            assert!(number(&positions[position]) > 0, "{position}: {held}");
        }
        let mut directories: Vec<_> =
            held["directories"].as_array().unwrap().iter().map(|one| one["path"].as_str().unwrap()).collect();
        directories.sort_unstable();
        assert_eq!(directories, ["/mnt/live/etcd/member/snap", "/mnt/live/etcd/member/wal"]);
        let copy = disk.cut();
        let released = client.release();
        assert_eq!(
            (&released["member"], &released["cluster"]),
            (&positions["member"], &positions["cluster"])
        );
        load.goes_on();

        let restored = Member::start(&copy, COPY, &[]);
        let mut session = Session::open(restored.port).unwrap();
        let status = session.ask("/v3/maintenance/status", &json!({})).unwrap();
        assert_eq!(status["header"]["member_id"], positions["member"]);
        assert!(number(&status["header"]["revision"]) >= number(&positions["revision"]), "{status} {held}");
        // What there was at the revision is known from after the thaw, and is the same in the copy.
        let at = json!({
            "key": "AA==", "range_end": "AA==", "count_only": true, "revision": positions["revision"]
        });
        assert_eq!(session.ask("/v3/kv/range", &at).unwrap()["count"], released["keys"], "{released}");
        for (writer, acknowledged) in acknowledged.iter().enumerate() {
            // A transaction has both of its keys, or none.
            let newest: u64 = session.value(&format!("newest/{writer}")).parse().unwrap();
            let count = session.count(&format!("{writer}/"), &format!("{writer}0"));
            assert!(newest >= *acknowledged && count == newest, "{writer}: {acknowledged} {newest} {count}");
        }
        drop(restored);
        copy.remove();
    }
}

#[test]
fn an_etcd_that_does_not_live_or_wait_for_its_disk_is_not_held() {
    if is_outside() {
        return;
    }
    Member::bring();
    let disk = Disk::new("live", 512);
    let mut member = Member::start(&disk, PORT, &[]);
    // By its process, as the agent finds it; one of somebody else, whose descriptors nobody may read.
    let mut client = Client::start("etcd", &format!("process:{}", member.process.id()));
    client.hold();
    client.release();
    let refused = Client::start("etcd", &format!("process:{}", std::process::id())).does_not_hold(PATIENCE);
    assert!(refused.contains("Permission denied"), "{refused}");
    // As another user than its own.
    let target = format!("http://127.0.0.1:{PORT}");
    let refused = Client::start_as_root("etcd", &target).does_not_hold(PATIENCE);
    assert!(refused.contains("listens at 127.0.0.1:2379, not one of 0"), "{refused}");
    // Where its data are may be said.
    let told = |data: &str| json!({"url": target, "data": data}).to_string();
    let mut client = Client::start("etcd", &told("/mnt/live/etcd"));
    assert_eq!(client.hold()["directories"].as_array().unwrap().len(), 2);
    let refused = Client::start("etcd", &told("/mnt/live")).does_not_hold(PATIENCE);
    assert!(refused.contains("/mnt/live/member/snap"), "{refused}");

    let mut client = member.client();
    client.hold();
    run(&format!("kill -STOP {}", member.process.id()));
    let begun = Instant::now();
    let refused = member.client().does_not_hold(Duration::from_secs(2));
    assert!(refused.contains("in time") && begun.elapsed() < PATIENCE, "{refused}");
    run(&format!("kill -CONT {}", member.process.id()));
    client.release();

    let mut client = member.client();
    client.hold();
    member.process.kill();
    assert!(client.loses().contains("has closed the connection"));
    let refused = member.client().does_not_hold(PATIENCE);
    assert!(refused.contains("cannot connect"), "{refused}");

    let fast = Member::start(&disk, PORT, &["--unsafe-no-fsync"]);
    let refused = fast.client().does_not_hold(PATIENCE);
    assert!(refused.contains("started with unsafe-no-fsync"), "{refused} {}", fast.log.display());
}

/// As clusters have it: nobody is answered who does not show a certificate.
#[test]
fn an_etcd_is_held_by_tls() {
    if is_outside() {
        return;
    }
    Member::bring();
    let (disk, folder) = (Disk::new("live", 512), Path::new("/mnt/tls"));
    std::fs::create_dir(folder).unwrap();
    let authority = Authority::new(folder);
    authority.serve("etcd", IpAddr::V4(Ipv4Addr::LOCALHOST));
    authority.kubeconfig("client", "client", "backup", "");
    std::fs::create_dir(folder.join("other")).unwrap();
    Authority::new(&folder.join("other"));
    run("chown -R nobody /mnt/tls");
    let file = |name: &str| folder.join(name).display().to_string();
    let (certificate, key, ca) = (file("etcd.crt"), file("etcd.key"), file("ca.crt"));
    let mut more = vec!["--cert-file", &certificate, "--key-file", &key];
    more.extend(["--trusted-ca-file", &ca, "--client-cert-auth"]);
    let mut member = Member::start(&disk, PORT, &more);
    let url = format!("https://127.0.0.1:{PORT}");
    let pair = file("client.pem");
    let target = |ca: &str| json!({"url": url, "ca": ca, "certificate": pair, "key": pair}).to_string();
    // It listens before it answers.
    let mut client = until("etcd is not held", || {
        let mut client = Client::start("etcd", &target(&ca));
        let said = client.ask_to_hold(PATIENCE);
        said["held"].is_object().then_some(client)
    });
    client.release();
    let mut client = Client::start("etcd", &target(&ca));
    assert_eq!(client.hold()["directories"].as_array().unwrap().len(), 2);
    member.process.kill();
    assert!(client.loses().contains("has closed the connection"));
    let _member = Member::start(&disk, PORT, &more);
    // Without a certificate, and by a server that is not trusted.
    let refused = Client::start("etcd", &json!({"url": url, "ca": ca}).to_string()).does_not_hold(PATIENCE);
    assert!(refused.contains("does not answer"), "{refused}");
    let refused = Client::start("etcd", &target(&file("other/ca.crt"))).does_not_hold(PATIENCE);
    assert!(refused.contains("invalid peer certificate"), "{refused}");
    let refused = Client::start("etcd", &target("/mnt/tls/missing")).does_not_hold(PATIENCE);
    assert!(refused.contains("cannot use /mnt/tls/missing"), "{refused}");
}

/// What something else answers at the address, as the user that the client runs as.
fn scripted(answer: Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut question = [0; 4096];
        let _ = stream.read(&mut question);
        let _ = stream.write_all(&answer);
        // It says no more, and does not end.
        std::thread::sleep(PATIENCE);
    });
    Client::start_as_root("etcd", &format!("http://{address}")).does_not_hold(Duration::from_secs(3))
}

#[test]
fn what_answers_strangely_is_no_etcd_that_is_held() {
    if is_outside() {
        return;
    }
    let answer =
        |body: &str| format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes();
    let status = |more: Value| {
        let mut status = json!({
            "header": {"cluster_id": "1", "member_id": "2", "revision": "3", "raft_term": "4"},
            "version": "3.5.16", "dbSize": "5", "raftIndex": "6", "raftTerm": "7"
        });
        status.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        answer(&status.to_string())
    };
    for (name, answer, words) in [
        ("nothing", vec![], "in time"),
        (
            "another protocol",
            b"SSH-2.0-OpenSSH_9.2p1\r\n\r\n\r\n".to_vec(),
            "not an answer of etcd's JSON gateway",
        ),
        ("a head without end", b"HTTP/1.1 200 OK\r\n".repeat(10_000), "not an answer of etcd's JSON gateway"),
        (
            "a long body",
            b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999\r\n\r\n".to_vec(),
            "not an answer of etcd's JSON gateway",
        ),
        ("another page", b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nno\n.".to_vec(), "404 no\\n."),
        ("no JSON", answer("etcd"), "does not answer"),
        ("another document", answer("{}"), "unexpected status"),
        ("numbers that are none", status(json!({"raftIndex": "-6"})), "unexpected status"),
        ("an alarm", status(json!({"errors": ["memberID:2 alarm:CORRUPT "]})), "alarm:CORRUPT"),
        ("an early version", status(json!({"version": "3.5.4"})), "3.5.5 is the first version"),
    ] {
        let said = scripted(answer);
        assert!(said.contains(words), "{name}: {said}");
    }
    for target in ["http://10.0.0.1:2379", "https://127.0.0.1:2379", "2379"] {
        let refused = Client::start("etcd", target).does_not_hold(PATIENCE);
        assert!(refused.contains("not an etcd on this machine"), "{target}: {refused}");
    }
}
