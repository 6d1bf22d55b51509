//! Many connections: all at once, and one after another.

use std::net::SocketAddr;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::task::JoinSet;

use crate::forwarding::{Forwarding, grants, lab, lab_of};
use crate::host::DEADLINE;
use crate::lab::{Lab, until};

const AT_ONCE: usize = 1000;

/// This process has both ends of all of them.
fn many_descriptors() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard.min(8192), hard).unwrap();
}

/// Serves in the background: each client gets back what it sends.
async fn echo() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (mut client, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let (mut from, mut to) = client.split();
                let _ = tokio::io::copy(&mut from, &mut to).await;
            });
        }
    });
    port
}

/// Connects, and sends a few bytes and reads them back.
async fn try_ping(place: SocketAddr) -> std::io::Result<TcpStream> {
    ping(TcpStream::connect(place).await?).await
}

async fn ping(mut stream: TcpStream) -> std::io::Result<TcpStream> {
    let mut back = [0; 4];
    stream.write_all(b"ping").await?;
    stream.read_exact(&mut back).await?;
    assert_eq!(&back, b"ping");
    Ok(stream)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_connections_at_once_are_all_served() {
    many_descriptors();
    let port = echo().await;
    let lab = lab_of(&[port]);
    let forwarding = Forwarding::of(&lab, port);
    let place: SocketAddr = forwarding.places[0].parse().unwrap();
    let mut pings = JoinSet::new();
    for _ in 0..AT_ONCE {
        pings.spawn(async move { try_ping(place).await.unwrap() });
    }
    let streams = pings.join_all().await;
    assert!(lab.status().contains("1000 connections of the host half"), "{}", lab.status());
    let mut pings = JoinSet::new();
    for stream in streams {
        pings.spawn(async move { ping(stream).await.unwrap() });
    }
    drop(pings.join_all().await);
    until("none is left", || !lab.status().contains("forwarding"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_connections_that_are_stuck_cost_the_agent_little() {
    many_descriptors();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("stuck");
    let stuck = UnixListener::bind(&path).unwrap();
    let lab = lab(&[format!("unix:{}", path.display())]);
    let spec = format!("{}:{}", folder.path().join("here").display(), path.display());
    let forwarding = Forwarding::start(&lab, &[&spec]);
    let before = lab.agent_memory();
    let (mut streams, mut taken) = (Vec::new(), Vec::new());
    for _ in 0..AT_ONCE {
        streams.push(UnixStream::connect(&forwarding.places[0]).await.unwrap());
        // It takes nothing, so that as much waits for it as may.
        taken.push(stuck.accept().await.unwrap().0);
    }
    let part = vec![0; 1 << 16];
    let count = u64::try_from(AT_ONCE).unwrap();
    let each = || lab.agent_memory().saturating_sub(before) / count;
    let end = std::time::Instant::now() + DEADLINE;
    let mut idle = 0;
    while idle < 50 {
        let sent: usize = streams.iter().map(|stream| stream.try_write(&part).unwrap_or(0)).sum();
        // What waits in the agent has filled it, and what is before it has filled up since.
        idle = if sent == 0 && each() >= 16 { idle + 1 } else { 0 };
        assert!(std::time::Instant::now() < end, "only {} KiB wait in the agent for each", each());
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    eprintln!("{} KiB of the agent for each of {AT_ONCE} connections that are stuck", each());
    assert!(each() <= 64, "{} KiB for each", each());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_requests_of_one_caller_are_refused_beyond_its_share_and_cost_little() {
    many_descriptors();
    let port = echo().await;
    let lab = Lab::with(&format!("[forward]\nconnections = 60\n{}", grants(&[port.to_string()])));
    let forwarding = Forwarding::of(&lab, port);
    let place: SocketAddr = forwarding.places[0].parse().unwrap();
    let mut kept = Vec::new();
    for _ in 0..36 {
        kept.push(try_ping(place).await.unwrap());
    }
    let before = lab.agent_memory();
    for _ in 0..50 {
        let mut refused = JoinSet::new();
        for _ in 0..200 {
            refused.spawn(async move { try_ping(place).await.is_err() });
        }
        assert!(refused.join_all().await.into_iter().all(|one| one), "one more than the caller may have");
    }
    forwarding.until_complains("this caller has 36 connections through this guest, which is the limit");
    let grown = lab.agent_memory().saturating_sub(before);
    assert!(grown < 8 << 10, "{grown} KiB");
    let records = lab.agent_log().matches("this caller has 36 connections").count();
    assert!((1..200).contains(&records), "{records} records");
    // There is room again, and those that there were are as they were.
    kept.pop();
    let mut again = Err(std::io::ErrorKind::NotFound.into());
    while again.is_err() {
        again = try_ping(place).await;
    }
    for stream in kept {
        ping(stream).await.unwrap();
    }
}
