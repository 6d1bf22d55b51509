//! A real MariaDB under load: what was acknowledged before it was held is in every snapshot, and whatever ends releases it.

use std::io::Write as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::sql::Sql;
use super::stand::{Client, Disk, Load, PATIENCE, Running, as_user, is_outside, rounds, run, until};

/// Where the packages of MariaDB are seen, whose own place not every user may enter.
const PROGRAMS: &str = "/mnt/programs";
/// Sessions that write.
const WRITERS: usize = 3;

/// One engine recovers by itself, and two do not.
const TABLES: &str = "CREATE DATABASE load_; \
    CREATE TABLE load_.one (writer INT, number BIGINT, PRIMARY KEY (writer, number)) ENGINE = InnoDB; \
    CREATE TABLE load_.two LIKE load_.one; \
    CREATE TABLE load_.aria (writer INT, number BIGINT, PRIMARY KEY (writer, number)) ENGINE = Aria; \
    CREATE TABLE load_.myisam (writer INT, number BIGINT, PRIMARY KEY (writer, number)) ENGINE = MyISAM; \
    CREATE USER load_@localhost; GRANT ALL ON *.* TO load_@localhost WITH GRANT OPTION;";

struct Server {
    process: Running,
    socket: PathBuf,
}

impl Server {
    /// A new server, with its data on a disk.
    fn new(disk: &Disk) -> Self {
        let packages =
            std::env::var("MARIADB").expect("MARIADB must name Debian's MariaDB; make test sets it");
        run(&format!("mkdir {PROGRAMS}; mount --bind {packages} {PROGRAMS}"));
        let data = disk.path().join("data");
        let mut install = as_user(&format!("{PROGRAMS}/usr/bin/mariadb-install-db"));
        install.args(["--no-defaults", "--skip-test-db", "--auth-root-authentication-method=socket"]);
        install.args(["--auth-root-socket-user=nobody", "--skip-name-resolve"]);
        install.arg(format!("--basedir={PROGRAMS}/usr")).arg(format!("--datadir={}", data.display()));
        install.env("TMPDIR", disk.path());
        let output = install.output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
        std::fs::write("/mnt/tables.sql", TABLES.replace("; ", ";\n")).unwrap();
        let server = Self::start(disk, &["--init-file=/mnt/tables.sql"]);
        until("the tables are made", || server.session().run("SELECT 1 FROM load_.myisam").ok());
        server
    }

    /// A server for what is on a disk.
    fn start(disk: &Disk, more: &[&str]) -> Self {
        let data = disk.path().join("data");
        let socket = disk.path().join("socket");
        let mut command = as_user(&format!("{PROGRAMS}/usr/sbin/mariadbd"));
        // Temporary tables are named after the number of the process, which servers in other namespaces have as well.
        command.env("TMPDIR", disk.path());
        command.args([
            "--no-defaults",
            "--skip-networking",
            "--log-bin=log",
            "--server-id=7",
            "--skip-name-resolve",
        ]);
        command.args(["--innodb-buffer-pool-size=16M", "--innodb-log-file-size=8M", "--key-buffer-size=1M"]);
        command.args([
            "--aria-pagecache-buffer-size=1M",
            "--innodb-use-native-aio=OFF",
            "--gtid-strict-mode=ON",
        ]);
        command
            .arg(format!("--basedir={PROGRAMS}/usr"))
            .arg(format!("--lc-messages-dir={PROGRAMS}/usr/share/mysql"));
        command.arg(format!("--datadir={}", data.display())).arg(format!("--socket={}", socket.display()));
        command.arg(format!("--pid-file={}", disk.path().join("pid").display())).args(more);
        let log = Path::new("/mnt").join(format!("{}.log", disk.path().file_name().unwrap().display()));
        let mut process = Running::start(&mut command, &log);
        until("MariaDB does not answer", || {
            assert!(!process.has_ended(), "{}", std::fs::read_to_string(&log).unwrap_or_default());
            Sql::connect(&socket, "load_").ok()
        });
        Self { process, socket }
    }

    fn session(&self) -> Sql {
        Sql::connect(&self.socket, "load_").unwrap()
    }

    fn client(&self) -> Client {
        Client::start("mysql", &self.socket.display().to_string())
    }

    fn load(&self) -> Load {
        Load::start(WRITERS, |writer| {
            let mut sql = self.session();
            move |number| {
                let values = format!("VALUES ({writer}, {number})");
                let transaction = ["one", "two"].map(|table| format!("INSERT INTO load_.{table} {values}"));
                sql.run("BEGIN").is_ok()
                    && transaction.iter().all(|insert| sql.run(insert).is_ok())
                    && sql.run("COMMIT").is_ok()
                    && sql.run(&format!("INSERT INTO load_.aria {values}")).is_ok()
                    && sql.run(&format!("INSERT INTO load_.myisam {values}")).is_ok()
            }
        })
    }

    /// Nothing of a backup is left: tables are changed and transactions committed, within the patience of a session.
    fn is_released(&self) {
        let mut sql = self.session();
        for statement in [
            "CREATE TABLE load_.more (i INT) ENGINE = InnoDB",
            "INSERT INTO load_.more VALUES (1)",
            "DROP TABLE load_.more",
        ] {
            sql.run(statement).unwrap();
        }
    }
}

/// Everything that was acknowledged is in a copy, nothing is there by half, and it is where the client has said.
fn is_whole(copy: &Disk, acknowledged: &[u64], held: &Value) {
    let server = Server::start(copy, &[]);
    let mut sql = server.session();
    let rows = |sql: &mut Sql, table: &str| {
        let query = format!(
            "SELECT writer, COUNT(*), MAX(number) FROM load_.{table} GROUP BY writer ORDER BY writer"
        );
        sql.run(&query).unwrap()
    };
    let one = rows(&mut sql, "one");
    assert_eq!(one, rows(&mut sql, "two"), "half of a transaction");
    for table in ["one", "aria", "myisam"] {
        let rows = rows(&mut sql, table);
        for (writer, acknowledged) in acknowledged.iter().enumerate() {
            let numbers: Vec<u64> = rows[writer].split('\t').map(|number| number.parse().unwrap()).collect();
            let [_, count, last] = numbers[..] else { panic!("{rows:?}") };
            assert!(
                count == last && last >= *acknowledged,
                "{table}: {acknowledged} were acknowledged: {rows:?}"
            );
        }
    }
    let checked = sql.run("CHECK TABLE load_.one, load_.two, load_.aria, load_.myisam EXTENDED").unwrap();
    assert!(checked.iter().filter(|row| row.ends_with("\tstatus\tOK")).count() == 4, "{checked:?}");
    let gtid = sql.run("SELECT @@gtid_binlog_pos").unwrap();
    assert_eq!(gtid, [held["positions"]["gtid-binlog"].as_str().unwrap()]);
}

#[test]
fn every_snapshot_of_a_mariadb_has_what_was_acknowledged() {
    if is_outside() {
        return;
    }
    let disk = Disk::new("live", 512);
    let server = Server::new(&disk);
    let load = server.load();
    for round in 0..rounds() {
        // Written and flushed, or not, when a transaction is acknowledged: the client sees to it.
        server.session().run(&format!("SET GLOBAL innodb_flush_log_at_trx_commit = {}", round % 3)).unwrap();
        load.goes_on();
        let mut client = server.client();
        let held = client.hold();
        let acknowledged = load.acknowledged();
        assert!(held["version"].as_str().unwrap().starts_with("MariaDB 1"), "{held}");
        for position in ["server", "server-id", "gtid-binlog", "binlog-file", "binlog-position", "lsn"] {
            assert!(held["positions"][position].is_string(), "{position}: {held}");
        }
        let data = disk.path().join("data").display().to_string();
        assert_eq!(held["directories"].as_array().unwrap().len(), 1, "{held}");
        assert_eq!(held["directories"][0]["path"], data);
        let copy = disk.cut();
        let released = client.release();
        assert_eq!(released["gtid-binlog"], held["positions"]["gtid-binlog"], "it was not held");
        load.goes_on();
        is_whole(&copy, &acknowledged, &held);
        copy.remove();
    }
    server.is_released();
}

/// Whatever ends while the server is held: no lock of a backup is left, or the client says that it is lost.
#[test]
fn whatever_ends_a_held_mariadb_goes_on() {
    if is_outside() {
        return;
    }
    let disk = Disk::new("live", 512);
    let mut server = Server::new(&disk);
    let load = server.load();
    load.goes_on();

    let mut client = server.client();
    client.hold();
    client.kill();
    load.goes_on();
    server.is_released();

    let mut client = server.client();
    client.hold();
    client.hang_up();
    load.goes_on();
    server.is_released();

    // Its session is ended by somebody else, and the lock with it.
    let mut client = server.client();
    client.hold();
    let held = "SELECT id FROM information_schema.processlist WHERE user = 'nobody'";
    let id = server.session().run(held).unwrap();
    server.session().run(&format!("KILL {}", id[0])).unwrap();
    assert!(client.loses().contains("has ended the session"));
    load.goes_on();

    // Another backup, or a table that is written to for long, holds it up for some seconds.
    let mut other = server.session();
    other.run("LOCK TABLES load_.myisam WRITE").unwrap();
    let refused = server.client().does_not_hold(PATIENCE);
    assert!(refused.contains("another session blocks it"), "{refused}");
    other.run("UNLOCK TABLES").unwrap();
    load.goes_on();
    server.is_released();

    // A user that may not do it is told what to be granted.
    server.session().run("REVOKE ALL PRIVILEGES, GRANT OPTION FROM nobody@localhost").unwrap();
    let refused = server.client().does_not_hold(PATIENCE);
    assert!(refused.contains("run GRANT RELOAD, BINLOG MONITOR ON *.* TO 'nobody'@'localhost'"), "{refused}");
    server.session().run("GRANT RELOAD, BINLOG MONITOR ON *.* TO 'nobody'@'localhost'").unwrap();
    let mut client = server.client();
    client.hold();
    client.release();
    server.session().run("DROP USER nobody@localhost").unwrap();
    let refused = server.client().does_not_hold(PATIENCE);
    assert!(refused.contains("CREATE USER 'nobody'@'localhost' IDENTIFIED VIA unix_socket"), "{refused}");
    server.session().run("CREATE USER nobody@localhost IDENTIFIED VIA unix_socket").unwrap();
    server.session().run("GRANT ALL ON *.* TO nobody@localhost").unwrap();

    // One that hangs costs no more than the time there is.
    run(&format!("kill -STOP {}", server.process.id()));
    let begun = Instant::now();
    let refused = server.client().does_not_hold(Duration::from_secs(2));
    assert!(refused.contains("in time") && begun.elapsed() < PATIENCE, "{refused}: {:?}", begun.elapsed());
    run(&format!("kill -CONT {}", server.process.id()));
    load.goes_on();

    let mut client = server.client();
    client.hold();
    server.process.kill();
    assert!(client.loses().contains("has ended the session"));
}

/// What another server says, byte by byte: `answers` are the packets with their heads.
fn scripted(answers: Vec<Vec<u8>>) -> String {
    let path = Path::new("/mnt/scripted");
    let _ = std::fs::remove_file(path);
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = answers.iter().try_for_each(|answer| stream.write_all(answer));
        // It says no more, and does not end.
        std::thread::sleep(PATIENCE);
    });
    let mut client = Client::start_as_root("mysql", "/mnt/scripted");
    client.does_not_hold(Duration::from_secs(3))
}

fn packet(sequence: u8, body: &[u8]) -> Vec<u8> {
    let [low, middle, high, _] = u32::try_from(body.len()).unwrap().to_le_bytes();
    [&[low, middle, high, sequence], body].concat()
}

const GREETING: &[u8] =
    b"\n5.5.5-10.11.19-MariaDB\x00\n\x00\x00\x00puy#=J=4\x00\xfe\xf7\x08\x02\x00\xff\x81\x15\x00\
    \x00\x00\x00\x00\x00\x1d\x00\x00\x00+x?o3MkT@%7%\x00mysql_native_password\x00";

#[test]
fn strange_servers_are_never_held() {
    if is_outside() {
        return;
    }
    let done = |sequence| packet(sequence, b"\0\0\0\x02\0\0\0");
    let greeting = || packet(0, GREETING);
    let no_database = "does not answer like any known MySQL or MariaDB";
    let endless_rows = || {
        let mut answers = vec![greeting(), done(2), done(1), packet(1, b"\x02")];
        answers.extend([packet(2, b"a"), packet(3, b"b"), packet(4, b"\xfe\0\0\x02\0")]);
        answers.extend((0..20_000_u32).map(|row| packet((row + 5).to_le_bytes()[0], b"\x01a\x01b")));
        answers
    };
    let cases: Vec<(&str, Vec<Vec<u8>>, &str)> = vec![
        ("nothing", vec![], "in time"),
        ("another protocol", vec![b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n".to_vec()], no_database),
        ("a long packet", vec![vec![0xff, 0xff, 0xff, 0]], no_database),
        ("an empty greeting", vec![packet(0, b"")], no_database),
        ("an error", vec![packet(0, b"\xff\x10\x04Too many\n connections")], "Too many\\n connections"),
        ("half of a greeting", vec![packet(0, &GREETING[..40])], no_database),
        ("a wrong number", vec![packet(7, GREETING)], no_database),
        ("a password", vec![greeting(), packet(2, b"\x01\x04")], "asks for a password"),
        ("a refusal", vec![greeting(), packet(2, b"\xff\x15\x04#28000No")], "IDENTIFIED VIA unix_socket"),
        (
            "plugins without end",
            std::iter::once(greeting())
                .chain((1..100).map(|number| packet(number * 2, b"\xfeplugin\0")))
                .collect(),
            "one authentication plugin after another",
        ),
        ("a file that it asks for", vec![greeting(), done(2), packet(1, b"\xfb/etc/shadow")], no_database),
        ("columns without end", vec![greeting(), done(2), packet(1, b"\xfc\xff\xff")], no_database),
        ("rows without end", endless_rows(), "too long"),
        ("no variables", vec![greeting(), done(2), done(1), done(1)], "does not report its data directory"),
    ];
    for (name, answers, words) in cases {
        let said = scripted(answers);
        assert!(said.contains(words), "{name}: {said}");
    }
    // Somebody else's socket, a link to one, and none.
    let other = UnixListener::bind("/mnt/other").unwrap();
    let refused = Client::start("mysql", "/mnt/other").does_not_hold(PATIENCE);
    assert!(refused.contains("belongs to the user 0"), "{refused}");
    std::os::unix::fs::symlink("/mnt/other", "/mnt/link").unwrap();
    let refused = Client::start_as_root("mysql", "/mnt/link").does_not_hold(PATIENCE);
    assert!(refused.contains("is not a socket"), "{refused}");
    run("chown nobody /mnt/other");
    let refused = Client::start("mysql", "/mnt/other").does_not_hold(PATIENCE);
    assert!(refused.contains("a process of the user 0 listens"), "{refused}");
    drop(other);
}
