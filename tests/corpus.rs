//! Everything that fuzzing has found interesting, checked with every test.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::disallowed_methods)]

use std::fmt::Write as _;

#[path = "fuzz/checks.rs"]
mod checks;

fn run(target: &str, check: fn(&[u8])) {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(target);
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let bytes = std::fs::read(&path).unwrap();
        let outcome = std::panic::catch_unwind(|| check(&bytes));
        assert!(outcome.is_ok(), "{}", path.display());
        count += 1;
    }
    assert!(count > 0, "the corpus of {target} is empty");
}

#[test]
fn qga() {
    run("qga", checks::qga);
}

#[test]
fn hybrid() {
    run("hybrid", checks::hybrid);
}

#[test]
fn qmp() {
    run("qmp", checks::qmp);
}

#[test]
fn parsers() {
    run("parsers", checks::parsers);
}

#[test]
fn disk() {
    run("disk", checks::disk);
    run("disk", |bytes| with_one_bit_changed(bytes, checks::disk));
}

#[test]
fn http2() {
    run("http2", checks::http2);
    run("http2", |bytes| with_one_bit_changed(bytes, checks::http2));
}

#[test]
fn callback() {
    run("callback", checks::callback);
    run("callback", |bytes| with_one_bit_changed(bytes, checks::callback));
}

#[test]
fn anchors() {
    run("anchors", checks::anchors);
    run("anchors", |bytes| with_one_bit_changed(bytes, checks::anchors));
}

#[test]
fn smbios() {
    run("smbios", checks::smbios);
    run("smbios", |bytes| with_one_bit_changed(bytes, checks::smbios));
}

#[test]
fn greeting() {
    run("greeting", checks::greeting::greeting);
    run("greeting", |bytes| with_one_bit_changed(bytes, checks::greeting::greeting));
}

/// All of it again, with one bit of each of its bytes changed.
fn with_one_bit_changed(bytes: &[u8], check: fn(&[u8])) {
    for at in 0..bytes.len() {
        let mut changed = bytes.to_vec();
        changed[at] ^= 1 << (at % 8);
        check(&changed);
    }
}

#[test]
fn dispatch() {
    run("dispatch", checks::dispatch::dispatch);
}

/// Each command, with what each argument could be.
#[test]
fn hostile_arguments_hurt_no_command() {
    let names = [
        "count",
        "crypted",
        "handle",
        "id",
        "keys",
        "mem-blks",
        "minimum",
        "mode",
        "mountpoints",
        "password",
        "path",
        "reset",
        "time",
        "username",
        "vcpus",
        "verbose",
    ];
    let values = [
        "-1",
        "0",
        "9223372036854775807",
        "9223372036854775808",
        "1e999",
        "null",
        "true",
        "\"\"",
        "\"..\"",
        "\"/\"",
        "\"a:b\"",
        "\"\\u0000\"",
        "\"\\n\"",
        "\"\\ud800\"",
        "[]",
        "[null]",
        "[[]]",
        "[{}]",
        "[{\"logical-id\":-1,\"online\":false}]",
        "{}",
        "[\"root\",\"\\n\"]",
    ];
    for command in guestlet::qga::table::COMMANDS {
        let mut lines = format!("{0}\n{0} []\n{0} 7\n", command.name);
        for name in names {
            for value in values {
                writeln!(lines, "{} {{\"{name}\":{value}}}", command.name).unwrap();
                // Beside what is right.
                let right = "\"username\":\"root\",\"password\":\"eA==\",\"crypted\":false,\"keys\":[]";
                writeln!(lines, "{} {{{right},\"x{name}\":{value}}}", command.name).unwrap();
            }
        }
        checks::dispatch::dispatch(lines.as_bytes());
    }
}
