//! Asks nodes whether they have endpoints of Services whose traffic is local: `GET /healthz` at the Service's own
//! port, which kube-proxy answers with 200 if there are some.
//!
//! An answer other than 200 counts at once. A missing answer counts after as many attempts as the failure
//! threshold of the Service's health check.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;

use super::health::Outcome;
use super::{Handle, Request};
use crate::supervise::Scope;

/// Load balancer, and lasting identifier of the VM.
pub type Key = (String, String);

/// Bytes at the beginning of an answer that are read.
const ANSWER: usize = 64;

/// Node that is asked about one load balancer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Load balancer and VM that an answer is about.
    pub key: Key,
    /// Cluster that the load balancer belongs to.
    pub cluster: String,
    /// Address and port at which the node is asked.
    pub at: SocketAddr,
    /// Seconds between two requests.
    pub period_seconds: u32,
    /// Timeout of one request in seconds.
    pub timeout_seconds: u32,
    /// Unanswered requests in a row after which the node counts as failed.
    pub failure_threshold: u32,
}

/// Asks all targets regularly, until the future is dropped.
pub async fn run(mut targets: watch::Receiver<Vec<Target>>, desk: Handle) {
    let mut asked: BTreeMap<Key, (Target, Scope)> = BTreeMap::new();
    loop {
        let wanted = targets.borrow_and_update().clone();
        let mut before = std::mem::take(&mut asked);
        for target in wanted {
            let known = before.remove(&target.key).filter(|(known, _)| *known == target);
            let (_, scope) = known.unwrap_or_else(|| {
                let scope = Scope::new();
                scope.children().spawn(keep_asking(target.clone(), desk.clone()));
                (target.clone(), scope)
            });
            asked.insert(target.key.clone(), (target, scope));
        }
        drop(before);
        if targets.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

async fn keep_asking(target: Target, desk: Handle) {
    let mut silent = 0;
    loop {
        let timeout = Duration::from_secs(target.timeout_seconds.into());
        let outcome = match tokio::time::timeout(timeout, ask(target.at)).await {
            Ok(Ok(200)) => Some(Outcome { healthy: true, problem: String::new() }),
            Ok(Ok(_)) => {
                let problem = "it has no endpoint of the Service".to_owned();
                Some(Outcome { healthy: false, problem })
            }
            Ok(Err(_)) | Err(_) => {
                silent += 1;
                let problem =
                    format!("it does not report whether it has endpoints (port {})", target.at.port());
                (silent >= target.failure_threshold).then_some(Outcome { healthy: false, problem })
            }
        };
        if let Some(outcome) = outcome {
            if outcome.healthy {
                silent = 0;
            }
            // Fails only if the desk has ended: then the process is ending.
            drop(desk.requests.send(Request::Endpoint(target.key.clone(), outcome)).await);
        }
        tokio::time::sleep(Duration::from_secs(target.period_seconds.into())).await;
    }
}

/// Asks once, and returns the HTTP status code.
async fn ask(at: SocketAddr) -> std::io::Result<u16> {
    let mut stream = TcpStream::connect(at).await?;
    let request = format!("GET /healthz HTTP/1.1\r\nHost: {at}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    while answer.len() < ANSWER {
        let mut some = [0; ANSWER];
        match stream.read(&mut some).await? {
            0 => break,
            length => answer.extend(some.iter().take(length)),
        }
    }
    status(&answer).ok_or_else(|| std::io::Error::from(std::io::ErrorKind::InvalidData))
}

fn status(answer: &[u8]) -> Option<u16> {
    let rest = answer.strip_prefix(b"HTTP/1.")?.get(1..)?.strip_prefix(b" ")?;
    std::str::from_utf8(rest.get(..3)?).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_is_read() {
        assert_eq!(status(b"HTTP/1.1 200 OK\r\n"), Some(200));
        assert_eq!(status(b"HTTP/1.0 503 Service Unavailable\r\n"), Some(503));
        for wrong in [&b""[..], b"HTTP/1.1", b"HTTP/1.1 2", b"HTTP/2 200 OK", b"SSH-2.0-OpenSSH"] {
            assert_eq!(status(wrong), None, "{wrong:?}");
        }
    }
}
