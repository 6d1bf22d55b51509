//! Keys and passwords of users whose homes are laid out. For root, as the agent is.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, symlink};
use std::process::Command;

use guestlet::qga::policy::{Limits, Policy};
use serde_json::{Value, json};

use crate::laid_out::LaidOut;
use crate::namespace::is_outside;

const USER: u32 = 54_321;
const GROUP: u32 = 54_322;
const KEYS: &str = "/home/me/.ssh/authorized_keys";
const ADD: &str = "guest-ssh-add-authorized-keys";
const REMOVE: &str = "guest-ssh-remove-authorized-keys";
const GET: &str = "guest-ssh-get-authorized-keys";

/// A machine with the user `me`, whose home is there, and some whose is not.
fn machine() -> LaidOut {
    let guest = LaidOut::new();
    guest.write(
        "/etc/passwd",
        format!(
            "root:x:0:0::/root:/bin/sh\nme:x:{USER}:{GROUP}::/home/me:/bin/sh\nhomeless:x:7:7::/nowhere:/bin/sh\n\
             daemon:x:8:8::/etc/passwd:/bin/false\n"
        ),
    );
    fs::create_dir_all(guest.path("/home/me")).unwrap();
    own(&guest, "/home/me");
    guest
}

fn own(guest: &LaidOut, path: &str) {
    chown(guest.path(path), Some(USER), Some(GROUP)).unwrap();
}

fn add(keys: &[&str]) -> Value {
    json!({"username": "me", "keys": keys})
}

fn keys(guest: &LaidOut) -> Value {
    guest.call(GET, &json!({"username": "me"}))["keys"].take()
}

#[test]
fn keys_come_and_go_and_the_users_own_lines_stay() {
    let guest = machine();
    assert_eq!(keys(&guest), json!([]));
    assert_eq!(guest.call(REMOVE, &add(&["ssh-rsa A"])), json!({}));
    assert!(!guest.path("/home/me/.ssh").exists());

    assert_eq!(guest.call(ADD, &add(&["ssh-rsa A me", "ssh-rsa B\n", "ssh-rsa A me", ""])), json!({}));
    assert_eq!(guest.read(KEYS), "ssh-rsa A me\nssh-rsa B\n");
    for (path, mode) in [("/home/me/.ssh", 0o40_700), (KEYS, 0o100_600)] {
        let found = fs::metadata(guest.path(path)).unwrap();
        assert_eq!((found.mode(), found.uid(), found.gid()), (mode, USER, GROUP), "{path}");
    }
    let own_lines = "# mine\n\nfrom=\"192.0.2.1\",no-pty ssh-rsa C you\n";
    guest.write(KEYS, own_lines);
    guest.call(ADD, &add(&["ssh-rsa B"]));
    assert_eq!(guest.read(KEYS), format!("{own_lines}ssh-rsa B\n"));
    assert_eq!(keys(&guest), json!(["from=\"192.0.2.1\",no-pty ssh-rsa C you", "ssh-rsa B"]));
    guest.call(REMOVE, &add(&["ssh-rsa B\r\n", "ssh-rsa C you", "ssh-rsa Z"]));
    assert_eq!(guest.read(KEYS), own_lines);
    guest.call(ADD, &json!({"username": "me", "keys": ["ssh-rsa D"], "reset": true}));
    assert_eq!(guest.read(KEYS), "ssh-rsa D\n");
    guest.call(ADD, &json!({"username": "me", "keys": [], "reset": true}));
    assert_eq!(keys(&guest), json!([]));
    let left: Vec<_> =
        fs::read_dir(guest.path("/home/me/.ssh")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["authorized_keys"]);
}

#[test]
fn a_file_that_stays_the_same_is_not_written() {
    let guest = machine();
    guest.call(ADD, &add(&["ssh-rsa A"]));
    let before = fs::metadata(guest.path(KEYS)).unwrap().ino();
    guest.call(ADD, &add(&["ssh-rsa A"]));
    guest.call(REMOVE, &add(&["ssh-rsa B"]));
    assert_eq!(fs::metadata(guest.path(KEYS)).unwrap().ino(), before);
    guest.call(ADD, &add(&["ssh-rsa B"]));
    assert_ne!(fs::metadata(guest.path(KEYS)).unwrap().ino(), before, "it is replaced, not written over");
}

#[test]
fn a_folder_that_others_may_write_to_is_closed() {
    let guest = machine();
    fs::create_dir(guest.path("/home/me/.ssh")).unwrap();
    own(&guest, "/home/me/.ssh");
    fs::set_permissions(guest.path("/home/me/.ssh"), fs::Permissions::from_mode(0o777)).unwrap();
    guest.call(ADD, &add(&["ssh-rsa A"]));
    assert_eq!(fs::metadata(guest.path("/home/me/.ssh")).unwrap().mode() & 0o7777, 0o700);
}

#[test]
fn what_is_no_key_or_no_user_changes_nothing() {
    let guest = machine();
    for wrong in ["ssh-rsa A\nssh-rsa B", "# no key", "\n#", "a\rb"] {
        for command in [ADD, REMOVE] {
            let error = guest.error(command, &add(&["ssh-rsa A", wrong]));
            assert!(error.contains("\"keys[1]\" must be one line, and not a comment"), "{wrong:?}: {error}");
        }
    }
    for (name, said) in [
        ("", "\"username\" must be a name"),
        ("me:x", "\"username\" must be a name"),
        ("me\n", "\"username\" must be a name"),
        ("../me", "\"username\" must be a name"),
        ("me/", "\"username\" must be a name"),
        ("..", "unknown user \"..\""),
        ("nobody-at-all", "unknown user \"nobody-at-all\""),
        ("homeless", "No such file"),
        ("daemon", "Not a directory"),
    ] {
        for command in [ADD, GET, REMOVE] {
            let mut arguments = json!({"username": name, "keys": ["ssh-rsa A"]});
            if command == GET {
                arguments.as_object_mut().unwrap().remove("keys");
            }
            let error = guest.error(command, &arguments);
            assert!(error.contains(said), "{command} {name:?}: {error}");
        }
    }
    for (arguments, said) in [
        (json!({"username": "me\0", "keys": []}), "\"username\" must be a string without NUL"),
        (json!({"username": 1, "keys": []}), "\"username\" must be a string"),
        (json!({"username": "me"}), "\"keys\" is missing"),
        (json!({"username": "me", "keys": [["x"]]}), "\"keys[0]\" must be a string"),
        (json!({"username": "me", "keys": ["x"], "reset": "yes"}), "\"reset\" must be true or false"),
        (json!({"username": "me", "keys": vec!["x"; 100_000]}), "\"keys\" must be a list of at most 65536"),
    ] {
        assert!(guest.error(ADD, &arguments).contains(said), "{said}");
    }
    assert!(!guest.path("/home/me/.ssh").exists());
}

#[test]
fn links_and_worse_things_that_a_user_plants_lead_nowhere() {
    type Plant = dyn Fn(&LaidOut);
    const SSH: &str = "/home/me/.ssh";
    let plants: &[(&str, &Plant)] = &[
        (".ssh is a symbolic link", &|guest| symlink(guest.path("/root"), guest.path(SSH)).unwrap()),
        (".ssh is a symbolic link", &|guest| symlink(".", guest.path(SSH)).unwrap()),
        (".ssh is not of the expected type", &|guest| fs::write(guest.path(SSH), "a file").unwrap()),
        ("authorized_keys is a symbolic link", &|guest| {
            guest.write(&format!("{SSH}/x"), "");
            symlink(guest.path("/root/authorized_keys"), guest.path(KEYS)).unwrap();
        }),
        ("authorized_keys is not of the expected type", &|guest| {
            fs::create_dir_all(guest.path(KEYS)).unwrap();
        }),
        ("authorized_keys is not of the expected type", &|guest| {
            fs::create_dir_all(guest.path(SSH)).unwrap();
            assert!(Command::new("mkfifo").arg(guest.path(KEYS)).status().unwrap().success());
            own(guest, KEYS);
        }),
        ("Permission denied", &|guest| {
            fs::create_dir_all(guest.path(SSH)).unwrap();
            fs::set_permissions(guest.path(SSH), fs::Permissions::from_mode(0o700)).unwrap();
        }),
    ];
    for (said, plant) in plants {
        let guest = machine();
        guest.write("/root/authorized_keys", "ssh-rsa of-root\n");
        fs::set_permissions(guest.path("/root"), fs::Permissions::from_mode(0o755)).unwrap();
        plant(&guest);
        for (command, arguments) in [
            (ADD, add(&["ssh-rsa A"])),
            (REMOVE, add(&["ssh-rsa of-root"])),
            (GET, json!({"username": "me"})),
        ] {
            let error = guest.error(command, &arguments);
            assert!(error.contains(said), "{said}: {command}: {error}");
        }
        assert_eq!(guest.read("/root/authorized_keys"), "ssh-rsa of-root\n", "{said}");
        assert_eq!(fs::read_dir(guest.path("/root")).unwrap().count(), 1, "{said}");
    }
}

#[test]
fn the_users_rights_are_all_that_is_used() {
    let guest = machine();
    // A hard link to a file of root's, a leftover of root's, a home of root's.
    guest.write(KEYS, "ssh-rsa of-root\n");
    fs::set_permissions(guest.path(KEYS), fs::Permissions::from_mode(0o600)).unwrap();
    own(&guest, "/home/me/.ssh");
    assert!(guest.error(GET, &json!({"username": "me"})).contains("Permission denied"));
    assert!(guest.error(ADD, &add(&["ssh-rsa A"])).contains("Permission denied"));
    assert_eq!(guest.read(KEYS), "ssh-rsa of-root\n");
    fs::remove_dir_all(guest.path("/home/me/.ssh")).unwrap();
    chown(guest.path("/home/me"), Some(0), Some(0)).unwrap();
    assert!(guest.error(ADD, &add(&["ssh-rsa A"])).contains("Permission denied"));
    assert!(!guest.path("/home/me/.ssh").exists());
    // The thread has its own rights again.
    fs::create_dir_all(guest.path("/root")).unwrap();
    guest.call(ADD, &json!({"username": "root", "keys": ["ssh-rsa A"]}));
    let made = fs::metadata(guest.path("/root/.ssh/authorized_keys")).unwrap();
    assert_eq!((made.uid(), made.gid()), (0, 0));
}

/// A disk that is full, or cannot be written to, in a namespace of its own.
#[test]
fn what_cannot_be_written_stays_as_it_is() {
    if is_outside() {
        return;
    }
    let guest = machine();
    let home = guest.path("/home/me");
    let mount = |options: &str| {
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", options, "none"]).arg(&home).status().unwrap();
        assert!(mounted.success(), "{options}");
    };
    mount(&format!("size=32k,uid={USER},gid={GROUP},mode=700"));
    guest.call(ADD, &add(&["ssh-rsa A"]));
    // All blocks but one, which does not hold what comes.
    let mut filled = 0;
    while fs::write(guest.path(&format!("/home/me/{filled}")), [0; 4096]).is_ok() {
        filled += 1;
    }
    let long = "x".repeat(8192);
    let error = guest.error(ADD, &add(&[long.as_str()]));
    assert!(error.contains("No space left"), "{error}");
    assert_eq!(guest.read(KEYS), "ssh-rsa A\n");
    assert_eq!(fs::read_dir(guest.path("/home/me/.ssh")).unwrap().count(), 1, "nothing is left behind");
    mount("ro");
    let error = guest.error(ADD, &add(&["ssh-rsa A"]));
    assert!(error.contains("Read-only") || error.contains("Permission denied"), "{error}");
    assert_eq!(keys(&guest), json!([]));
}

/// A chpasswd that writes down what it is asked, or says something and fails.
fn with_chpasswd(guest: &LaidOut, script: &str) {
    guest.program("/usr/sbin/chpasswd", &format!("cd $root\n{script}"));
}

fn password(bytes: &[u8], crypted: bool) -> Value {
    let password = String::from_utf8(guestlet::qga::base64::encode(bytes)).unwrap();
    json!({"username": "me", "password": password, "crypted": crypted})
}

const SET: &str = "guest-set-user-password";

#[test]
fn a_password_goes_through_the_standard_input_of_chpasswd() {
    let guest = machine();
    with_chpasswd(
        &guest,
        "echo \"[$*]\" $# > arguments; cat > input; tr '\\0' ' ' < /proc/$$/cmdline >> arguments",
    );
    assert_eq!(guest.call(SET, &password("s e:crét".as_bytes(), false)), json!({}));
    assert_eq!(guest.read("input"), "me:s e:crét\n");
    assert!(guest.read("arguments").starts_with("[] 0\n") && !guest.read("arguments").contains("crét"));
    guest.call(SET, &password(b"$6$x$y", true));
    assert_eq!(guest.read("input"), "me:$6$x$y\n");
    assert!(guest.read("arguments").starts_with("[-e] 1\n"));
    // No bytes that are no text, and lines of base64.
    guest.call(SET, &json!({"username": "me", "password": "/w\n==\n", "crypted": false}));
    assert_eq!(fs::read(guest.path("input")).unwrap(), b"me:\xff\n");
}

#[test]
fn the_error_says_what_chpasswd_says_but_never_the_password() {
    let guest = machine();
    assert!(guest.error(SET, &password(b"geheim", false)).contains("No such file"));
    with_chpasswd(&guest, "cat > /dev/null; echo 'too weak' >&2; exit 1");
    let error = guest.error(SET, &password(b"geheim", false));
    assert!(error.contains("of me is not set") && error.contains("too weak"), "{error}");
    with_chpasswd(&guest, "cat >&2; exit 1");
    let error = guest.error(SET, &password(b"geheim", false));
    assert!(error.contains("exit status: 1") && !error.contains("geheim"), "{error}");
}

#[test]
fn a_password_that_is_none_never_reaches_chpasswd() {
    let guest = machine();
    with_chpasswd(&guest, "touch reached");
    let must = "\"password\" must be";
    for (bytes, crypted) in [
        (&b"a\nroot:x"[..], false),
        (b"a\0b", false),
        (b"a\rb", false),
        (b"\n", true),
        (b"$6$x:0:0", true),
        (&[b'x'; 4097], false),
    ] {
        let error = guest.error(SET, &password(bytes, crypted));
        assert!(error.contains(must) && !error.contains("root:x"), "{error}");
    }
    for (arguments, said) in [
        (
            json!({"username": "me", "password": "!", "crypted": false}),
            "\"password\" must be a string in base64",
        ),
        (json!({"username": "me", "password": 7, "crypted": false}), "\"password\" must be a string"),
        (json!({"username": "me", "password": "Zg=="}), "\"crypted\" is missing"),
        (json!({"username": "me:0", "password": "Zg==", "crypted": false}), "\"username\" must be a name"),
        (
            json!({"username": "me\nroot", "password": "Zg==", "crypted": false}),
            "\"username\" must be a name",
        ),
        (
            json!({"username": "me\0", "password": "Zg==", "crypted": false}),
            "\"username\" must be a string without",
        ),
        (json!({"username": "you", "password": "Zg==", "crypted": false}), "unknown user \"you\""),
    ] {
        let error = guest.error(SET, &arguments);
        assert!(error.contains(said), "{error}");
    }
    assert!(!guest.path("reached").exists());
    let limits = Limits { passwords: false, ..Limits::default() };
    let policy = Policy::from(limits);
    let limited = LaidOut::limited(policy);
    assert!(limited.error(SET, &password(b"x", false)).contains("qga.passwords.allow"));
}
