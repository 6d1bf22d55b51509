//! The project in a minute or two: `make demo` boots a real guest with the agent's package in it, starts a host
//! half, and shows what they do. With KEEP=1 they stay up until Ctrl-C, with commands to try.
#![allow(clippy::disallowed_methods, clippy::print_stdout, clippy::print_stderr, reason = "a test program")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test program")]

#[allow(dead_code, reason = "each test program uses a part of it")]
mod harness;

use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::bail;
use harness::csi::{Csi, DRIVER, target};
use harness::host::{HostHalf, Listed, Watch};
use harness::images::Images;
use harness::launch::Options;
use harness::snapshot::Saved;
use harness::vm::{BOOT, REAL_READY, SOON, Vm};
use harness::{process, tools};
use serde_json::{Value, json};

const NAME: &str = "web-1";
/// A disk that belongs to /srv/data.
const RULE: &str = "\
[[disk]]
match = { serial = \"data-1\" }
mount-point = \"/srv/data\"
file-system = \"ext4\"
format-if-blank = true
";

/// Ctrl-C was pressed.
static STOP: AtomicBool = AtomicBool::new(false);

fn main() -> ExitCode {
    process::on_signal(Duration::from_secs(5), || STOP.store(true, Ordering::Relaxed));
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) if STOP.load(Ordering::Relaxed) => {
            println!("\nInterrupted; everything is stopped and removed.");
            ExitCode::from(130)
        }
        Err(error) => {
            eprintln!("\ndemo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<()> {
    let mut show = Show { started: Instant::now(), watch: None };
    show.step("The guest: Debian 12 with guestlet's package, installed by dpkg (built once, then cached)");
    let images = Images::prepare()?;
    let disk = Saved::installed(&images, &tools::package()?)?.disk;
    if images.accelerator != "kvm" {
        println!("  KVM does not work on this machine: QEMU emulates the processor, and boots take a while.");
    }

    show.step("Power on, and a host half that knows the VM");
    let vm = Options::named(NAME).real(&images, &disk)?;
    let host = HostHalf::start(&[Listed::of(&vm).cluster("demo")])?;
    show_guestctl(&host, &["ls"])?;
    println!("  $ guestctl watch {NAME}      (what it says from now on is behind a bar)");
    show.watch = Some(host.watch(NAME, &[])?);
    let (first, took) = show.until("the agent answers", || connected(&host, |_| true))?;
    show.events(Duration::from_millis(300));
    println!("  the host half has a session {:.1} s after power-on", took.as_secs_f32());
    show_guestctl(&host, &["ls"])?;
    show_guestctl(&host, &["info", NAME])?;

    show.step("A client of QEMU's guest agent on virtio-serial, at the same time");
    ask(&vm)?;

    show.step("Where the guest runs: the zone in the host half's settings is edited");
    host.place("rack-7")?;
    let (took, _) = show.until("the guest knows", || host.wait_placed(NAME, "rack-7", SOON).ok())?;
    show.events(Duration::from_millis(300));
    println!("  the guest knows it {} ms after the edit", took.as_millis());
    show_guestctl(&host, &["topology"])?;

    show.step("The guest ends its first boot");
    show.until("cloud-init is done", || vm.console().log().contains(REAL_READY).then_some(()))?;

    show.step("A disk is plugged into the running guest, where a rule waits for it");
    let mounted = plug(&mut show, &vm, &host)?;
    println!("  formatted and mounted {:.1} s after guestctl began", mounted.as_secs_f32());
    show_in_guest(&vm, "guestlet disks")?;
    show_in_guest(&vm, "df -h /srv/data")?;
    vm.run("echo hello > /srv/data/greeting && sync")?;

    show.step(
        "A volume for a pod: what a guest cluster's sidecars and its kubelet ask for, on the agent's sockets",
    );
    claim(&mut show, &vm, &host)?;

    show.step("Reset, as by the machine's button");
    vm.reset()?;
    let other = |now: &Value| now["guest"]["boot_id"] != first["guest"]["boot_id"];
    let (second, took) = show.until("the agent answers again", || connected(&host, other))?;
    show.events(Duration::from_millis(500));
    println!("  back {:.1} s after the reset", took.as_secs_f32());
    println!("  boot id {} → {}", first["guest"]["boot_id"], second["guest"]["boot_id"]);
    show_guestctl(&host, &["ls"])?;
    let (greeting, _) = show.until("the disk is mounted again", || {
        vm.console().run("cat /srv/data/greeting", SOON).ok().filter(|(status, _)| *status == 0)
    })?;
    println!("  /srv/data is mounted again; what was written there says {:?}", greeting.1.trim());

    if std::env::var_os("KEEP").is_some_and(|keep| !keep.is_empty() && keep != "0") {
        return keep(&mut show, &vm, &host);
    }
    drop(host);
    drop(vm);
    println!("\nDone in {:.0} s; everything is stopped and removed.", show.started.elapsed().as_secs_f32());
    println!("KEEP=1 make demo leaves it up to try things.");
    Ok(())
}

/// Plugs a disk for which there is a rule, and says how long it took until it was mounted.
fn plug(show: &mut Show, vm: &Vm, host: &HostHalf) -> anyhow::Result<Duration> {
    let file = "/etc/guestlet/disks.d/data.toml";
    vm.write(file, RULE.as_bytes())?;
    println!("  {file} in the guest:");
    RULE.lines().for_each(|line| println!("    {line}"));
    let started = Instant::now();
    show_guestctl(host, &["disk", "attach", NAME, "--size", "256M", "--serial", "data-1"])?;
    show.until("it is mounted", || vm.run("mountpoint -q /srv/data").ok())?;
    let took = started.elapsed();
    show.events(Duration::from_millis(500));
    show_guestctl(host, &["disks", NAME])?;
    Ok(took)
}

/// Makes a volume, gives it to a pod, and lets it grow there.
fn claim(show: &mut Show, vm: &Vm, host: &HostHalf) -> anyhow::Result<()> {
    let csi = Csi::of(vm)?;
    let node = csi.register()?;
    println!("  the driver is {DRIVER}, and this node is {node}");
    let began = Instant::now();
    let id = csi.create("pvc-demo", 64 << 20)?;
    println!("  CreateVolume, in the guest → {id}  ({} ms)", began.elapsed().as_millis());
    let [attached, staged, published] = csi.use_volume(&id, &node)?.map(|took| took.as_millis());
    println!("  ControllerPublish → plugged  ({attached} ms)");
    println!(
        "  NodeStage, NodePublish → formatted, mounted, and shown to the pod  (after {staged}, {published} ms)"
    );
    show.events(Duration::from_millis(500));
    show_guestctl(host, &["volumes", "ls"])?;
    let usage = format!("df -h --output=source,fstype,size,avail {}", target(&id));
    show_in_guest(vm, &usage)?;
    let began = Instant::now();
    csi.expand(&id, 128 << 20)?;
    println!(
        "  ControllerExpand, NodeExpand → grown, while it is mounted  ({} ms)",
        began.elapsed().as_millis()
    );
    show_in_guest(vm, &usage)?;
    csi.unpublish(&id)?;
    csi.unstage(&id)?;
    csi.detach(&id, &node)?;
    csi.delete(&id)?;
    println!("  NodeUnpublish, NodeUnstage, ControllerUnpublish, DeleteVolume → gone");
    show.events(Duration::from_millis(500));
    Ok(())
}

/// Runs a command in the guest and shows it as typed and as answered.
fn show_in_guest(vm: &Vm, command: &str) -> anyhow::Result<()> {
    println!("  guest # {command}");
    for line in vm.run(command)?.lines() {
        println!("    {line}");
    }
    Ok(())
}

fn connected(host: &HostHalf, wanted: impl Fn(&Value) -> bool) -> Option<Value> {
    host.info(NAME).ok().filter(|vm| vm["session"] == "connected" && wanted(vm))
}

/// Some calls that hypervisors' tools make.
fn ask(vm: &Vm) -> anyhow::Result<()> {
    let mut client = vm.qga()?;
    for command in ["guest-ping", "guest-get-host-name", "guest-get-osinfo", "guest-network-get-interfaces"] {
        let started = Instant::now();
        let answer = client.execute(command, json!({}))?.to_string();
        let shown: String = answer.chars().take(160).collect();
        let more = if shown.len() < answer.len() { " …" } else { "" };
        println!("  → {command}\n  ← {shown}{more}  ({} ms)", started.elapsed().as_millis());
    }
    Ok(())
}

fn keep(show: &mut Show, vm: &Vm, host: &HostHalf) -> anyhow::Result<()> {
    let guestctl = format!("{} --socket {}", tools::program("guestctl")?.display(), host.socket().display());
    let qga = vm.qga_socket();
    let console = vm.file("console.sock");
    show.step("All of it stays up until Ctrl-C. In another terminal:");
    println!("  {guestctl} ls");
    println!("  {guestctl} info {NAME} -o json");
    println!("  {guestctl} watch");
    println!("  {guestctl} disk attach {NAME} --size 1G --serial data-2");
    println!("  echo '{{\"execute\":\"guest-info\"}}' | socat -t1 - UNIX-CONNECT:{}", qga.display());
    println!("  echo '{{\"execute\":\"guest-shutdown\",\"arguments\":{{\"mode\":\"reboot\"}}}}' |");
    println!("      socat -t1 - UNIX-CONNECT:{}", qga.display());
    println!("  socat -,rawer,escape=0x1d UNIX-CONNECT:{}", console.display());
    println!("      (the guest's console, a root shell; Ctrl-] leaves it; journalctl -u guestlet)");
    println!("  cat {}", host.settings().display());
    println!("\n  What happens meanwhile:");
    while !STOP.load(Ordering::Relaxed) && vm.qemu().ended().is_none() {
        show.events(Duration::from_millis(200));
    }
    if !STOP.load(Ordering::Relaxed) {
        show.events(Duration::from_secs(1));
        println!("  the VM has powered off");
        show_guestctl(host, &["ls"])?;
    }
    println!("\nEverything is stopped and removed.");
    Ok(())
}

/// Runs guestctl and shows it as typed and as answered.
fn show_guestctl(host: &HostHalf, arguments: &[&str]) -> anyhow::Result<()> {
    println!("  $ guestctl {}", arguments.join(" "));
    for line in host.ctl(arguments)?.lines() {
        println!("    {line}");
    }
    Ok(())
}

/// What is on the screen.
struct Show {
    started: Instant,
    watch: Option<Watch>,
}

impl Show {
    fn step(&mut self, title: &str) {
        println!("\n[{:>3.0} s] {title}", self.started.elapsed().as_secs_f32());
    }

    /// Shows events of the watch that come within `limit`.
    fn events(&mut self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let Some(watch) = &self.watch else { return std::thread::sleep(limit) };
        while let Some(line) = watch.next(deadline.saturating_duration_since(Instant::now())) {
            println!("{}  │ {line}", clear());
        }
        std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
    }

    /// Waits until `probe` gives something, and shows for how long.
    fn until<T>(
        &mut self,
        what: &str,
        mut probe: impl FnMut() -> Option<T>,
    ) -> anyhow::Result<(T, Duration)> {
        let started = Instant::now();
        let mut said = 0;
        loop {
            if let Some(found) = probe() {
                print!("{}", clear());
                return Ok((found, started.elapsed()));
            }
            if STOP.load(Ordering::Relaxed) || started.elapsed() > BOOT {
                bail!("waited {} s until {what}, in vain", started.elapsed().as_secs());
            }
            let seconds = started.elapsed().as_secs();
            if std::io::stdout().is_terminal() {
                print!("\r  … until {what}: {seconds} s");
                std::io::stdout().flush()?;
            } else if seconds >= said + 10 {
                said = seconds;
                println!("  … until {what}: {seconds} s");
            }
            self.events(Duration::from_millis(100));
        }
    }
}

/// Removes the line that counts the seconds.
fn clear() -> &'static str {
    if std::io::stdout().is_terminal() { "\r\x1b[K" } else { "" }
}
