//! Mounts by rule, of loop devices that a laid-out tree of sysfs shows as disks of the machine.

use std::io;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use guestlet::guest::Guest;
use guestlet::guest::disk_rules::made::FILE;
use guestlet::guest::disk_rules::rule::{How, Matcher, Rule};
use guestlet::guest::disk_rules::{Rules, Standing, engine, keep, release};
use guestlet::guest::disks::identity::KnownDisk;
use guestlet::guest::disks::lookup::Selector;
use guestlet::guest::events::{Kind, News as Told, Watcher};
use guestlet::guest::monitor::disks::{News, follow};
use guestlet::sys::root::Root;
use guestlet::sys::uevents::{Action, Heard, Uevent};
use guestlet::wire::proto::v1::{DiskFailed, DiskMounted};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;

use crate::lab::{Disk, Lab, enter, run};

const LONG: Duration = Duration::from_secs(60);

/// What a test has the kernel say.
struct Words(UnboundedReceiver<Heard>);

impl News for Words {
    async fn next(&mut self) -> io::Result<Heard> {
        match self.0.recv().await {
            Some(heard) => Ok(heard),
            None => std::future::pending().await,
        }
    }

    fn at_hand(&mut self) -> io::Result<Option<Heard>> {
        Ok(self.0.try_recv().ok())
    }
}

/// A machine whose disks are what its tree shows.
pub struct Machine<'a> {
    lab: &'a Lab,
    root: PathBuf,
}

/// A run of the agent's part for rules.
pub struct Run {
    pub guest: Guest,
    events: Watcher,
    kernel: UnboundedSender<Heard>,
    rules: watch::Sender<Rules>,
}

impl<'a> Machine<'a> {
    pub fn new(lab: &'a Lab) -> Self {
        let root = lab.folder("root");
        for folder in ["bin", "dev", "etc", "proc", "sbin", "usr", "var"] {
            symlink(format!("/{folder}"), root.join(folder)).unwrap();
        }
        for folder in ["run", "sys/block", "sys/dev/block"] {
            std::fs::create_dir_all(root.join(folder)).unwrap();
        }
        Self { lab, root }
    }

    fn place(name: &str) -> String {
        format!("sys/devices/pci0000:00/0000:00:06.0/virtio4/{name}/block/{name}")
    }

    /// Shows a device as a disk with a serial number.
    fn plug(&self, name: &str, number: &str, sectors: u64, serial: &str) {
        let place = self.root.join(Self::place(name));
        std::fs::create_dir_all(&place).unwrap();
        std::fs::write(place.join("dev"), number).unwrap();
        std::fs::write(place.join("size"), sectors.to_string()).unwrap();
        std::fs::write(place.join("serial"), serial).unwrap();
        let link = Self::place(name).replacen("sys/", "../", 1);
        symlink(&link, self.root.join("sys/block").join(name)).unwrap();
        let by_number = self.root.join("sys/dev/block").join(number);
        let _ = std::fs::remove_file(&by_number);
        symlink(format!("../{link}"), by_number).unwrap();
    }

    pub fn plug_loop(&self, disk: &Disk, serial: &str) -> String {
        let name = disk.name().rsplit('/').next().unwrap().to_owned();
        let number = run(&format!("cat /sys/block/{name}/dev"));
        let sectors = run(&format!("cat /sys/block/{name}/size")).parse().unwrap();
        self.plug(&name, &number, sectors, serial);
        let sequence = run(&format!("cat /sys/block/{name}/diskseq"));
        std::fs::write(self.root.join(Self::place(&name)).join("diskseq"), sequence).unwrap();
        name
    }

    pub fn unplug(&self, name: &str) {
        std::fs::remove_file(self.root.join("sys/block").join(name)).unwrap();
        // Kept elsewhere, so that no inode comes back, as none does in sysfs.
        let grave = tempfile::Builder::new().disable_cleanup(true).tempdir_in(&self.root).unwrap();
        std::fs::rename(self.root.join(Self::place(name)), grave.path()).unwrap();
    }

    /// Runs the rules while `test` does.
    pub fn run(&self, rules: &[Rule], test: impl AsyncFnOnce(&mut Run)) {
        self.run_as(Guest::default(), rules, test);
    }

    pub fn run_as(&self, guest: Guest, rules: &[Rule], test: impl AsyncFnOnce(&mut Run)) {
        let guest = Guest { root: Root::at(&self.root), ..guest };
        let (kernel, words) = unbounded_channel();
        let rules = Rules { list: Some(rules.into()), problem: None, read: 1 };
        let (rules, followed) = watch::channel(rules);
        let (_, events) = guest.events.watch(None);
        let mut run = Run { guest: guest.clone(), events, kernel, rules };
        self.lab.wait(async {
            tokio::select! {
                ended = follow(&guest, Words(words)) => panic!("{ended:?}"),
                ended = engine::run(guest.clone(), followed, self.root.clone()) => panic!("{ended:?}"),
                () = test(&mut run) => {}
            }
        });
    }
}

impl Run {
    pub fn say(&self, action: Action, name: &str) {
        let place = format!("/{}", Machine::place(name));
        self.kernel.send(Heard::Uevent(Uevent { action, place, partition: false, disk: None })).unwrap();
    }

    pub fn write(&self, rules: &[Rule]) {
        self.rules.send_modify(|now| {
            now.list = Some(rules.into());
            now.read += 1;
        });
    }

    /// Waits until a rule is so.
    pub async fn until(&self, point: &Path, state: &str) -> Standing {
        let mut changes = self.guest.disk_rules.changes();
        let find = |told: &Arc<guestlet::guest::disk_rules::Told>| {
            told.rules.iter().find(|rule| rule.mount_point == point && rule.state == state).cloned()
        };
        let told = tokio::time::timeout(LONG, changes.wait_for(|told| find(told).is_some())).await;
        let told = told.unwrap_or_else(|_| panic!("not {state}: {:?}", self.guest.disk_rules.told()));
        find(&told.unwrap()).unwrap()
    }

    pub async fn disk(&self, serial: &str) -> Arc<KnownDisk> {
        self.guest.disks.wait(&Selector::Serial(serial.to_owned()), LONG).await.unwrap()
    }

    /// The next event that rules make.
    async fn event(&mut self) -> String {
        loop {
            let news = tokio::time::timeout(LONG, self.events.next()).await.unwrap();
            let Told::Event(recorded) = news else { continue };
            match &recorded.event {
                Kind::DiskMounted(DiskMounted { disk: Some(disk), mount_point, r#type }) => {
                    return format!("{} {} {mount_point}", disk.name, r#type);
                }
                Kind::DiskFailed(DiskFailed { disk: Some(disk), problem }) => {
                    return format!("{} failed: {problem}", disk.name);
                }
                _ => {}
            }
        }
    }
}

fn rule(serial: &str, point: &Path) -> Rule {
    Rule {
        origin: format!("{serial}.toml:1"),
        matcher: Matcher { serial: Some(serial.to_owned()), ..Matcher::default() },
        how: How { mount_point: point.to_owned(), ..How::default() },
    }
}

pub fn made_new(serial: &str, point: &Path, kind: &str) -> Rule {
    let mut rule = rule(serial, point);
    rule.how.kind = Some(kind.to_owned());
    rule.how.format = true;
    rule
}

/// Waits until something is so that nobody tells of.
async fn eventually(mut is_so: impl FnMut() -> bool) {
    let wait = async {
        while !is_so() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LONG, wait).await.unwrap();
}

/// How a place is mounted; empty if it is not.
pub fn mounted(point: &Path) -> String {
    run(&format!("findmnt -n -o ID,FSTYPE,VFS-OPTIONS --mountpoint {} || true", point.display()))
}

#[test]
fn a_disk_is_mounted_when_it_comes_and_unmounted_when_it_is_told_to_go() {
    let Some(lab) = enter() else { return };
    let machine = Machine::new(&lab);
    let (disk, point) = (lab.disk("disk", 64), lab.path("deep/er/data"));
    let mut wanted = made_new("data-1", &point, "ext4");
    let file = point.join("file");
    (wanted.how.owner, wanted.how.group, wanted.how.mode) =
        (Some("1234".into()), Some("daemon".into()), Some(0o2750));
    wanted.how.options = vec!["nodev,noatime".into()];
    machine.run(&[wanted.clone()], async |run| {
        run.until(&point, "no-disk").await;
        let name = machine.plug_loop(&disk, "data-1");
        run.say(Action::Add, &name);
        let standing = run.until(&point, "mounted").await;
        assert_eq!(standing.file.as_deref(), disk.device.to_str());
        assert_eq!(run.event().await, format!("{name} ext4 {}", point.display()));
        assert!(mounted(&point).ends_with("ext4   rw,nodev,noatime"), "{}", mounted(&point));
        let folder = std::fs::metadata(&point).unwrap();
        assert_eq!((folder.uid(), folder.gid(), folder.mode() & 0o7777), (1234, 1, 0o2750));
        assert_eq!(std::fs::metadata(lab.path("deep")).unwrap().mode() & 0o7777, 0o755);

        // Let go of only when nobody uses it; and then not taken again.
        let held = std::fs::File::create(&file).unwrap();
        let known = run.disk("data-1").await;
        let error = release(&run.guest, &known).await.unwrap_err().to_string();
        assert!(error.contains(&format!("(process {})", std::process::id())), "{error}");
        run.until(&point, "mounted").await;
        drop(held);
        release(&run.guest, &known).await.unwrap();
        assert_eq!(mounted(&point), "");
        release(&run.guest, &known).await.unwrap();
        run.write(&[wanted.clone()]);
        run.until(&point, "waiting").await;
        keep(&run.guest, &known);
        run.until(&point, "mounted").await;
        release(&run.guest, &known).await.unwrap();
    });
    // Nor by the next agent, until it was away.
    machine.run(&[wanted.clone()], async |run| {
        run.until(&point, "waiting").await;
        let name = disk.name().rsplit('/').next().unwrap();
        machine.unplug(name);
        run.say(Action::Remove, name);
        run.until(&point, "no-disk").await;
        machine.plug_loop(&disk, "data-1");
        run.say(Action::Add, name);
        run.until(&point, "mounted").await;
        assert!(file.exists());
        // Taken away without a word: it is unmounted, and mounted again when it comes back.
        machine.unplug(name);
        run.say(Action::Remove, name);
        run.until(&point, "no-disk").await;
        eventually(|| mounted(&point).is_empty()).await;
        machine.plug_loop(&disk, "data-1");
        run.say(Action::Add, name);
        run.until(&point, "mounted").await;
    });
    // A killed agent's successor knows what is mounted by the rule.
    let before = mounted(&point);
    let mut edited = wanted.clone();
    machine.run(&[wanted.clone()], async |run| {
        run.until(&point, "mounted").await;
        assert_eq!(mounted(&point), before);
        // Edits take effect, as far as nobody uses it.
        edited.how.mode = Some(0o700);
        run.write(&[edited.clone()]);
        eventually(|| std::fs::metadata(&point).unwrap().mode() & 0o7777 == 0o700).await;
        run.until(&point, "mounted").await;
        assert_eq!(mounted(&point), before);
        edited.how.options = vec!["nosuid".into()];
        let held = std::fs::File::open(&file).unwrap();
        run.write(&[edited.clone()]);
        let standing = run.until(&point, "failed").await;
        assert!(standing.reason.contains("has") && standing.reason.contains("open"), "{standing:?}");
        assert_eq!(mounted(&point), before);
        drop(held);
        run.write(&[edited.clone()]);
        run.until(&point, "mounted").await;
        assert!(mounted(&point).contains("nosuid"), "{}", mounted(&point));
        // What somebody has unmounted stays so, until the rules are written again.
        run_umount(&point);
        run.say(Action::Change, disk.name().rsplit('/').next().unwrap());
        run.write(&[edited.clone()]);
        run.until(&point, "mounted").await;
        run.write(&[]);
        eventually(|| mounted(&point).is_empty()).await;
        let kept = || std::fs::read_to_string(machine.root.join(FILE)).unwrap();
        eventually(|| kept().contains("\"made\":[]")).await;
    });
}

pub fn run_umount(point: &Path) {
    run(&format!("umount {}", point.display()));
}

#[test]
fn what_is_not_meant_is_left_alone() {
    let Some(lab) = enter() else { return };
    let machine = Machine::new(&lab);
    let [foreign, blank, twin, other, theirs] =
        ["foreign", "blank", "twin", "other", "theirs"].map(|name| lab.disk(name, 128));
    run(&format!("mkfs.btrfs -q {}; mkfs.ext4 -q -L mine {}", foreign.name(), theirs.name()));
    let sums = [&foreign, &blank, &twin, &other].map(Disk::sum);
    let [on_foreign, on_blank, full, on_twin, on_theirs, on_system] =
        ["on-foreign", "on-blank", "full", "on-twin", "on-theirs", "on-system"].map(|name| lab.path(name));
    std::fs::create_dir(&full).unwrap();
    std::fs::write(full.join("file"), "seen").unwrap();
    std::fs::create_dir(&on_theirs).unwrap();
    run(&format!("mount {} {}", theirs.name(), on_theirs.display()));
    let before = mounted(&on_theirs);
    let link = lab.path("link");
    symlink(&full, &link).unwrap();
    let through = link.join("data");
    let mut by_label = rule("", &on_theirs);
    by_label.matcher = Matcher { label: Some("mine".into()), ..Matcher::default() };
    let mut no_user = made_new("blank", &lab.path("no-user"), "ext4");
    no_user.how.owner = Some("no-such-user".into());
    let rules = [
        made_new("foreign", &on_foreign, "ext4"),
        rule("blank", &on_blank),
        made_new("blank", &full, "ext4"),
        made_new("blank", &through, "ext4"),
        no_user,
        made_new("twin", &on_twin, "ext4"),
        by_label,
        made_new("system", &on_system, "ext4"),
    ];
    machine.plug_loop(&foreign, "foreign");
    machine.plug_loop(&blank, "blank");
    machine.plug_loop(&twin, "twin");
    machine.plug_loop(&other, "twin");
    machine.plug_loop(&theirs, "");
    // Whatever this machine's root is on, if it is a disk.
    let number = run("stat -c %Hd:%Ld /");
    let system = !number.starts_with("0:");
    if system {
        machine.plug("vda", &number, 1 << 20, "system");
    }
    machine.run(&rules, async |run| {
        for (point, state, reason) in [
            (&on_foreign, "failed", "is not blank: it holds btrfs"),
            (&on_blank, "failed", "is blank, and the rule does not set format-if-blank"),
            (&full, "failed", "not empty"),
            (&through, "failed", "link is a symbolic link"),
            (&lab.path("no-user"), "failed", "unknown user \"no-such-user\""),
            (&on_twin, "ambiguous", "2 match, so none is used: loop"),
            (&on_theirs, "mounted", "it was already mounted like this"),
        ] {
            let standing = run.until(point, state).await;
            assert!(standing.reason.contains(reason), "{standing:?}");
        }
        if system {
            let standing = run.until(&on_system, "no-disk").await;
            let why = ("vda".to_owned(), "it holds the system itself".to_owned());
            assert!(standing.others.contains(&why), "{standing:?}");
        }
        let mut failed = 0;
        while failed < 5 {
            let event = run.event().await;
            assert!(event.contains(" failed: /"), "{event}");
            failed += 1;
        }
        assert_eq!([&foreign, &blank, &twin, &other].map(Disk::sum), sums);
        // What others have mounted is not unmounted by the end of a rule.
        run.write(&rules[..1]);
        run.until(&on_foreign, "failed").await;
        assert_eq!(mounted(&on_theirs), before);
        // The one that is left of two is taken.
        let name = other.name().rsplit('/').next().unwrap();
        machine.unplug(name);
        run.say(Action::Remove, name);
        run.write(&rules[5..6]);
        run.until(&on_twin, "mounted").await;
    });
    assert_eq!(mounted(&on_theirs), before);
    assert_ne!(mounted(&on_twin), "");
}

#[test]
fn a_disk_with_only_the_beginning_of_the_serial_number_is_never_formatted() {
    let Some(lab) = enter() else { return };
    let machine = Machine::new(&lab);
    let (blank, full) = (lab.disk("blank", 64), lab.disk("full", 64));
    run(&format!("mkfs.ext4 -q {}", full.name()));
    let [serial, other] = ["customer-data-of-2026-1", "another-data-of-2026-2"];
    machine.plug_loop(&blank, &serial[..20]);
    machine.plug_loop(&full, &other[..20]);
    let (on_blank, on_full) = (lab.path("on-blank"), lab.path("on-full"));
    let before = blank.sum();
    let rules = [made_new(serial, &on_blank, "ext4"), made_new(other, &on_full, "ext4")];
    machine.run(&rules, async |run| {
        let standing = run.until(&on_blank, "failed").await;
        assert!(standing.reason.contains("shows only"), "{standing:?}");
        assert_eq!(blank.sum(), before);
        run.until(&on_full, "mounted").await;
        // A rule that says what the disk says means it.
        run.write(&[made_new(&serial[..20], &on_blank, "ext4")]);
        run.until(&on_blank, "mounted").await;
    });
}

#[test]
fn what_is_on_a_disk_grows_with_it() {
    let Some(lab) = enter() else { return };
    let machine = Machine::new(&lab);
    let (disk, point) = (lab.disk("disk", 320), lab.path("data"));
    let mut wanted = made_new("data-1", &point, "xfs");
    wanted.how.grow = true;
    let name = machine.plug_loop(&disk, "data-1");
    let blocks = || run(&format!("stat -f -c %b {}", point.display())).parse::<u64>().unwrap();
    machine.run(&[wanted], async |run| {
        run.until(&point, "mounted").await;
        let before = blocks();
        disk.resize(640);
        std::fs::write(machine.root.join(Machine::place(&name)).join("size"), (640 << 11).to_string())
            .unwrap();
        run.say(Action::Change, &name);
        eventually(|| run.guest.disks.all().iter().any(|disk| disk.bytes == 640 << 20)).await;
        let standing = run.until(&point, "mounted").await;
        assert_eq!(standing.reason, "", "{standing:?}");
        eventually(|| blocks() > before + before / 2).await;
    });
}
