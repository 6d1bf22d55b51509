//! Handshakes with keys, one after the other, with both ends on one processor.

use std::path::Path;
use std::time::Instant;

use guestlet::transport::listen::Incoming;
use guestlet::trust::Peer;
use guestlet::trust::guest::{Standing, greet};
use guestlet::trust::host::{self, Files, Shown};
use tokio::net::UnixStream;

use crate::guests::knows;
use crate::percentile;

const HANDSHAKES: usize = 10_000;

/// Prints how long one takes, for a host half with the key in this file. Panics if one fails.
pub fn measure(key: &Path) {
    let shown = Shown::load(&Files { key: key.to_owned(), certificate: None }).unwrap();
    let guest = knows(shown.key);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let begun = Instant::now();
    let mut milliseconds: Vec<_> = (0..HANDSHAKES)
        .map(|_| {
            let begun = Instant::now();
            runtime.block_on(shake(&shown, &guest));
            begun.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    println!("{HANDSHAKES} handshakes, both ends         {:>8.2} s", begun.elapsed().as_secs_f64());
    println!("a handshake, p50                    {:>8.3} ms", percentile(&mut milliseconds, 0.5));
    println!("a handshake, p99                    {:>8.3} ms", percentile(&mut milliseconds, 0.99));
}

async fn shake(shown: &Shown, guest: &Standing) {
    let (near, far) = UnixStream::pair().unwrap();
    let incoming = Incoming { stream: Box::new(far), plain_refusal: None };
    // The host half waits for the guest's first word, which HTTP/2 brings.
    let greeting = async {
        let greeted = greet(incoming, guest.clone()).await.unwrap();
        let Peer::Keyed(peer) = &greeted.peer else { panic!("without a key") };
        assert_eq!(peer.fingerprint, shown.key.fingerprint());
        let mut stream = greeted.stream;
        tokio::io::AsyncWriteExt::write_all(&mut stream, b"first").await.unwrap();
        tokio::io::AsyncWriteExt::flush(&mut stream).await.unwrap();
        (stream, greeted.binding)
    };
    let (connected, (_stream, binding)) = tokio::join!(host::connect(near, shown), greeting);
    let secured = connected.unwrap_or_else(|failure| panic!("{failure}"));
    let Standing::Keyed(keys) = guest else { panic!("a guest without keys") };
    assert_eq!((secured.key, Some(secured.binding)), (keys.key.public(), binding));
}
