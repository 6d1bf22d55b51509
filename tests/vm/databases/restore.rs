//! Restore tests by guestctl of the snapshot of a guest with databases.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use crate::harness::host::HostHalf;
use crate::harness::process::RunFolder;
use crate::harness::tools;
use crate::harness::vm::{SOON, Vm};
use crate::harness::wait_for;
use crate::images;

/// How guestctl is told of an image.
pub fn image(file: &Path) -> String {
    format!("--from={}={}", file.extension().unwrap().display(), file.display())
}

/// Restore tests by guestctl.
pub struct Restore<'a> {
    pub vm: &'a Vm,
    pub host: &'a HostHalf,
    pub id: &'a str,
}

/// Direct boot, as the guest itself has it; the root is the first disk.
fn boot() -> Vec<String> {
    let (kernel, initrd) = (images().kernel().display().to_string(), images().initrd().display().to_string());
    let append = "console=ttyS0 quiet testguest.root=/dev/vda cloud-init=disabled no_timer_check";
    let words = ["-kernel", &kernel, "-initrd", &initrd, "-append", append];
    words.iter().map(|word| format!("--qemu-argument={word}")).collect()
}

impl Restore<'_> {
    /// In a mount namespace where it keeps its marks in memory, which are told after it, as guestctl shows the receipt.
    fn verify(&self, words: &[String]) -> Output {
        let ctl = format!(
            "{} --socket {}",
            tools::program("guestctl").unwrap().display(),
            self.host.socket().display()
        );
        let (name, id) = (self.vm.name(), self.id);
        let script = format!(
            "mount -t tmpfs none /var/lib; {ctl} receipts verify {name} {id} \"$@\"; {ctl} receipts show {name} {id} -o json"
        );
        let accelerator = format!("--accelerator={}", images().accelerator);
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-ec", &script, "sh", "--memory=512", &accelerator]).args(words);
        command.output().unwrap()
    }

    /// It fails, and says why.
    fn fails(&self, words: &[String], why: &str) {
        let output = self.verify(words);
        let said = String::from_utf8_lossy(&output.stderr);
        println!("{}", said.lines().find(|line| line.contains("not verified")).unwrap_or_default());
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("not verified") && said.contains(why), "{why}: {said}");
    }

    /// Images with nothing in them, and a guestctl that is killed.
    pub fn of_nothing(&self, kept: &RunFolder) {
        let (empty, blank, garbage) =
            (kept.file("empty.raw"), kept.file("blank.raw"), kept.file("garbage.qcow2"));
        std::fs::write(&empty, "").unwrap();
        std::fs::File::create(&blank).unwrap().set_len(1 << 20).unwrap();
        std::fs::write(&garbage, [b'g'; 4096]).unwrap();
        self.fails(&[image(&empty)], "the file is empty");
        self.fails(&[image(&blank)], "it does not boot");
        self.fails(&[image(&garbage)], "not in qcow2 format");
        self.fails(
            &[vec![image(&blank), "--timeout=5s".into()], boot()].concat(),
            "in 5 s: the agent in the clone does not answer",
        );
        assert_eq!(clones_of(&blank), [0; 0]);

        let mut command = Command::new(tools::program("guestctl").unwrap());
        command.arg("--socket").arg(self.host.socket()).args(["receipts", "verify", self.vm.name(), self.id]);
        let accelerator = format!("--accelerator={}", images().accelerator);
        let mut child = command.args([image(&blank), accelerator]).args(boot()).spawn().unwrap();
        wait_for("the clone", SOON, || (clones_of(&blank).len() == 1).then_some(())).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        wait_for("the end of the clone", SOON, || clones_of(&blank).is_empty().then_some(())).unwrap();
    }

    /// All databases come up in the clone, and the images stay as they were.
    pub fn succeeds(&self, disks: &[String], kept: &RunFolder) {
        let changed = || {
            let file = |disk: &String| disk.rsplit_once('=').unwrap().1.to_owned();
            disks
                .iter()
                .map(|disk| std::fs::metadata(file(disk)).unwrap().modified().unwrap())
                .collect::<Vec<_>>()
        };
        let (before, console) = (changed(), kept.file("clone.log"));
        let serial = ["-serial".to_owned(), format!("file:{}", console.display())];
        let serial = serial.map(|word| format!("--qemu-argument={word}"));
        let output = self.verify(&[disks, &serial, &boot()].concat());
        let said = String::from_utf8_lossy(&output.stdout);
        let (errors, console) =
            (String::from_utf8_lossy(&output.stderr), std::fs::read(&console).unwrap_or_default());
        assert!(output.status.success(), "{said}{errors}\n{}", String::from_utf8_lossy(&console));
        let (told, shown) = said.split_at(said.find("\n{").unwrap());
        println!("{told}");
        for found in ["file systems: ", "recovered-to", "gtid-binlog", "revision", "the receipt was unsigned"]
        {
            assert!(told.contains(found), "{found}: {told}");
        }
        let shown: Value = serde_json::from_str(shown).unwrap();
        assert_eq!(shown["restored"]["id"], self.id, "{shown:#}");
        assert_eq!(changed(), before);
        assert_eq!(clones_of(Path::new(&disks[0])), [0; 0]);
    }

    /// Has the guest's receipt say that the log of PostgreSQL was further.
    pub fn claim_more(&self) {
        let file = self.vm.run(&format!("echo /var/lib/guestlet/receipts/*{}*", self.id)).unwrap();
        let change = r#"s,\(\[\\"lsn\\"\,\\"\)[^\\]*,\1FFFF/FFFFFFF8,"#;
        self.vm.run(&format!("sed -i '{change}' {} && grep -c FFFF/FFFFFFF8 {0}", file.trim())).unwrap();
    }

    pub fn of_more(&self, disks: &[String]) {
        self.fails(&[disks, &boot()].concat(), "its lsn was FFFF/FFFFFFF8");
    }
}

/// Processes of QEMU for a restore test from this image.
fn clones_of(file: &Path) -> Vec<u32> {
    let file = file.to_str().unwrap();
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    ids.filter(|id| {
        let words = std::fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        let mut words = words.split(|byte| *byte == 0).map(String::from_utf8_lossy);
        words.next().is_some_and(|program| program.contains("qemu-system"))
            && words.any(|word| word.contains(file))
    })
    .collect()
}
