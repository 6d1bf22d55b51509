//! Grants for QGA clients: the real agent with settings that have some, and what it writes down.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Instant;

use serde_json::{Value, json};

use crate::agent::{Agent, Client, PATIENCE, launch, settings_in};
use crate::namespace::{is_outside, run};

fn exec(client: &mut Client, path: &str) -> Value {
    client.ask(&json!({"execute": "guest-exec", "arguments": {"path": path, "arg": ["secret"]}}).to_string())
}

fn open(client: &mut Client, path: &Path, mode: &str) -> Value {
    client.ask(&json!({"execute": "guest-file-open", "arguments": {"path": path, "mode": mode}}).to_string())
}

fn call(client: &mut Client, command: &str) -> Value {
    client.ask(&json!({"execute": command}).to_string())
}

fn refusal(answer: &Value) -> &str {
    answer["error"]["desc"].as_str().unwrap_or_else(|| panic!("{answer}"))
}

/// The names of the commands that guest-info calls enabled.
fn enabled(client: &mut Client) -> Vec<String> {
    let info = client.call("guest-info");
    let commands = info["supported_commands"].as_array().unwrap();
    let enabled = commands.iter().filter(|command| command["enabled"] == true);
    enabled.map(|command| command["name"].as_str().unwrap().to_owned()).collect()
}

/// The records in a file, as soon as `enough` of them are there.
fn records(file: &Path, enough: impl Fn(&[Value]) -> bool) -> Vec<Value> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let records: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        if enough(&records) {
            return records;
        }
        assert!(Instant::now() < deadline, "{records:#?}");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

fn guestlet(words: &[&str]) -> Output {
    launch::guestlet().args(words).output().unwrap()
}

#[test]
fn a_grant_for_qga_is_all_that_its_clients_have() {
    let agent = Agent::start_set(&[], "[[grant]]\nhost = 'qga'\nroles = ['status', 'power']\n");
    let mut client = agent.client();
    let enabled = enabled(&mut client);
    for (command, expected) in [
        ("guest-sync", true),
        ("guest-get-osinfo", true),
        ("guest-shutdown", true),
        ("guest-set-time", true),
        ("guest-exec", false),
        ("guest-file-open", false),
        ("guest-set-user-password", false),
        ("guest-fsfreeze-freeze", false),
        ("guest-get-load", false),
    ] {
        assert_eq!(enabled.contains(&command.to_owned()), expected, "{command}");
    }
    assert!(client.call("guest-get-host-name")["host-name"].is_string());
    let answer = exec(&mut client, "/bin/true");
    assert_eq!(answer["error"]["class"], "CommandNotFound");
    assert_eq!(
        refusal(&answer),
        "Command guest-exec has been disabled: no grant gives the role exec to QGA clients; add a [[grant]] with \
         host = \"qga\" and roles = [\"exec\"] to /etc/guestlet/agent.d"
    );
    let log = agent.log();
    let line = log.lines().find(|line| line.contains("audit: ") && line.contains("guest-exec")).unwrap();
    assert!(line.contains(": guest-exec: denied: no grant gives the role exec"), "{line}");
}

#[test]
fn a_grant_for_others_leaves_qga_as_it_was() {
    let agent = Agent::start_set(&[], "[[grant]]\nhost = '*'\nroles = ['disks']\n");
    let all = Agent::start();
    assert_eq!(enabled(&mut agent.client()), enabled(&mut all.client()));
}

#[test]
fn programs_and_files_are_those_of_one_grant_each() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().canonicalize().unwrap();
    for name in ["read", "write", "none"] {
        std::fs::create_dir(folder.join(name)).unwrap();
        std::fs::write(folder.join(name).join("file"), "content").unwrap();
    }
    std::os::unix::fs::symlink(folder.join("none/file"), folder.join("read/link")).unwrap();
    let at = folder.display();
    let truth = std::fs::canonicalize("/bin/true").unwrap();
    let agent = Agent::start_set(
        &[],
        &format!(
            "[[grant]]\nhost = 'qga'\nroles = ['exec']\nexec = {{ paths = ['{}'] }}\n\
             [[grant]]\nhost = 'qga'\nroles = ['files-read']\nfiles = {{ paths = ['{at}/read'] }}\n\
             [[grant]]\nhost = 'qga'\nroles = ['files-write']\nfiles = {{ paths = ['{at}/write'] }}\n",
            truth.display()
        ),
    );
    let mut client = agent.client();
    assert!(exec(&mut client, "/bin/true")["return"]["pid"].is_i64());
    assert!(refusal(&exec(&mut client, "/bin/sh")).starts_with("no grant lets QGA clients run "));
    let with_environment =
        json!({"execute": "guest-exec", "arguments": {"path": truth, "env": ["LD_PRELOAD=/x"]}}).to_string();
    assert!(refusal(&client.ask(&with_environment)).starts_with("no grant lets QGA clients run "));
    let link = open(&mut client, &folder.join("read/link"), "r");
    assert!(refusal(&link).contains(&format!("{at}/none/file")), "{link}");
    for (name, mode, expected) in [
        ("read/file", "r", true),
        ("read/file", "r+", false),
        ("read/link", "r", false),
        ("write/file", "r", true),
        ("write/file", "w", true),
        ("none/file", "r", false),
        ("none/new", "w", false),
    ] {
        let answer = open(&mut client, &folder.join(name), mode);
        assert_eq!(answer["return"].is_i64(), expected, "{name} {mode}: {answer}");
    }
    assert_eq!(std::fs::read(folder.join("none/file")).unwrap(), b"content");
    assert!(!folder.join("none/new").exists());
}

/// A process of whoever may make a user namespace has any file of the guest under any path, `/proc/PID/root/…`.
#[test]
fn no_mount_namespace_of_a_process_gives_a_file_a_path_that_is_allowed() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().canonicalize().unwrap();
    for name in ["allowed", "secret"] {
        std::fs::create_dir(folder.join(name)).unwrap();
        std::fs::write(folder.join(name).join("file"), name).unwrap();
    }
    let (allowed, audit) = (folder.join("allowed"), folder.join("audit.jsonl"));
    let script = format!(
        "mount --make-rprivate / && mount --bind {} {} && echo ready && exec sleep 600",
        folder.join("secret").display(),
        allowed.display()
    );
    let mut other = std::process::Command::new("unshare")
        .args(["--mount", "sh", "-ec", &script])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut ready = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(other.stdout.take().unwrap()), &mut ready)
        .unwrap();
    assert_eq!(ready, "ready\n");
    let root = format!("/proc/{}/root", other.id());
    let through = |path: &Path| Path::new(&format!("{root}{}", path.display())).to_owned();
    let paths = format!("files = {{ paths = ['{}'] }}\n", allowed.display());
    let granted = Agent::start_set(
        &[],
        &format!(
            "[audit]\nfile = '{}'\n[[grant]]\nhost = 'qga'\nroles = ['files-write']\n{paths}",
            audit.display()
        ),
    );
    let limited = Agent::start_set(&[], &format!("[qga.files]\npaths = ['{}']\n", allowed.display()));
    for agent in [&granted, &limited] {
        let mut client = agent.client();
        assert!(open(&mut client, &allowed.join("file"), "r")["return"].is_i64());
        for (name, mode) in [("file", "r"), ("file", "w"), ("new", "w")] {
            let answer = open(&mut client, &through(&allowed.join(name)), mode);
            assert!(refusal(&answer).contains("which leads into another mount namespace"), "{answer}");
            assert!(refusal(&answer).contains(&root), "{answer}");
        }
        assert_eq!(std::fs::read(folder.join("secret/file")).unwrap(), b"secret");
        assert!(!folder.join("secret/new").exists());
    }
    let records = records(&audit, |records| records.len() >= 4);
    assert_eq!(records[1]["subject"], json!(through(&allowed.join("file"))), "{}", records[1]);
    // Where paths are not limited, it is a file as any other.
    let answer = open(&mut Agent::start().client(), &through(&allowed.join("file")), "r");
    assert!(answer["return"].is_i64(), "{answer}");
    other.kill().unwrap();
    other.wait().unwrap();
}

#[test]
fn what_is_blocked_stays_so_whatever_is_granted() {
    let agent = Agent::start_set(
        &["--block-rpcs", "guest-exec"],
        "[qga.files]\nread-only = true\n[[grant]]\nhost = 'qga'\nprofile = 'qemu-ga'\n",
    );
    let mut client = agent.client();
    assert!(refusal(&exec(&mut client, "/bin/true")).ends_with("the command is not allowed"));
    let answer = open(&mut client, &agent.folder.path().join("new"), "w");
    assert!(refusal(&answer).contains("qga.files.read-only"), "{answer}");
}

#[test]
fn each_audited_call_is_one_record_without_what_nobody_else_may_know() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("audit.jsonl");
    let agent = Agent::start_set(&[], &format!("[audit]\nfile = '{}'\n", file.display()));
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let mut client = agent.client();
    let data = folder.path().join("data");
    std::fs::write(&data, "content").unwrap();
    let truth = std::fs::canonicalize("/bin/true").unwrap();
    assert!(exec(&mut client, &truth.display().to_string())["return"]["pid"].is_i64());
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&data, &link).unwrap();
    assert!(open(&mut client, &link, "r")["return"].is_i64());
    assert!(open(&mut client, &data.join("x"), "w")["error"].is_object());
    client.call("guest-get-osinfo");
    let records = records(&file, |records| records.len() >= 3);
    assert_eq!(records.len(), 3, "{records:#?}");
    let told: Vec<_> = records
        .iter()
        .map(|record| {
            ["host", "role", "verb", "decision"].map(|key| record[key].as_str().unwrap().to_owned())
        })
        .collect();
    assert_eq!(
        told,
        [
            ["qga", "exec", "guest-exec", "allowed"],
            ["qga", "files-read", "guest-file-open", "allowed"],
            ["qga", "files-write", "guest-file-open", "allowed"],
        ]
    );
    assert_eq!((&records[0]["subject"], &records[0]["result"]), (&json!(truth), &"done".into()));
    let through_a_link = records.iter().map(|record| &record["given"]).collect::<Vec<_>>();
    assert_eq!(through_a_link, [&json!(""), &json!(link), &json!("")]);
    assert!(records[2]["result"].as_str().unwrap().contains("Not a directory"), "{}", records[2]);
    assert!(records.iter().all(|record| record["id"].as_str().unwrap().len() == 32));
    assert!(records[0]["caller"].as_str().unwrap().contains("uid "), "{}", records[0]);
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(!text.contains("secret") && !text.contains("content"), "{text}");
}

/// An agent that gives QGA no more than a look, a client that was denied so often to run a program, and the file of records.
fn denied(folder: &Path, times: usize) -> (Agent, Client, PathBuf) {
    let file = folder.join("audit.jsonl");
    let settings =
        format!("[audit]\nfile = '{}'\n[[grant]]\nhost = 'qga'\nroles = ['status']\n", file.display());
    let agent = Agent::start_set(&[], &settings);
    let mut client = agent.client();
    for _ in 0..times {
        refusal(&exec(&mut client, "/bin/true"));
    }
    (agent, client, file)
}

#[test]
fn of_a_flood_of_denials_few_are_written_and_the_others_counted() {
    let folder = tempfile::tempdir().unwrap();
    let (agent, _client, file) = denied(folder.path(), 500);
    // By the tick at the latest, which comes every ten seconds.
    let counted =
        |line: &&str| line.contains("more calls were denied") || line.contains("more were denied before");
    let deadline = Instant::now() + PATIENCE;
    while !agent.log().lines().any(|line| counted(&line)) {
        assert!(Instant::now() < deadline, "{}", agent.log());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let written = records(&file, |records| records.len() >= 20).len();
    assert!((20..200).contains(&written), "{written}");
    assert!(written < 100, "one a second after the first twenty: {written}");
}

fn sum(records: &[Value], key: &str) -> u64 {
    records.iter().map(|record| record[key].as_u64().unwrap_or_default()).sum()
}

#[test]
fn a_flood_of_denials_hides_no_other_one_and_the_file_has_its_count_without_another_call() {
    let folder = tempfile::tempdir().unwrap();
    let (agent, mut client, file) = denied(folder.path(), 200);
    refusal(&call(&mut client, "guest-set-user-password"));
    let of = |verb: &str, records: &[Value]| records.iter().filter(|record| record["verb"] == verb).count();
    let written = records(&file, |records| of("guest-set-user-password", records) == 1);
    assert!((20..100).contains(&of("guest-exec", &written)), "{written:#?}");
    let all =
        |records: &[Value]| of("guest-exec", records) as u64 + sum(records, "more_denied_before") == 200;
    let written = records(&file, all);
    assert!(
        written.iter().any(|record| record["verb"].is_null() && record["role"] == "exec"),
        "{written:#?}"
    );
    assert!(agent.log().contains("more calls were denied (exec)"), "{}", agent.log());
    let suggested = guestlet(&["policy", "suggest", "--file", file.to_str().unwrap()]);
    let suggested = String::from_utf8(suggested.stdout).unwrap();
    assert!(suggested.contains("201 denied calls"), "{suggested}");
}

/// The disk is a tmpfs, in a mount namespace of its own.
#[test]
fn records_that_a_full_disk_has_no_room_for_are_counted() {
    if is_outside() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    run(&format!("mount -t tmpfs -o size=64k none {}", disk.display()));
    let (file, ballast) = (disk.join("audit.jsonl"), disk.join("fill"));
    let agent = Agent::start_set(&[], &format!("[audit]\nfile = '{}'\n", file.display()));
    let mut client = agent.client();
    let mut open_it = || open(&mut client, folder.path(), "r");
    open_it();
    records(&file, |records| records.len() == 1);
    drop(std::fs::write(&ballast, vec![b'x'; 1 << 20]));
    for _ in 0..60 {
        open_it();
    }
    std::thread::sleep(std::time::Duration::from_millis(500));
    std::fs::remove_file(&ballast).unwrap();
    open_it();
    let deadline = Instant::now() + PATIENCE;
    loop {
        let text = std::fs::read_to_string(&file).unwrap();
        let parsed: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let kept = parsed.iter().filter(|record| !record["verb"].is_null()).count() as u64;
        let lost = sum(&parsed, "lost_before");
        if kept + lost == 62 && lost > 0 {
            break;
        }
        assert!(Instant::now() < deadline, "{kept} kept, {lost} lost: {parsed:#?}");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

#[test]
fn what_the_mode_audit_writes_down_becomes_grants_that_give_just_that() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("audit.jsonl");
    let data = folder.path().canonicalize().unwrap().join("data");
    std::fs::write(&data, "content").unwrap();
    let audited = Agent::start_set(
        &[],
        &format!(
            "[policy]\nmode = 'audit'\n[audit]\nfile = '{}'\n[[grant]]\nhost = 'qga'\nroles = ['logs']\n",
            file.display()
        ),
    );
    let program = folder.path().join("link");
    std::os::unix::fs::symlink("/bin/true", &program).unwrap();
    let program = program.display().to_string();
    let mut client = audited.client();
    assert!(exec(&mut client, &program)["return"]["pid"].is_i64());
    assert!(open(&mut client, &data, "r")["return"].is_i64());
    client.call("guest-get-osinfo");
    let all = records(&file, |records| records.len() >= 3);
    assert!(all.iter().all(|record| record["decision"] == "would-deny"), "{all:#?}");
    assert!(audited.log().contains("would be denied: no grant gives the role exec to QGA clients"));
    drop(audited);

    let suggested = guestlet(&["policy", "suggest", "--file", file.to_str().unwrap()]);
    let suggested = String::from_utf8(suggested.stdout).unwrap();
    let agent = Agent::start_set(&[], &suggested);
    let mut client = agent.client();
    assert!(exec(&mut client, &program)["return"]["pid"].is_i64(), "{suggested}");
    assert!(open(&mut client, &data, "r")["return"].is_i64(), "{suggested}");
    client.call("guest-get-osinfo");
    for answer in [
        exec(&mut client, "/bin/sh"),
        open(&mut client, &data, "w"),
        open(&mut client, &file, "r"),
        call(&mut client, "guest-fsfreeze-status"),
        call(&mut client, "guest-get-load"),
    ] {
        assert!(refusal(&answer).contains("no grant "), "{answer}: {suggested}");
    }
}

#[test]
fn what_is_in_force_is_shown_with_its_file_and_line_and_a_mistake_is_refused_with_them() {
    let folder = tempfile::tempdir().unwrap();
    let main = folder.path().join("agent.toml");
    let drop_in = folder.path().join("agent.d/1.toml");
    std::fs::create_dir(drop_in.parent().unwrap()).unwrap();
    std::fs::write(&main, "qemu-ga-files = false\n[qga]\nblock-rpcs = ['guest-exec']\n").unwrap();
    std::fs::write(&drop_in, "\n[[grant]]\nhost = 'guestlet://shop/host/a'\nprofile = 'monitor'\n").unwrap();
    let main = main.to_str().unwrap();
    let shown = guestlet(&["policy", "show", "--settings", main]);
    let text = String::from_utf8(shown.stdout).unwrap();
    let line = text
        .lines()
        .find(|line| line.starts_with("guestlet://shop/host/a"))
        .unwrap_or_else(|| panic!("{text}"));
    assert!(line.contains(&format!("  {}:2 ", drop_in.display())), "{text}");
    assert!(line.ends_with("  status metrics logs"), "{text}");
    assert!(text.contains("not these commands: guest-exec"), "{text}");
    let shown = guestlet(&["policy", "show", "-o", "json", "--settings", main]);
    let json: Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!(json["grants"][0]["origin"], format!("{}:2", drop_in.display()));
    assert_eq!(json["grants"][0]["roles"], json!(["status", "metrics", "logs"]));
    assert_eq!(json["mode"], "enforce");

    std::fs::write(&drop_in, "[[grant]]\nhost = 'qga'\nroles = ['exce']\n").unwrap();
    for words in [&["policy", "show", "--settings", main][..], &["--settings", main]] {
        let refused = guestlet(words);
        let error = String::from_utf8(refused.stderr).unwrap();
        assert!(!refused.status.success());
        assert!(error.contains(&format!("{}:3: unknown role \"exce\"", drop_in.display())), "{error}");
    }
    let wrong = guestlet(&["policy", "sugest"]);
    assert!(String::from_utf8(wrong.stderr).unwrap().contains("policy needs show or suggest"));
}

/// As while the disk is not mounted that has the grants: without them QGA clients would have everything.
#[test]
fn settings_behind_a_link_to_nothing_are_refused_and_not_left_out() {
    for link in ["agent.d/grants.toml", "agent.d"] {
        let folder = tempfile::tempdir().unwrap();
        let main = folder.path().join("agent.toml");
        std::fs::write(&main, settings_in(folder.path())).unwrap();
        let link = folder.path().join(link);
        std::fs::create_dir_all(link.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(folder.path().join("disk/grants.toml"), &link).unwrap();
        let main = main.to_str().unwrap();
        for words in [&["policy", "show", "--settings", main][..], &["--settings", main]] {
            let refused = guestlet(words);
            let error = String::from_utf8(refused.stderr).unwrap();
            assert!(!refused.status.success() && refused.stdout.is_empty(), "{words:?}");
            let expected = format!("{0}: cannot be read: {0} is a dangling symbolic link", link.display());
            assert!(error.contains(&expected), "{error}");
        }
    }
}

/// The test is journald, in a mount namespace of its own.
#[test]
fn journald_has_the_parts_of_a_record_as_fields() {
    if is_outside() {
        return;
    }
    run("mount -t tmpfs run /run");
    std::fs::create_dir_all("/run/systemd/journal").unwrap();
    let journal = UnixDatagram::bind("/run/systemd/journal/socket").unwrap();
    journal.set_read_timeout(Some(PATIENCE)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (settings, socket) = (folder.path().join("agent.toml"), folder.path().join("qga.sock"));
    let grant = "[[grant]]\nhost = 'qga'\nroles = ['status']\n";
    std::fs::write(&settings, settings_in(folder.path()) + grant).unwrap();
    let log = std::fs::File::create(folder.path().join("log")).unwrap();
    let found = log.metadata().unwrap();
    let child = launch::guestlet()
        .args(["-m", "unix-listen", "-p"])
        .arg(&socket)
        .arg("-t")
        .arg(folder.path())
        .arg("--settings")
        .arg(&settings)
        .env("JOURNAL_STREAM", format!("{}:{}", found.dev(), found.ino()))
        .stderr(log)
        .spawn()
        .unwrap();
    let _agent = Agent { child, folder };
    let deadline = Instant::now() + PATIENCE;
    while UnixStream::connect(&socket).is_err() {
        assert!(Instant::now() < deadline, "the agent does not listen");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    refusal(&exec(&mut Client::connect(&socket), "/bin/true"));
    let mut buffer = vec![0; 1 << 16];
    let entry = loop {
        let length = journal.recv(&mut buffer).unwrap();
        let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
        if text.contains("audit: ") {
            break text;
        }
    };
    for line in [
        "PRIORITY=6",
        "SYSLOG_IDENTIFIER=guestlet",
        "GUESTLET_HOST=qga",
        "GUESTLET_ROLE=exec",
        "GUESTLET_VERB=guest-exec",
        "GUESTLET_DECISION=denied",
        "GUESTLET_RESULT=not begun",
    ] {
        assert!(entry.lines().any(|found| found == line), "{line}: {entry:?}");
    }
    let field = |name: &str| {
        let found = entry.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        found.unwrap_or_else(|| panic!("{name}: {entry:?}")).to_owned()
    };
    assert_eq!(field("GUESTLET_AUDIT_ID").len(), 32);
    assert!(field("GUESTLET_CALLER").starts_with(socket.to_str().unwrap()));
    assert!(field("GUESTLET_DURATION_USEC").parse::<u64>().is_ok());
}
