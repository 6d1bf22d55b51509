//! Shutdown and suspension, through a logind of the test's own or the machine's files. Never this machine's.

use serde_json::{Value, json};

use crate::bus::{Kind, Logind};
use crate::laid_out::LaidOut;

fn can(can: &'static str, flags: Option<u64>) -> Kind {
    Kind { can, flags, ..Kind::default() }
}

/// systemd 257, 249 to 256, and before.
const VERSIONS: [Option<u64>; 3] = [Some(0b1_1111), Some(0b1111), None];

#[test]
fn inhibitors_are_overridden_in_every_version_of_logind() {
    for flags in VERSIONS {
        for (command, arguments, method) in [
            ("guest-shutdown", Value::Null, "PowerOff"),
            ("guest-shutdown", json!({"mode": "powerdown"}), "PowerOff"),
            ("guest-shutdown", json!({"mode": "halt"}), "Halt"),
            ("guest-shutdown", json!({"mode": "reboot"}), "Reboot"),
            ("guest-suspend-ram", Value::Null, "Suspend"),
            ("guest-suspend-disk", json!({}), "Hibernate"),
            ("guest-suspend-hybrid", json!({}), "HybridSleep"),
        ] {
            let guest = LaidOut::new();
            let logind = Logind::begin(&guest, can("yes", flags));
            assert_eq!(guest.ask(command, &arguments), Value::Null, "success is not answered");
            let expected = if flags == VERSIONS[0] {
                format!("{method}WithFlags(16)")
            } else {
                format!("{method}(false)")
            };
            assert_eq!(logind.done(), [expected], "{command} {flags:?}");
        }
    }
}

#[test]
fn what_is_unsupported_or_refused_is_an_error_before_anything_happens() {
    let commands = ["guest-suspend-ram", "guest-suspend-disk", "guest-suspend-hybrid"];
    for says in ["no", "na", "challenge", ""] {
        let guest = LaidOut::new();
        guest.write("/sys/power/state", "freeze mem disk\n");
        let logind = Logind::begin(&guest, can(says, VERSIONS[0]));
        for command in commands {
            let error = guest.error(command, &Value::Null);
            assert!(error.contains(&format!("logind says {says:?}")), "{error}");
        }
        assert!(logind.done().is_empty());
        assert_eq!(guest.read("/sys/power/state"), "freeze mem disk\n");
    }
    let guest = LaidOut::new();
    let logind = Logind::begin(&guest, Kind { refuses: true, ..can("yes", VERSIONS[0]) });
    for command in commands {
        assert!(guest.error(command, &Value::Null).contains("was not suspended"), "{command}");
        assert!(guest.error(command, &json!({"x": 1})).contains("Parameter 'x' is unexpected"));
    }
    let error = guest.error("guest-shutdown", &Value::Null);
    assert!(error.contains("logind") && error.contains("cannot run"), "{error}");
    assert!(guest.error("guest-shutdown", &json!({"mode": "explode"})).contains("\"mode\" must be one of"));
    assert!(logind.done().is_empty());
}

#[test]
fn without_logind_the_kernel_suspends() {
    let (state, disk) = ("/sys/power/state", "/sys/power/disk");
    let guest = LaidOut::new();
    assert!(guest.error("guest-suspend-ram", &Value::Null).contains("cannot be suspended to ram"));
    let lay_out = |states: &str, disks: &str| {
        guest.write(state, states);
        guest.write(disk, disks);
    };
    lay_out("freeze mem\n", "[disabled]\n");
    for command in ["guest-suspend-disk", "guest-suspend-hybrid"] {
        assert!(guest.error(command, &Value::Null).contains("does not have disk"), "{command}");
    }
    assert_eq!(guest.read(state), "freeze mem\n");
    assert_eq!(guest.ask("guest-suspend-ram", &Value::Null), Value::Null);
    assert_eq!(guest.read(state), "mem");

    lay_out("freeze disk\n", "[platform] shutdown reboot\n");
    assert!(guest.error("guest-suspend-ram", &Value::Null).contains("does not have mem"));
    assert!(guest.error("guest-suspend-hybrid", &Value::Null).contains("does not have suspend"));
    assert_eq!(guest.ask("guest-suspend-disk", &Value::Null), Value::Null);
    assert_eq!(
        (guest.read(state).as_str(), guest.read(disk).as_str()),
        ("disk", "[platform] shutdown reboot\n")
    );

    lay_out("freeze mem disk\n", "[platform] shutdown reboot suspend\n");
    assert_eq!(guest.ask("guest-suspend-hybrid", &Value::Null), Value::Null);
    assert_eq!((guest.read(state).as_str(), guest.read(disk).as_str()), ("disk", "platform"));
}

#[test]
fn without_logind_the_systems_command_shuts_down() {
    for (command, others) in [("/sbin/shutdown", "-H +0"), ("/sbin/halt", "")] {
        let guest = LaidOut::new();
        guest.program(command, "echo \"$*\" > $root/told");
        assert_eq!(guest.ask("guest-shutdown", &json!({"mode": "halt"})), Value::Null);
        assert_eq!(guest.read("told").trim(), others);
    }
}
