//! Real servers of PostgreSQL, whose data, log and tablespace are on two file systems.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::agent::Client;
use crate::lab::{
    self, Agent, FREEZE, Process, THAW, USER, as_user, evidence, freeze_list, inside, kept, level, newest,
    nothing_is_frozen, processes_with, refusal, runs, thaw, until,
};

pub const SOCKET: &str = "/run/postgresql/.s.PGSQL.5432";
const BIN: &str = "/usr/lib/postgresql/15/bin";

/// What the small machine needs of PostgreSQL, from where it was unpacked.
pub fn is_outside() -> bool {
    let tree =
        std::env::var("POSTGRESQL").expect("POSTGRESQL must name Debian's PostgreSQL; make test sets it");
    lab::is_outside(&format!(
        "mkdir -p usr/lib/postgresql/15/bin usr/lib/x86_64-linux-gnu usr/share/postgresql
         export LD_LIBRARY_PATH={tree}/usr/lib/x86_64-linux-gnu
         for name in postgres initdb psql; do
             cp {tree}{BIN}/$name .{BIN}/; bring {tree}{BIN}/$name
         done
         cp {tree}/usr/lib/x86_64-linux-gnu/libpq.so.5 usr/lib/x86_64-linux-gnu/
         mkdir usr/lib/postgresql/15/lib; cp {tree}/usr/lib/postgresql/15/lib/*.so usr/lib/postgresql/15/lib/
         cp -r {tree}/usr/share/postgresql/15 usr/share/postgresql/
         unset LD_LIBRARY_PATH"
    ))
}

/// A server.
pub struct Server {
    process: Process,
    directory: &'static str,
}

impl Server {
    /// A new one, with a tablespace beside its log.
    pub fn new() -> Self {
        let output = as_user(USER, &format!("{BIN}/initdb"))
            .args(["-D", "/data/pg", "-X", "/wal/log", "-k", "-U", "postgres", "--locale=C", "--no-sync"])
            .args(["--auth-local=peer", "--auth-host=reject", "--wal-segsize=1", "--no-instructions"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        inside(&format!("mkdir /run/postgresql /wal/space; chown {USER}:{USER} /run/postgresql /wal/space"));
        let server = Self::again();
        server.ask("CREATE TABLESPACE beside LOCATION '/wal/space'");
        server.ask("CREATE TABLE a (n bigint PRIMARY KEY, filler text)");
        server.ask("CREATE TABLE b (n bigint PRIMARY KEY, filler text) TABLESPACE beside");
        server
    }

    /// The same once more.
    pub fn again() -> Self {
        Self::start(as_user(USER, &format!("{BIN}/postgres")), "/run/postgresql")
    }

    /// From what was cut, in mounts of its own.
    fn of_cut() -> Self {
        inside(&format!("mkdir -p /run/restored; chown {USER}:{USER} /run/restored"));
        let script = format!(
            "/usr/bin/mount -o loop /cut-data /data; /usr/bin/mount -o loop /cut-wal /wal; rm -f /data/pg/postmaster.pid
             exec /usr/bin/setpriv --reuid {USER} --regid {USER} --clear-groups {BIN}/postgres \"$@\""
        );
        let mut command = as_user(0, "/usr/bin/unshare");
        command.args(["--mount", "--propagation", "private", "/bin/sh", "-ec", &script, "sh"]);
        Self::start(command, "/run/restored")
    }

    fn start(mut command: Command, directory: &'static str) -> Self {
        command
            .args(["-D", "/data/pg", "-c", "listen_addresses=", "-c", "shared_buffers=4MB"])
            .args(["-c", &format!("unix_socket_directories={directory}"), "-c", "max_wal_size=16MB"])
            .args([
                "-c",
                "min_wal_size=2MB",
                "-c",
                "dynamic_shared_memory_type=mmap",
                "-c",
                "max_connections=20",
            ]);
        let server = Self { process: Process::server(&mut command), directory };
        until("the server answers", || server.try_ask("SELECT 1").is_some());
        server
    }

    fn psql(&self) -> Command {
        let mut command = as_user(USER, &format!("{BIN}/psql"));
        command.args(["-X", "-q", "-A", "-t", "-h", self.directory, "-U", "postgres", "postgres"]);
        command
    }

    fn try_ask(&self, query: &str) -> Option<String> {
        let output = self.psql().args(["-v", "ON_ERROR_STOP=1", "-c", query]).output().unwrap();
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap().trim().to_owned())
    }

    /// What a query gives.
    #[track_caller]
    pub fn ask(&self, query: &str) -> String {
        self.try_ask(query).unwrap_or_else(|| panic!("{query}: {}", Agent::log()))
    }

    /// Sends a signal to the server's first process.
    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.process.0.id().cast_signed()), signal).unwrap();
    }

    /// Sessions of the agent's process.
    fn sessions(&self) -> String {
        self.ask("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'guestlet'")
    }

    /// Ends it as whoever restarts it would.
    fn stop(mut self) {
        self.signal(Signal::SIGINT);
        until("the server ends", || self.process.0.try_wait().unwrap().is_some());
    }
}

/// The process of the server that serves the only client. (A new client may have to wait until what is frozen is thawed.)
fn backend() -> Option<i32> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let mut ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    ids.find(|id| {
        let title = std::fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        title.starts_with(b"postgres: postgres ")
    })
}

/// A client that writes one number after the other, each into two tables, and waits for each to be acknowledged.
struct Load {
    acknowledged: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Load {
    fn on(server: &Server) -> Self {
        let (acknowledged, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let mut psql = Process(server.psql().stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
        let (done, ended) = (Arc::clone(&acknowledged), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let mut input = psql.0.stdin.take().unwrap();
            let mut output = BufReader::new(psql.0.stdout.take().unwrap());
            for number in 1_u64.. {
                writeln!(
                    input,
                    "WITH both_ AS (INSERT INTO a VALUES ({number}, repeat('x', 200)) RETURNING n, filler) \
                     INSERT INTO b SELECT n, filler FROM both_ RETURNING n;"
                )
                .unwrap();
                let mut line = String::new();
                output.read_line(&mut line).unwrap();
                assert_eq!(line.trim(), number.to_string(), "what is acknowledged");
                done.store(number, Ordering::SeqCst);
                if ended.load(Ordering::SeqCst) {
                    return;
                }
            }
        });
        Self { acknowledged, stop, thread: Some(thread) }
    }

    fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::SeqCst)
    }

    /// Waits until it has gone on.
    fn goes_on(&self) {
        let before = self.acknowledged();
        until("the load goes on", || self.acknowledged() > before + 5);
    }

    fn finish(mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// Freezes, copies the disks and thaws. The receipt, and what was acknowledged when all was frozen.
fn cut(client: &mut Client, load: &Load) -> (Value, u64) {
    assert_eq!(client.call("guest-fsfreeze-freeze"), lab::FILE_SYSTEMS, "{}", Agent::log());
    let acknowledged = load.acknowledged();
    inside("cp /disk-data /cut-data; cp /disk-wal /cut-wal");
    (thaw(client), acknowledged)
}

/// Starts what was cut: it has all that was acknowledged, and nothing in parts.
fn comes_up_with(acknowledged: u64) -> Server {
    let restored = Server::of_cut();
    let table =
        |name: &str| restored.ask(&format!("SELECT count(*), max(n), sum(length(filler)) FROM {name}"));
    let (a, b) = (table("a"), table("b"));
    assert_eq!(a, b, "one transaction is there in parts");
    let numbers: Vec<u64> = a.split('|').map(|number| number.parse().unwrap_or(0)).collect();
    assert_eq!((numbers[0], numbers[2]), (numbers[1], numbers[0] * 200), "what is there has no gaps");
    assert!(numbers[1] >= acknowledged, "{} of {acknowledged} are there", numbers[1]);
    restored
}

#[test]
fn what_was_acknowledged_before_a_cut_is_in_it() {
    if is_outside() {
        return;
    }
    let rounds = if std::env::var_os("GUESTLET_SOAK").is_some() { 50 } else { 10 };
    let server = Server::new();
    let agent = Agent::start("");
    let mut client = agent.client();
    let load = Load::on(&server);
    for _ in 0..rounds {
        load.goes_on();
        let (receipt, acknowledged) = cut(&mut client, &load);
        assert_eq!(receipt["level"], "application", "{receipt:#}");
        assert_eq!(level(&receipt, SOCKET), ("application", ""), "{receipt:#}");
        let said = |name: &str| evidence(&receipt, SOCKET, name);
        assert_eq!((&*said("checkpoint"), &*said("in-recovery"), &*said("timeline")), ("done", "false", "1"));
        assert_eq!((&*said("data-directory"), said("version").starts_with("15")), ("/data/pg", true));
        assert_eq!(said("system-identifier"), said("after.system-identifier"));
        let restored = comes_up_with(acknowledged);
        let lsn = said("lsn");
        // What it recovered, whatever it has written since. The end of a page may be in the middle of a record.
        let reached =
            format!("SELECT pg_last_wal_replay_lsn() >= '{lsn}' OR ('{lsn}'::pg_lsn - '0/0') % 8192 = 0");
        assert_eq!(restored.ask(&reached), "t", "{lsn}");
        restored.stop();
    }
    until("no session is left", || server.sessions() == "0");
    assert_eq!(processes_with("application"), [0; 0]);

    // Of a part of what it needs.
    let before = kept();
    assert_eq!(client.ask(&freeze_list(&["/data"]))["return"], 1);
    client.call("guest-fsfreeze-thaw");
    let part = newest(&before);
    let (reached, why) = level(&part, SOCKET);
    assert!(reached == "crash" && why.contains("are on /wal, which was not frozen"), "{part:#}");
    assert_eq!(part["level"], "filesystem", "{part:#}");
    drop(agent);

    // The control group: nobody asks the server, which comes up as after a power failure, and nothing more is said.
    let agent = Agent::start("[freeze]\napplications = 'listed'");
    let mut client = agent.client();
    load.goes_on();
    let (receipt, acknowledged) = cut(&mut client, &load);
    assert_eq!(
        (&receipt["level"], &receipt["applications"]),
        (&"filesystem".into(), &Value::Array(Vec::new()))
    );
    comes_up_with(acknowledged).stop();
    drop(agent);

    // Whoever comes too late has nothing, whatever the server says.
    let agent = Agent::start("[qga.freeze]\ndeadline = 1");
    let before = kept();
    agent.client().call("guest-fsfreeze-freeze");
    let late = newest(&before);
    assert_eq!((&late["level"], level(&late, SOCKET).0), (&"crash".into(), "crash"), "{late:#}");
    load.goes_on();
    load.finish();
}

#[test]
fn a_session_that_does_not_last_until_the_thaw_costs_a_level() {
    if is_outside() {
        return;
    }
    let server = Server::new();
    let agent = Agent::start("");
    let mut client = agent.client();
    let frozen = |client: &mut Client| assert_eq!(client.call("guest-fsfreeze-freeze"), lab::FILE_SYSTEMS);
    // Somebody ends the session.
    frozen(&mut client);
    kill(Pid::from_raw(backend().unwrap()), Signal::SIGTERM).unwrap();
    // (The server's process itself may have to write something before it ends.)
    until("the agent has heard of it", || processes_with("application").is_empty());
    let receipt = thaw(&mut client);
    let (reached, why) = level(&receipt, SOCKET);
    assert!(reached == "filesystem" && why.contains("terminating connection"), "{receipt:#}");
    assert_eq!(receipt["level"], "filesystem");

    // Its process is killed.
    frozen(&mut client);
    let [process] = processes_with("application")[..] else { panic!("one process") };
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let has = |line: &str| {
        assert!(status.lines().any(|found| found.split_whitespace().eq(line.split(' '))), "{line}: {status}");
    };
    has(&format!("Uid: {USER} {USER} {USER} {USER}"));
    has(&format!("Gid: {USER} {USER} {USER} {USER}"));
    has("CapEff: 0000000000000000");
    has("CapPrm: 0000000000000000");
    has("NoNewPrivs: 1");
    // (The service manager tells all processes to end; the agent does so after the thaw.)
    kill(Pid::from_raw(process), Signal::SIGTERM).unwrap();
    assert!(backend().is_some(), "the session has ended");
    kill(Pid::from_raw(process), Signal::SIGKILL).unwrap();
    let receipt = thaw(&mut client);
    let (reached, why) = level(&receipt, SOCKET);
    assert!(reached == "filesystem" && why.contains("its process has ended"), "{receipt:#}");
    until("no session is left", || server.sessions() == "0");
    assert_eq!(agent.freeze_and_thaw()["level"], "application");

    // The whole server is, and the next one is there before the thaw is asked for.
    frozen(&mut client);
    server.signal(Signal::SIGKILL);
    until("its processes end", || processes_with("application").is_empty());
    let receipt = thaw(&mut client);
    let (reached, why) = level(&receipt, SOCKET);
    assert!(reached == "filesystem" && why.contains("ended"), "{receipt:#}");
    drop(server);
    // What it leaves is a socket where nobody listens.
    let receipt = agent.freeze_and_thaw();
    let (reached, why) = level(&receipt, SOCKET);
    assert!(reached == "filesystem" && why.contains("ECONNREFUSED"), "{receipt:#}");
    until("another server can start", || !runs("postgres"));
    let server = Server::again();
    assert_eq!(agent.freeze_and_thaw()["level"], "application");
    server.stop();
    // One that was stopped leaves nothing.
    assert_eq!(agent.freeze_and_thaw()["applications"], Value::Array(Vec::new()));
}

#[test]
fn an_agent_that_is_killed_leaves_the_database_alone() {
    if is_outside() {
        return;
    }
    let server = Server::new();
    let load = Load::on(&server);
    for _ in 0..3 {
        let agent = Agent::start("");
        load.goes_on();
        assert_eq!(agent.client().call("guest-fsfreeze-freeze"), lab::FILE_SYSTEMS);
        assert_eq!(processes_with("application").len(), 1);
        agent.kill();
        load.goes_on();
        nothing_is_frozen();
        until("its process has ended", || processes_with("application").is_empty());
        until("no session is left", || server.sessions() == "0");
        let before = kept();
        let agent = Agent::again();
        assert!(refusal(&agent.client().ask(THAW)).contains("the agent crashed"));
        let receipt = newest(&before);
        assert_eq!((&receipt["level"], level(&receipt, SOCKET).0), (&"crash".into(), "crash"), "{receipt:#}");
    }
    // While it is being held, too.
    server.signal(Signal::SIGSTOP);
    let agent = Agent::start("");
    let mut client = agent.client();
    client.send(FREEZE.as_bytes());
    until("its process is there", || !processes_with("application").is_empty());
    agent.kill();
    until("its process has ended", || processes_with("application").is_empty());
    server.signal(Signal::SIGCONT);
    load.goes_on();
    until("no session is left", || server.sessions() == "0");
    load.finish();
}

#[test]
fn a_server_that_hangs_costs_a_level_or_what_is_required() {
    if is_outside() {
        return;
    }
    let server = Server::new();
    let agent = Agent::start("[freeze]\napplications-deadline = 2");
    server.signal(Signal::SIGSTOP);
    let receipt = agent.freeze_and_thaw();
    let (reached, why) = level(&receipt, SOCKET);
    assert!(reached == "filesystem" && why.contains("in time"), "{receipt:#}");
    assert_eq!(receipt["level"], "filesystem");
    drop(agent);

    let agent = Agent::start("[freeze]\napplications-deadline = 2\nrequire = 'application'");
    let mut client = agent.client();
    let refused = client.ask(FREEZE);
    assert!(refusal(&refused).contains("an application-consistent freeze is required"), "{refused}");
    assert!(refusal(&refused).contains("in time"), "{refused}");
    assert_eq!(client.call("guest-fsfreeze-status"), "thawed");
    nothing_is_frozen();
    server.signal(Signal::SIGCONT);
    assert_eq!(agent.freeze_and_thaw()["level"], "application");
    // It needs more than what is frozen.
    let refused = client.ask(&freeze_list(&["/data"]));
    assert!(refusal(&refused).contains("are on /wal, which was not frozen"), "{refused}");
    nothing_is_frozen();
    until("no session is left", || server.sessions() == "0");
    // One that is lost while all is frozen is told with the thaw.
    assert_eq!(client.call("guest-fsfreeze-freeze"), lab::FILE_SYSTEMS);
    kill(Pid::from_raw(processes_with("application")[0]), Signal::SIGKILL).unwrap();
    let answer = client.ask(THAW);
    assert!(refusal(&answer).contains("the snapshot is not application-consistent"), "{answer}");
    nothing_is_frozen();
    server.stop();
    let refused = client.ask(FREEZE);
    assert!(refusal(&refused).contains("no application was found"), "{refused}");
}
