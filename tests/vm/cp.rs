//! Files to and from a whole Debian, over its vsock device, with the guest reset in the middle.

use std::process::{Child, Command, Stdio};

use serde_json::json;

use crate::harness::host::HostHalf;
use crate::harness::tools::program;
use crate::harness::vm::SOON;
use crate::harness::wait_for;
use crate::{host_with, real};

/// What host halves may do here.
const ROLES: [&str; 4] = ["status", "topology", "freeze", "files-write"];
const LENGTH: usize = 64 << 20;

/// `guestctl cp` with these words.
fn cp(host: &HostHalf, words: &[&str]) -> Child {
    let mut command = Command::new(program("guestctl").unwrap());
    command.arg("--socket").arg(host.socket()).arg("cp").args(words);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// How it ended, and what it said.
fn ended(child: Child) -> (Option<i32>, String) {
    let output = child.wait_with_output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn files_arrive_although_the_guest_is_reset_in_the_middle() {
    let vm = real("copies");
    let host = host_with(&vm, &ROLES);
    // What the settings say by now is to be there after a reset.
    vm.run("sync").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let [source, back] = ["source", "back"].map(|name| folder.path().join(name));
    let mut state = 1_u64;
    let bytes = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    });
    let content: Vec<u8> = bytes.take(LENGTH).collect();
    std::fs::write(&source, &content).unwrap();
    let (source, back) = (source.to_str().unwrap(), back.to_str().unwrap());

    let going = cp(&host, &["-p", source, "copies:/root/file"]);
    let is_begun = "test $(stat -c %s /root/.file.guestlet-* 2>/dev/null || echo 0) -gt 4194304";
    wait_for("a part of the file", SOON, || vm.run(is_begun).ok()).unwrap();
    vm.run("! test -e /root/file").unwrap();
    vm.qmp().execute("system_reset", json!({})).unwrap();
    let (code, said) = ended(going);
    assert_eq!(code, Some(0), "{said}");
    vm.run("! ls /root/.file.guestlet-*").unwrap();

    // It is on the disk: another reset, at once, takes nothing away.
    vm.qmp().execute("system_reset", json!({})).unwrap();
    let (code, said) = ended(cp(&host, &["copies:/root/file", back]));
    // The session may be gone when it begins.
    if code != Some(0) {
        host.wait_connected("copies", SOON).unwrap();
        let (code, said) = ended(cp(&host, &["copies:/root/file", back]));
        assert_eq!(code, Some(0), "{said}");
    }
    assert!(std::fs::read(back).unwrap() == content, "{said}");

    // Nothing is begun in a frozen guest, and what is there can be read.
    host.ctl(&["freeze", "copies"]).unwrap();
    let (code, said) = ended(cp(&host, &[source, "copies:/root/other"]));
    assert!(code == Some(1) && said.contains("frozen"), "{code:?} {said}");
    let (code, said) = ended(cp(&host, &["copies:/root/file", back]));
    assert_eq!(code, Some(0), "{said}");
    host.ctl(&["thaw", "copies"]).unwrap();
}
