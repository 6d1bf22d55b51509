//! The guest's end of the callback channel: it asks, in good or bad manners.

use std::sync::atomic::Ordering;
use std::time::Duration;

use guestlet::transport::http2;
use guestlet::wire::proto::v1::host_client::HostClient;
use guestlet::wire::proto::v1::{PingRequest, WhoAmIRequest};
use tokio::net::UnixStream;

use crate::guest::Asked;

/// Between two pings of a guest that does not nag.
const PAUSE: Duration = Duration::from_millis(50);

/// Asks who it is, and then pings until the stream ends.
pub async fn ask(stream: UnixStream, asked: &Asked, nagging: bool) -> std::io::Result<()> {
    let (client, mut connection) = http2::connect(stream).await.map_err(std::io::Error::other)?;
    asked.client.send_replace(Some(client.clone()));
    let mut client = HostClient::with_origin(client, http::Uri::from_static(http2::ORIGIN));
    let asking = async {
        let Ok(identity) = client.who_am_i(WhoAmIRequest {}).await else { return };
        *asked.identity.lock().unwrap() = Some(identity.into_inner());
        let payload = b"ping".to_vec();
        while let Ok(answer) = client.ping(PingRequest { payload: payload.clone() }).await {
            assert_eq!(answer.get_ref().payload, payload);
            asked.answers.fetch_add(1, Ordering::SeqCst);
            if !nagging {
                tokio::time::sleep(PAUSE).await;
            }
        }
        // Only the end of the stream ends the call of this one.
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = asking => Ok(()),
        ended = connection.ended() => ended.map_err(std::io::Error::other),
    }
}

/// Opens calls and resets them before they are answered, again and again (rapid reset, CVE-2023-44487).
pub async fn reset(stream: UnixStream) -> std::io::Result<()> {
    let (client, mut connection) = http2::connect(stream).await.map_err(std::io::Error::other)?;
    let resetting = async {
        loop {
            let calls: Vec<_> = (0..64)
                .map(|_| {
                    let mut client =
                        HostClient::with_origin(client.clone(), http::Uri::from_static(http2::ORIGIN));
                    async move { drop(client.who_am_i(WhoAmIRequest {}).await) }
                })
                .collect();
            for call in calls {
                drop(tokio::time::timeout(Duration::ZERO, call).await);
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        () = resetting => Ok(()),
        ended = connection.ended() => ended.map_err(std::io::Error::other),
    }
}
