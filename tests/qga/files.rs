//! guest-file-*: what a client can do with files, and beside Debian's qemu-ga.

use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::time::{Duration, Instant};

use base64_simd::STANDARD;
use serde_json::{Value, json};

use crate::agent::{Agent, Client};
use crate::beside_qemu_ga::both;

fn ask(client: &mut Client, command: &str, arguments: &Value) -> Value {
    client.ask(&json!({"execute": format!("guest-file-{command}"), "arguments": arguments}).to_string())
}

/// What a command returns.
#[allow(clippy::needless_pass_by_value, reason = "they are written down where they are passed")]
fn call(client: &mut Client, command: &str, arguments: Value) -> Value {
    let answer = ask(client, command, &arguments);
    answer.get("return").unwrap_or_else(|| panic!("{command} {arguments}: {answer}")).clone()
}

/// The description of the error that a command gives.
#[allow(clippy::needless_pass_by_value, reason = "as above")]
fn refused(client: &mut Client, command: &str, arguments: Value) -> String {
    let answer = ask(client, command, &arguments);
    assert_eq!(answer["error"]["class"], "GenericError", "{command} {arguments}: {answer}");
    answer["error"]["desc"].as_str().unwrap().to_owned()
}

fn open(client: &mut Client, path: &Path, mode: &str) -> i64 {
    call(client, "open", json!({"path": path, "mode": mode})).as_i64().unwrap()
}

fn bytes_of(read: &Value) -> Vec<u8> {
    let bytes = STANDARD.decode_to_vec(read["buf-b64"].as_str().unwrap()).unwrap();
    assert_eq!(read["count"], bytes.len(), "count does not agree with the bytes");
    bytes
}

/// What cannot be made by repeating a piece of it.
fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x2545_f491_u32;
    let next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state.to_le_bytes()[1]
    };
    std::iter::repeat_with(next).take(length).collect()
}

#[test]
fn a_file_of_any_size_is_written_and_read_back() {
    let agent = Agent::start();
    let path = agent.folder.path().join("file");
    let mut client = agent.client();
    for length in [0, 1, 2, 3, 4095, 4096, 196_607, 196_608, 196_609, 393_216, 1_000_001, 3 << 20] {
        let bytes = noise(length);
        let handle = open(&mut client, &path, "w+");
        let written = call(
            &mut client,
            "write",
            json!({"handle": handle, "buf-b64": STANDARD.encode_to_string(&bytes)}),
        );
        assert_eq!(written, json!({"count": length, "eof": false}));
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
        let begin = json!({"handle": handle, "offset": 0, "whence": "set"});
        assert_eq!(call(&mut client, "seek", begin), json!({"position": 0, "eof": false}));
        let read = call(&mut client, "read", json!({"handle": handle, "count": length}));
        assert!(bytes_of(&read) == bytes, "{length} bytes");
        assert_eq!(read["eof"], false, "{length}: the end has not been met yet");
        let after = call(&mut client, "read", json!({"handle": handle, "count": 1}));
        assert_eq!(after, json!({"count": 0, "buf-b64": "", "eof": true}));
        call(&mut client, "seek", json!({"handle": handle, "offset": 0, "whence": 0}));
        let more = call(&mut client, "read", json!({"handle": handle, "count": length + 1}));
        assert!(bytes_of(&more) == bytes && more["eof"] == true, "{length} bytes, one more asked for");
        assert_eq!(call(&mut client, "close", json!({"handle": handle})), json!({}));
    }
}

/// As QEMU's own unit test does it.
#[test]
fn a_relative_path_begins_at_the_working_directory() {
    let agent = Agent::start();
    let mut client = agent.client();
    let handle = open(&mut client, Path::new("foo"), "w+");
    assert!((1000..1 << 31).contains(&handle), "{handle}");
    let hello = b"Hello World!\n\0";
    let text = STANDARD.encode_to_string(hello);
    let written = call(&mut client, "write", json!({"handle": handle, "buf-b64": text}));
    assert_eq!(written, json!({"count": hello.len(), "eof": false}));
    call(&mut client, "flush", json!({"handle": handle}));
    call(&mut client, "close", json!({"handle": handle}));
    assert_eq!(std::fs::read(agent.folder.path().join("foo")).unwrap(), hello);
    let handle = open(&mut client, Path::new("./foo"), "r");
    let read = json!({"handle": handle});
    assert_eq!(
        call(&mut client, "read", read.clone()),
        json!({"count": hello.len(), "buf-b64": text, "eof": true})
    );
    assert_eq!(call(&mut client, "read", read.clone()), json!({"count": 0, "buf-b64": "", "eof": true}));
    let seek = json!({"handle": handle, "offset": 6, "whence": "set"});
    assert_eq!(call(&mut client, "seek", seek), json!({"position": 6, "eof": false}));
    assert_eq!(bytes_of(&call(&mut client, "read", read)), hello[6..]);
    std::fs::create_dir(agent.folder.path().join("below")).unwrap();
    open(&mut client, Path::new("below/new"), "w");
    assert!(agent.folder.path().join("below/new").exists());
    assert!(
        refused(&mut client, "open", json!({"path": "missing/new", "mode": "w"})).contains("No such file")
    );
}

#[test]
fn handles_outlive_their_client_and_an_id_comes_back_behind_a_long_answer() {
    let agent = Agent::start();
    let path = agent.folder.path().join("file");
    let bytes = noise(1 << 20);
    std::fs::write(&path, &bytes).unwrap();
    let handle = open(&mut agent.client(), &path, "r");
    let request =
        json!({"execute": "guest-file-read", "arguments": {"handle": handle, "count": 1 << 20}, "id": [7]});
    let answer = agent.client().ask(&request.to_string());
    assert_eq!(answer["id"], json!([7]));
    assert!(bytes_of(&answer["return"]) == bytes);
}

#[test]
fn a_client_that_leaves_within_an_answer_leaves_the_file_usable() {
    let agent = Agent::start();
    let path = agent.folder.path().join("file");
    std::fs::File::create(&path).unwrap().set_len(48 << 20).unwrap();
    let handle = open(&mut agent.client(), &path, "r");
    let mut client = agent.client();
    let request = json!({"execute": "guest-file-read", "arguments": {"handle": handle, "count": 48 << 20}});
    client.send(request.to_string().as_bytes());
    drop(client);
    let mut client = agent.client();
    let end = call(&mut client, "seek", json!({"handle": handle, "offset": 0, "whence": "end"}));
    assert_eq!(end["position"], 48 << 20);
}

/// The files that a test looks at, alike for both agents.
fn prepare(folder: &Path) {
    std::fs::write(folder.join("digits"), "0123456789").unwrap();
    symlink("nowhere", folder.join("dangling")).unwrap();
}

/// An answer without what is meant to differ: an error is its class, a handle is a handle.
fn outcome(answer: &Value, opened: bool) -> Value {
    match answer.get("error") {
        Some(error) => error["class"].clone(),
        None if opened => json!("a handle"),
        None => answer["return"].clone(),
    }
}

#[test]
fn every_mode_and_step_ends_as_with_qemu_ga() {
    let (ours, theirs) = both();
    let mut clients = [&ours, &theirs].map(|agent| {
        prepare(agent.folder.path());
        (agent.folder.path(), agent.client())
    });
    let modes = [
        "r", "rb", "w", "wb", "a", "ab", "r+", "rb+", "r+b", "w+", "wb+", "w+b", "a+", "ab+", "a+b", "x",
        "rw", "", "R", "wx", "re", "r+e",
    ];
    let names = ["digits", "new", "dangling", "missing/new", "digits/", "new/", "digits/x", "."];
    let mut wrong = Vec::new();
    for (mode, name) in modes.iter().flat_map(|mode| names.map(|name| (*mode, name))) {
        let steps = |handle: i64| {
            [
                ("read", json!({"handle": handle, "count": 4})),
                ("seek", json!({"handle": handle, "offset": 0, "whence": "cur"})),
                ("write", json!({"handle": handle, "buf-b64": "QUI="})),
                ("flush", json!({"handle": handle})),
                ("seek", json!({"handle": handle, "offset": 0, "whence": "cur"})),
                ("write", json!({"handle": handle, "buf-b64": "QUJD", "count": 2})),
                ("seek", json!({"handle": handle, "offset": -1, "whence": "end"})),
                ("read", json!({"handle": handle})),
                ("read", json!({"handle": handle, "count": 0})),
                ("seek", json!({"handle": handle, "offset": 3, "whence": 0})),
                ("seek", json!({"handle": handle, "offset": -1, "whence": 0})),
                ("seek", json!({"handle": handle, "offset": 0, "whence": 7})),
                ("read", json!({"handle": handle, "count": -1})),
                ("read", json!({"handle": handle, "count": (48 << 20) + 1})),
                ("read", json!({"handle": handle, "count": i64::MAX})),
                ("write", json!({"handle": handle, "buf-b64": "QUI=", "count": 3})),
                ("write", json!({"handle": handle, "buf-b64": "QUI=", "count": -1})),
                ("write", json!({"handle": handle, "buf-b64": "Q!I="})),
                ("write", json!({"handle": handle, "buf-b64": "QQ==\n"})),
                ("close", json!({"handle": handle})),
                ("close", json!({"handle": handle})),
                ("read", json!({"handle": handle})),
            ]
        };
        let [ours, theirs] = clients.each_mut().map(|(folder, client)| {
            let path = format!("{}/{name}", folder.display());
            let opened = ask(client, "open", &json!({"path": path, "mode": mode}));
            let mut outcomes = vec![("open", outcome(&opened, true))];
            if let Some(handle) = opened["return"].as_i64() {
                outcomes.extend(
                    steps(handle)
                        .map(|(step, arguments)| (step, outcome(&ask(client, step, &arguments), false))),
                );
            }
            let digits = std::fs::read(folder.join("digits")).unwrap();
            let new = std::fs::read(folder.join("new")).ok();
            prepare_again(folder);
            (outcomes, digits, new)
        });
        if ours != theirs {
            wrong.push(format!("{name:?} with {mode:?}\n  ours:   {ours:?}\n  theirs: {theirs:?}"));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

fn prepare_again(folder: &Path) {
    std::fs::write(folder.join("digits"), "0123456789").unwrap();
    let _ = std::fs::remove_file(folder.join("new"));
}

#[test]
fn new_files_have_a_mode_that_the_umask_does_not_change_and_are_not_writable_by_all() {
    let agent = Agent::start();
    let mut client = agent.client();
    let old = agent.folder.path().join("old");
    std::fs::write(&old, "").unwrap();
    std::fs::set_permissions(&old, std::fs::Permissions::from_mode(0o640)).unwrap();
    for (name, mode) in [("old", 0o640), ("new", 0o644)] {
        let path = agent.folder.path().join(name);
        open(&mut client, &path, "w");
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o7777, mode, "{name}");
    }
}

#[test]
fn devices_pipes_and_files_of_the_kernel() {
    let agent = Agent::start();
    let mut client = agent.client();
    let full = open(&mut client, Path::new("/dev/full"), "w");
    let error = refused(&mut client, "write", json!({"handle": full, "buf-b64": "QQ=="}));
    assert!(error.contains("/dev/full") && error.contains("No space left"), "{error}");
    let version = open(&mut client, Path::new("/proc/version"), "r");
    let read = call(&mut client, "read", json!({"handle": version}));
    assert_eq!(bytes_of(&read), std::fs::read("/proc/version").unwrap());
    assert_eq!(read["eof"], true);
    let zero = open(&mut client, Path::new("/dev/zero"), "r");
    let read = call(&mut client, "read", json!({"handle": zero, "count": 500_000}));
    assert_eq!((bytes_of(&read), &read["eof"]), (vec![0; 500_000], &json!(false)));

    let fifo = agent.folder.path().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let error = refused(&mut client, "open", json!({"path": fifo, "mode": "w"}));
    assert!(error.starts_with(&format!("cannot open {}: ", fifo.display())), "{error}");
    let reading = open(&mut client, &fifo, "r");
    let read = call(&mut client, "read", json!({"handle": reading}));
    assert_eq!(read, json!({"count": 0, "buf-b64": "", "eof": true}));
    let mut writer = std::fs::OpenOptions::new().write(true).open(&fifo).unwrap();
    let error = refused(&mut client, "read", json!({"handle": reading}));
    assert!(error.contains("temporarily unavailable"), "{error}");
    writer.write_all(b"some").unwrap();
    let read = call(&mut client, "read", json!({"handle": reading}));
    assert_eq!((bytes_of(&read), &read["eof"]), (b"some".to_vec(), &json!(false)));
    // What would wait for a reader is no wait either.
    let writing = open(&mut client, &fifo, "w");
    let much = STANDARD.encode_to_string(vec![0; 1 << 20]);
    let error = refused(&mut client, "write", json!({"handle": writing, "buf-b64": much}));
    assert!(error.contains("only 65536 of 1048576 bytes were written"), "{error}");
}

#[test]
fn wrong_arguments_are_named_and_do_nothing() {
    let agent = Agent::start();
    let mut client = agent.client();
    let path = agent.folder.path().join("kept");
    std::fs::write(&path, "kept").unwrap();
    let handle = open(&mut client, &path, "r+");
    let cases = [
        ("open", json!({}), "\"path\" is missing"),
        ("open", json!({"path": "a\0b"}), "\"path\" must be a string without NUL"),
        ("open", json!({"path": ""}), "\"path\" must not be empty"),
        ("open", json!({"path": path, "mode": "wx"}), "\"mode\" must be one of r, w, a"),
        ("open", json!({"path": path, "mode": "w", "x": 1}), "Parameter 'x' is unexpected"),
        ("read", json!({"handle": handle, "count": -1}), "\"count\" must be from 0 to 50331648"),
        ("read", json!({"handle": handle, "count": 50_331_649}), "\"count\" must be from 0 to 50331648"),
        ("read", json!({"handle": handle, "count": 1_u64 << 63}), "\"count\" must be an integer of 64 bits"),
        ("read", json!({"handle": 0}), "\"handle\" belongs to no open file"),
        ("read", json!({"handle": -1}), "\"handle\" belongs to no open file"),
        ("read", json!({"handle": "1"}), "\"handle\" must be an integer"),
        ("write", json!({"handle": handle}), "\"buf-b64\" is missing"),
        ("write", json!({"handle": handle, "buf-b64": "A"}), "\"buf-b64\" must be a string in base64"),
        ("write", json!({"handle": handle, "buf-b64": "AAAA!AAA"}), "\"buf-b64\" must be a string in base64"),
        (
            "write",
            json!({"handle": handle, "buf-b64": "QUI=", "count": 3}),
            "\"count\" must be from 0 to the 2 bytes",
        ),
        (
            "write",
            json!({"handle": handle, "buf-b64": "QUI=", "count": -1}),
            "\"count\" must be from 0 to the 2 bytes",
        ),
        ("write", json!({"handle": handle + 1000, "buf-b64": "QQ=="}), "\"handle\" belongs to no open file"),
        ("seek", json!({"handle": handle, "offset": 0}), "\"whence\" is missing"),
        ("seek", json!({"handle": handle, "offset": 0, "whence": "top"}), "\"whence\" must be one of"),
        ("seek", json!({"handle": handle, "offset": 0, "whence": 3}), "\"whence\" must be one of"),
        ("seek", json!({"handle": handle, "offset": -1, "whence": 0}), "\"offset\" must not be negative"),
        ("seek", json!({"handle": handle, "offset": i64::MIN, "whence": 1}), "Invalid argument"),
        ("close", json!({"handle": 9}), "\"handle\" belongs to no open file"),
        ("flush", json!({"handle": 9}), "\"handle\" belongs to no open file"),
    ];
    for (command, arguments, named) in cases {
        let error = refused(&mut client, command, arguments.clone());
        assert!(error.contains(named), "{command} {arguments}: {error}");
    }
    assert_eq!(std::fs::read(&path).unwrap(), b"kept");
    let here = call(&mut client, "seek", json!({"handle": handle, "offset": 0, "whence": "cur"}));
    assert_eq!(here["position"], 0);
}

#[test]
fn files_that_nobody_closes_are_bounded_and_the_log_says_who_opened_which() {
    let agent = Agent::start();
    let mut client = agent.client();
    let path = agent.folder.path().join("file");
    std::fs::write(&path, "").unwrap();
    let handles: Vec<_> = (0..512).map(|_| open(&mut client, &path, "r")).collect();
    let error = refused(&mut client, "open", json!({"path": path}));
    assert!(error.contains("512 files are open"), "{error}");
    call(&mut client, "close", json!({"handle": handles[0]}));
    open(&mut client, &path, "r");
    let log = agent.log();
    assert!(log.contains(&format!("guest-file-open ({}): done", path.display())), "{log}");
}

#[test]
fn a_large_read_is_never_held_and_what_it_took_is_given_back() {
    let agent = Agent::start();
    let path = agent.folder.path().join("file");
    std::fs::write(&path, vec![7; 48 << 20]).unwrap();
    let mut client = agent.client();
    let idle = agent.status("RssAnon:");
    let resident = agent.status("VmRSS:");
    let handle = open(&mut client, &path, "r");
    let request = json!({"execute": "guest-file-read", "arguments": {"handle": handle, "count": 48 << 20}});
    client.send(request.to_string().as_bytes());
    assert!(client.line().len() > 64 << 20);
    let peak = agent.peak();
    assert!(peak < resident + 8 * 1024, "{resident} KiB idle, {peak} KiB at most");
    let begun = Instant::now();
    while agent.status("RssAnon:") > idle + 512 {
        let now = agent.status("RssAnon:");
        assert!(begun.elapsed() < Duration::from_secs(5), "{idle} KiB idle, {now} KiB a while after");
        std::thread::sleep(Duration::from_millis(20));
    }
}
