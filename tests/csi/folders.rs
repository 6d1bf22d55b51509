//! Folders of kubelet that no socket can be in, or that are not where they seem to be: what is wrong with one is told, and
//! the others serve.

use std::os::unix::fs::symlink;
use std::path::PathBuf;

use guestlet::wire::proto::csi::GetPluginInfoRequest;
use tonic::Code;

use crate::disk::Machine;
use crate::kubelet::{Volume, identity, mount, register};
use crate::lab::{DRIVER, Lab, is_outside, run, serves, until, wait};

/// The sockets: kubelet's, the sidecars', and that by which kubelet finds the driver.
fn sockets(lab: &Lab) -> [PathBuf; 3] {
    [lab.socket(), lab.controller(), lab.registration()]
}

/// Waits until these of the sockets serve, and no others.
async fn serve(lab: &Lab, which: [bool; 3]) {
    until(&format!("{which:?} serve"), || sockets(lab).each_ref().map(|path| serves(path)) == which);
    for (path, _) in sockets(lab)[..2].iter().zip(which).filter(|(_, serves)| *serves) {
        let info = identity(path).await.get_plugin_info(GetPluginInfoRequest {}).await.unwrap();
        assert_eq!(info.into_inner().name, DRIVER);
    }
    if which[2] {
        assert_eq!(register(&lab.registration()).await.name, DRIVER);
    }
}

/// An agent whose kubelet has such folders; what `prepare` does is done in kubelet's folder, and `{above}` is beside that.
async fn agent(prepare: &str) -> Lab {
    let mut lab = Lab::unknown("");
    // It appears as a whole.
    let script =
        format!("mkdir new elsewhere; cd new; {prepare}; cd ..; mv --no-target-directory new kubelet");
    let above = lab.folder.path().display().to_string();
    run(&format!("cd {above}; {}", script.replace("{above}", &above)));
    lab.introduce().await;
    lab
}

fn is_told(lab: &Lab, words: &str) {
    until(words, || lab.log().contains(words));
}

const ALL: [bool; 3] = [true, true, true];

#[test]
fn links_are_followed_within_kubelets_folder() {
    if is_outside() {
        return;
    }
    wait(async {
        let lab = agent("mkdir -p other/place; ln -s other plugins").await;
        serve(&lab, ALL).await;
        assert!(lab.root().join("other").join(DRIVER).join("csi.sock").exists());
        drop(lab);

        // So may kubelet's folder itself be one.
        let mut lab = Lab::unknown("");
        std::fs::create_dir(lab.path("data")).unwrap();
        symlink("data", lab.root()).unwrap();
        lab.introduce().await;
        serve(&lab, ALL).await;
    });
}

#[test]
fn links_that_lead_out_are_refused_in_words() {
    if is_outside() {
        return;
    }
    wait(async {
        let place = format!("plugins/{DRIVER}");
        let outside = "outside kubelet's directory";
        for (link, words, which) in [
            (format!("{place}/controller"), outside, [true, false, true]),
            ("plugins_registry".to_owned(), outside, [true, true, false]),
            (place.clone(), outside, [false, false, false]),
            ("plugins".to_owned(), outside, [false, false, false]),
        ] {
            let lab =
                agent(&format!("mkdir -p {link}; rmdir {link}; ln -s {{above}}/elsewhere {link}")).await;
            is_told(&lab, words);
            serve(&lab, which).await;
            assert_eq!(std::fs::read_dir(lab.path("elsewhere")).unwrap().count(), 0, "{link}");
            std::fs::remove_file(lab.root().join(&link)).unwrap();
            serve(&lab, ALL).await;
        }

        // Within, too, kubelet finds nothing behind this one.
        let lab = agent("mkdir other; ln -s other plugins_registry").await;
        is_told(&lab, "plugins_registry is a symbolic link");
        serve(&lab, [true, true, false]).await;
        std::fs::remove_file(lab.root().join("plugins_registry")).unwrap();
        serve(&lab, ALL).await;
        drop(lab);

        // To nowhere.
        let lab = agent(&format!("mkdir -p {place}; ln -s nowhere {place}/controller")).await;
        is_told(&lab, "controller: No such file or directory");
        serve(&lab, [true, false, true]).await;
    });
}

#[test]
fn folders_that_are_read_only_or_full_are_told() {
    if is_outside() {
        return;
    }
    wait(async {
        let controller = format!("plugins/{DRIVER}/controller");
        for (folder, options, words, which) in [
            (controller.as_str(), "ro", "Read-only file system", [true, false, true]),
            ("plugins_registry", "ro", "Read-only file system", [true, true, false]),
            (controller.as_str(), "nr_inodes=1", "No space left on device", [true, false, true]),
            ("plugins_registry", "nr_inodes=1", "No space left on device", [true, true, false]),
            ("plugins", "nr_inodes=1", "No space left on device", [false, false, false]),
        ] {
            let lab = agent(&format!("mkdir -p {folder}; mount -t tmpfs -o {options} bad {folder}")).await;
            is_told(&lab, words);
            serve(&lab, which).await;
            run(&format!("umount {}/{folder}", lab.root().display()));
            serve(&lab, ALL).await;
        }
    });
}

/// kubelet makes the folder above a pod's place, and may do so when there was room for just that.
#[test]
fn a_volume_that_finds_no_room_for_its_place_is_refused_and_comes_later() {
    if is_outside() {
        return;
    }
    let machine = Machine::new();
    wait(async {
        let mut lab = Lab::unknown("");
        let root = lab.root().display().to_string();
        run(&format!("mkdir {root}; mount -t tmpfs -o nr_inodes=64 kubelet {root}"));
        lab.introduce().await;
        serve(&lab, ALL).await;
        let disk = machine.plugged("one", 32);
        let volume = Volume::new(&lab, "volume", &disk.serial);
        let ext4 = mount("ext4", &[]);
        volume.stage(&ext4).await.unwrap();
        let target = volume.target(&lab, "pod");
        run(&format!("n=0; while mkdir {root}/fill-$n 2> /dev/null; do n=$((n + 1)); done"));
        let refused = volume.publish(&target, &ext4, false).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        assert!(refused.message().contains("No space left on device"), "{refused}");
        // Nobody else minds.
        serve(&lab, ALL).await;
        run(&format!("rmdir {root}/fill-*; mount -o remount,ro {root}"));
        let refused = volume.publish(&target, &ext4, false).await.unwrap_err();
        assert!(refused.message().contains("Read-only file system"), "{refused}");
        run(&format!("mount -o remount,rw {root}"));
        volume.publish(&target, &ext4, false).await.unwrap();
        volume.unpublish(&target).await.unwrap();
        volume.unstage().await.unwrap();
    });
}
