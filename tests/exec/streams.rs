//! What a program reads and writes, and what it exits with.

use std::fs::File;
use std::io::Read as _;
use std::process::Stdio;
use std::time::Duration;

use crate::lab::{Lab, code, is_running, text, until};

#[test]
fn output_errors_and_exit_codes_are_those_of_the_program() {
    let lab = Lab::new();
    let output = lab.exec(&[], &["sh", "-c", "echo out; echo err >&2; exit 7"]);
    assert_eq!((code(&output), &output.stdout[..], &output.stderr[..]), (7, &b"out\n"[..], &b"err\n"[..]));
    for (script, expected) in [("exit 0", 0), ("exit 255", 255), ("kill -9 $$", 137), ("kill -TERM $$", 143)]
    {
        assert_eq!(code(&lab.exec(&[], &["sh", "-c", script])), expected, "{script}");
    }
    let missing = lab.exec(&[], &["no-such-program"]);
    assert_eq!(code(&missing), 127, "{missing:?}");
    assert!(String::from_utf8_lossy(&missing.stderr).contains("no-such-program"), "{missing:?}");
    let plain = lab.file("plain");
    std::fs::write(&plain, "x").unwrap();
    assert_eq!(code(&lab.exec(&[], &[plain.to_str().unwrap()])), 126);
    assert_eq!(code(&lab.exec(&[], &["/"])), 126);
}

#[test]
fn arguments_variables_directory_and_user_arrive_as_they_were_given() {
    let lab = Lab::new();
    let words = text(&lab.exec(&[], &["printf", "[%s]", "a b", "", "$HOME", "ä\n"]));
    assert_eq!(words, "[a b][][$HOME][ä\n]");
    let variables = text(&lab.exec(&["--env", "A=b=c", "-e", "PATH=/x"], &["/usr/bin/env"]));
    let mut lines: Vec<_> = variables.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines[..2], ["A=b=c", "HOME=/root"], "{lines:?}");
    assert!(lines.contains(&"PATH=/x") && lines.contains(&"USER=root"), "{lines:?}");
    assert!(!variables.contains("TERM="), "{variables}");
    assert_eq!(text(&lab.exec(&["--cwd", "/usr"], &["pwd"])), "/usr\n");
    assert_eq!(text(&lab.exec(&["--cwd", "/usr/bin"], &["./pwd"])), "/usr/bin\n");
    let user = text(&lab.exec(&["--user", "daemon"], &["sh", "-c", "id -un; id -G; echo $HOME $LOGNAME"]));
    let groups = std::process::Command::new("id").args(["-G", "daemon"]).output().unwrap();
    let groups = String::from_utf8(groups.stdout).unwrap();
    let home = nix::unistd::User::from_name("daemon").unwrap().unwrap().dir;
    assert_eq!(user, format!("daemon\n{groups}{} daemon\n", home.display()));
    assert_eq!(text(&lab.exec(&["--user", "1"], &["id", "-un"])), "daemon\n");
}

#[test]
fn input_ends_and_there_is_none_unless_it_was_asked_for() {
    let lab = Lab::new();
    assert_eq!(lab.exec_with(&["-i"], &["cat"], b"hello").stdout, b"hello");
    assert_eq!(lab.exec_with(&["-i"], &["cat"], b"").stdout, b"");
    assert_eq!(lab.exec_with(&[], &["cat"], b"hello").stdout, b"");
    // A program need not read everything.
    let output = lab.exec_with(&["-i"], &["head", "-c", "3"], &vec![b'x'; 1 << 20]);
    assert_eq!((code(&output), &output.stdout[..]), (0, &b"xxx"[..]));
}

#[test]
fn megabytes_arrive_as_they_were_sent_in_both_directions() {
    let lab = Lab::new();
    let bytes: Vec<u8> = (0..8u32 << 20).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let output = lab.exec_with(&["-i"], &["cat"], &bytes);
    assert_eq!(code(&output), 0, "{:?}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stdout == bytes, "{} bytes of {}", output.stdout.len(), bytes.len());
}

#[test]
fn a_program_whose_output_nobody_reads_waits_and_costs_no_memory() {
    let lab = Lab::new();
    let mut command = lab.command(&[], &["sh", "-c", "head -c 67108864 /dev/zero; echo end >&2"]);
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let before = lab.agent_memory();
    std::thread::sleep(Duration::from_secs(2));
    let more = lab.agent_memory().saturating_sub(before);
    assert!(more < 4096, "{more} KiB more");
    assert_eq!(lab.programs().len(), 1);
    assert!(child.try_wait().unwrap().is_none(), "it waits");
    let mut length = 0;
    let mut output = child.stdout.take().unwrap();
    let mut part = vec![0; 1 << 16];
    loop {
        match output.read(&mut part).unwrap() {
            0 => break,
            read => length += read,
        }
    }
    assert_eq!(length, 64 << 20);
    assert!(child.wait().unwrap().success());
    assert!(lab.programs().is_empty(), "whoever was told of the end knows it");
}

/// A pipe of one page, so that its writer soon waits.
fn narrow_pipe() -> (File, Stdio) {
    let (reader, writer) = nix::unistd::pipe().unwrap();
    nix::fcntl::fcntl(&reader, nix::fcntl::FcntlArg::F_SETPIPE_SZ(4096)).unwrap();
    (reader.into(), writer.into())
}

#[test]
fn small_messages_that_wait_for_a_reader_break_no_connection() {
    let lab = Lab::new();
    let script = "head -c 8192 /dev/zero; i=0; while [ $i -lt 1500 ]; do echo $i; i=$((i+1)); sleep 0.001; done; echo end >&2";
    let mut command = lab.command(&[], &["sh", "-c", script]);
    let (mut output, writer) = narrow_pipe();
    let child = command.stdin(Stdio::null()).stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
    // It has the other end.
    drop(command);
    let process = u32::try_from(lab.program_process()).unwrap();
    until("the program has written everything", || !is_running(process));
    let mut all = Vec::new();
    output.read_to_end(&mut all).unwrap();
    let lines: String = (0..1500).map(|line| line.to_string() + "\n").collect();
    assert!(all[8192..] == *lines.as_bytes(), "{} bytes", all.len());
    let ended = child.wait_with_output().unwrap();
    assert_eq!((code(&ended), &ended.stderr[..]), (0, &b"end\n"[..]), "{ended:?}");
    let log = lab.host.log();
    assert!(log.contains("audit:") && !log.contains(": attach"), "it was one connection: {log}");
}

#[test]
fn a_reader_that_has_gone_ends_the_program() {
    let lab = Lab::new();
    let mut command = lab.command(&[], &["yes"]);
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut output = child.stdout.take().unwrap();
    let mut some = [0; 4];
    output.read_exact(&mut some).unwrap();
    drop(output);
    assert_eq!(child.wait().unwrap().code(), Some(141));
    assert!(lab.programs().is_empty());
}

fn full() -> File {
    File::options().write(true).open("/dev/full").unwrap()
}

#[test]
fn output_that_cannot_be_written_is_an_error_and_stays_in_the_guest() {
    let lab = Lab::new();
    let mut command = lab.command(&[], &["sh", "-c", "echo x; exec sleep 1000"]);
    let output = command.stdin(Stdio::null()).stdout(full()).stderr(Stdio::piped()).spawn().unwrap();
    let output = output.wait_with_output().unwrap();
    assert_eq!(code(&output), 125, "{output:?}");
    let words = String::from_utf8(output.stderr).unwrap();
    assert!(words.contains("cannot write standard output: No space left on device"), "{words}");
    // The program goes on, as without a connection, and somebody else gets what was not written.
    let program = lab.programs().remove(0);
    let id = program["id"].as_str().unwrap();
    assert!(words.contains(&format!("guestctl attach web {id}")), "{words}");
    assert!(is_running(u32::try_from(program["process_id"].as_u64().unwrap()).unwrap()));
    lab.host.words(&["kill", "web", id, "--signal", "KILL"]);
    let attached = lab.host.ctl(&["attach", "web", id]);
    assert_eq!((code(&attached), &attached.stdout[..]), (137, &b"x\n"[..]), "{attached:?}");

    let errors = lab.command(&[], &["sh", "-c", "echo x >&2"]).stdin(Stdio::null()).stderr(full()).status();
    assert_eq!(errors.unwrap().code(), Some(125));
}

#[test]
fn output_of_a_program_that_has_ended_has_to_be_written_too() {
    let lab = Lab::new();
    let id = text(&lab.exec(&["--detach"], &["echo", "x"]));
    let id = id.trim();
    until("it has ended", || lab.programs()[0]["exit_code"] == 0);
    let mut command = lab.host.ctl_command(&["attach", "web", id]);
    let child = command.stdout(full()).stderr(Stdio::piped()).spawn().unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(code(&output), 125, "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("No space left on device"), "{output:?}");
    assert_eq!(text(&lab.host.ctl(&["attach", "web", id])), "x\n");
    assert!(lab.programs().is_empty());
}

#[test]
fn input_that_cannot_be_read_does_not_end() {
    let lab = Lab::new();
    let mut command = lab.command(&["-i"], &["sh", "-c", "cat; echo end"]);
    let output = command.stdin(File::open("/").unwrap()).output().unwrap();
    assert_eq!((code(&output), &output.stdout[..]), (125, &b""[..]), "{output:?}");
    let words = String::from_utf8(output.stderr).unwrap();
    assert!(words.contains("cannot read standard input: Is a directory"), "{words}");
    let program = lab.programs().remove(0);
    assert!(program["exit_code"].is_null(), "{program}");
    // Somebody else may send what it waits for.
    let id = program["id"].as_str().unwrap();
    let attached = lab.host.ctl_command(&["attach", "-i", "web", id]).stdin(Stdio::null()).output().unwrap();
    assert_eq!(text(&attached), "end\n");
}
