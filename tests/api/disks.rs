//! Disks that a host half asks for. None is released here: they are those of the machine that runs the tests.

use std::time::{Duration, Instant};

use guestlet::wire::proto::v1::disk_selector::By;
use guestlet::wire::proto::v1::{DiskSelector, FindDiskRequest, GetInfoRequest, ReleaseDiskRequest};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tonic::Code;

use crate::agent::Agent;
use crate::host::{Control, next};

fn serial(text: &str) -> DiskSelector {
    DiskSelector { by: Some(By::Serial(text.to_owned())) }
}

#[tokio::test]
async fn a_disk_that_nobody_has_is_not_there_and_not_held() {
    let agent = Agent::start();
    let control = Control::dial(agent.folder.path()).await;
    let mut client = control.client.clone();
    let info = client.get_info(GetInfoRequest {}).await.unwrap().into_inner();
    assert!(info.capabilities.contains(&"disks".to_owned()), "{info:?}");
    let nobody = "nobody-has-this-serial-number";
    let begun = Instant::now();
    for wait_milliseconds in [0, 200] {
        let request = FindDiskRequest { disk: Some(serial(nobody)), wait_milliseconds };
        assert_eq!(client.find_disk(request).await.unwrap().into_inner().disk, None);
    }
    assert!(begun.elapsed() >= Duration::from_millis(200));
    let released =
        client.release_disk(ReleaseDiskRequest { disk: Some(serial(nobody)) }).await.unwrap().into_inner();
    assert!(released.disk.is_none() && !released.removed, "{released:?}");
    assert!(
        agent
            .log()
            .contains(&format!("audit: the host half: ReleaseDisk (the serial number \"{nobody}\"): done"))
    );
}

#[tokio::test]
async fn it_has_to_be_said_which_disk_is_meant() {
    let agent = Agent::start();
    let control = Control::dial(agent.folder.path()).await;
    let mut client = control.client.clone();
    for (disk, wait_milliseconds, words) in [
        (None, 0, "disk.by is missing"),
        (Some(DiskSelector { by: None }), 0, "disk.by is missing"),
        (Some(serial("")), 0, "is empty"),
        (Some(serial("0000")), 0, "is all zeros"),
        (Some(DiskSelector { by: Some(By::WorldWideName("naa.".to_owned())) }), 0, "is empty"),
        (Some(DiskSelector { by: Some(By::Alias("a\nb".to_owned())) }), 0, "has a control character"),
        (Some(serial("x")), 600_001, "wait_milliseconds is more than 600000"),
    ] {
        let request = FindDiskRequest { disk: disk.clone(), wait_milliseconds };
        let refused = client.find_disk(request).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(refused.message().contains(words), "{refused}");
        if wait_milliseconds == 0 {
            let refused = client.release_disk(ReleaseDiskRequest { disk }).await.unwrap_err();
            assert!(
                refused.code() == Code::InvalidArgument && refused.message().contains(words),
                "{refused}"
            );
        }
    }
}

#[tokio::test]
async fn a_wait_does_not_hold_up_an_agent_that_stops() {
    let agent = Agent::start();
    let control = Control::dial(agent.folder.path()).await;
    let mut events = control.watch("first", None).await.unwrap();
    next(&mut events).await;
    let mut client = control.client.clone();
    let request = FindDiskRequest { disk: Some(serial("nobody-has-this")), wait_milliseconds: 600_000 };
    let begun = Instant::now();
    let stop = async {
        // The agent takes the calls of a connection in their order.
        control.client.clone().get_info(GetInfoRequest {}).await.unwrap();
        kill(Pid::from_raw(agent.child.id().cast_signed()), Signal::SIGTERM).unwrap();
    };
    let (ended, ()) = tokio::join!(client.find_disk(request), stop);
    assert_eq!(ended.unwrap_err().message(), "the agent is stopping");
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}
