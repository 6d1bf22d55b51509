//! What the settings limit beyond the lists of commands: asked of a session in this process, with limits of its own.

use std::os::unix::fs::symlink;
use std::path::PathBuf;

use guestlet::guest::Guest;
use guestlet::qga::complaints::Complaints;
use guestlet::qga::policy::{Limits, Policy};
use guestlet::qga::session::{self, End};
use guestlet::qga::{Context, PROTOCOL_VERSION};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

/// The answers to some requests.
async fn ask(limits: Limits, requests: &[Value]) -> Vec<Value> {
    let mut policy = Policy::default();
    policy.limits = limits;
    let context = Context {
        guest: Guest::default(),
        policy,
        complaints: Complaints::default(),
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
    tokio::join!(asking, serving).0
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
