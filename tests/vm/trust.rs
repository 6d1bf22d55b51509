//! What becomes of keys in VMs whose disks are kept, copied and restored, with a host half that dials through a tap on the
//! hybrid vsock socket.
//!
//! The guests are fast ones; what the agent remembers, and the machine-id, are on a disk.

use std::io::{ErrorKind, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::certificates::{Authority, Oddly};
use crate::harness::host::{HostHalf, Listed};
use crate::harness::launch::Options;
use crate::harness::process::RunFolder;
use crate::harness::tools;
use crate::harness::vm::{BOOT, FAST_READY, SOON, Vm};
use crate::harness::wait_for;
use crate::images;
use crate::keys::printed_options;
use crate::wire::{PLAIN, Tap};

/// The agent's port.
const PORT: u32 = 970;

/// In a guest without systemd: the disk is mounted where the agent keeps its keys, the machine is the one that the disk is of,
/// and the agent is started again whenever it ends.
const START: &str = "mkdir -p /var/lib/guestlet && mount -t ext4 /dev/vda /var/lib/guestlet && cd /var/lib/guestlet && \
    { [ -e machine-id ] || cp /etc/machine-id .; } && cp machine-id /etc/machine-id && cd / && \
    { while :; do guestlet > /dev/ttyS1 2>&1; sleep 0.2; done & }";

/// A host half and its VMs, which it is told of before they are started.
pub struct Lab {
    pub host: HostHalf,
    folder: RunFolder,
    vms: Vec<(String, String)>,
}

/// A VM that runs, and what was said to it since it was started.
pub struct Guest {
    pub vm: Vm,
    tap: Tap,
}

/// What the firmware of a VM says.
#[derive(Clone, Copy, PartialEq)]
pub enum Firmware {
    /// The host half's key, as `guestctl trust bootstrap` prints it.
    Key,
    Nothing,
}

impl Lab {
    pub fn new(names: &[&str]) -> Self {
        Self::with(names, |_| String::new())
    }

    /// With settings of the host half, whose files are made in this folder.
    pub fn with(names: &[&str], settings: impl FnOnce(&Path) -> String) -> Self {
        let vm = |name: &&str| ((*name).to_owned(), Options::named(name).its_uuid().to_owned());
        Self::of(names.iter().map(vm).collect(), settings)
    }

    /// Another host, which is told of the same VMs.
    pub fn beside(&self, settings: impl FnOnce(&Path) -> String) -> Self {
        Self::of(self.vms.clone(), settings)
    }

    fn of(vms: Vec<(String, String)>, settings: impl FnOnce(&Path) -> String) -> Self {
        let folder = RunFolder::new().unwrap();
        let listed = |(name, uuid): &(String, String)| Listed::at(name, uuid, front(&folder, name));
        let listed: Vec<_> = vms.iter().map(listed).collect();
        let host = HostHalf::start_with(&listed, &settings(&folder.file(""))).unwrap();
        Self { host, folder, vms }
    }

    pub fn uuid(&self, name: &str) -> &str {
        &self.vms.iter().find(|(vm, _)| vm == name).unwrap().1
    }

    /// An empty disk.
    pub fn disk(&self, name: &str) -> PathBuf {
        let disk = self.folder.file(name);
        std::fs::File::create(&disk).unwrap().set_len(16 << 20).unwrap();
        let made = Command::new("mke2fs").args(["-q", "-t", "ext4"]).arg(&disk).status().unwrap();
        assert!(made.success());
        disk
    }

    /// The disk as it is now.
    fn copy(&self, guest: &Guest, disk: &Path, name: &str) -> PathBuf {
        guest.vm.run("sync").unwrap();
        let copy = self.folder.file(name);
        std::fs::copy(disk, &copy).unwrap();
        copy
    }

    /// A VM with this disk; these are more options of QEMU.
    fn options(&self, name: &str, disk: &Path, firmware: Firmware, more: &[&str]) -> Options {
        let mut options = vec!["-drive".to_owned(), "-device".to_owned()];
        options.insert(1, format!("if=none,id=kept,format=raw,file={}", disk.display()));
        options.push("virtio-blk-pci,drive=kept,bus=pcie.0,addr=6".to_owned());
        options.extend(more.iter().map(|word| (*word).to_owned()));
        if firmware == Firmware::Key {
            let printed = self.host.ctl(&["trust", "bootstrap", name, "--for", "qemu"]).unwrap();
            options.extend(printed_options("-smbios", &printed));
        }
        Options::named(name).uuid(self.uuid(name)).without_agent_at_boot().qemu(options)
    }

    /// Starts it, and its agent.
    pub fn start(&self, name: &str, disk: &Path, firmware: Firmware, more: &[&str]) -> Guest {
        let options = self.options(name, disk, firmware, more);
        let vm = options.fast(images(), &tools::program("guestlet").unwrap()).unwrap();
        vm.wait_booted(FAST_READY, 1).unwrap();
        let tap = self.tap(name, &vm);
        vm.run(START).unwrap();
        wait_for("the agent", SOON, || vm.run("guestlet status").ok()).unwrap();
        Guest { vm, tap }
    }

    /// Starts its machine, for a guest that is still elsewhere.
    pub fn await_guest(&self, name: &str, disk: &Path, more: &[&str]) -> Guest {
        let options = self.options(name, disk, Firmware::Key, more);
        let vm = options.awaited(images(), &tools::program("guestlet").unwrap()).unwrap();
        let tap = self.tap(name, &vm);
        Guest { vm, tap }
    }

    /// Has the host half reach this VM.
    fn tap(&self, name: &str, vm: &Vm) -> Tap {
        let front = front(&self.folder, name);
        drop(std::fs::remove_file(&front));
        Tap::new(&front, &vm.vsock_socket())
    }

    /// What `guestctl trust show` says of a VM.
    pub fn key(&self, name: &str) -> Value {
        serde_json::from_str(&self.host.ctl(&["trust", "show", name, "-o", "json"]).unwrap()).unwrap()
    }

    pub fn until_speaks(&self, name: &str, how: &str) {
        let seen =
            wait_for(&format!("{how} session"), BOOT, || (self.key(name)["session"] == how).then_some(()));
        seen.unwrap_or_else(|error| {
            panic!("{error}: {:#} {:#}", self.key(name), self.host.info(name).unwrap())
        });
    }

    pub fn until_refused(&self, name: &str) -> String {
        until_refused(&self.host, name)
    }

    /// Waits until a session with the guest that shows this key is open.
    pub fn until_shows(&self, name: &str, key: &str) {
        let shown = |vm: &Value| vm["session"] == "connected" && vm["guest_key"] == key;
        self.host.wait(name, "keyed", BOOT, shown).unwrap();
    }
}

/// The socket that the host half dials.
fn front(folder: &RunFolder, name: &str) -> PathBuf {
    folder.file(&format!("{name}.sock"))
}

/// Waits until the host half talks to the VM no more, and returns why.
pub fn until_refused(host: &HostHalf, name: &str) -> String {
    let (seen, _) = host.wait(name, "refused", BOOT, |vm| vm["session"] == "refused").unwrap();
    seen["reason"].as_str().unwrap().to_owned()
}

impl Guest {
    /// What `guestlet trust ls` says.
    pub fn keys(&self) -> Value {
        serde_json::from_str(&self.vm.run("guestlet trust ls -o json").unwrap()).unwrap()
    }

    /// The fingerprint of its own key.
    pub fn own(&self) -> String {
        self.keys()["own"].as_str().unwrap_or_default().to_owned()
    }

    /// The agent ends, and is started again.
    pub fn restart_agent(&self) {
        self.vm.run("kill -9 $(pidof guestlet)").unwrap();
    }

    /// What the agent answers first to somebody who says this on its port; nothing if it closes the connection.
    fn answer(&self, words: &[u8]) -> Vec<u8> {
        let mut stream = self.vm.dial(PORT).unwrap();
        // It may have closed the connection already.
        drop(stream.write_all(words));
        let mut answer = vec![0; 4096];
        let length = stream.read(&mut answer).unwrap_or_else(|error| {
            assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
            0
        });
        answer.truncate(length);
        answer
    }

    /// Waits until its agent's log says so.
    pub fn until_logs(&self, words: &str) {
        let log = || std::fs::read_to_string(self.vm.file("agent.log")).unwrap_or_default();
        let said = wait_for(&format!("{words:?} in the log"), SOON, || log().contains(words).then_some(()));
        said.unwrap_or_else(|error| panic!("{error}: {}", log()));
    }

    /// Asserts that a handshake or more went through the tap, and nothing but TLS.
    pub fn said_tls_alone(&self) {
        let mut handshakes = 0;
        for [host, guest] in self.tap.seen() {
            let (asked, host) = first_line(&host);
            let (answered, guest) = first_line(&guest);
            assert!(asked.is_empty() || asked == format!("CONNECT {PORT}\n").as_bytes());
            assert!(answered.is_empty() || answered.starts_with(b"OK "));
            for said in [host, guest] {
                assert!(said.is_empty() || matches!(said[0], 0x15 | 0x16), "not TLS: {said:?}");
                for plain in [&b"PRI * HTTP"[..], b"guestlet.v1", b"grpc"] {
                    assert!(
                        !said.windows(plain.len()).any(|window| window == plain),
                        "{}",
                        said.escape_ascii()
                    );
                }
            }
            handshakes += usize::from(host.len() > 500 && guest.len() > 500);
        }
        assert!(handshakes > 0, "nothing went through: {:?}", self.tap.seen().len());
    }

    /// Ends QEMU, as a power cut does, once its disk has all.
    pub fn end(self) {
        self.vm.run("sync").unwrap();
        self.vm.qmp().execute("quit", json!({})).unwrap();
        self.vm.wait_off(SOON).unwrap();
    }
}

/// Settings of a host half with a certificate of this CA, whose files are made in this folder.
pub fn vouched(authority: &Authority, host: &str, folder: &Path) -> String {
    let (key, certificate) = authority.files(folder, host, Oddly::default());
    format!("trust.key = {}\ntrust.certificate = {}\n", json!(key), json!(certificate))
}

/// The first line, which hybrid vsock has, and what follows it.
fn first_line(said: &[u8]) -> (&[u8], &[u8]) {
    let end = said.iter().position(|byte| *byte == b'\n').map_or(said.len(), |at| at + 1);
    said.split_at(end)
}

#[test]
fn once_keyed_a_vm_speaks_no_plain_until_root_in_it_resets_its_keys() {
    let lab = Lab::new(&["web"]);
    let disk = lab.disk("web.raw");
    let guest = lab.start("web", &disk, Firmware::Key, &[]);
    lab.until_speaks("web", "keyed");
    let pinned = lab.key("web");
    assert_eq!((&pinned["key"], &pinned["how"]), (&json!(guest.own()), &json!("first-use")));
    assert!(lab.host.ctl(&["ping", "web", "-c", "3"]).unwrap().contains("3 pings"));
    guest.said_tls_alone();

    // Somebody without a key, and a host half with another one, on the same socket.
    assert_eq!(guest.answer(PLAIN).escape_ascii().to_string(), "");
    guest.until_logs("it uses no key, but this guest was given keys");
    let stranger = HostHalf::start(&[Listed::at("web", lab.uuid("web"), guest.vm.vsock_socket())]).unwrap();
    let reason = until_refused(&stranger, "web");
    assert!(reason.contains("does not know this host half's key SHA256:"), "{reason}");
    guest.until_logs("is not among those that this guest was given");
    drop(stranger);
    assert!(lab.host.ctl(&["ping", "web", "-c", "3"]).unwrap().contains("3 pings"));
    assert_eq!(lab.host.info("web").unwrap()["sessions"], 1, "the session went on");
    guest.said_tls_alone();
    guest.end();

    // The same disk, and no credential.
    let guest = lab.start("web", &disk, Firmware::Nothing, &[]);
    assert_eq!(guest.keys()["hosts"], json!([]));
    assert_eq!(guest.answer(PLAIN).escape_ascii().to_string(), "");
    let reason = lab.until_refused("web");
    assert!(reason.contains("does not know this host half's key"), "{reason}");
    assert!(reason.contains("guestctl trust bootstrap web"), "{reason}");
    guest.said_tls_alone();
    guest.vm.run("guestlet trust reset").unwrap();
    assert_ne!(guest.answer(PLAIN), b"");
    let told = |vm: &Value| vm["reason"].as_str().unwrap_or_default().contains("uses no keys");
    let (seen, _) = lab.host.wait("web", "downgraded", BOOT, told).unwrap();
    assert!(seen["reason"].as_str().unwrap().contains("guestctl trust forget web"), "{seen}");
    guest.said_tls_alone();
    lab.host.ctl(&["trust", "forget", "web"]).unwrap();
    lab.until_speaks("web", "plain");
}

#[test]
fn a_copy_of_a_disk_makes_itself_a_key_and_a_key_opens_the_vm_that_it_is_pinned_for() {
    let lab = Lab::new(&["web", "copy"]);
    let disk = lab.disk("web.raw");
    let web = lab.start("web", &disk, Firmware::Key, &[]);
    lab.until_speaks("web", "keyed");
    let copied = lab.copy(&web, &disk, "copy.raw");
    let copy = lab.start("copy", &copied, Firmware::Key, &[]);
    lab.until_speaks("copy", "keyed");
    copy.until_logs("this machine is not the one that its key was created on");
    copy.said_tls_alone();
    assert_ne!(copy.own(), web.own());
    let pinned = |name: &str| lab.key(name)["key"].as_str().unwrap().to_owned();
    assert_eq!((pinned("web"), pinned("copy")), (web.own(), copy.own()));
    assert_eq!(lab.host.info("web").unwrap()["sessions"], 1, "the first one's session went on");

    // One that hides that it is a copy: it has the key of the other, made on this machine as it says.
    let (key, octal) = ("/var/lib/guestlet/guest.key", "od -An -v -to1 /var/lib/guestlet/guest.key");
    let dumped = web.vm.run(octal).unwrap();
    let bytes = dumped.split_whitespace().map(|byte| u8::from_str_radix(byte, 8).unwrap());
    copy.vm.write(&format!("{key}.new"), &bytes.collect::<Vec<_>>()).unwrap();
    copy.vm.run(&format!("chmod 600 {key}.new && mv {key}.new {key}")).unwrap();
    copy.restart_agent();
    let reason = lab.until_refused("copy");
    assert!(reason.contains(&format!("{}, which is that of VM web", web.own())), "{reason}");
    assert_ne!(pinned("copy"), web.own());
    assert!(lab.host.ctl(&["ping", "web", "-c", "3"]).unwrap().contains("3 pings"));
}

#[test]
fn a_disk_of_before_a_rotation_is_known_and_one_of_before_two_is_held_back_until_it_is_accepted() {
    let lab = Lab::new(&["web"]);
    let disk = lab.disk("web.raw");
    let guest = lab.start("web", &disk, Firmware::Key, &[]);
    lab.until_speaks("web", "keyed");
    let first = guest.own();
    let [once, twice] = ["once.raw", "twice.raw"].map(|name| lab.copy(&guest, &disk, name));
    let rotate = |guest: &Guest| {
        lab.host.ctl(&["trust", "rotate", "web"]).unwrap();
        guest.restart_agent();
        wait_for("the new key", SOON, || {
            let now = lab.key("web");
            (now["key"] == guest.own() && now["session"] == "keyed").then_some(())
        })
        .unwrap();
        guest.own()
    };
    let second = rotate(&guest);
    assert_ne!(second, first);
    assert_eq!(lab.key("web")["previous"], first);
    guest.end();

    let guest = lab.start("web", &once, Firmware::Key, &[]);
    assert_eq!(guest.own(), first);
    lab.until_shows("web", &first);
    lab.until_speaks("web", "keyed");
    assert_eq!(lab.key("web")["key"], second, "the one of before is not pinned again");
    let third = rotate(&guest);
    assert!(third != first && third != second, "{third}");
    guest.end();

    let guest = lab.start("web", &twice, Firmware::Key, &[]);
    let reason = lab.until_refused("web");
    assert!(
        reason.contains(&format!("the guest's key has changed: it is {first}, but {third} is pinned")),
        "{reason}"
    );
    assert!(reason.contains("guestctl trust accept web"), "{reason}");
    assert_eq!(lab.key("web")["offered"], first);
    guest.said_tls_alone();
    lab.host.ctl(&["trust", "accept", "web", &first]).unwrap();
    lab.until_shows("web", &first);
    let pinned = lab.key("web");
    assert_eq!((&pinned["key"], &pinned["how"]), (&json!(first), &json!("operator")));
}

#[test]
fn a_guest_in_1970_takes_the_certificate_of_its_ca_and_none_of_another() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let lab = Lab::with(&["web"], |folder| vouched(&ours, "one", folder));
    let disk = lab.disk("web.raw");
    let guest = lab.start("web", &disk, Firmware::Key, &["-rtc", "base=1970-01-02"]);
    assert_eq!(guest.vm.run("date +%Y").unwrap().trim(), "1970");
    assert_eq!(guest.keys()["hosts"][0]["ca"], true, "{}", guest.keys());
    lab.until_speaks("web", "keyed");
    assert_eq!(lab.key("web")["key"], guest.own());
    guest.said_tls_alone();

    // A host half with a certificate of the other CA.
    let folder = RunFolder::new().unwrap();
    let listed = Listed::at("web", lab.uuid("web"), guest.vm.vsock_socket());
    let foreign = HostHalf::start_with(&[listed], &vouched(&theirs, "one", &folder.file(""))).unwrap();
    let reason = until_refused(&foreign, "web");
    assert!(reason.contains("does not know this host half's key"), "{reason}");
    assert_eq!(guest.vm.run("date +%Y").unwrap().trim(), "1970");
    assert!(lab.host.ctl(&["ping", "web", "-c", "3"]).unwrap().contains("3 pings"));
}
