//! `guestlet doctor` over machines that are folders, and the real program beside a real agent.
#![allow(clippy::disallowed_methods, clippy::unwrap_used, reason = "a test program")]

#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "fixtures/launch.rs"]
mod launch;

use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

use guestlet::config::agent::fragment::AgentFragment;
use guestlet::config::agent::options::Program;
use guestlet::config::agent::{AgentSettings, Places, load};
use guestlet::doctor::{Answer, Patient, examine};
use guestlet::sys::root::Root;
use guestlet::text::findings::{Finding, Level};
use guestlet::wire::proto::v1::{DiskRule, FreezeStatus, GuestInfo, HostHalf, Status, WhoAmIResponse};
use serde_json::Value;
use tempfile::TempDir;

const AGENT: i32 = 77;

/// A machine that is a folder, with an agent in it.
struct Machine {
    folder: TempDir,
    answer: Answer,
}

impl Machine {
    /// One on which everything is as it should be.
    fn sound() -> Self {
        let machine = Self { folder: tempfile::tempdir().unwrap(), answer: Answer::default() };
        machine.write("/dev/vport1p1", "");
        machine.link("/dev/virtio-ports/org.qemu.guest_agent.0", "../vport1p1");
        machine.write("/sys/class/virtio-ports/vport1p1/name", "org.qemu.guest_agent.0\n");
        machine.write("/sys/bus/virtio/devices/virtio3/device", "0x0013\n");
        machine.link("/sys/bus/virtio/devices/virtio3/driver", "/sys");
        for process in [1, AGENT] {
            machine.link(&format!("/proc/{process}/ns/mnt"), "mnt:[4026531841]");
        }
        machine.write(&format!("/proc/{AGENT}/status"), "Name:\tguestlet\nCapBnd:\t000001ffffffffff\n");
        machine.write(&format!("/proc/{AGENT}/attr/current"), "unconfined\n");
        let status = Status {
            guest: Some(GuestInfo { agent_version: guestlet::VERSION.to_owned(), ..GuestInfo::default() }),
            control_channel: "vsock port 970, held by guestlet.socket".to_owned(),
            host: Some(HostHalf { host_name: "host-1".to_owned(), ..HostHalf::default() }),
            identity: Some(WhoAmIResponse { vm_name: "web-1".to_owned(), ..WhoAmIResponse::default() }),
            freeze: Some(FreezeStatus { stage: "thawed".to_owned(), ..FreezeStatus::default() }),
            ..Status::default()
        };
        Self { answer: Answer { process: Some(AGENT), status, ..Answer::default() }, ..machine }
    }

    fn path(&self, path: &str) -> std::path::PathBuf {
        self.folder.path().join(path.trim_start_matches('/'))
    }

    fn write(&self, path: &str, text: &str) {
        std::fs::create_dir_all(self.path(path).parent().unwrap()).unwrap();
        std::fs::write(self.path(path), text).unwrap();
    }

    fn link(&self, path: &str, to: &str) {
        std::fs::create_dir_all(self.path(path).parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(to, self.path(path)).unwrap();
    }

    fn settings(&self, text: &str) -> AgentSettings {
        let fragment: AgentFragment = toml::from_str(text).unwrap();
        load(&Places::from(self.folder.path()), Program::Guestlet, fragment).unwrap()
    }

    fn examine(&self, settings: &str) -> Vec<Finding> {
        let (root, settings) = (Root::at(self.folder.path()), self.settings(settings));
        examine(&Patient { root: &root, settings: Ok(&settings), answer: Ok(&self.answer) })
    }
}

fn of<'a>(findings: &'a [Finding], subject: &str) -> &'a Finding {
    let found = findings.iter().find(|finding| finding.subject == subject);
    found.unwrap_or_else(|| panic!("nothing about {subject}: {findings:#?}"))
}

fn level(findings: &[Finding], subject: &str) -> Level {
    of(findings, subject).level
}

#[test]
fn where_all_is_well_there_is_nothing_to_do() {
    let found = Machine::sound().examine("");
    assert!(
        found.iter().all(|finding| finding.level == Level::Good && finding.remedy.is_empty()),
        "{found:#?}"
    );
    for subject in ["settings", "agent", "privileges", "QGA", "vsock", "host", "kubelet"] {
        assert_eq!(level(&found, subject), Level::Good);
    }
    assert!(of(&found, "host").says.contains("host-1") && of(&found, "host").says.contains("web-1"));
}

#[test]
fn without_an_agent_the_machine_is_looked_at_all_the_same() {
    let machine = Machine::sound();
    // It has the channel open, and is busy with something else.
    machine.write(&format!("/proc/{AGENT}/comm"), "guestlet\n");
    let device = machine.path("/dev/vport1p1").canonicalize().unwrap();
    machine.link(&format!("/proc/{AGENT}/fd/3"), device.to_str().unwrap());
    let (root, settings) = (Root::at(machine.folder.path()), machine.settings(""));
    let answer = Err("the agent is not running".to_owned());
    let found = examine(&Patient { root: &root, settings: Ok(&settings), answer });
    assert_eq!(level(&found, "agent"), Level::Wrong);
    assert_eq!((level(&found, "QGA"), level(&found, "vsock")), (Level::Good, Level::Good));
}

#[test]
fn channels_that_are_missing_are_named() {
    let mut machine = Machine::sound();
    std::fs::remove_file(machine.path("/dev/virtio-ports/org.qemu.guest_agent.0")).unwrap();
    // The host half is there: that is enough to reach this guest.
    let found = machine.examine("");
    assert_eq!(level(&found, "QGA"), Level::Note);
    assert!(of(&found, "QGA").remedy.contains("udevadm"), "{found:#?}");
    machine.answer.status.host = None;
    machine.answer.status.identity = None;
    std::fs::remove_dir_all(machine.path("/sys/class/virtio-ports")).unwrap();
    let found = machine.examine("");
    assert_eq!((level(&found, "QGA"), level(&found, "host")), (Level::Wrong, Level::Note));
    assert!(of(&found, "QGA").remedy.contains("<channel type='unix'>"), "{found:#?}");
    assert_eq!(level(&machine.examine("qga.method = 'none'"), "QGA"), Level::Note);

    machine.answer.status.control_channel = "none (no vsock)".to_owned();
    let says = |machine: &Machine| {
        let found = machine.examine("");
        let Finding { level, says, remedy, .. } = of(&found, "vsock");
        (*level, says.clone(), remedy.clone())
    };
    let (grade, said, remedy) = says(&machine);
    assert!(
        grade == Level::Wrong && said.contains("does not listen") && remedy.contains("restart"),
        "{said}"
    );
    // The module is there, and not loaded; it is not there; there is not even virtio's own driver.
    std::fs::remove_file(machine.path("/sys/bus/virtio/devices/virtio3/driver")).unwrap();
    machine.write("/proc/sys/kernel/osrelease", "6.1.0-1-cloud\n");
    let modules = "kernel/net/vmw_vsock/vmw_vsock_virtio_transport_common.ko.xz: kernel/net/vsock.ko.xz\n";
    let module = "kernel/net/vmw_vsock/vmw_vsock_virtio_transport.ko.xz: kernel/net/vsock.ko.xz\n";
    machine.write("/lib/modules/6.1.0-1-cloud/modules.dep", &[modules, module].concat());
    let (grade, said, remedy) = says(&machine);
    assert!(
        grade == Level::Wrong && said.contains("is not loaded") && remedy.starts_with("modprobe"),
        "{said}"
    );
    machine.write("/lib/modules/6.1.0-1-cloud/modules.dep", modules);
    let (grade, said, remedy) = says(&machine);
    assert!(
        grade == Level::Wrong && said.contains("has no module") && remedy.starts_with("install"),
        "{said}"
    );
    std::fs::remove_dir_all(machine.path("/sys/bus/virtio")).unwrap();
    machine.write("/sys/bus/pci/devices/0000:00:05.0/vendor", "0x1af4\n");
    machine.write("/sys/bus/pci/devices/0000:00:05.0/device", "0x1053\n");
    assert!(says(&machine).1.contains("has no module"));
    // There is no device.
    std::fs::remove_dir_all(machine.path("/sys/bus")).unwrap();
    let (grade, said, remedy) = says(&machine);
    assert!(grade == Level::Note && said.contains("no vsock device") && remedy.contains("autoattachVSOCK"));
    let off = "control.listen = 'none'";
    assert!(of(&machine.examine(off), "vsock").says.contains("not used"));
}

#[test]
fn another_program_on_the_channel_is_named() {
    let machine = Machine::sound();
    machine.write("/proc/55/comm", "qemu-ga\n");
    let device = machine.path("/dev/vport1p1").canonicalize().unwrap();
    machine.link("/proc/55/fd/3", device.to_str().unwrap());
    // The agent itself may have it open.
    machine.link(&format!("/proc/{AGENT}/fd/3"), device.to_str().unwrap());
    machine.write("/usr/sbin/qemu-ga", "");
    let found = machine.examine("");
    assert_eq!(level(&found, "QGA"), Level::Wrong);
    assert!(of(&found, "QGA").says.contains("in use by qemu-ga (process 55)"), "{found:#?}");
    assert!(!of(&found, "QGA").says.contains(&AGENT.to_string()), "{found:#?}");
    assert_eq!(level(&found, "qemu-ga"), Level::Note);
    // A link to guestlet stands in for it.
    std::fs::remove_file(machine.path("/usr/sbin/qemu-ga")).unwrap();
    machine.write("/usr/bin/guestlet", "");
    machine.link("/usr/sbin/qemu-ga", "../bin/guestlet");
    assert!(!machine.examine("").iter().any(|finding| finding.subject == "qemu-ga"));
}

#[test]
fn what_the_unit_takes_away_is_held_against_the_settings() {
    let machine = Machine::sound();
    let bounds = |bits: u64| {
        machine.write(&format!("/proc/{AGENT}/status"), &format!("Name:\tguestlet\nCapBnd:\t{bits:016x}\n"));
    };
    let blocked = "qga.block-rpcs = ['guest-exec']";
    assert_eq!(level(&machine.examine(blocked), "privileges"), Level::Note, "more than they need");
    bounds(0);
    assert_eq!(level(&machine.examine(""), "privileges"), Level::Wrong);
    let found = machine.examine(blocked);
    assert_eq!(level(&found, "privileges"), Level::Wrong);
    assert!(of(&found, "privileges").says.contains("CAP_SYS_ADMIN"), "{found:#?}");
    assert!(of(&found, "privileges").remedy.contains("daemon-reload"));

    std::fs::remove_file(machine.path("/proc/77/ns/mnt")).unwrap();
    machine.link("/proc/77/ns/mnt", "mnt:[4026532999]");
    assert_eq!(level(&machine.examine(""), "mounts"), Level::Wrong);
}

/// Keys are worth little while QGA leads around them.
#[test]
fn grants_that_hold_nobody_back_are_told() {
    let machine = Machine::sound();
    let has = |settings: &str| {
        let found = machine.examine(settings);
        found.iter().find(|finding| finding.subject == "grants").map(|finding| finding.says.clone())
    };
    let for_keys = "[[grant]]\nhost = '*'\nprofile = 'volumes'\n";
    let for_qga = "[[grant]]\nhost = 'qga'\nroles = ['status']\n";
    assert_eq!(has(""), None);
    assert!(has(for_keys).unwrap().contains("QGA clients may run programs"));
    assert_eq!(has(&[for_keys, for_qga].concat()), None);
    assert!(has("policy.mode = 'audit'").unwrap().contains("recorded, but not denied"));
}

#[test]
fn what_else_matters_is_told() {
    let mut machine = Machine::sound();
    machine.answer.status.guest.as_mut().unwrap().agent_version = "0.0.1".to_owned();
    machine.answer.status.identity = None;
    machine.answer.status.freeze.as_mut().unwrap().stage = "frozen".to_owned();
    let rule = |state: &str| DiskRule { state: state.to_owned(), ..DiskRule::default() };
    machine.answer.disks.rules = vec![rule("mounted"), rule("failed")];
    std::fs::create_dir_all(machine.path("/var/lib/rancher/rke2/agent")).unwrap();
    machine.write("/sys/fs/selinux/enforce", "1");
    machine.write(&format!("/proc/{AGENT}/attr/current"), "system_u:system_r:virt_qemu_ga_t:s0\0");
    let found = machine.examine("qga.block-rpcs = ['guest-get-users']");
    for (subject, expected) in [
        ("agent", Level::Note),
        ("host", Level::Wrong),
        ("freeze", Level::Note),
        ("disk rules", Level::Wrong),
        ("QGA commands", Level::Note),
        ("SELinux", Level::Note),
    ] {
        assert_eq!(level(&found, subject), expected, "{subject}: {found:#?}");
    }
    assert!(of(&found, "agent").remedy.contains("restart"));
    assert!(of(&found, "kubelet").says.contains("RKE2"));
    assert!(of(&found, "SELinux").remedy.contains("virt_qemu_ga_read_nonsecurity_files"));
}

fn doctor(folder: &Path) -> Output {
    let mut command = launch::guestlet();
    command.args(["doctor", "-o", "json", "--settings"]).arg(folder.join("agent.toml")).output().unwrap()
}

#[test]
fn the_program_ends_with_5_when_something_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().display();
    let channel = format!("method = \"unix-listen\"\npath = \"{place}/qga.sock\"\n");
    let settings = launch::settings_in(folder.path()).replace("[qga]\n", &format!("[qga]\n{channel}"));
    std::fs::write(folder.path().join("agent.toml"), &settings).unwrap();
    let told = |output: &Output| serde_json::from_slice::<Value>(&output.stdout).unwrap();

    let output = doctor(folder.path());
    assert_eq!((output.status.code(), &told(&output)["wrong"]), (Some(5), &Value::Bool(true)), "{output:?}");

    let mut agent = launch::guestlet();
    let mut agent = agent.arg("--settings").arg(folder.path().join("agent.toml")).spawn().unwrap();
    let patience = Instant::now() + Duration::from_secs(30);
    let found = loop {
        let output = doctor(folder.path());
        let runs = told(&output)["findings"]
            .as_array()
            .unwrap()
            .iter()
            .any(|finding| finding["subject"] == "agent" && finding["level"] == "ok");
        if runs || Instant::now() > patience {
            break output;
        }
    };
    agent.kill().unwrap();
    agent.wait().unwrap();
    let says = told(&found);
    let agent =
        says["findings"].as_array().unwrap().iter().find(|finding| finding["subject"] == "agent").unwrap();
    assert_eq!(agent["level"], "ok", "{says:#}");

    std::fs::write(folder.path().join("agent.toml"), "[qga]\nmethod = \"pigeon\"\n").unwrap();
    let output = doctor(folder.path());
    assert_eq!(output.status.code(), Some(5));
    let settings = told(&output)["findings"][0].clone();
    assert_eq!((&settings["subject"], &settings["level"]), (&"settings".into(), &"wrong".into()));
    assert!(settings["says"].as_str().unwrap().contains("agent.toml:2: "), "{settings}");
}
