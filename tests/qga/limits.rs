//! What the settings limit beyond the lists of commands: asked of a session in this process, with limits of its own.

use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use guestlet::guest::Guest;
use guestlet::pace::Complaints;
use guestlet::policy::Audit;
use guestlet::qga::owners::Owners;
use guestlet::qga::policy::{Limits, Policy};
use guestlet::qga::room::Room;
use guestlet::qga::session::{self, End};
use guestlet::qga::{Context, PROTOCOL_VERSION};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::agent::PATIENCE;

/// The answers to some requests.
async fn ask(limits: Limits, requests: &[Value]) -> Vec<Value> {
    let policy = Policy::from(limits);
    let context = Context {
        guest: Guest::default(),
        policy,
        audit: Audit::default(),
        complaints: Complaints::default(),
        room: Room::default(),
        owners: Owners::default(),
        stopping: guestlet::qga::Stopping::new(),
        version: PROTOCOL_VERSION.to_owned(),
    };
    let (mut client, stream) = tokio::io::duplex(1 << 16);
    let text: String = requests.iter().map(Value::to_string).collect();
    let asking = async {
        client.write_all(text.as_bytes()).await.unwrap();
        client.shutdown().await.unwrap();
        let mut answers = String::new();
        client.read_to_string(&mut answers).await.unwrap();
        answers.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let serving = async { session::run(stream, "test", &context, End::Said).await.finish().await.unwrap() };
    tokio::select! {
        (answers, ()) = async { tokio::join!(asking, serving) } => answers,
        () = context.guest.processes.care() => unreachable!("it ends never"),
    }
}

fn description(answer: &Value) -> &str {
    answer["error"]["desc"].as_str().unwrap_or_else(|| panic!("{answer}"))
}

#[tokio::test]
async fn files_are_limited_by_where_links_lead() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().canonicalize().unwrap();
    std::fs::create_dir(folder.join("open")).unwrap();
    std::fs::write(folder.join("open/file"), "x").unwrap();
    std::fs::write(folder.join("secret"), "kept").unwrap();
    symlink(folder.join("secret"), folder.join("open/link")).unwrap();
    symlink(&folder, folder.join("open/up")).unwrap();
    let open = |name: &str, mode: &str| {
        let path: PathBuf = folder.join(name);
        json!({"execute": "guest-file-open", "arguments": {"path": path, "mode": mode}})
    };
    let limits = Limits { file_paths: Some(vec![folder.join("open")]), ..Limits::default() };
    let answers = ask(limits.clone(), &[open("open/file", "r"), open("open/new", "w")]).await;
    assert!(answers.iter().all(|answer| answer["return"].is_i64()), "{answers:?}");
    let names = ["secret", "open/link", "open/../secret", "open/up/secret", "open/up/new"];
    let answers = ask(limits, &names.map(|name| open(name, "w"))).await;
    assert_eq!(answers.len(), names.len());
    for answer in &answers {
        assert!(description(answer).contains("is not among those allowed; see qga.files.paths"), "{answer}");
    }
    assert_eq!(std::fs::read(folder.join("secret")).unwrap(), b"kept");
    assert!(!folder.join("new").exists());
    let limits = Limits { files_read_only: true, ..Limits::default() };
    let answers = ask(limits, &[open("secret", "r"), open("secret", "r+"), open("secret", "a")]).await;
    assert!(answers[0]["return"].is_i64(), "{answers:?}");
    assert!(
        answers[1..].iter().all(|answer| description(answer).contains("qga.files.read-only")),
        "{answers:?}"
    );
}

#[tokio::test]
async fn programs_are_limited_by_where_links_lead_and_that_is_what_runs() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().canonicalize().unwrap();
    std::fs::create_dir(folder.join("allowed")).unwrap();
    let mark = folder.join("mark");
    for name in ["allowed/tool", "other"] {
        let script = format!("#!/bin/sh\necho $0 >> {}\n", mark.display());
        std::fs::write(folder.join(name), script).unwrap();
        std::fs::set_permissions(folder.join(name), std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    symlink("allowed/tool", folder.join("link-in")).unwrap();
    symlink("../other", folder.join("allowed/link-out")).unwrap();
    let exec = |path: PathBuf| json!({"execute": "guest-exec", "arguments": {"path": path}});
    let limits = Limits { exec_paths: Some(vec![folder.join("allowed")]), ..Limits::default() };
    let refused = ["other", "allowed/link-out", "allowed/../other"].map(|name| exec(folder.join(name)));
    for answer in ask(limits.clone(), &[&refused[..], &[exec("true".into())]].concat()).await {
        assert!(description(&answer).contains("is not among those allowed; see qga.exec.paths"), "{answer}");
    }
    // By its environment a program that may be run would run another.
    let arguments = json!({"path": folder.join("link-in"), "env": ["BASH_ENV=/dev/stdin"]});
    let answers = ask(limits.clone(), &[json!({"execute": "guest-exec", "arguments": arguments})]).await;
    assert!(description(&answers[0]).contains("see qga.exec.paths"), "{answers:?}");
    assert!(!mark.exists());
    let answers = ask(limits, &[exec(folder.join("link-in"))]).await;
    assert!(answers[0]["return"]["pid"].is_i64(), "{answers:?}");
    let expected = format!("{}\n", folder.join("allowed/tool").display());
    let deadline = Instant::now() + PATIENCE;
    while std::fs::read_to_string(&mark).unwrap_or_default() != expected {
        assert!(Instant::now() < deadline, "{:?}", std::fs::read_to_string(&mark));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
