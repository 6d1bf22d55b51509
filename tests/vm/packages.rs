//! The package as people install it: by cloud-init from an apt repository, beside or in place of Debian's
//! qemu-guest-agent; its upgrade, downgrade and removal.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};

use crate::harness::host::{HostHalf, Listed};
use crate::harness::launch::Options;
use crate::harness::repository::Repository;
use crate::harness::snapshot::Saved;
use crate::harness::tools;
use crate::harness::vm::{REAL_READY, SOON, Vm};
use crate::harness::wait_for;
use crate::service::{doctor, level};
use crate::{images, real, restored};

/// How long apt may take in an emulated guest on a busy machine.
const LONG: Duration = Duration::from_secs(600);
/// A line of cloud-init's well-known lines.
const ENABLE: &str = "systemctl enable --now qemu-guest-agent.service";

fn example(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("packaging/cloud-init").join(name);
    std::fs::read_to_string(path).unwrap()
}

/// A command that may take long in an emulated guest.
fn run(vm: &Vm, command: &str) -> String {
    let (status, said) = vm.console().run(command, LONG).unwrap();
    assert_eq!(status, 0, "{command}: {said}");
    said
}

fn agent(vm: &Vm) -> Value {
    vm.qga().unwrap().execute("guest-info", json!({})).unwrap()
}

fn is_enabled(info: &Value, command: &str) -> bool {
    let commands = info["supported_commands"].as_array().unwrap();
    commands.iter().find(|found| found["name"] == command).unwrap()["enabled"] == true
}

/// Says which process the agent is.
const MAIN_PROCESS: &str = "systemctl show --value --property MainPID guestlet";

fn main_process(vm: &Vm) -> String {
    run(vm, MAIN_PROCESS).trim().to_owned()
}

fn installed_version(vm: &Vm) -> String {
    run(vm, "dpkg-query -W -f '${Status} ${Version}' guestlet").trim().to_owned()
}

#[test]
fn cloud_init_installs_and_enables_it_as_its_examples_say() {
    let mut packages = Repository::new(&[tools::package().unwrap()]).unwrap();
    packages.add_real_agent().unwrap();
    let source = "https://packages.example.org/guestlet";
    let (apt, settings) = (example("apt.yaml"), example("settings.yaml"));
    assert!(apt.contains(source));
    let user_data = apt.replace(source, "file:/srv/packages") + &settings;
    let vm = Options::named("new").user_data(&user_data).real(images(), &images().root().unwrap()).unwrap();
    packages.plug(&vm).unwrap();
    vm.console().wait(REAL_READY, 1, LONG).unwrap();
    let status = run(&vm, "cloud-init status --long --wait || :");
    assert!(status.contains("status: done"), "{status}");

    // Both sides answer, and the settings hold.
    let info = agent(&vm);
    assert!(is_enabled(&info, "guest-file-read") && !is_enabled(&info, "guest-exec"), "{info}");
    let host = HostHalf::start(&[Listed::of(&vm)]).unwrap();
    host.wait_connected("new", SOON).unwrap();
    assert_eq!(run(&vm, "systemctl is-enabled guestlet.service guestlet.socket"), "enabled\nenabled\n");

    // What is written everywhere for qemu-guest-agent, once more and twice: nothing changes.
    let before = main_process(&vm);
    assert!(example("in-the-image.yaml").contains("[systemctl, enable, --now, qemu-guest"));
    // Who asks for the other package by its name gets it, unless a pin says otherwise.
    let said = run(&vm, "apt-get install --yes --simulate qemu-guest-agent 2>&1");
    assert!(said.contains("Remv guestlet ") && said.contains("Inst qemu-guest-agent "), "{said}");
    vm.write("/etc/apt/preferences.d/keep-guestlet", pin().as_bytes()).unwrap();
    for _ in 0..2 {
        let said = run(&vm, "apt-get install --yes qemu-guest-agent 2>&1");
        assert!(said.contains("guestlet is already the newest version"), "{said}");
        run(&vm, ENABLE);
    }
    assert_eq!(main_process(&vm), before);
    assert_eq!(run(&vm, "systemctl is-active guestlet qemu-guest-agent"), "active\nactive\n");
    assert!(is_enabled(&agent(&vm), "guest-ping"));
}

/// The pin that builders of images are told of.
fn pin() -> String {
    let page =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/image-builders.md")).unwrap();
    let lines = page.lines().map(str::trim).skip_while(|line| !line.starts_with("Package: "));
    let pin: Vec<_> = lines.take_while(|line| !line.starts_with("```")).collect();
    assert_eq!(pin.len(), 3, "{pin:?}");
    pin.join("\n") + "\n"
}

#[test]
fn it_replaces_the_real_agent_is_upgraded_and_goes_without_a_trace() {
    let package = tools::released_package().unwrap();
    let mut packages = Repository::new(std::slice::from_ref(&package)).unwrap();
    packages.add_real_agent().unwrap();
    let next = packages.add_version(&package, "9.0").unwrap();
    let vm = restored("old", &Saved::booted(images()).unwrap());
    packages.mount(&vm).unwrap();
    run(&vm, "echo 'deb [trusted=yes] file:/srv/packages ./' > /etc/apt/sources.list && apt-get -q update");

    // A guest with Debian's agent, which has settings.
    run(&vm, "apt-get -q install --yes --no-install-recommends qemu-guest-agent");
    run(&vm, ENABLE);
    run(&vm, "mkdir -p /etc/sysconfig && echo BLACKLIST_RPC=guest-get-users > /etc/sysconfig/qemu-ga");
    run(&vm, "printf '[general]\\nblock-rpcs=guest-get-osinfo\\n' > /etc/qemu/qemu-ga.conf");
    run(&vm, "systemctl restart qemu-guest-agent");
    assert!(agent(&vm)["version"].as_str().unwrap().starts_with("7.2"));

    // guestlet takes its place, and its settings.
    vm.write("/etc/guestlet-tests.toml", b"[vsock]\nhybrid = true\n[qga.freeze]\ndeadline = \"10min\"\n")
        .unwrap();
    run(
        &vm,
        "mkdir -p /etc/guestlet/agent.d && mv /etc/guestlet-tests.toml /etc/guestlet/agent.d/tests.toml",
    );
    run(&vm, "apt-get -q install --yes guestlet");
    run(&vm, ENABLE);
    let info = agent(&vm);
    assert!(!is_enabled(&info, "guest-get-users") && !is_enabled(&info, "guest-get-osinfo"), "{info}");
    let this = installed_version(&vm);
    assert!(this.starts_with("install ok installed 0."), "{this}");
    assert!(!run(&vm, "dpkg-query -W -f '${Status}' qemu-guest-agent").contains("ok installed"));
    let host = HostHalf::start(&[Listed::of(&vm)]).unwrap();
    host.wait_connected("old", SOON).unwrap();

    // An upgrade while a data file system is frozen, a disk is mounted by rule: it waits for the thaw.
    let rule = "[[disk]]\nmatch = { serial = \"data\" }\nmount-point = \"/srv/data\"\nfile-system = \"ext4\"\n\
        format-if-blank = true\n";
    vm.write("/etc/guestlet/disks.d/data.toml", rule.as_bytes()).unwrap();
    plug_data(&vm);
    wait_for("the data's mount", SOON, || vm.run("mountpoint -q /srv/data").ok()).unwrap();
    run(&vm, "echo kept > /srv/data/file");
    let mut client = vm.qga().unwrap();
    let freeze = json!({ "mountpoints": ["/srv/data"] });
    assert_eq!(client.execute("guest-fsfreeze-freeze-list", freeze).unwrap(), 1);
    let before = main_process(&vm);
    let upgrade = format!("dpkg -i /srv/packages/{next} > /run/upgrade 2>&1; echo $? > /run/upgraded");
    run(&vm, &format!("({upgrade}) &"));
    let stopping = || vm.run("systemctl show --property ActiveState guestlet | grep -q deactivating").ok();
    wait_for("the restart of the agent", LONG, stopping).unwrap();
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(main_process(&vm), before, "the agent did not wait for the thaw");
    client.execute("guest-ping", json!({})).unwrap();
    assert_eq!(client.execute("guest-fsfreeze-thaw", json!({})).unwrap(), 1);
    drop(client);
    wait_for("end of the upgrade", LONG, || vm.run("test -s /run/upgraded").ok()).unwrap();
    assert_eq!(run(&vm, "cat /run/upgraded"), "0\n", "{}", run(&vm, "cat /run/upgrade"));
    assert_ne!(main_process(&vm), before, "the new agent runs");
    host.wait_connected("old", SOON).unwrap();
    run(&vm, "grep -q kept /srv/data/file && mountpoint -q /srv/data");

    // Down again.
    run(&vm, "dpkg -i /srv/packages/guestlet_*_amd64.deb");
    assert_eq!(installed_version(&vm), this);
    assert!(is_enabled(&agent(&vm), "guest-ping"));

    // Removal: what is mounted stays, nothing else does but settings, and Debian's agent can come back.
    run(&vm, "apt-get -q remove --yes guestlet");
    run(&vm, "grep -q kept /srv/data/file && test -f /etc/guestlet/agent.toml && ! pidof guestlet");
    run(&vm, "! systemctl is-active --quiet guestlet.socket && test ! -e /etc/apt/preferences.d/guestlet");
    run(&vm, "echo '{}' > /run/guestlet.freeze-spoiled");
    assert_eq!(
        run(&vm, "find /etc/systemd /run/systemd /usr/lib/systemd -name 'qemu-guest-agent*' -xtype l"),
        ""
    );
    run(&vm, "apt-get -q install --yes --no-install-recommends qemu-guest-agent");
    run(&vm, ENABLE);
    assert!(agent(&vm)["version"].as_str().unwrap().starts_with("7.2"));
    install_from_url(&vm);
    run(&vm, "dpkg --purge guestlet");
    run(&vm, "test ! -e /var/lib/guestlet && test ! -e /run/guestlet && test -e /etc/qemu/qemu-ga.conf");
    let left =
        run(&vm, "find / -xdev -name '*guestlet*' ! -path '/proc/*' ! -path '/var/log/*' ! -path '/tmp/*'");
    println!("left after the purge: {}", left.split_whitespace().collect::<Vec<_>>().join(" "));
    assert!(left.lines().all(|path| path == "/etc/guestlet"), "{left}");
}

/// dpkg ran in the agent's unit, and was killed when its last script restarted the agent.
#[test]
fn an_upgrade_and_a_removal_that_guest_exec_runs_end_well_and_the_agent_ends_after_them() {
    let package = tools::package().unwrap();
    let mut packages = Repository::new(std::slice::from_ref(&package)).unwrap();
    let next = packages.add_version(&package, "9.0").unwrap();
    let vm = real("itself");
    packages.mount(&vm).unwrap();
    let before = main_process(&vm);
    let mut client = vm.qga().unwrap();
    let command = json!({
        "path": "/bin/sh",
        "arg": ["-c", format!("dpkg -i /srv/packages/{next} && {MAIN_PROCESS} > /run/main-process")],
        "capture-output": "merged",
    });
    let started = client.execute("guest-exec", command).unwrap();
    let ended = wait_for("the end of the upgrade", LONG, || {
        let told = client.execute("guest-exec-status", started.clone()).unwrap();
        (told["exited"] == true).then_some(told)
    });
    let ended = ended.unwrap();
    assert_eq!(ended["exitcode"], 0, "{ended}");
    assert_eq!(installed_version(&vm), "install ok installed 9.0");
    assert_eq!(run(&vm, "cat /run/main-process").trim(), before, "the agent that ran it");
    // The channel has one client.
    drop(client);
    wait_for("the restart", LONG, || (main_process(&vm) != before).then_some(())).unwrap();
    wait_for("the new agent", SOON, || vm.qga().ok()?.execute("guest-ping", json!({})).ok()).unwrap();

    // So was a removal, by the end of the agent.
    let mut client = vm.qga().unwrap();
    let command = json!({
        "path": "/bin/sh", "arg": ["-c", "dpkg -r guestlet && echo whole"], "capture-output": "merged",
    });
    let started = client.execute("guest-exec", command).unwrap();
    let ended = wait_for("the end of the removal", LONG, || {
        let told = client.execute("guest-exec-status", started.clone()).unwrap();
        (told["exited"] == true).then_some(told)
    });
    let ended = ended.unwrap();
    assert_eq!(ended["exitcode"], 0, "{ended}");
    drop(client);
    assert!(run(&vm, "dpkg-query -W -f '${Status}' guestlet").contains("config-files"));
    let stopped = "! pidof guestlet && ! systemctl is-active --quiet guestlet.service guestlet.socket";
    wait_for("the agent's end", LONG, || vm.run(stopped).ok()).unwrap();
    run(&vm, "test ! -e /usr/bin/guestlet && test ! -e /usr/lib/guestlet/restart");
}

/// Runs what the example for a deb at a URL has cloud-init run. A file with another checksum is refused.
fn install_from_url(vm: &Vm) {
    let told = run(vm, "sha256sum /srv/packages/guestlet_*_amd64.deb");
    let (sum, file) = told.trim().split_once("  ").unwrap();
    let example: Value = serde_saphyr::from_str(&example("deb-by-url.yaml")).unwrap();
    let commands = example["runcmd"].as_array().unwrap();
    let line = |command: &Value, sum: &str| {
        let word = |word: &Value| match word.as_str().unwrap() {
            url if url.starts_with("https://") => format!("file:{file}"),
            sums if sums.starts_with("SHA256:") => format!("SHA256:{sum}"),
            word => word.to_owned(),
        };
        command.as_array().unwrap().iter().map(word).collect::<Vec<_>>().join(" ")
    };
    let (status, said) = vm.console().run(&line(&commands[0], &"0".repeat(64)), LONG).unwrap();
    assert!(status != 0 && vm.run("test -e /run/guestlet.deb").is_err(), "{said}");
    for command in commands {
        run(vm, &line(command, sum));
    }
    assert_eq!(run(vm, "systemctl is-active guestlet"), "active\n");
    assert!(is_enabled(&agent(vm), "guest-ping"));
}

/// What the unit of a service comes to, by systemd's own figure.
fn exposure(vm: &Vm, unit: &str) -> String {
    run(vm, &format!("systemd-analyze security --no-pager {unit} | tail -n 1")).trim().to_owned()
}

#[test]
fn services_have_the_privileges_that_their_settings_need() {
    let agent_package = tools::package().unwrap();
    let host_package = agent_package.to_str().unwrap().replace("/guestlet_", "/guestlet-host_");
    let mut packages = Repository::new(&[host_package.into()]).unwrap();
    packages.add_debian(&["apparmor"]).unwrap();
    let vm = real("confined");
    packages.mount(&vm).unwrap();

    // With AppArmor the package loads its profile, and everything below is in it.
    run(&vm, "systemctl mask apparmor && dpkg -i /srv/packages/apparmor_*.deb && dpkg-reconfigure guestlet");
    assert_eq!(run(&vm, "cat /proc/$(pidof guestlet)/attr/current"), "guestlet (complain)\n");
    println!("agent: {}", exposure(&vm, "guestlet.service"));
    let told = doctor(&vm);
    assert_eq!(told["wrong"], false, "{told:#}");
    assert_eq!((level(&told, "QGA"), level(&told, "vsock")), (json!("ok"), json!("ok")), "{told:#}");
    assert_eq!(level(&told, "host"), "note", "nobody holds this guest yet");

    // Without guest-exec the unit loses what only that needs; everything else goes on.
    let settings = b"[qga]\nblock-rpcs = [\"guest-exec\", \"guest-shutdown\"]\n";
    vm.write("/etc/guestlet/agent.d/block.toml", settings).unwrap();
    let told = doctor(&vm);
    assert_eq!(told["wrong"], false, "{told:#}");
    assert_eq!(
        level(&told, "privileges"),
        "note",
        "more than they need, until the unit is loaded anew: {told:#}"
    );
    run(&vm, "systemctl daemon-reload && systemctl restart guestlet");
    println!("agent without guest-exec: {}", exposure(&vm, "guestlet.service"));
    let bounds = run(&vm, "systemctl show --property CapabilityBoundingSet guestlet");
    assert!(bounds.contains("cap_sys_time") && !bounds.contains("cap_sys_boot"), "{bounds}");
    assert!(!bounds.contains("cap_sys_module") && !bounds.contains("cap_net_admin"), "{bounds}");
    let same =
        "test $(readlink /proc/1/ns/mnt) = $(readlink /proc/$(pidof guestlet | cut -d ' ' -f 1)/ns/mnt)";
    run(&vm, same);
    let rule = "[[disk]]\nmatch = { serial = \"data\" }\nmount-point = \"/srv/data\"\nfile-system = \"ext4\"\n\
        format-if-blank = true\nowner = \"daemon\"\n";
    vm.write("/etc/guestlet/disks.d/data.toml", rule.as_bytes()).unwrap();
    plug_data(&vm);
    wait_for("the data's mount", SOON, || vm.run("mountpoint -q /srv/data").ok()).unwrap();
    {
        let mut client = vm.qga().unwrap();
        assert_eq!(client.execute("guest-fsfreeze-freeze", json!({})).unwrap(), 2);
        assert_eq!(client.execute("guest-fsfreeze-thaw", json!({})).unwrap(), 2);
        let time = client.execute("guest-get-time", json!({})).unwrap();
        client.execute("guest-set-time", json!({ "time": time })).unwrap();
        let password = json!({ "username": "daemon", "password": "c2VjcmV0", "crypted": false });
        client.execute("guest-set-user-password", password).unwrap();
        let keys = json!({ "username": "root", "keys": ["ssh-ed25519 AAAA test"] });
        client.execute("guest-ssh-add-authorized-keys", keys).unwrap();
        client.execute("guest-fstrim", json!({})).unwrap();
        client.execute("guest-get-disks", json!({})).unwrap();
    }
    // On a busy machine the agent may take longer to answer than the doctor waits.
    let sound =
        wait_for("the doctor's consent", SOON, || Some(doctor(&vm)).filter(|told| told["wrong"] == false));
    let told = sound.unwrap();
    assert_eq!(level(&told, "privileges"), "ok", "{told:#}");
    let denied =
        vm.run("journalctl --unit guestlet --output cat | grep -i 'not permitted\\|permission denied'");
    assert!(denied.is_err(), "{denied:?}");

    let unlisted = vm.run("dmesg | grep 'apparmor=.*profile=.guestlet' | grep -v STATUS");
    assert!(unlisted.is_err(), "{unlisted:?}");

    // The host half, in its sandbox, with a second agent in the guest as its guest.
    run(&vm, "dpkg -i /srv/packages/guestlet-host_*.deb && systemctl is-active guestlet-host");
    println!("host half: {}", exposure(&vm, "guestlet-host.service"));
    run(
        &vm,
        "systemd-analyze verify --man=no guestlet-host.service guestlet.service guestlet.socket qemu-guest-agent.service",
    );
    let second = "runtime-dir = \"/run/second\"\n[control]\nlisten = \"unix:/run/second/control.sock\"\n\
        [qga]\nmethod = \"none\"\n";
    vm.write("/run/second.toml", second.as_bytes()).unwrap();
    run(&vm, "mkdir -p /run/second && systemd-run --unit second guestlet --settings /run/second.toml");
    let uuid = run(&vm, "cat /sys/class/dmi/id/product_uuid").trim().to_owned();
    let machine =
        format!("[[vm]]\nname = \"second\"\nuuid = \"{uuid}\"\nunix-socket = \"/run/second/control.sock\"\n");
    vm.write("/etc/guestlet/host.toml", machine.as_bytes()).unwrap();
    wait_for("a session of the sandboxed host half", SOON, || {
        vm.run("guestctl info second -o json | grep '\"session\": \"connected\"'").ok()
    })
    .unwrap();
    let said = run(&vm, "guestctl doctor");
    assert!(said.contains("Nothing is wrong."), "{said}");
    assert_eq!(run(&vm, "ps -o user:32= -C guestlet-host").trim(), "guestlet-host");
    run(&vm, "systemctl stop second");
    wait_for("the doctor's word", SOON, || {
        let (status, said) = vm.console().run("guestctl doctor", SOON).ok()?;
        (status == 5 && said.contains("WRONG  VM second")).then_some(())
    })
    .unwrap();
    run(&vm, "dpkg --purge guestlet-host && test ! -e /run/guestlet-host");
}

fn plug_data(vm: &Vm) {
    let path = vm.file("data");
    std::fs::File::create(&path).unwrap().set_len(64 << 20).unwrap();
    let file = json!({ "driver": "file", "filename": path });
    vm.qmp().execute("blockdev-add", json!({ "driver": "raw", "node-name": "data", "file": file })).unwrap();
    let device = json!({ "driver": "scsi-hd", "bus": "scsi0.0", "drive": "data", "serial": "data" });
    vm.qmp().execute("device_add", device).unwrap();
}
