//! File systems that hang where kubelet asks for something: whatever else is asked for is answered.

use std::future::Future;
use std::time::{Duration, Instant};

use guestlet::wire::proto::csi::NodeGetInfoRequest;

use crate::disk::Machine;
use crate::fuse::Hanging;
use crate::kubelet::{Volume, mount, node};
use crate::lab::{Lab, NODE, is_outside, run, serves, until, wait};

/// What must not wait for anything.
async fn at_once<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(10), work).await.unwrap_or_else(|_| panic!("{what} waits"))
}

async fn answers(lab: &Lab) {
    let info = async { node(&lab.socket()).await.node_get_info(NodeGetInfoRequest {}).await };
    assert_eq!(at_once("NodeGetInfo", info).await.unwrap().into_inner().node_id, NODE);
    let begun = Instant::now();
    lab.disks();
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}

#[test]
fn a_volume_that_hangs_holds_up_nobody() {
    if is_outside() {
        return;
    }
    let machine = Machine::new();
    wait(async {
        let lab = Lab::new().await;
        let disk = machine.plugged("sound", 64);
        let (sound, access) = (Volume::new(&lab, "pvc-sound", &disk.serial), mount("", &[]));
        sound.stage(&access).await.unwrap();
        let volume = Volume::new(&lab, "pvc-hung", "hung");
        let (target, next) = (volume.target(&lab, "pod"), volume.target(&lab, "next"));
        std::fs::create_dir(&target).unwrap();
        let (staged, published) = (Hanging::silent(&volume.staging), Hanging::silent(&target));
        let (asked, asking) = (volume.clone(), target.clone());
        let stats = tokio::spawn(async move { asked.stats(&asking).await });
        let (asked, asking, how) = (volume.clone(), next.clone(), access.clone());
        let publish = tokio::spawn(async move { asked.publish(&asking, &how, false).await });
        until("they hang", || staged.unanswered() > 1 && published.unanswered() > 1);
        // Beside the publish, which it must not wait for.
        let asked = volume.clone();
        let unstage = tokio::spawn(async move { asked.unstage().await });
        answers(&lab).await;
        let pod = sound.target(&lab, "pod");
        at_once("another volume", sound.publish(&pod, &access, false)).await.unwrap();
        let condition = at_once("its health", sound.stats(&pod)).await.unwrap().volume_condition.unwrap();
        assert!(!condition.abnormal, "{condition:?}");
        let told = stats.await.unwrap().unwrap().volume_condition.unwrap();
        assert!(told.abnormal && told.message.contains("has not answered"), "{told:?}");
        assert!(publish.await.unwrap().is_err());
        // It may be refused, because the volume is busy.
        drop(unstage.await.unwrap());
        answers(&lab).await;
        drop((staged, published));
        at_once("another volume", sound.unpublish(&pod)).await.unwrap();
        sound.unstage().await.unwrap();
    });
}

/// The sockets were looked for on the event loop.
#[test]
fn a_folder_of_sockets_that_hangs_holds_up_nobody() {
    if is_outside() {
        return;
    }
    wait(async {
        let lab = Lab::new().await;
        answers(&lab).await;
        let folder = lab.registration().parent().unwrap().to_owned();
        let hanging = Hanging::silent(&folder);
        until("it hangs", || hanging.unanswered() > 1);
        for _ in 0..3 {
            answers(&lab).await;
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
        drop(hanging);
        run(&format!("umount -l {}", folder.display()));
        until("the driver is offered", || serves(&lab.registration()));
        answers(&lab).await;
    });
}
