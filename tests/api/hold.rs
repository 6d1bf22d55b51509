//! At most one host half holds a guest.

use std::time::Duration;

use guestlet::wire::proto::v1::Event;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status, Streaming};

use crate::agent::Agent;
use crate::host::{Callback, Control, eventually, next};

/// How a stream of events ends.
async fn end(events: &mut Streaming<Event>) -> Status {
    loop {
        match events.message().await {
            Ok(event) => assert!(event.is_some(), "it ends without a word"),
            Err(status) => return status,
        }
    }
}

#[tokio::test]
async fn who_does_not_say_which_host_half_it_is_gets_no_events() {
    let agent = Agent::start();
    let control = Control::dial(agent.folder.path()).await;
    assert_eq!(control.watch("", None).await.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test]
async fn a_second_host_half_is_refused_while_the_first_answers() {
    let agent = Agent::start();
    let folder = agent.folder.path();
    let first = Control::dial(folder).await;
    let mut events = first.watch("first", None).await.unwrap();
    next(&mut events).await;
    let second = Control::dial(folder).await;
    // Before its callback is there, and after.
    let refused = second.watch("second", None).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains("host-of-first"), "{refused}");
    let _callback = Callback::dial(folder, "first", CancellationToken::new()).await;
    let known = folder.join("identity.json");
    eventually("the identity is kept", || known.exists()).await;
    for _ in 0..3 {
        assert_eq!(second.watch("second", None).await.unwrap_err().code(), Code::FailedPrecondition);
    }
    assert!(agent.log().contains("is refused: host-of-first (first) holds this guest"), "{}", agent.log());
    // The holder has lost nothing by it, and may open its events anew.
    next(&mut first.watch("first", None).await.unwrap()).await;
    let ended = end(&mut events).await;
    assert_eq!(ended.code(), Code::Aborted);
}

#[tokio::test]
async fn a_host_half_that_hangs_is_taken_over_and_its_streams_end() {
    let agent = Agent::start();
    let folder = agent.folder.path();
    let hangs = CancellationToken::new();
    let first = Control::dial(folder).await;
    let mut events = first.watch("first", None).await.unwrap();
    next(&mut events).await;
    let mut callback = Callback::dial(folder, "first", hangs.clone()).await;
    eventually("the identity is kept", || folder.join("identity.json").exists()).await;
    hangs.cancel();
    let second = Control::dial(folder).await;
    next(&mut second.watch("second", None).await.unwrap()).await;
    let ended = end(&mut events).await;
    assert_eq!(ended.code(), Code::Aborted);
    assert!(ended.message().contains("taken over by host half host-of-second"), "{ended}");
    assert_eq!(callback.ended().await, Code::Aborted);
}

#[tokio::test]
async fn a_guest_is_free_as_soon_as_its_holder_is_gone() {
    let agent = Agent::start();
    for instance in ["one", "two", "three"] {
        let control = Control::dial(agent.folder.path()).await;
        // The stream before ends a moment after it was dropped.
        let mut events = loop {
            match control.watch(instance, None).await {
                Ok(events) => break events,
                Err(refused) => assert_eq!(refused.code(), Code::FailedPrecondition),
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        next(&mut events).await;
    }
}

#[tokio::test]
async fn a_callback_of_a_stranger_is_refused() {
    let agent = Agent::start();
    let folder = agent.folder.path();
    let mut nobody = Callback::dial(folder, "one", CancellationToken::new()).await;
    assert_eq!(nobody.ended().await, Code::FailedPrecondition);
    let control = Control::dial(folder).await;
    let mut events = control.watch("one", None).await.unwrap();
    next(&mut events).await;
    let mut stranger = Callback::dial(folder, "two", CancellationToken::new()).await;
    assert_eq!(stranger.ended().await, Code::FailedPrecondition);
    assert!(!folder.join("identity.json").exists(), "a stranger said who this guest is");
}

#[tokio::test]
async fn when_the_hold_ends_so_does_the_callback_and_another_one_takes_its_place() {
    let agent = Agent::start();
    let folder = agent.folder.path();
    let control = Control::dial(folder).await;
    let mut events = control.watch("one", None).await.unwrap();
    next(&mut events).await;
    let mut first = Callback::dial(folder, "one", CancellationToken::new()).await;
    eventually("the identity is kept", || folder.join("identity.json").exists()).await;
    let mut callback = Callback::dial(folder, "one", CancellationToken::new()).await;
    assert_eq!(first.ended().await, Code::Aborted);
    drop((events, control));
    assert_eq!(callback.ended().await, Code::Aborted);
}
