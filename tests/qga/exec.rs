//! guest-exec and guest-exec-status: what is run, how, and what is told of it, also beside Debian's qemu-ga.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use base64_simd::STANDARD;
use serde_json::{Value, json};

use crate::agent::{Agent, Client, PATIENCE};
use crate::beside_qemu_ga::both;
use crate::namespace::{self, is_outside};

fn ask(client: &mut Client, command: &str, arguments: &Value) -> Value {
    client.ask(&json!({"execute": command, "arguments": arguments}).to_string())
}

/// Starts a program.
fn start(client: &mut Client, arguments: &Value) -> i64 {
    let answer = ask(client, "guest-exec", arguments);
    answer["return"]["pid"].as_i64().unwrap_or_else(|| panic!("{arguments}: {answer}"))
}

/// What is told of a program when it has ended.
fn wait(client: &mut Client, pid: i64) -> Value {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let status = ask(client, "guest-exec-status", &json!({"pid": pid}))["return"].clone();
        match status["exited"].as_bool() {
            Some(true) => return status,
            Some(false) => {}
            None => panic!("{status}"),
        }
        assert!(Instant::now() < deadline, "{pid} does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn run(client: &mut Client, arguments: &Value) -> Value {
    let pid = start(client, arguments);
    wait(client, pid)
}

fn shell(script: &str, capture: &Value) -> Value {
    json!({"path": "/bin/sh", "arg": ["-c", script], "capture-output": capture})
}

/// An output as bytes; none at all is none.
fn output(status: &Value, name: &str) -> Option<Vec<u8>> {
    status.get(format!("{name}-data")).map(|text| STANDARD.decode_to_vec(text.as_str().unwrap()).unwrap())
}

fn text(status: &Value) -> String {
    String::from_utf8(output(status, "out").unwrap_or_else(|| panic!("{status}"))).unwrap()
}

#[test]
fn programs_end_as_with_qemu_ga() {
    let (ours, theirs) = both();
    let script = ours.folder.path().join("script");
    std::fs::write(&script, "echo script $1").unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let plain = ours.folder.path().join("plain");
    std::fs::write(&plain, "x").unwrap();
    let (mut ours, mut theirs) = (ours.client(), theirs.client());
    let cases = [
        json!({"path": "/bin/true"}),
        json!({"path": "false", "capture-output": true}),
        json!({"path": "false", "capture-output": false}),
        shell("echo out; echo err >&2; exit 3", &json!(true)),
        shell("echo out; echo err >&2; exit 3", &json!(false)),
        shell("kill -9 $$", &json!(true)),
        shell("kill -TERM $$", &json!(true)),
        shell("echo $0 $#", &json!(true)),
        shell("exec 1>&2; echo err", &json!(true)),
        json!({"path": "/bin/cat", "input-data": "aGk=", "capture-output": true}),
        json!({"path": "/bin/cat", "input-data": "", "capture-output": true}),
        json!({"path": "/bin/cat", "capture-output": true}),
        json!({"path": "/bin/true", "input-data": STANDARD.encode_to_string(vec![0; 1 << 20])}),
        json!({"path": "/bin/cat", "input-data": STANDARD.encode_to_string(vec![7; 1 << 20]), "capture-output": true}),
        json!({"path": "/bin/cat", "input-data": "!!", "capture-output": true}),
        json!({"path": "/usr/bin/env", "env": ["A=1", "EMPTY=", "A=2"], "capture-output": true}),
        json!({"path": "/usr/bin/env", "env": [], "capture-output": true}),
        json!({"path": "sh", "arg": ["-c", "echo $X"], "env": ["X=y=z"], "capture-output": true}),
        json!({"path": script, "arg": ["x"], "capture-output": true}),
        json!({"path": plain}),
        json!({"path": "/no/such/program"}),
        json!({"path": "no-such-program"}),
        json!({"path": "/"}),
        json!({"path": ""}),
        json!({"path": "/bin/true", "arg": "x"}),
        json!({"path": "/bin/true", "arg": ["x", 1]}),
        json!({"path": "/bin/true", "capture-output": 1}),
        json!({"path": "/bin/true", "env": "A=1"}),
        json!({}),
    ];
    let end =
        |client: &mut Client, case: &Value| match ask(client, "guest-exec", case)["return"]["pid"].as_i64() {
            Some(pid) => wait(client, pid),
            None => json!("an error"),
        };
    for case in cases {
        let (mut ours, mut theirs) = (end(&mut ours, &case), end(&mut theirs, &case));
        if case["path"] == "/usr/bin/env" {
            // The same variables, in another order; of two with one name the first counts, and we pass only that.
            for status in [&mut ours, &mut theirs] {
                let text = String::from_utf8(output(status, "out").unwrap_or_default()).unwrap();
                let mut lines: Vec<_> = text.lines().filter(|line| *line != "A=2").collect();
                lines.sort_unstable();
                status["out-data"] = json!(lines);
            }
        }
        assert_eq!(ours, theirs, "{}", case.to_string().chars().take(200).collect::<String>());
    }
    for pid in [json!(1), json!(-1), json!(1_i64 << 40), json!("1"), json!(1_u64 << 63), Value::Null] {
        let arguments = json!({"pid": pid});
        let classes = [&mut ours, &mut theirs]
            .map(|client| ask(client, "guest-exec-status", &arguments)["error"]["class"].clone());
        assert_eq!(classes, [json!("GenericError"), json!("GenericError")], "{pid}");
    }
}

#[test]
fn every_way_to_capture() {
    let agent = Agent::start();
    let mut client = agent.client();
    let script = "echo out; echo err >&2; echo more";
    let both = (Some("out\nmore\n"), Some("err\n"));
    for (capture, expected) in [
        (json!(true), both),
        (json!("separated"), both),
        (json!("stdout"), (both.0, None)),
        (json!("stderr"), (None, both.1)),
        (json!("merged"), (Some("out\nerr\nmore\n"), None)),
        (json!("none"), (None, None)),
        (json!(false), (None, None)),
    ] {
        let status = run(&mut client, &shell(script, &capture));
        let found = [output(&status, "out"), output(&status, "err")];
        assert_eq!(
            found,
            [expected.0, expected.1].map(|text| text.map(|text| text.as_bytes().to_vec())),
            "{capture}"
        );
    }
}

#[test]
fn a_program_gets_nothing_of_the_agents() {
    let agent = Agent::start();
    let mut client = agent.client();
    let script = "ls /proc/self/fd | tr '\\n' ' '; umask; pwd; grep -E '^Sig(Blk|Ign)' /proc/self/status; \
                  cat /proc/self/oom_score_adj; [ $(cut -d' ' -f5 /proc/$$/stat) = $$ ] && echo own group";
    let found = text(&run(&mut client, &shell(script, &json!("merged"))));
    let lines: Vec<_> = found.lines().collect();
    // The fourth is that of `ls` itself, on the folder.
    assert_eq!(lines[0], "0 1 2 3 0022", "{found}");
    assert_eq!(lines[1], "/");
    // Beyond 31 are those that the C library keeps to itself.
    let signals =
        |line: &str| u64::from_str_radix(line.split_whitespace().last().unwrap(), 16).unwrap() & 0x7fff_ffff;
    // What this test was started with, such as by a shell in its background, is not the agent's.
    let own = std::fs::read_to_string("/proc/self/status").unwrap();
    let ignored = signals(own.lines().find(|line| line.starts_with("SigIgn")).unwrap());
    assert_eq!((signals(lines[2]), signals(lines[3]) & !ignored), (0, 0), "{found}");
    assert_eq!(lines[5], "own group", "{found}");
    let variables = text(&run(&mut client, &json!({"path": "env", "capture-output": true})));
    assert!(variables.contains("PATH="), "{variables}");
    for ours in ["NOTIFY_SOCKET", "GLIBC_TUNABLES"] {
        assert!(!variables.contains(ours), "{variables}");
    }
}

/// What came more than 100 ms after the program's end was lost, and nothing said so.
#[test]
fn what_a_descendant_writes_after_the_programs_end_is_its_output_as_with_qemu_ga() {
    let (ours, theirs) = both();
    let script = "exec 3<&0; (sleep 1; cat <&3; echo late >&2) & echo important";
    let mut program = shell(script, &json!(true));
    program["input-data"] = json!(STANDARD.encode_to_string("read late\n"));
    let bash = json!({"path": "bash", "arg": ["-c", "exec > >(sleep 0.5; cat); echo important"], "capture-output": true});
    let [ours, theirs] = [ours, theirs].map(|agent| {
        let mut client = agent.client();
        [run(&mut client, &program), run(&mut client, &bash)]
    });
    assert_eq!(text(&ours[0]), "important\nread late\n");
    assert_eq!(text(&ours[1]), "important\n");
    assert_eq!(ours, theirs);
}

/// qemu-ga waits for them for ever.
#[test]
fn outputs_that_a_daemon_holds_open_are_waited_for_so_long_and_it_lives_on() {
    let agent = Agent::start_set(&[], "[qga.exec]\noutput-deadline = 2\n");
    let mut client = agent.client();
    let mark = agent.folder.path().join("mark");
    let go = agent.folder.path().join("go");
    nix::unistd::mkfifo(&go, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let daemon = format!(
        "exec 2>&-; (cat {}; echo late; echo late; touch {}) & echo started",
        go.display(),
        mark.display()
    );
    let begun = Instant::now();
    let status = run(&mut client, &shell(&daemon, &json!(true)));
    let took = begun.elapsed();
    assert!(took >= Duration::from_secs(2) && took < PATIENCE / 2, "{took:?}");
    assert_eq!(text(&status), "started\n");
    // Nobody knows whether it would have been all.
    assert_eq!((&status["out-truncated"], status.get("err-truncated")), (&json!(true), None));
    // It writes to the pipe that nobody asks about any more, and does not die of it.
    drop(std::fs::OpenOptions::new().write(true).open(&go).unwrap());
    let deadline = Instant::now() + PATIENCE;
    while !mark.exists() {
        assert!(Instant::now() < deadline, "it died of its output");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_program_gets_as_many_arguments_as_the_kernel_takes() {
    let agent = Agent::start();
    let mut client = agent.client();
    let mut program = shell("echo $#", &json!(true));
    program["arg"].as_array_mut().unwrap().extend(vec![json!("x"); 100_000]);
    assert_eq!(text(&run(&mut client, &program)), "99999\n");
    program["arg"].as_array_mut().unwrap().extend(vec![json!("x"); 900_000]);
    let answer = ask(&mut client, "guest-exec", &program);
    assert!(answer["error"]["desc"].as_str().unwrap().contains("Argument list too long"), "{answer}");
}

/// Ten clients that do not read took 209 MB.
#[test]
fn large_answers_that_nobody_reads_are_bounded_for_all_clients_together() {
    let agent = Agent::start();
    let mut client = agent.client();
    let large = shell("head -c 16777216 /dev/zero", &json!(true));
    let mut stalled = Vec::new();
    let mut refused = 0;
    for _ in 0..10 {
        let pid = start(&mut client, &large);
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut reader = agent.client();
            reader.send(
                json!({"execute": "guest-exec-status", "arguments": {"pid": pid}}).to_string().as_bytes(),
            );
            let begun = reader.begins();
            if begun.contains("\"exited\":true") {
                stalled.push(reader);
                break;
            }
            if begun.contains("try again later") {
                refused += 1;
                break;
            }
            assert!(begun.contains("\"exited\":false"), "{begun}");
            assert!(Instant::now() < deadline, "{pid} does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    assert!(refused >= 6 && !stalled.is_empty(), "{refused} were refused");
    assert!(agent.peak() < 110 << 10, "{} KiB", agent.peak());
    // A small one, and others that are as large, once those are read.
    assert_eq!(text(&run(&mut client, &shell("echo small", &json!(true)))), "small\n");
    drop(stalled);
    let status = run(&mut client, &large);
    assert_eq!(output(&status, "out").unwrap().len(), 16 << 20);
}

#[test]
fn what_is_more_than_is_kept_is_told_and_the_program_does_not_wait_for_it() {
    let agent = Agent::start();
    let mut client = agent.client();
    let status =
        run(&mut client, &shell("head -c 16777216 /dev/zero; head -c 5 /dev/zero >&2", &json!(true)));
    assert_eq!(output(&status, "out").unwrap().len(), 16 << 20);
    assert_eq!((&status["out-truncated"], &status["err-truncated"]), (&json!(false), &json!(false)));
    let status = run(&mut client, &shell("head -c 20000000 /dev/zero; echo end >&2", &json!(true)));
    assert_eq!(output(&status, "out").unwrap().len(), 16 << 20);
    assert_eq!(status["out-truncated"], true);
    assert_eq!(output(&status, "err").unwrap(), b"end\n");
}

#[test]
fn wrong_arguments_are_named_and_start_nothing() {
    let agent = Agent::start();
    let mut client = agent.client();
    let mark = agent.folder.path().join("mark");
    for (arguments, named) in [
        (json!({}), "\"path\" is missing"),
        (json!({"path": ""}), "\"path\" must not be empty"),
        (json!({"path": "/bin/tr\0ue"}), "\"path\" must be a string without NUL"),
        (json!({"path": "touch", "arg": [mark, "a\0"]}), "\"arg[1]\" must be a string without NUL"),
        (json!({"path": "touch", "arg": [mark, 5]}), "\"arg[1]\" must be a string"),
        (json!({"path": "touch", "arg": [mark], "env": ["A"]}), "\"env[0]\" must be of the form NAME=VALUE"),
        (json!({"path": "touch", "arg": [mark], "env": ["A=1", "=x"]}), "\"env[1]\" must be of the form"),
        (
            json!({"path": "touch", "arg": [mark], "input-data": "?"}),
            "\"input-data\" must be a string in base64",
        ),
        (
            json!({"path": "touch", "arg": [mark], "capture-output": "all"}),
            "\"capture-output\" must be true, false",
        ),
        (json!({"path": "touch", "arg": [mark], "timeout": 1}), "Parameter 'timeout' is unexpected"),
        (
            json!({"path": "touch", "arg": [mark, "x".repeat(1 << 20)]}),
            "cannot run touch: Argument list too long",
        ),
        (
            json!({"path": "touch", "arg": vec![""; (1 << 20) + 1]}),
            "\"arg\" must be a list of at most 1048576",
        ),
        (json!({"path": "/no/such/program"}), "cannot run /no/such/program: No such file"),
        (json!({"path": "/etc/passwd"}), "cannot run /etc/passwd: Permission denied"),
    ] {
        let answer = ask(&mut client, "guest-exec", &arguments);
        let error = answer["error"]["desc"].as_str().unwrap_or_else(|| panic!("{answer}"));
        assert!(error.contains(named), "{error}");
    }
    assert!(!mark.exists());
    let log = agent.log();
    assert!(log.contains("guest-exec (/no/such/program): cannot run"), "{log}");
}

#[test]
fn secrets_of_a_call_are_not_in_the_log_and_no_process_is_left() {
    let agent = Agent::start_with(&["-v"]);
    let mut client = agent.client();
    let secret =
        json!({"path": "/bin/true", "arg": ["hunter2"], "env": ["P=hunter2"], "input-data": "aHVudGVyMg=="});
    for _ in 0..20 {
        run(&mut client, &secret);
    }
    let log = agent.log();
    assert!(log.contains("guest-exec (/bin/true): done"), "{log}");
    assert!(!log.contains("hunter2") && !log.contains("aHVudGVyMg"), "{log}");
    let children = format!("/proc/{0}/task/{0}/children", agent.child.id());
    assert_eq!(std::fs::read_to_string(children).unwrap(), "");
}

#[test]
fn programs_that_run_are_bounded_and_told_apart() {
    let agent = Agent::start();
    let mut client = agent.client();
    let wait_for_input = json!({"path": "/bin/sleep", "arg": ["1000"]});
    let pids: Vec<_> = (0..256).map(|_| start(&mut client, &wait_for_input)).collect();
    let answer = ask(&mut client, "guest-exec", &wait_for_input);
    assert!(answer["error"]["desc"].as_str().unwrap().contains("256 programs are running"), "{answer}");
    for pid in &pids {
        nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(i32::try_from(*pid).unwrap()),
            nix::sys::signal::Signal::SIGKILL,
        )
        .unwrap();
    }
    for pid in pids {
        assert_eq!(wait(&mut client, pid), json!({"exited": true, "signal": 9}));
        assert!(ask(&mut client, "guest-exec-status", &json!({"pid": pid}))["error"].is_object());
    }
    run(&mut client, &json!({"path": "/bin/true"}));
}

/// With the usual limit of 1024 descriptors the agent could not take one more client.
#[test]
fn with_all_files_and_programs_that_there_may_be_clients_are_still_let_in() {
    if is_outside() {
        return;
    }
    namespace::run(&format!("prlimit --pid {} --nofile=1024:", std::process::id()));
    let agent = Agent::start();
    let mut client = agent.client();
    for _ in 0..512 {
        let opened = ask(&mut client, "guest-file-open", &json!({"path": "/proc/self/status"}));
        assert!(opened["return"].is_i64(), "{opened}");
    }
    let mut program = shell("exec sleep 1000", &json!("separated"));
    program["input-data"] = json!(STANDARD.encode_to_string("go\n"));
    let pids: Vec<_> = (0..255).map(|_| start(&mut client, &program)).collect();
    let crowd: Vec<_> = (0..60).map(|_| agent.client()).collect();
    for mut client in crowd {
        assert_eq!(client.call("guest-ping"), json!({}));
    }
    // It reads its input only after it was given its limits.
    program["arg"] = json!(["-c", "read word; ulimit -n"]);
    assert_eq!(text(&run(&mut client, &program)), "1024\n");
    for pid in pids {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    }
}

/// No growth after the first ones, whatever is called.
#[test]
fn a_hundred_thousand_calls_leave_nothing() {
    let agent = Agent::start();
    let path = agent.folder.path().join("file");
    let mut client = agent.client();
    // Of each ten thousand calls fifty are programs.
    let mixed = |client: &mut Client, calls: usize| {
        for round in 0..calls / 200 {
            let handle =
                ask(client, "guest-file-open", &json!({"path": path, "mode": "w+"}))["return"].clone();
            let four = |place| {
                format!(
                    "{{\"execute\":\"guest-file-write\",\"arguments\":{{\"handle\":{handle},\"buf-b64\":\"eHh4\"}}}}\
                     {{\"execute\":\"guest-file-seek\",\"arguments\":{{\"handle\":{handle},\"offset\":{place},\"whence\":0}}}}\
                     {{\"execute\":\"guest-file-read\",\"arguments\":{{\"handle\":{handle}}}}}\
                     {{\"execute\":\"guest-ping\"}}"
                )
            };
            client.send((0..49).map(four).collect::<String>().as_bytes());
            for _ in 0..196 {
                let line = client.line();
                assert!(line.starts_with(b"{\"return\""), "{}", String::from_utf8_lossy(&line));
            }
            ask(client, "guest-file-close", &json!({"handle": handle}));
            if round % 10 == 0 {
                run(client, &shell("echo x", &json!(true)));
            }
        }
    };
    mixed(&mut client, 2_000);
    let (before, descriptors) = agent.footprint();
    mixed(&mut client, 100_000);
    // Threads that have worked on files end when they have had nothing to do for a while, and their stacks with them.
    let deadline = Instant::now() + PATIENCE;
    loop {
        let (after, descriptors_after) = agent.footprint();
        if after < before + 400 && descriptors == descriptors_after {
            break;
        }
        assert!(
            Instant::now() < deadline,
            "{before} KiB before, {after} KiB after, {descriptors_after} descriptors"
        );
        std::thread::sleep(Duration::from_millis(200));
    }
    assert!(Path::new(&path).exists());
}
