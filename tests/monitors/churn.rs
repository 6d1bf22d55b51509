//! Disks that come and go in any order, under names and at addresses that others had before, while the kernel's words
//! about them are late or lost.

use std::collections::{BTreeMap, VecDeque};
use std::os::unix::fs::symlink;
use std::time::Duration;

use futures_util::FutureExt as _;
use guestlet::guest::disks::lookup::{FindError, Selector};
use guestlet::guest::events::{Kind, News as Told, Watcher};
use guestlet::sys::uevents::{Action, Heard, Uevent};
use guestlet::wire::proto::v1::{Disk, DiskAdded, DiskRemoved};
use proptest::prelude::*;

use crate::disks::{LONG, Lab, serial, told};
use crate::lay_out::lay_out;
use crate::soak::steps;

/// What happens.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// A disk comes to that address, with the first name that is free, as the kernel does it.
    Plug(usize),
    Unplug(usize),
    /// The monitor hears the kernel's next word.
    Hear,
    /// All words that it has not heard are lost.
    Lose,
    /// It has time to do something.
    Rest,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0_usize..4).prop_map(Step::Plug),
        4 => (0_usize..4).prop_map(Step::Unplug),
        6 => Just(Step::Hear),
        1 => Just(Step::Lose),
        3 => Just(Step::Rest),
    ]
}

/// A kernel.
#[derive(Default)]
struct Kernel {
    /// Name and serial number of the disk at each address.
    there: BTreeMap<usize, (String, String)>,
    words: VecDeque<Heard>,
    count: u64,
    /// It numbers its disks, and says so.
    counts: bool,
}

fn place(address: usize, name: &str) -> String {
    format!(
        "/sys/devices/pci0000:00/0000:00:04.0/virtio2/host0/target0:0:{address}/0:0:{address}:0/block/{name}"
    )
}

impl Kernel {
    fn plug(&mut self, lab: &Lab, address: usize) {
        let taken = |name: &String| self.there.values().any(|(taken, _)| taken == name);
        let name =
            ["sda", "sdb", "sdc", "sdd"].map(str::to_owned).into_iter().find(|name| !taken(name)).unwrap();
        self.count += 1;
        let (serial, place) = (format!("serial-{}", self.count), place(address, &name));
        let minor = u32::from(name.as_bytes()[2] - b'a') * 16;
        let sequence =
            if self.counts { format!("{place}/diskseq = \"{}\\n\"\n", self.count) } else { String::new() };
        let tree = format!(
            "{place}/dev = \"8:{minor}\\n\"\n{place}/size = \"2048\\n\"\n{place}/device/serial = \"{serial}\\n\"\n{sequence}"
        );
        lay_out(&tree, lab.folder.path());
        symlink(place.replace("/sys/", "../"), lab.path(&format!("/sys/block/{name}"))).unwrap();
        self.say(Action::Add, place);
        self.there.insert(address, (name, serial));
    }

    fn unplug(&mut self, lab: &Lab, address: usize) {
        let Some((name, serial)) = self.there.remove(&address) else { return };
        std::fs::remove_file(lab.path(&format!("/sys/block/{name}"))).unwrap();
        // Kept elsewhere, so that no inode comes back, as none does in sysfs.
        let grave = tempfile::Builder::new().disable_cleanup(true).tempdir_in(lab.folder.path()).unwrap();
        let place = place(address, &name);
        std::fs::rename(lab.path(&place), grave.path()).unwrap();
        let count = serial.rsplit('-').next().unwrap().parse().unwrap();
        self.words.push_back(word(Action::Remove, place, self.counts.then_some(count)));
    }

    fn say(&mut self, action: Action, place: String) {
        let disk = self.counts.then_some(self.count);
        self.words.push_back(word(action, place, disk));
    }
}

fn word(action: Action, place: String, disk: Option<u64>) -> Heard {
    Heard::Uevent(Uevent { action, place, partition: false, disk })
}

/// Takes what was told into account, and says what is wrong with it.
fn take(watcher: &mut Watcher, known: &mut BTreeMap<String, String>) -> Result<(), String> {
    while let Some(news) = watcher.next().now_or_never() {
        let Told::Event(entry) = news else { continue };
        let of = |disk: &Option<Disk>| {
            let Disk { name, serials, .. } = disk.clone().unwrap_or_default();
            (name, serials.into_iter().next().map(|serial| serial.value).unwrap_or_default())
        };
        match &entry.event {
            Kind::DiskAdded(DiskAdded { disk }) => {
                let (name, serial) = of(disk);
                if let Some(other) = known.insert(name.clone(), serial) {
                    return Err(format!("{name} came twice, first as {other}"));
                }
            }
            Kind::DiskRemoved(DiskRemoved { disk, .. }) => {
                let (name, serial) = of(disk);
                if known.remove(&name) != Some(serial) {
                    return Err(format!("{name} went, and was not that"));
                }
            }
            other => return Err(format!("{other:?}")),
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(steps(48, 5000)))]
    #[test]
    fn none_is_lost_and_none_is_wrong(steps in prop::collection::vec(step(), 0..50), counts: bool) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let outcome: Result<(), String> = runtime.block_on(async {
            let mut lab = Lab::new();
            let mut outcome = Ok(());
            lab.beside(async |lab, watcher| outcome = run(lab, watcher, &steps, counts).await).await;
            outcome
        });
        prop_assert_eq!(outcome, Ok(()));
    }
}

async fn run(lab: &Lab, watcher: &mut Watcher, steps: &[Step], counts: bool) -> Result<(), String> {
    let mut kernel = Kernel { counts, ..Kernel::default() };
    let mut known = BTreeMap::new();
    for step in steps {
        match *step {
            Step::Plug(address) if kernel.there.contains_key(&address) => {}
            Step::Plug(address) => kernel.plug(lab, address),
            Step::Unplug(address) => kernel.unplug(lab, address),
            Step::Hear => {
                if let Some(word) = kernel.words.pop_front() {
                    lab.hear(word);
                }
            }
            Step::Lose => {
                kernel.words.clear();
                lab.hear(Heard::Overrun);
            }
            Step::Rest => tokio::time::sleep(Duration::from_millis(1)).await,
        }
        take(watcher, &mut known)?;
    }
    kernel.words.drain(..).for_each(|word| lab.hear(word));
    let there: BTreeMap<_, _> = kernel.there.values().cloned().collect();
    let all_known = async {
        loop {
            take(watcher, &mut known)?;
            let listed = lab.guest.disks.all();
            let listed: BTreeMap<_, _> =
                listed.iter().map(|disk| (disk.name.clone(), disk.serial().unwrap().text())).collect();
            if known == there && listed == there {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    match tokio::time::timeout(LONG, all_known).await {
        Ok(outcome) => outcome,
        Err(_) => Err(format!("{there:?} are there, {:?} are known", lab.guest.disks.all())),
    }
}

#[tokio::test]
async fn serial_numbers_that_say_little_are_never_taken_for_one() {
    let mut lab = Lab::new();
    let long = "pvc-0123456789abcdef-and-more";
    let disks: [(&str, &[u8]); 10] = [
        ("vda", b"two words  here"),
        ("vdb", "größe".as_bytes()),
        ("vdc", b"00000000000000000000"),
        ("vdd", b""),
        ("vde", b"twin"),
        ("vdf", b"twin"),
        ("vdg", &long.as_bytes()[..20]),
        ("vdh", b"\xff\xfe\x01"),
        ("vdi", b"   padded   "),
        ("vdj", &[0; 20]),
    ];
    for (name, serial) in disks {
        lab.plug(name, "");
        std::fs::write(lab.path(&format!("{}/serial", Lab::place(name))), serial).unwrap();
    }
    lab.beside(async |lab, watcher| {
        for _ in disks {
            assert!(told(watcher).await.starts_with("+vd"));
        }
        let find = |text: &str| lab.guest.disks.find(&serial(text));
        for (text, name) in [
            ("two words  here", "vda"),
            ("größe", "vdb"),
            (long, "vdg"),
            ("padded", "vdi"),
            (" padded ", "vdi"),
        ] {
            assert_eq!(find(text).unwrap().name, name, "{text:?}");
        }
        for text in ["", "  ", "0", "00000000000000000000", "tw\no", "\0"] {
            assert!(matches!(find(text), Err(FindError::Unusable { .. })), "{text:?}");
        }
        for text in ["two", "two words here", "gr", "Größe", "TWIN", "\u{fffd}\u{fffd}\u{fffd}"] {
            // What is shown in place of bytes that are no text is not what the disk says.
            assert!(matches!(find(text), Err(FindError::NotFound(_))), "{text:?}");
        }
        let Err(FindError::Ambiguous { candidates, .. }) = find("twin") else { panic!() };
        let named = ["vde (virtio, serial number \"twin\")", "vdf (virtio, serial number \"twin\")"];
        assert_eq!(candidates, named);
        let by_name = lab.guest.disks.find(&Selector::Name("/dev/vdh".to_owned())).unwrap();
        assert_eq!(by_name.serial().unwrap().text(), "\u{fffd}\u{fffd}\u{fffd}");
        // What cannot be meant is not waited for.
        for text in ["", "000", "twin"] {
            let wanted = serial(text);
            let answer = lab.guest.disks.wait(&wanted, LONG);
            assert!(answer.now_or_never().unwrap().is_err(), "{text:?}");
        }
    })
    .await;
}
