//! Clients that are broken or hostile: they get an error or are closed, and nobody else notices.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::agent::{Agent, PATIENCE};

#[test]
fn after_garbage_the_same_client_goes_on() {
    let agent = Agent::start();
    let cases: &[(&str, &[u8])] = &[
        ("no JSON", b"GET / HTTP/1.1\r\n\r\n"),
        ("binary", b"\x00\x01\x02\x80\xfe"),
        ("not UTF-8", b"{\"execute\":\"\xc3\x28\"}"),
        ("crossed brackets", b"{\"a\":[}]"),
        ("an unfinished string", b"{\"execute\":\"gu\n"),
        ("an array", b"[{\"execute\":\"guest-ping\"}]"),
        ("twice", b"{\"execute\":\"guest-ping\",\"execute\":\"guest-ping\"}"),
        ("unfinished, then reset", b"{\"execute\":{\"x\":\xff"),
    ];
    for (name, garbage) in cases {
        let mut client = agent.client();
        client.send(garbage);
        client.send(b"\n\xff{\"execute\":\"guest-sync\",\"arguments\":{\"id\":42}}");
        let mut answers = 0;
        loop {
            let answer = client.answer();
            if answer == json!({"return": 42}) {
                break;
            }
            assert!(answer["error"]["class"].is_string(), "{name}: {answer}");
            answers += 1;
            assert!(answers < 50, "{name}");
        }
        assert!(answers >= 1, "{name}: no error was told");
    }
}

#[test]
fn deeply_nested_and_huge_messages_are_errors_and_memory_comes_back() {
    let agent = Agent::start();
    let mut client = agent.client();
    client.send(&[b'['; 1025]);
    assert!(client.answer()["error"]["desc"].as_str().unwrap().contains("nested deeper"));
    client.send(b"\n");
    let before = agent.footprint().0;
    client.send(b"{\"execute\":\"");
    let block = vec![b'x'; 1 << 20];
    for _ in 0..65 {
        client.send(&block);
    }
    client.send(b"\"}\n");
    assert!(client.answer()["error"]["desc"].as_str().unwrap().contains("larger than 64 MiB"));
    client.send(b"\n\xff");
    client.send(b"{\"execute\":\"guest-sync\",\"arguments\":{\"id\":1}}");
    while client.answer() != json!({"return": 1}) {}
    let deadline = Instant::now() + PATIENCE;
    while agent.footprint().0 > before + 2048 {
        assert!(Instant::now() < deadline, "{} KiB before, {} KiB after", before, agent.footprint().0);
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_client_that_says_its_last_gets_its_answers() {
    let agent = Agent::start();
    let mut client = agent.client();
    client.send(b"{\"execute\":\"guest-ping\"}{\"execute\":\"guest-ping\"}{\"execute\":");
    assert_eq!(client.finish(), b"{\"return\":{}}\n{\"return\":{}}\n");
}

/// qemu-ga exits when a client closes with a large reply unread.
#[test]
fn a_client_that_leaves_with_answers_unread_ends_nothing_but_itself() {
    let agent = Agent::start();
    for _ in 0..20 {
        let mut client = agent.client();
        client.send("{\"execute\":\"guest-info\"}".repeat(2000).as_bytes());
        drop(client);
    }
    assert_eq!(agent.client().call("guest-ping"), json!({}));
}

/// qemu-ga spins at 90 % of a core while a client does not read.
#[test]
fn a_client_that_does_not_read_costs_no_processor_time() {
    let agent = Agent::start();
    let stalled = std::os::unix::net::UnixStream::connect(agent.socket()).unwrap();
    stalled.set_nonblocking(true).unwrap();
    let request = "{\"execute\":\"guest-info\"}".repeat(100);
    let mut sent = 0;
    // Until the agent reads no more, because its answers are not read.
    let deadline = Instant::now() + PATIENCE;
    let mut last = Instant::now();
    while last.elapsed() < Duration::from_millis(500) {
        assert!(Instant::now() < deadline, "{sent} bytes were taken and no end is seen");
        match std::io::Write::write(&mut &stalled, request.as_bytes()) {
            Ok(length) => {
                sent += length;
                last = Instant::now();
            }
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
    let before = processor_time(&agent);
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(agent.client().call("guest-ping"), json!({}));
    let ticks = processor_time(&agent) - before;
    assert!(ticks <= 5, "{ticks} of 100 ticks were used");
}

/// User and system time in ticks of 10 ms.
fn processor_time(agent: &Agent) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", agent.child.id())).unwrap();
    let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn a_crowd_of_silent_clients_locks_nobody_out_for_good_and_leaks_nothing() {
    let agent = Agent::start();
    let (_, descriptors) = agent.footprint();
    let connect = || std::os::unix::net::UnixStream::connect(agent.socket()).unwrap();
    let crowd: Vec<_> = (0..64).map(|_| connect()).collect();
    // One more is told at once, by an end, and is not left waiting.
    let mut late = connect();
    late.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(std::io::Read::read(&mut late, &mut [0; 1]).unwrap(), 0);
    drop(crowd);
    let deadline = Instant::now() + PATIENCE;
    // What the agent opens for itself meanwhile is less than a crowd.
    while agent.footprint().1 > descriptors + 15 {
        assert!(Instant::now() < deadline, "{} descriptors, {} now", descriptors, agent.footprint().1);
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(agent.client().call("guest-ping"), json!({}));
}

#[test]
fn a_flooding_client_does_not_hold_up_another() {
    let agent = Agent::start();
    let flood = std::os::unix::net::UnixStream::connect(agent.socket()).unwrap();
    let mut reader = flood.try_clone().unwrap();
    let served = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let count = std::sync::Arc::clone(&served);
    let drain = std::thread::spawn(move || {
        let mut bytes = vec![0; 1 << 16];
        while let Ok(length @ 1..) = std::io::Read::read(&mut reader, &mut bytes) {
            let answers = bytes[..length].split(|byte| *byte == b'\n').count() - 1;
            count.fetch_add(answers, std::sync::atomic::Ordering::Relaxed);
        }
    });
    let mut writer = flood.try_clone().unwrap();
    let writing = std::thread::spawn(move || {
        let requests = "{\"execute\":\"guest-network-get-interfaces\"}".repeat(2000);
        while std::io::Write::write_all(&mut writer, requests.as_bytes()).is_ok() {}
    });
    let now = || served.load(std::sync::atomic::Ordering::Relaxed);
    let deadline = Instant::now() + PATIENCE;
    while now() < 1000 {
        assert!(Instant::now() < deadline, "the flood does not flow");
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut client = agent.client();
    let before = now();
    for _ in 0..50 {
        client.call("guest-ping");
    }
    let between = (now() - before) / 50;
    flood.shutdown(std::net::Shutdown::Both).unwrap();
    writing.join().unwrap();
    drain.join().unwrap();
    // One read of the flood holds more than 370 requests; they must not all be served before one ping is.
    assert!(between < 200, "{between} requests of the flood were served for each ping");
}

#[test]
fn a_huge_text_in_the_wrong_place_is_neither_echoed_nor_multiplied() {
    let agent = Agent::start();
    let mut client = agent.client();
    let huge = "\u{7f}".repeat(16 << 20);
    for message in [
        format!("{{\"execute\":\"guest-sync\",\"arguments\":{{\"id\":\"{huge}\"}}}}"),
        format!("{{\"execute\":\"guest-shutdown\",\"arguments\":{{\"mode\":\"{huge}\"}}}}"),
        format!("{{\"execute\":\"guest-ping\",\"arguments\":{{\"{huge}\":1}}}}"),
        format!("{{\"execute\":\"{huge}\"}}"),
        format!("{{\"{huge}\":1}}"),
    ] {
        client.send(message.as_bytes());
        let line = client.line();
        assert!(line.len() < 8192, "an answer of {} bytes", line.len());
    }
    let status = std::fs::read_to_string(format!("/proc/{}/status", agent.child.id())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak < 120 * 1024, "a peak of {peak} KiB for messages of 16 MiB");
}

#[test]
fn many_clients_with_large_messages_are_bounded_together_and_small_ones_are_always_served() {
    let agent = Agent::start();
    let begin = [&b"{\"execute\":\"guest-ping\",\"arguments\":{\"x\":\""[..], &vec![b'x'; 60 << 20]].concat();
    let mut crowd: Vec<_> = (0..5).map(|_| agent.client()).collect();
    for client in &mut crowd {
        client.send(&begin);
    }
    // Four fit. The fifth, or whoever came last, is told at once and can go on with what is small.
    let mut refused = crowd.pop().unwrap();
    let answer = refused.answer();
    assert!(answer["error"]["desc"].as_str().unwrap().contains("send it later"), "{answer}");
    refused.send(b"\xff{\"execute\":\"guest-sync\",\"arguments\":{\"id\":1}}");
    while refused.answer() != json!({"return": 1}) {}
    assert_eq!(agent.client().call("guest-ping"), json!({}));
    assert!(agent.peak() < 400 * 1024, "a peak of {} KiB", agent.peak());
    for client in &mut crowd {
        client.send(b"\"}}");
        assert!(client.answer()["error"]["desc"].as_str().unwrap().contains("Parameter 'x' is unexpected"));
    }
    // There is room again.
    refused.send(&begin);
    refused.send(b"\"}}");
    assert!(refused.answer()["error"]["desc"].as_str().unwrap().contains("Parameter 'x' is unexpected"));
}

#[test]
fn an_id_over_several_lines_comes_back_on_one() {
    let agent = Agent::start();
    let mut client = agent.client();
    client.send(b"{\"execute\":\"guest-ping\",\"id\":[1,\r\n\t2]}");
    assert_eq!(client.line(), b"{\"return\":{},\"id\":[1,2]}");
}

#[test]
fn clients_that_come_again_and_again_fill_no_log_either() {
    let agent = Agent::start();
    let started = Instant::now();
    for _ in 0..500 {
        let mut client = agent.client();
        client.send(b"}");
        client.line();
    }
    let allowed = started.elapsed().as_secs() + 1;
    let complaints = agent.log().lines().filter(|line| line.contains("WARN")).count() as u64;
    assert!((1..=allowed).contains(&complaints), "{complaints} lines, {allowed} allowed");
}

#[test]
fn complaints_about_a_client_fill_no_log() {
    let agent = Agent::start();
    let started = Instant::now();
    let mut client = agent.client();
    client.send("}".repeat(20_000).as_bytes());
    for _ in 0..20_000 {
        client.line();
    }
    let allowed = started.elapsed().as_secs() + 1;
    let complaints = agent.log().lines().filter(|line| line.contains("WARN")).count() as u64;
    assert!((1..=allowed).contains(&complaints), "{complaints} lines, {allowed} allowed:\n{}", agent.log());
}

#[test]
fn garbage_on_the_control_channel_ends_that_connection_only() {
    use std::io::{Read as _, Write as _};

    let agent = Agent::start();
    let control = agent.folder.path().join("control.sock");
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let huge_frame = [preface.as_slice(), &[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1]].concat();
    for garbage in [b"GET / HTTP/1.1\r\n\r\n".as_slice(), &[0xff; 100], &huge_frame] {
        let mut stream = std::os::unix::net::UnixStream::connect(&control).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(garbage).unwrap();
        let mut rest = Vec::new();
        // A reset is as good as an end.
        let _ = stream.read_to_end(&mut rest);
    }
    assert_eq!(agent.client().call("guest-ping"), json!({}));
}

#[test]
fn a_peer_that_says_nothing_on_the_control_channel_is_closed() {
    use std::io::{Read as _, Write as _};

    let agent = Agent::start();
    let control = agent.folder.path().join("control.sock");
    let silent = [b"".as_slice(), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"].map(|words| {
        let mut stream = std::os::unix::net::UnixStream::connect(&control).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(words).unwrap();
        stream
    });
    for mut stream in silent {
        stream.read_to_end(&mut Vec::new()).unwrap();
    }
}
