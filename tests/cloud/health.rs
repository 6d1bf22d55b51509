//! The probes of kubelet: what is stuck is started anew, and what cannot ask anybody is not.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::lab::{Lab, Replica, packaged, quiet, text, wait};
use crate::patience::until;

/// How long kubelet waits for an answer, as the manifest says; here less.
const PROBE: Duration = Duration::from_secs(2);

/// What a replica answers to a probe; none if it does not.
async fn probe(replica: &Replica, path: &str) -> Option<(u16, String)> {
    let address = until("it says where probes are served", async || {
        let log = replica.log();
        let line = log.lines().find(|line| line.contains("serving probes"))?;
        line.split_once("address=")?.1.split_whitespace().next()?.parse::<SocketAddr>().ok()
    })
    .await;
    let asked = async {
        let mut stream = TcpStream::connect(address).await.ok()?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: kubelet\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.ok()?;
        let status = answer.split(' ').nth(1)?.parse().ok()?;
        Some((status, answer.split_once("\r\n\r\n")?.1.to_owned()))
    };
    tokio::time::timeout(PROBE, asked).await.ok()?
}

async fn status(replica: &Replica, path: &str) -> Option<u16> {
    probe(replica, path).await.map(|(status, _)| status)
}

/// A way to the API server that can be shut.
struct Gate {
    kubeconfig: PathBuf,
    at: SocketAddr,
    to: SocketAddr,
    task: Option<JoinHandle<()>>,
}

impl Gate {
    async fn new(kubeconfig: &Path) -> Self {
        let config = std::fs::read_to_string(kubeconfig).unwrap();
        let server = config.split_once("https://").unwrap().1;
        let to: SocketAddr = server.split(['\n', '"', '\'']).next().unwrap().trim().parse().unwrap();
        let listener = TcpListener::bind((to.ip(), 0)).await.unwrap();
        let at = listener.local_addr().unwrap();
        let path = kubeconfig.with_extension("gate");
        std::fs::write(&path, config.replace(&to.to_string(), &at.to_string())).unwrap();
        let mut gate = Self { kubeconfig: path, at, to, task: None };
        gate.serve(listener);
        gate
    }

    fn serve(&mut self, listener: TcpListener) {
        let to = self.to;
        self.task = Some(tokio::spawn(async move {
            let mut ways = tokio::task::JoinSet::new();
            loop {
                let Ok((mut here, _)) = listener.accept().await else { return };
                ways.spawn(async move {
                    let mut there = TcpStream::connect(to).await.unwrap();
                    let _ = tokio::io::copy_bidirectional(&mut here, &mut there).await;
                });
            }
        }));
    }

    async fn shut(&mut self) {
        let task = self.task.take().unwrap();
        task.abort();
        let _ = task.await;
    }

    async fn open(&mut self) {
        let at = self.at;
        self.serve(until("the port is free", async || TcpListener::bind(at).await.ok()).await);
    }
}

#[test]
fn a_leader_that_is_stuck_answers_no_probe_and_one_that_waits_is_well() {
    wait(async {
        let lab = Lab::start().await;
        let first = lab.replica("first");
        first.leads().await;
        let second = lab.replica("second");
        for replica in [&first, &second] {
            for path in ["/healthz", "/livez", "/readyz"] {
                assert_eq!(probe(replica, path).await, Some((200, "ok\n".to_owned())), "{path}");
            }
            assert_eq!(status(replica, "/").await, Some(404));
        }
        first.signal(Signal::SIGSTOP);
        assert_eq!(status(&first, "/healthz").await, None, "kubelet starts it anew");
        second.leads().await;
        assert_eq!(status(&second, "/healthz").await, Some(200));
    });
}

#[test]
fn without_a_host_it_is_unready_and_not_started_anew() {
    wait(async {
        let mut lab = Lab::start().await;
        let mut replica = lab.replica("a");
        replica.leads().await;
        until("it is ready", async || (status(&replica, "/readyz").await? == 200).then_some(())).await;
        lab.serving = None;
        let words = until("it is not ready", async || {
            let (status, words) = probe(&replica, "/readyz").await?;
            (status == 503).then_some(words)
        })
        .await;
        assert!(words.contains("the host half does not report the VMs of this cluster"), "{words}");
        assert_eq!(status(&replica, "/healthz").await, Some(200));
        lab.serving = Some(lab.host.serve());
        until("it is ready again", async || (status(&replica, "/readyz").await? == 200).then_some(())).await;
        assert!(replica.runs());
    });
}

/// A leader ends when it leads no more. Whoever is started then waits for the API server, however long that takes.
#[test]
fn without_an_api_server_nothing_is_started_anew_again_and_again() {
    wait(async {
        let lab = Lab::start().await;
        let mut gate = Gate::new(&lab.kubeconfig("gated")).await;
        let mut first = lab.replica_by("first", &gate.kubeconfig);
        first.leads().await;
        gate.shut().await;
        assert!(!first.ended().await.success());
        assert!(first.log().contains("no longer the leader"), "{}", first.log());
        let mut second = lab.replica_by("second", &gate.kubeconfig);
        until("it is not ready", async || (status(&second, "/readyz").await? == 503).then_some(())).await;
        for _ in 0..6 {
            // Longer than the Lease lasts.
            quiet(1).await;
            assert_eq!(status(&second, "/healthz").await, Some(200));
        }
        let (_, words) = probe(&second, "/readyz").await.unwrap();
        assert!(words.contains("the Lease of the cloud controller managers"), "{words}");
        assert!(second.runs());
        gate.open().await;
        second.leads().await;
        until("it is ready", async || (status(&second, "/readyz").await? == 200).then_some(())).await;
    });
}

#[test]
fn the_manifest_probes_what_the_program_answers() {
    let set = packaged("DaemonSet");
    let container = &set["spec"]["template"]["spec"]["containers"][0];
    for (probe, path) in [("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")] {
        let get = &container[probe]["httpGet"];
        assert_eq!(
            (text(&get["path"]), text(&get["host"]), get["port"].as_u64()),
            (path, "127.0.0.1", Some(10268))
        );
    }
    let help = std::process::Command::new(env!("CARGO_BIN_EXE_guestlet-ccm")).arg("--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    assert!(help.contains("[default: 127.0.0.1:10268]"), "{help}");
}
