//! The first bytes of a connection with the agent: whatever they are, nobody is taken for a host half with a key, and a guest
//! that was given keys says nothing that is not TLS.

use std::sync::{Arc, LazyLock};

use guestlet::transport::listen::Incoming;
use guestlet::trust::guest::{Clock, Greeted, Keys, Refused, Standing, greet};
use guestlet::trust::key::Key;
use guestlet::trust::tls::FIRST_BYTE;
use guestlet::trust::{Peer, anchors};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

/// More than a guest says before it knows whom it talks to.
const ROOM: usize = 64 * 1024;

/// A record of TLS (RFC 8446, 5.1), by its type: an alert, and what a server says in a handshake besides.
const ALERT: u8 = 21;
const OF_A_SERVER: [u8; 4] = [20, ALERT, 22, 23];
const SERVER_HELLO: u8 = 2;

/// Checks what becomes of a peer that says this, and goes or stays.
pub fn greeting(bytes: &[u8]) {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    for goes in [true, false] {
        runtime.block_on(async {
            without_keys(bytes, goes).await;
            with_keys(bytes, goes, false).await;
            with_keys(bytes, goes, true).await;
        });
    }
}

/// What the guest makes of the peer, and what it answers; what the guest would read from then on comes first.
async fn meet(bytes: &[u8], goes: bool, standing: Standing) -> (Result<(Peer, Vec<u8>), Refused>, Vec<u8>) {
    let (near, mut far) = tokio::io::duplex(ROOM.max(bytes.len()));
    far.write_all(bytes).await.unwrap();
    if goes {
        far.shutdown().await.unwrap();
    }
    let outcome = match greet(Incoming { stream: Box::new(near), plain_refusal: None }, standing).await {
        Ok(Greeted { mut stream, peer, binding }) => {
            assert!(binding.is_none(), "a secret of nobody");
            let mut left = vec![0; bytes.len()];
            stream.read_exact(&mut left).await.unwrap();
            Ok((peer, left))
        }
        Err(refused) => Err(refused),
    };
    let mut answer = Vec::new();
    far.read_to_end(&mut answer).await.unwrap();
    (outcome, answer)
}

async fn without_keys(bytes: &[u8], goes: bool) {
    let (outcome, answer) = meet(bytes, goes, Standing::Plain).await;
    match (bytes.first(), outcome) {
        (None, Err(Refused::Gone | Refused::Late(_))) => assert!(answer.is_empty()),
        (Some(&FIRST_BYTE), Err(Refused::NoKeys)) => {
            assert_eq!(records(&answer).expect("TLS"), [ALERT]);
        }
        (Some(first), Ok((Peer::Plain, left))) if *first != FIRST_BYTE => {
            assert_eq!(left, bytes, "what was looked at is there for HTTP/2");
            assert!(answer.is_empty());
        }
        (_, outcome) => panic!("without keys: {outcome:?}"),
    }
}

async fn with_keys(bytes: &[u8], goes: bool, plain: bool) {
    static KEYS: LazyLock<Keys> = LazyLock::new(|| {
        let host = Key::generate().unwrap().public();
        let ca = Key::generate().unwrap().public();
        let anchors = anchors::parse("fuzz", &format!("{host}\n{ca} ca")).unwrap().into();
        Keys { key: Arc::new(Key::generate().unwrap()), anchors, clock: Clock::Unset, plain: false }
    });
    let (outcome, answer) = meet(bytes, goes, Standing::Keyed(Keys { plain, ..KEYS.clone() })).await;
    match (bytes.first(), outcome) {
        (None, Err(Refused::Gone | Refused::Late(_))) => assert!(answer.is_empty()),
        (
            Some(&FIRST_BYTE),
            Err(Refused::Gone | Refused::Late(_) | Refused::Handshake(_) | Refused::Certificate(_)),
        ) => {
            let types = records(&answer).expect("TLS");
            assert!(types.iter().all(|kind| OF_A_SERVER.contains(kind)), "{types:?}");
            // Whoever has not said hello is told of that at most.
            let is_greeted = answer.get(5) == Some(&SERVER_HELLO) && types.first() == Some(&22);
            assert!(is_greeted || types.iter().all(|kind| *kind == ALERT), "{types:?}");
        }
        (Some(first), Err(Refused::Plain)) if !plain && *first != FIRST_BYTE => assert!(answer.is_empty()),
        (Some(first), Ok((Peer::Plain, left))) if plain && *first != FIRST_BYTE => {
            assert_eq!(left, bytes, "what was looked at is there for HTTP/2");
            assert!(answer.is_empty());
        }
        (_, outcome) => panic!("with keys, plain = {plain}: {outcome:?}"),
    }
}

/// The types of TLS records; nothing if the bytes are anything else.
fn records(mut bytes: &[u8]) -> Option<Vec<u8>> {
    let mut types = Vec::new();
    while let Some((head, rest)) = bytes.split_first_chunk::<5>() {
        let length = usize::from(u16::from_be_bytes([head[3], head[4]]));
        if head[1..3] != [3, 3] || length == 0 {
            return None;
        }
        types.push(head[0]);
        bytes = rest.get(length..)?;
    }
    bytes.is_empty().then_some(types)
}
