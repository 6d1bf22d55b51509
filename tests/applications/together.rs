//! A MariaDB and an etcd in freezes by the real agent.

use std::path::Path;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::lab::{
    self, Agent, FILE_SYSTEMS, Process, THAW, USER, as_user, evidence, freeze_list, inside, kept, level,
    newest, nothing_is_frozen, processes_with, refusal, thaw, until,
};
use crate::sql::Sql;
use crate::stand::Load;

const SOCKET: &str = "/run/mysqld/mysqld.sock";
/// The user of the databases in the small machine.
const NAME: &str = "postgres";

fn is_outside() -> bool {
    let tree = std::env::var("MARIADB").expect("MARIADB must name Debian's MariaDB; make test sets it");
    let etcd = std::env::var("KUBERNETES_BIN_DIR")
        .expect("KUBERNETES_BIN_DIR must name the directory of etcd; make test sets it");
    lab::is_outside(&format!(
        "mkdir -p usr/sbin usr/share
         TMPDIR=$PWD {tree}/usr/bin/mariadb-install-db --no-defaults --user=root --skip-test-db --skip-name-resolve --basedir={tree}/usr \\
             --auth-root-authentication-method=socket --auth-root-socket-user={NAME} --datadir=$PWD/seed > /dev/null
         cp {tree}/usr/sbin/mariadbd usr/sbin/; bring {tree}/usr/sbin/mariadbd
         cp -r {tree}/usr/share/mysql usr/share/; cp {etcd}/etcd usr/bin/"
    ))
}

/// Starts a MariaDB of what is there, or of a new one.
fn mariadb() -> Process {
    if !Path::new("/data/mysql").exists() {
        inside(&format!("cp -r /seed /data/mysql; chown -R {USER}:{USER} /data/mysql"));
        inside(&format!("mkdir /wal/log /run/mysqld; chown {USER}:{USER} /wal/log /run/mysqld"));
        std::fs::write(
            "/etc/tables.sql",
            "CREATE DATABASE IF NOT EXISTS load_;\n\
             CREATE TABLE IF NOT EXISTS load_.one (writer INT, number BIGINT, PRIMARY KEY (writer, number));\n\
             CREATE USER IF NOT EXISTS load_@localhost;\nGRANT ALL ON *.* TO load_@localhost;\n",
        )
        .unwrap();
    }
    let mut command = as_user(USER, "/usr/sbin/mariadbd");
    command
        .args([
            "--no-defaults",
            "--basedir=/usr",
            "--datadir=/data/mysql",
            "--skip-networking",
            "--server-id=7",
        ])
        .args(["--innodb-buffer-pool-size=16M", "--innodb-log-file-size=8M", "--innodb-use-native-aio=OFF"])
        .args(["--log-bin=/wal/log/log", "--skip-name-resolve", "--init-file=/etc/tables.sql"])
        .args([&format!("--socket={SOCKET}"), "--pid-file=/run/mysqld/pid"]);
    let process = Process::server(&mut command);
    until("MariaDB answers", || {
        Sql::connect(Path::new(SOCKET), "load_")
            .is_ok_and(|mut sql| sql.run("SELECT 1 FROM load_.one").is_ok())
    });
    process
}

fn load() -> Load {
    // It goes on where another one has ended.
    let first =
        Sql::connect(Path::new(SOCKET), "load_").unwrap().run("SELECT COUNT(*) FROM load_.one").unwrap();
    let first: u64 = first[0].parse().unwrap();
    Load::start(1, move |_| {
        let mut sql = Sql::connect(Path::new(SOCKET), "load_").unwrap();
        move |number| sql.run(&format!("INSERT INTO load_.one VALUES (0, {})", first + number)).is_ok()
    })
}

fn etcd(port: u16) -> Process {
    let (clients, peers) = (format!("http://127.0.0.1:{port}"), format!("http://127.0.0.1:{}", port + 1));
    let mut command = as_user(USER, "/usr/bin/etcd");
    command
        .args(["--data-dir", "/data/etcd", "--wal-dir", "/wal/etcd", "--listen-client-urls", &clients])
        .args(["--advertise-client-urls", &clients, "--listen-peer-urls", &peers])
        .args(["--initial-advertise-peer-urls", &peers, "--initial-cluster", &format!("default={peers}")]);
    let process = Process::server(&mut command);
    until("etcd answers", || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());
    process
}

/// A port that is free, and the one behind it.
fn free_port() -> u16 {
    loop {
        let first = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        if first < u16::MAX && std::net::TcpListener::bind(("127.0.0.1", first + 1)).is_ok() {
            return first;
        }
    }
}

#[test]
fn databases_of_two_kinds_are_held_in_one_freeze() {
    if is_outside() {
        return;
    }
    inside(&format!("mkdir /wal/etcd; chown {USER}:{USER} /wal/etcd"));
    let port = free_port();
    let (server, member) = (mariadb(), etcd(port));
    let url = format!("http://127.0.0.1:{port}");
    let listed = format!("[[freeze.application]]\nkind = 'etcd'\ntarget = '{url}'\nuser = '{NAME}'");
    let agent = Agent::start(&listed);
    let mut client = agent.client();
    let load = load();
    // A member without a leader has nothing to say yet.
    until("etcd is held", || level(&agent.freeze_and_thaw(), &url).0 == "application");
    for _ in 0..3 {
        load.goes_on();
        assert_eq!(client.call("guest-fsfreeze-freeze"), FILE_SYSTEMS);
        let acknowledged = load.acknowledged()[0];
        let receipt = thaw(&mut client);
        assert_eq!(receipt["level"], "application", "{receipt:#}");
        for instance in [SOCKET, &url] {
            assert_eq!(level(&receipt, instance), ("application", ""), "{receipt:#}");
        }
        let said = |name: &str| evidence(&receipt, SOCKET, name);
        assert_eq!(said("gtid-binlog"), said("after.gtid-binlog"), "it was not held");
        assert!(said("version").starts_with("MariaDB 10."), "{receipt:#}");
        // One transaction for each number, and some for the tables and the user.
        let transactions: u64 = said("gtid-binlog").rsplit('-').next().unwrap().parse().unwrap();
        assert!(transactions >= acknowledged, "{transactions} {acknowledged}");
        assert_eq!(evidence(&receipt, &url, "member"), evidence(&receipt, &url, "after.member"));
    }
    // Of a part of what they need.
    let before = kept();
    assert_eq!(client.ask(&freeze_list(&["/data"]))["return"], 1);
    client.call("guest-fsfreeze-thaw");
    let some = newest(&before);
    for instance in [SOCKET, &url] {
        let (reached, why) = level(&some, instance);
        assert!(reached == "crash" && why.contains("are on /wal, which was not frozen"), "{some:#}");
    }

    // A kill of the agent, and of the process that holds the server: it goes on, and is told of.
    assert_eq!(client.call("guest-fsfreeze-freeze"), FILE_SYSTEMS);
    assert_eq!(processes_with("application").len(), 2);
    agent.kill();
    load.goes_on();
    until("their processes have ended", || processes_with("application").is_empty());
    nothing_is_frozen();
    let agent = Agent::again();
    let mut client = agent.client();
    assert!(refusal(&client.ask(THAW)).contains("the agent crashed"));
    assert_eq!(client.call("guest-fsfreeze-freeze"), FILE_SYSTEMS);
    for process in processes_with("application") {
        kill(Pid::from_raw(process), Signal::SIGKILL).unwrap();
    }
    let receipt = thaw(&mut client);
    for instance in [SOCKET, &url] {
        let (reached, why) = level(&receipt, instance);
        assert!(reached == "filesystem" && why.contains("its process has ended"), "{receipt:#}");
    }
    load.goes_on();

    // An etcd that hangs leaves MariaDB, which is held after it, some of the time.
    drop(agent);
    let agent = Agent::start(&format!("[freeze]\napplications-deadline = 8\n{listed}"));
    kill(Pid::from_raw(member.0.id().cast_signed()), Signal::SIGSTOP).unwrap();
    let receipt = agent.freeze_and_thaw();
    assert!(level(&receipt, &url).1.contains("in time"), "{receipt:#}");
    assert_eq!(level(&receipt, SOCKET), ("application", ""), "{receipt:#}");
    assert_eq!(receipt["level"], Value::from("filesystem"));
    kill(Pid::from_raw(member.0.id().cast_signed()), Signal::SIGCONT).unwrap();
    load.goes_on();

    // A server that is killed while it is held.
    let mut client = agent.client();
    assert_eq!(client.call("guest-fsfreeze-freeze"), FILE_SYSTEMS);
    kill(Pid::from_raw(server.0.id().cast_signed()), Signal::SIGKILL).unwrap();
    // It may be writing to what is frozen, and then it ends with the thaw and no earlier.
    let receipt = thaw(&mut client);
    let (reached, why) = level(&receipt, SOCKET);
    assert!(reached == "filesystem" && why.contains("ended"), "{receipt:#}");
    drop((load, server));
    let _server = mariadb();
    assert_eq!(level(&agent.freeze_and_thaw(), SOCKET), ("application", ""));
}
