//! The daemon as a service: settings, its socket, its start and its end.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixDatagram;
use std::process::Stdio;
use std::time::Duration;

use crate::guest::{Door, Guest, Manner, info};
use crate::lab::{DEADLINE, Lab, Watch, assert_fails, terminate, text, uuid, wait};

#[test]
fn wrong_settings_are_refused_with_file_and_line() {
    let lab = Lab::new().vm("a", 1, "vsock-cid = 3");
    lab.write();
    let check = || lab.daemon("log").arg("--check").stderr(Stdio::piped()).output().unwrap();
    assert!(check().status.success());

    let drop_ins = lab.path("host.d");
    std::fs::create_dir(&drop_ins).unwrap();
    let drop_in = drop_ins.join("10-more.toml");
    std::fs::write(&drop_in, format!("\n[[vm]]\nname = 'a'\nuuid = '{}'\nvsock-cid = 4\n", uuid(2))).unwrap();
    let words = format!(
        "guestlet-host: {}:3: name \"a\" is already used at {}:5; change one",
        text(&drop_in),
        text(&lab.settings())
    );
    assert_fails(&check(), 78, &words);
    let run = lab.daemon("log").stderr(Stdio::piped()).output().unwrap();
    assert_fails(&run, 78, &words);

    std::fs::write(&drop_in, "[[vm]\n").unwrap();
    assert_fails(&check(), 78, &format!("{}:1: ", text(&drop_in)));
    std::fs::remove_file(lab.settings()).unwrap();
    assert_fails(&check(), 78, "host.toml: cannot be read: No such file");
}

#[test]
fn wrong_settings_do_not_let_systemd_start_it_every_second() {
    let lab = Lab::new().set("no-such-key = 1");
    lab.write();
    let manager = UnixDatagram::bind(lab.path("notify")).unwrap();
    let started = std::time::Instant::now();
    let mut daemon = lab.daemon("log").env("NOTIFY_SOCKET", lab.path("notify")).spawn().unwrap();
    lab.until("it says why at once", || lab.log().contains("no-such-key"));
    assert!(started.elapsed() < Duration::from_secs(9));
    assert_eq!(wait(&mut daemon).code(), Some(78));
    assert!(started.elapsed() >= Duration::from_secs(10));
    drop(manager);
}

#[test]
fn a_second_daemon_on_the_same_socket_is_refused() {
    let lab = Lab::new().vm("a", 1, "unix-socket = '@a.sock'").start();
    let second = lab.daemon("second").stderr(Stdio::piped()).output().unwrap();
    let words = format!("another guestlet-host already serves {}", text(&lab.socket()));
    assert_fails(&second, 1, &words);
    assert!(lab.words(&["ls"]).contains("connecting"), "the first goes on");
}

#[test]
fn a_socket_left_behind_is_replaced() {
    let lab = Lab::new();
    std::fs::create_dir(lab.path("run")).unwrap();
    drop(std::os::unix::net::UnixListener::bind(lab.socket()).unwrap());
    let lab = lab.start();
    let mode = std::fs::metadata(lab.socket()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn a_signal_ends_everything_within_the_deadline() {
    let mut lab =
        Lab::new().vm("a", 1, "unix-socket = '@a.sock'").vm("b", 2, "unix-socket = '@b.sock'").start();
    let a = Guest::start(&lab.path("a.sock"), Door::Unix, Manner::Good, info(&uuid(1), "boot-1"));
    let _b = Guest::start(&lab.path("b.sock"), Door::Unix, Manner::Silent, info(&uuid(2), "boot-1"));
    lab.until_session("a", "connected");
    let watch = Watch::start(&lab, &[]);
    assert_eq!(a.open(), 1);

    let started = std::time::Instant::now();
    assert!(lab.stop().success(), "{}", lab.log());
    assert!(started.elapsed() < Duration::from_secs(5), "the drain took {:?}", started.elapsed());
    assert!(!lab.log().contains("did not end in time"), "{}", lab.log());
    assert!(!lab.socket().exists());
    lab.until("the stream to the guest is closed", || a.open() == 0);
    let (status, complaint) = watch.end();
    assert_eq!(
        (status.code(), complaint.as_str()),
        (Some(1), "guestctl: guestlet-host closed the connection\n")
    );
}

#[test]
fn the_service_manager_is_told() {
    let lab = Lab::new().vm("a", 1, "unix-socket = '@a.sock'");
    lab.write();
    let manager = UnixDatagram::bind(lab.path("notify")).unwrap();
    manager.set_read_timeout(Some(DEADLINE)).unwrap();
    let heard = |wanted: &str| {
        let mut buffer = [0; 1024];
        loop {
            let length = manager.recv(&mut buffer).unwrap_or_else(|error| panic!("{wanted}: {error}"));
            let text = String::from_utf8_lossy(&buffer[..length]);
            if text.lines().any(|line| line == wanted) {
                return;
            }
        }
    };
    let mut daemon = lab
        .daemon("log")
        .env("NOTIFY_SOCKET", lab.path("notify"))
        .env("WATCHDOG_USEC", "400000")
        .spawn()
        .unwrap();
    heard("READY=1");
    assert!(lab.words(&["ls"]).contains("connecting"), "it answers as soon as it is ready");
    heard("WATCHDOG=1");
    heard("WATCHDOG=1");
    let _guest = Guest::start(&lab.path("a.sock"), Door::Unix, Manner::Good, info(&uuid(1), "boot-1"));
    heard("STATUS=1 of 1 VMs connected");
    terminate(&daemon);
    heard("STOPPING=1");
    assert!(wait(&mut daemon).success());
}

#[test]
fn too_many_clients_are_turned_away_and_the_rest_are_served() {
    let lab = Lab::new().vm("a", 1, "unix-socket = '@a.sock'").start();
    let _guest = Guest::start(&lab.path("a.sock"), Door::Unix, Manner::Good, info(&uuid(1), "boot-1"));
    lab.until_session("a", "connected");
    let watch = Watch::start(&lab, &[]);
    let connect = || std::os::unix::net::UnixStream::connect(lab.socket()).unwrap();
    let idle: Vec<_> = (0..70).map(|_| connect()).collect();
    assert_fails(&lab.ctl(&["ls"]), 1, "guestctl: guestlet-host closed the connection");
    watch.until(|line| line.contains("heartbeat"));
    drop(idle);
    lab.until("others are served again", || lab.ctl(&["ls"]).status.success());
}
