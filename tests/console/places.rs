//! Where a console is: what QEMU has, what the settings say, and what is not this VM's.

use std::os::unix::net::UnixListener;

use crate::guest::GREETING;
use crate::host::{self, assert_fails};
use crate::lab::{Lab, SOCKET};

/// That a console is connected to, and answers.
fn works(lab: &Lab) {
    let mut client = lab.client(&[]);
    lab.qemu.go();
    client.write(b"a");
    client.until("b");
}

#[test]
fn a_pseudo_terminal_is_a_console() {
    let lab = Lab::with("pty,id=console0", &[], "");
    let mut client = lab.client(&[]);
    let words = client.complaint();
    assert!(words.contains("console of web at /dev/pts/"), "{words}");
    lab.qemu.go();
    client.until(GREETING);
    // Nothing is changed on the way, as a terminal would.
    client.write(b"\r\n\x03\x04\x11");
    client.until("\x0e\x0b\x04\x05\x12");
    drop(client);
    works(&lab);
}

#[test]
fn a_pseudo_terminal_ends_with_its_vm() {
    let mut lab = Lab::with("pty,id=console0", &[], "");
    let mut client = lab.client(&[]);
    lab.qemu.kill();
    assert_eq!(client.code(), Some(6));
    client.until_complaint("the VM web has ended");
}

#[test]
fn the_settings_name_a_device_or_a_socket() {
    let more = ["-chardev", "socket,id=second,path=@second,server=on,wait=off", "-serial", "chardev:second"];
    let lab = Lab::with(SOCKET, &more, "");
    works(&lab);
    // The guest speaks on the first port alone.
    let second = |settings: &str| {
        let lab = Lab::with(SOCKET, &more, settings);
        let client = lab.client(&[]);
        let at = format!("console of web at {}", lab.host.path("second").display());
        assert!(client.complaint().contains(&at), "{}", client.complaint());
    };
    second("console = 'second'");
    second("console = '@second'");
    works(&Lab::with(SOCKET, &more, "console = '@console'"));
}

#[test]
fn a_device_with_an_identifier_is_found() {
    let device = ["-chardev", "socket,id=charserial0,path=@console,server=on,wait=off"];
    let lab =
        Lab::with("", &[&device[..], &["-device", "isa-serial,chardev=charserial0,id=serial0"]].concat(), "");
    works(&lab);
}

#[test]
fn a_socket_of_another_process_is_refused() {
    let host = host::Lab::new();
    let other = UnixListener::bind(host.path("other")).unwrap();
    let lab = Lab::of(host, SOCKET, &[], "console = '@other'");
    let own = format!("was made by the process {}, and the QMP socket by the process ", std::process::id());
    assert_fails(&lab.ctl(&[]), 1, &own);
    drop(other);
    assert_fails(&lab.ctl(&[]), 1, "cannot connect to the console at ");
    drop(lab);

    // QEMU's own path, at which somebody else listens by now.
    let lab = Lab::new();
    std::fs::remove_file(lab.host.path("console")).unwrap();
    let other = UnixListener::bind(lab.host.path("console")).unwrap();
    assert_fails(&lab.ctl(&[]), 1, &own);
    drop(other);
}

#[test]
fn without_a_console_it_is_said_what_to_give_qemu() {
    let advice = "give QEMU -chardev socket,id=console0,path=/run/vm/web/console.sock,server=on,wait=off -serial chardev:console0";
    for (chardev, words) in [
        ("", "the VM has no serial port"),
        ("null,id=console0", "\"null\": what is written there is discarded"),
        (
            "socket,id=console0,path=@console,server=on,wait=off,mux=on",
            "\"mux\": its users could reach QEMU's monitor",
        ),
        (
            "socket,id=console0,host=127.0.0.1,port=0,server=on,wait=off",
            "only unix sockets and pseudo-terminals",
        ),
    ] {
        let output = Lab::with(chardev, &[], "").ctl(&[]);
        assert_fails(&output, 1, words);
        assert_fails(&output, 1, advice);
    }
    let lab = Lab::with(SOCKET, &[], "console = 'serial9'");
    assert_fails(&lab.ctl(&[]), 1, "QEMU has no character device \"serial9\"");

    let host = host::Lab::new().guest("web", 1).start();
    assert_fails(
        &host.ctl(&["console", "web"]),
        1,
        "the VM has no QMP socket in the settings of guestlet-host",
    );
    assert_fails(&host.ctl(&["console", "db"]), 4, "knows no VM named \"db\"");
}
