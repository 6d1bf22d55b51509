//! The answers through the eyes of a client that others wrote: the crate `qapi`, whose types come from QEMU's own
//! schema. Commands that would change this machine are asked in tests/vm/qapi.rs.

use std::io::{BufRead as _, BufReader};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use qapi::qga::*;
use qapi::{Command, ErrorClass, Execute, ExecuteError, Qga};
use serde::Serialize;
use serde_json::{Value, json};

use crate::agent::{Agent, PATIENCE};

/// An agent, asked twice: by the crate, and by hand to see what the crate does not read.
struct Both {
    agent: Agent,
    stream: UnixStream,
}

impl Both {
    fn start() -> Self {
        let agent = Agent::start();
        let stream = UnixStream::connect(agent.socket()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { agent, stream }
    }

    fn execute<C: Command>(&self, command: &C) -> Result<C::Ok, ExecuteError> {
        Qga::from_stream(&self.stream).execute(command)
    }

    /// What a command returns, all of whose fields the crate knows.
    fn ask<C: Command>(&self, command: &C) -> C::Ok
    where
        C::Ok: Serialize,
    {
        serde_json::to_writer(&self.stream, &Execute::<&C>::from(command)).unwrap();
        let mut line = String::new();
        BufReader::new(&self.stream).read_line(&mut line).unwrap();
        let mut raw = serde_json::from_str::<Value>(&line).unwrap()["return"].take();
        let read: C::Ok = serde_json::from_value(raw.clone())
            .unwrap_or_else(|error| panic!("{}: {error} in {raw}", C::NAME));
        let mut read = serde_json::to_value(read).unwrap();
        floats(&mut raw);
        floats(&mut read);
        assert_eq!(raw, read, "{}: a field is not in QEMU's schema", C::NAME);
        self.ask_once(command)
    }

    /// What a command returns that must not be asked twice.
    fn ask_once<C: Command>(&self, command: &C) -> C::Ok {
        self.execute(command).unwrap_or_else(|error| panic!("{}: {error}", C::NAME))
    }

    /// The error of a command that fails.
    fn refused<C: Command>(&self, command: &C, named: &str) {
        match self.execute(command) {
            Err(ExecuteError::Qapi(error)) => {
                assert_eq!(error.class, ErrorClass::GenericError, "{}: {error}", C::NAME);
                assert!(error.desc.contains(named), "{}: {error}", C::NAME);
            }
            Err(error) => panic!("{}: {error}", C::NAME),
            Ok(_) => panic!("{} succeeds", C::NAME),
        }
    }
}

/// All numbers as the crate keeps those that QEMU calls `number`.
fn floats(value: &mut Value) {
    match value {
        Value::Number(number) => *value = json!(number.as_f64()),
        Value::Array(items) => items.iter_mut().for_each(floats),
        Value::Object(fields) => fields.values_mut().for_each(floats),
        _ => {}
    }
}

#[test]
fn a_foreign_client_reads_the_protocols_own_commands() {
    let both = Both::start();
    Qga::from_stream(&both.stream).guest_sync(-7).unwrap();
    both.ask(&guest_ping {});
    assert_eq!(both.ask(&guest_sync { id: i64::MIN }), i64::MIN);
    let info = both.ask(&guest_info {});
    let shutdown = info.supported_commands.iter().find(|command| command.name == "guest-shutdown").unwrap();
    assert!(shutdown.enabled && !shutdown.success_response);
}

#[test]
fn a_foreign_client_reads_who_the_guest_is() {
    let both = Both::start();
    let name = both.ask(&guest_get_host_name {});
    assert_eq!(name.host_name, std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim());
    let system = both.ask(&guest_get_osinfo {});
    assert!(system.kernel_release.is_some() && system.id.is_some());
    let zone = both.ask(&guest_get_timezone {});
    assert!(zone.zone.is_some() && (-86400..86400).contains(&zone.offset), "{zone:?}");
    let users = both.ask(&guest_get_users {});
    assert!(users.iter().all(|user| !user.user.is_empty() && user.login_time > 0.0), "{users:?}");
    let time = both.ask(&guest_get_time {});
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    assert!(i64::try_from(now.as_nanos()).unwrap() - time < 10_000_000_000, "{time}");
}

#[test]
fn a_foreign_client_reads_the_network() {
    let both = Both::start();
    let interfaces = both.ask(&guest_network_get_interfaces {});
    assert!(interfaces.iter().any(|interface| interface.name == "lo" && interface.statistics.is_some()));
    let routes = both.ask(&guest_network_get_route {});
    assert!(routes.iter().all(|route| matches!(route.version, 4 | 6)), "{routes:?}");
}

#[test]
fn a_foreign_client_reads_disks_and_file_systems() {
    let both = Both::start();
    let disks = both.ask(&guest_get_disks {});
    assert!(disks.iter().all(|disk| disk.name.starts_with("/dev/")), "{disks:?}");
    let systems = both.ask(&guest_get_fsinfo {});
    assert!(systems.iter().all(|system| system.used_bytes <= system.total_bytes_privileged), "{systems:?}");
    let statistics = both.ask(&guest_get_diskstats {});
    assert!(statistics.iter().all(|disk| disk.stats.read_ios.is_some()), "{statistics:?}");
    assert!(matches!(both.ask(&guest_fsfreeze_status {}), GuestFsfreezeStatus::thawed));
}

#[test]
fn a_foreign_client_reads_processors_and_memory() {
    let both = Both::start();
    let processors = both.ask(&guest_get_vcpus {});
    assert!(processors.iter().any(|processor| processor.online), "{processors:?}");
    both.refused(
        &guest_set_vcpus {
            vcpus: vec![GuestLogicalProcessor { logical_id: 1 << 40, online: true, can_offline: None }],
        },
        "1099511627776",
    );
    assert!(!both.ask(&guest_get_cpustats {}).is_empty());
    // Not every kernel has memory blocks.
    if std::path::Path::new("/sys/devices/system/memory/block_size_bytes").exists() {
        assert!(both.ask(&guest_get_memory_block_info {}).size > 0);
        assert!(both.ask(&guest_get_memory_blocks {}).iter().any(|block| block.online));
        let block = GuestMemoryBlock { phys_index: 1 << 40, online: true, can_offline: None };
        let responses = both.ask(&guest_set_memory_blocks { mem_blks: vec![block] });
        assert!(matches!(responses[0].response, GuestMemoryBlockResponseType::not_found), "{responses:?}");
    }
}

#[test]
fn a_foreign_client_works_on_files() {
    let both = Both::start();
    let path = both.agent.folder.path().join("file").display().to_string();
    let open = |mode: &str| both.ask_once(&guest_file_open { path: path.clone(), mode: Some(mode.into()) });
    let handle = open("w+");
    let written = both.ask_once(&guest_file_write { handle, buf_b64: b"hello\0file".to_vec(), count: None });
    assert_eq!((written.count, written.eof), (10, false));
    both.ask_once(&guest_file_flush { handle });
    for whence in [GuestFileWhence::value(0), GuestFileWhence::name(QGASeek::set)] {
        let seek = both.ask_once(&guest_file_seek { handle, offset: 6, whence });
        assert_eq!((seek.position, seek.eof), (6, false));
    }
    let read = both.ask_once(&guest_file_read { handle, count: Some(100) });
    assert_eq!((read.buf_b64.as_slice(), read.count, read.eof), (b"file".as_slice(), 4, true));
    both.ask_once(&guest_file_close { handle });
    both.refused(&guest_file_close { handle }, "handle");
    both.refused(&guest_file_open { path: "/no/such/file".into(), mode: None }, "/no/such/file");
}

#[test]
fn a_foreign_client_runs_programs() {
    let both = Both::start();
    let script = "read line; echo $WORD $line; echo wrong >&2; exit 3";
    let GuestExec { pid } = both.ask_once(&guest_exec {
        path: "sh".into(),
        arg: Some(vec!["-c".into(), script.into()]),
        env: Some(vec!["WORD=hello".into(), "PATH=/usr/bin:/bin".into()]),
        input_data: Some(b"input\n".to_vec()),
        capture_output: Some(GuestExecCaptureOutput::mode(GuestExecCaptureOutputMode::separated)),
    });
    let deadline = Instant::now() + PATIENCE;
    let status = loop {
        let status = both.ask_once(&guest_exec_status { pid });
        if status.exited {
            break status;
        }
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(status.exitcode, Some(3), "{status}");
    assert_eq!(status.out_data.as_deref(), Some(b"hello input\n".as_slice()));
    assert_eq!(status.err_data.as_deref(), Some(b"wrong\n".as_slice()));
    both.refused(&guest_exec_status { pid }, "\"pid\" belongs to no program");
}

#[test]
fn a_foreign_client_asks_for_a_user_who_is_not_there() {
    let both = Both::start();
    let (username, keys) = ("no-such-user".to_owned(), vec!["ssh-ed25519 AAAA".to_owned()]);
    both.refused(&guest_ssh_get_authorized_keys { username: username.clone() }, &username);
    let reset = Some(true);
    both.refused(
        &guest_ssh_add_authorized_keys { username: username.clone(), keys: keys.clone(), reset },
        &username,
    );
    both.refused(&guest_ssh_remove_authorized_keys { username: username.clone(), keys }, &username);
    let password = b"secret".to_vec();
    both.refused(
        &guest_set_user_password { username: username.clone(), password, crypted: false },
        &username,
    );
}
