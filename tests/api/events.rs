//! The stream of events: its beginning, its numbers, how it is resumed, how it ends.

use guestlet::wire::proto::v1::event::Kind;
use guestlet::wire::proto::v1::{AgentReady, GetInfoRequest, PingRequest, Position};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tonic::Code;

use crate::agent::Agent;
use crate::host::{Control, eventually, next};

fn ready(kind: Option<Kind>) -> AgentReady {
    match kind {
        Some(Kind::AgentReady(ready)) => ready,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn info_says_who_the_guest_is() {
    let agent = Agent::start();
    let control = Control::dial(agent.folder.path()).await;
    let info = control.client.clone().get_info(GetInfoRequest {}).await.unwrap().into_inner();
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    assert_eq!(info.boot_id, boot_id.trim());
    assert_eq!(info.agent_version, env!("CARGO_PKG_VERSION"));
    assert_eq!(info.heartbeat_interval_seconds, 10);
}

#[tokio::test]
async fn ping_gives_back_what_it_got_and_refuses_more_than_it_should_carry() {
    let agent = Agent::start();
    let control = Control::dial(agent.folder.path()).await;
    let mut client = control.client.clone();
    let answer = client.ping(PingRequest { payload: b"abc".to_vec() }).await.unwrap().into_inner();
    assert_eq!(answer.payload, b"abc");
    let refused = client.ping(PingRequest { payload: vec![0; 5000] }).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn a_stream_begins_with_the_state_and_resumes_where_it_was() {
    let agent = Agent::start();
    let control = Control::dial(agent.folder.path()).await;
    let mut events = control.watch("one", None).await.unwrap();
    let first = next(&mut events).await;
    let sequence = first.sequence;
    assert!(sequence >= 1, "the agent's start is the first event");
    let begun = ready(first.kind);
    assert!(begun.state.is_some() && !begun.resumed, "{begun:?}");
    drop((events, control));

    let control = Control::dial(agent.folder.path()).await;
    let at = |sequence| Some(Position { run_id: begun.run_id.clone(), sequence });
    let mut events = control.watch("one", at(0)).await.unwrap();
    let resumed = ready(next(&mut events).await.kind);
    assert!(resumed.resumed && resumed.state.is_none() && resumed.missed == 0, "{resumed:?}");
    let started = next(&mut events).await;
    assert_eq!(started.sequence, 1);
    assert!(
        matches!(started.kind, Some(Kind::AgentStarted(ref event)) if event.first_since_boot),
        "{started:?}"
    );

    for strange in [at(1 << 40), Some(Position { run_id: "another".to_owned(), sequence: 1 })] {
        let mut events = control.watch("one", strange).await.unwrap();
        assert!(ready(next(&mut events).await.kind).state.is_some());
    }
}

#[tokio::test]
async fn a_second_run_since_the_boot_knows_that_it_is_one() {
    let mut agent = Agent::start();
    // Its sockets answer a moment before it has left its mark.
    let mark = agent.folder.path().join("boot-id");
    eventually("the first run leaves its mark", || mark.exists()).await;
    agent.kill_and_start();
    let control = Control::dial(agent.folder.path()).await;
    let mut events = control.watch("one", None).await.unwrap();
    let run_id = ready(next(&mut events).await.kind).run_id;
    let mut events = control.watch("one", Some(Position { run_id, sequence: 0 })).await.unwrap();
    next(&mut events).await;
    let started = next(&mut events).await;
    assert!(
        matches!(started.kind, Some(Kind::AgentStarted(ref event)) if !event.first_since_boot),
        "{started:?}"
    );
}

#[tokio::test]
async fn the_last_event_is_that_the_agent_stops() {
    let mut agent = Agent::start();
    let control = Control::dial(agent.folder.path()).await;
    let mut events = control.watch("one", None).await.unwrap();
    next(&mut events).await;
    kill(Pid::from_raw(agent.child.id().cast_signed()), Signal::SIGTERM).unwrap();
    let mut last = None;
    while let Some(event) = events.message().await.unwrap() {
        last = event.kind;
    }
    assert!(matches!(last, Some(Kind::AgentStopping(_))), "{last:?}");
    assert!(agent.child.wait().unwrap().success());
}
