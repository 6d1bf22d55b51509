//! How the public keys of host halves come into a guest, with the options and the user data that guestctl prints.

use std::process::Command;

use guestlet::ctl::trust::bootstrap::{Format, text};
use guestlet::trust::anchors;
use guestlet::trust::key::PublicKey;

use crate::harness::launch::Options;
use crate::harness::tools;
use crate::harness::vm::{FAST_READY, REAL_READY, SOON, Vm};
use crate::harness::wait_for;
use crate::{images, installed};

/// A public key: its line, and what people call it.
fn key(number: u8, comment: &str) -> (String, String) {
    let mut public_key = [number; 44];
    public_key[..12].copy_from_slice(&[0x30, 0x2a, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 3, 0x21, 0]);
    let public_key = PublicKey::from_spki(&public_key).unwrap();
    let line = anchors::line(&public_key, false, &["status", "freeze"], comment);
    (line, public_key.fingerprint().to_string())
}

/// The options for QEMU that are printed for a key, as a shell takes them: those of this name.
fn options(name: &str, line: &str) -> Vec<String> {
    printed_options(name, &text(Format::Qemu, "vm", line, None))
}

/// Those of this name in what guestctl printed.
pub fn printed_options(name: &str, printed: &str) -> Vec<String> {
    let mut words = String::new();
    printed.lines().filter(|line| line.starts_with(name)).for_each(|line| words = format!("{words} {line}"));
    let script = format!("printf '%s\\n' {words}");
    let told = Command::new("sh").args(["-c", &script]).output().unwrap();
    let options: Vec<_> = String::from_utf8(told.stdout).unwrap().lines().map(str::to_owned).collect();
    assert_eq!(options.len(), 2, "{printed}");
    options
}

/// The lines of the keys that the guest has.
fn listed(vm: &Vm) -> Vec<String> {
    vm.run("guestlet trust ls").unwrap().lines().map(str::to_owned).collect()
}

/// Whether the guest has this key from this place.
fn has(vm: &Vm, fingerprint: &str, place: &str) -> bool {
    listed(vm).iter().any(|line| line.contains(fingerprint) && line.contains(place))
}

/// Quotes and commas are where they would be lost.
const COMMENT: &str = "rack 4, the host's \"first\"";

#[test]
fn a_guest_without_systemd_has_its_key_from_the_firmware() {
    let (line, fingerprint) = key(3, COMMENT);
    let options = Options::named("firmware").qemu(options("-smbios", &line));
    let vm = options.fast(images(), &tools::program("guestlet").unwrap()).unwrap();
    vm.wait_booted(FAST_READY, 1).unwrap();
    vm.run("test ! -e /run/credentials").unwrap();
    wait_for("the agent", SOON, || vm.run("guestlet status").ok()).unwrap();
    assert!(has(&vm, &fingerprint, "SMBIOS OEM string 1"), "{:?}", listed(&vm));
    // To the letter.
    vm.run("tr '\\0' '\\n' < /sys/firmware/dmi/tables/DMI > /run/strings").unwrap();
    vm.write("/run/expected", line.as_bytes()).unwrap();
    vm.run("grep -qF \"io.systemd.credential:guestlet.hosts=$(cat /run/expected)\" /run/strings").unwrap();
}

#[test]
fn a_real_guest_has_keys_from_systemd_cloud_init_and_files() {
    let (smbios, of_smbios) = key(4, COMMENT);
    let (fw_cfg, of_fw_cfg) = key(5, COMMENT);
    let (written, of_cloud_init) = key(6, COMMENT);
    let (file, of_file) = key(7, COMMENT);
    let given = [options("-smbios", &smbios), options("-fw_cfg", &fw_cfg)].concat();
    let user_data = text(Format::CloudInit, "vm", &written, None);
    let options = Options::named("keys").qemu(given).user_data(&user_data);
    let vm = options.real(images(), &installed().disk).unwrap();
    vm.wait_booted(REAL_READY, 1).unwrap();
    wait_for("the agent", SOON, || vm.run("guestlet status").ok()).unwrap();
    // systemd takes the first of the two; the agent finds the other one itself.
    assert!(has(&vm, &of_fw_cfg, "/run/credentials/@system/guestlet.hosts"), "{:?}", listed(&vm));
    assert!(has(&vm, &of_smbios, "SMBIOS OEM string 1"), "{:?}", listed(&vm));
    assert_eq!(vm.run("cat /etc/guestlet/hosts.d/bootstrap.pub").unwrap(), format!("{written}\n"));
    let taken = || has(&vm, &of_cloud_init, "/etc/guestlet/hosts.d/bootstrap.pub").then_some(());
    wait_for("the key that cloud-init wrote", SOON, taken).unwrap();

    // By hand, as a person in the guest.
    vm.write("/etc/guestlet/hosts.d/ops.pub", format!("# ours\n{file}\n").as_bytes()).unwrap();
    let taken = || has(&vm, &of_file, "/etc/guestlet/hosts.d/ops.pub:2").then_some(());
    wait_for("the key in the file", SOON, taken).unwrap();
}
