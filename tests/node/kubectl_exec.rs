//! Programs in guests of a cluster, by its API server.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};

use crate::agent::Agent;
use crate::bench::{host, install, socket, until_names};
use crate::cluster::{HOSTS, Lab as Cluster, wait};
use crate::kubectl::{SYSTEM, ctl, pod, program, user, value, words};
use crate::kubelet::Kubelet;
use crate::lab::{Lab, assert_fails};
use crate::model::objects::{Kind, text};

const GRANTS: &str = "[[grant]]\nhost = \"plain\"\nroles = [\"status\", \"topology\", \"exec\", \"files-write\", \"forward\"]\n";

/// Sends back what each client sends.
fn serve(path: &Path) {
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (mut from, mut to) = {
                let client = client.unwrap();
                (client.try_clone().unwrap(), client)
            };
            drop(std::io::copy(&mut from, &mut to));
        }
    });
}

/// A VM that nobody made from a VirtualMachine, and of whose DMI nothing is said: this machine has none that an agent could read.
async fn instance(cluster: &Cluster) -> Value {
    let instance = json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": { "name": "web" },
        "spec": { "domain": { "devices": {}, "memory": { "guest": "1Gi" } } },
    });
    cluster.api.create(&Kind::Vmi.within("default"), &instance).await;
    cluster.runs("web").await
}

/// Files go there and back, also where every connection breaks in the middle.
async fn copies(admin: &Path, kubelet: &Kubelet, lab: &Lab) {
    let bytes: Vec<u8> =
        (0..32_u64 << 17).flat_map(|at| at.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes()).collect();
    let folder = lab.path("files");
    std::fs::create_dir(&folder).unwrap();
    let [here, there, back] = ["here", "there", "back"].map(|name| folder.join(name));
    std::fs::write(&here, &bytes).unwrap();
    let [here, there, back] = [&here, &there, &back].map(|path| path.to_str().unwrap());
    let remote = format!("web:{there}");
    for (from, to, path) in [(here, remote.as_str(), there), (remote.as_str(), back, back)] {
        let mut command = program(env!("CARGO_BIN_EXE_guestctl"));
        command.arg("--kubeconfig").arg(admin).args(["cp", from, to]).env("XDG_STATE_HOME", &folder);
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let is_beside = || {
            let mut names = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap());
            names.any(|entry| entry.file_name().to_string_lossy().contains(".guestlet-"))
        };
        while child.try_wait().unwrap().is_none() && !is_beside() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        kubelet.break_connections();
        let output = child.wait_with_output().await.unwrap();
        assert!(output.status.success(), "{from}: {output:?}");
        assert!(std::fs::read(path).unwrap() == bytes, "{to}");
    }
    let missing = ctl(admin, &["cp", "web:/nonexistent", back]).await;
    assert_fails(&missing, 1, "/nonexistent");
    assert!(std::fs::read(back).unwrap() == bytes);
}

#[test]
fn a_program_goes_on_while_connections_break_and_its_vm_is_migrated() {
    wait(async {
        let cluster = Cluster::start().await;
        let (api, plane) = (&cluster.api, cluster.turn.plane());
        install(api).await;
        api.ensure("/api/v1/namespaces", &json!({ "metadata": { "name": SYSTEM } })).await;
        let kubelet = Kubelet::start(plane.address()).await;
        let instance = instance(&cluster).await;
        let from = text(&instance["status"]["nodeName"]).to_owned();
        let to = HOSTS.into_iter().find(|host| *host != from).unwrap();
        let mut nodes: Vec<Lab> = Vec::new();
        for node in [from.as_str(), to] {
            kubelet.announce(api, node).await;
            let lab = host(plane, node).start();
            let name = format!("guestlet-node-{node}");
            pod(api, &name, "guestlet-node", node).await;
            kubelet.run(&name, lab.socket());
            nodes.push(lab);
        }
        let (source, target) = (&nodes[0], &nodes[1]);
        let echo = source.path("echo.sock");
        serve(&echo);
        let grants = format!("{GRANTS}forward = [\"unix:{}\"]\n", echo.display());
        let agent = Agent::start_with(&source.path("agent"), &socket(source, &instance), &grants);
        agent.is_also_at(&socket(target, &instance));
        source.until_session("default/web", "connected");
        let admin = user(plane, api, "admin", &["guestlet-viewer", "guestlet-admin"]).await;

        let failed = ctl(&admin, &["exec", "web", "--", "sh", "-c", "echo out; echo err >&2; exit 7"]).await;
        assert_eq!(
            (failed.status.code(), &failed.stdout[..], &failed.stderr[..]),
            (Some(7), &b"out\n"[..], &b"err\n"[..])
        );
        assert_fails(&ctl(&admin, &["exec", "wbe", "--", "true"]).await, 125, "did you mean default/web?");

        let mut command = program(env!("CARGO_BIN_EXE_guestctl"));
        command.arg("--kubeconfig").arg(&admin).args(["exec", "-i", "web", "--", "sh", "-c", "cat; exit 6"]);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (mut keys, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut output = BufReader::new(output).lines();
        keys.write_all(b"one\n").await.unwrap();
        assert_eq!(output.next_line().await.unwrap().unwrap(), "one");
        let programs = value(&admin, &["ps", "web"]).await;
        assert_eq!(programs[0]["is_attached"], true, "{programs}");

        kubelet.break_connections();
        keys.write_all(b"two\n").await.unwrap();
        assert_eq!(output.next_line().await.unwrap().unwrap(), "two");

        cluster.model.migrate("default", "web", to).await;
        target.until_session("default/web", "connected");
        until_names(source, &[]);
        keys.write_all(b"three\n").await.unwrap();
        assert_eq!(output.next_line().await.unwrap().unwrap(), "three");
        drop(keys);
        assert_eq!(output.next_line().await.unwrap(), None);
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).await.unwrap();
        assert_eq!(child.wait().await.unwrap().code(), Some(6), "{said}");
        assert_eq!(words(&admin, &["exec", "web", "--", "echo", "done"]).await, "done\n");

        let mut command = program(env!("CARGO_BIN_EXE_guestctl"));
        let forward = ["forward", "web", echo.to_str().unwrap(), "--stdio"];
        command.arg("--kubeconfig").arg(&admin).args(forward).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(b"there and back\n").await.unwrap();
        let output = child.wait_with_output().await.unwrap();
        assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"there and back\n"[..]));
        copies(&admin, &kubelet, target).await;
    });
}
