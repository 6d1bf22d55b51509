//! The callback channel: the host dialled, and the guest asks `guestlet.v1.Host`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use tonic::{Request, Status};

use crate::rpc::holder::Holder;
use crate::transport::http2::{self, Client};
use crate::transport::{Stream, http2::ORIGIN};
use crate::wire::proto::v1::host_client::HostClient;
use crate::wire::proto::v1::{HostHalf, PingRequest, WhoAmIRequest, WhoAmIResponse};

/// How long the host half may take to say who the guest is.
const INTRODUCTION: Duration = Duration::from_secs(10);
/// How long it may take to show that it is there.
const ANSWER: Duration = Duration::from_secs(2);
/// How long nothing may change before the host half is asked again.
const SETTLED: Duration = Duration::from_secs(1);
/// When it is asked again though nothing has changed here.
const AT_LATEST: Duration = Duration::from_secs(300);
/// Bytes of one answer; those so far are all small.
const MAX_ANSWER: usize = 64 * 1024;

static STREAMS: AtomicU64 = AtomicU64::new(0);

/// An open callback stream.
#[derive(Debug, Clone)]
pub struct Callback {
    number: u64,
    channel: Client,
    identity: WhoAmIResponse,
}

impl Callback {
    /// Which of the streams of this run of the agent it is.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The host half at its other end.
    pub fn host(&self) -> HostHalf {
        self.identity.host.clone().unwrap_or_default()
    }

    /// For calls of other services.
    pub fn channel(&self) -> Client {
        self.channel.clone()
    }

    /// What it says of this guest.
    pub fn identity(&self) -> WhoAmIResponse {
        self.identity.clone()
    }

    /// Whether the host half is there.
    pub async fn answers(&self) -> bool {
        let mut client = host(self.channel.clone());
        let ping = client.ping(Request::new(PingRequest::default()));
        matches!(tokio::time::timeout(ANSWER, ping).await, Ok(Ok(_)))
    }
}

fn host(channel: Client) -> HostClient<Client> {
    HostClient::with_origin(channel, http::Uri::from_static(ORIGIN)).max_decoding_message_size(MAX_ANSWER)
}

/// Why a callback stream was closed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The peer does not speak HTTP/2, or the stream broke.
    #[error("the stream broke")]
    Stream(#[from] http2::ClientError),
    /// The peer did not say who this guest is.
    #[error("no answer to WhoAmI")]
    Introduction(#[source] Box<Status>),
    /// The stream is not the holder's.
    #[error("{0}")]
    Stranger(String),
}

/// Asks who this guest is.
async fn introduction(mut client: HostClient<Client>) -> Result<WhoAmIResponse, Error> {
    match tokio::time::timeout(INTRODUCTION, client.who_am_i(Request::new(WhoAmIRequest {}))).await {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) => Err(Error::Introduction(Box::new(status))),
        Err(_) => Err(Error::Introduction(Box::new(Status::deadline_exceeded("too late")))),
    }
}

/// Serves one stream until it ends, or the hold of its host half does. `known` is told what the host half
/// says of this guest, and again with each `change` after which it says something else.
///
/// # Errors
/// If the peer does not do its part.
pub async fn run(
    stream: impl Stream,
    holder: &Holder,
    mut change: watch::Receiver<u64>,
    known: impl Fn(&WhoAmIResponse),
) -> Result<(), Error> {
    let (channel, mut connection) = http2::connect(stream).await?;
    let client = host(channel.clone());
    let identity = tokio::select! {
        identity = introduction(client.clone()) => identity?,
        ended = connection.ended() => return ended.map_err(Error::Stream),
    };
    let number = STREAMS.fetch_add(1, Ordering::Relaxed);
    let over =
        holder.attach(Callback { number, channel, identity: identity.clone() }).map_err(Error::Stranger)?;
    known(&identity);
    let again = async {
        let mut told = identity;
        // Nobody changes anything any more when the agent ends. What changes on the host alone is seen late.
        while !matches!(tokio::time::timeout(AT_LATEST, change.changed()).await, Ok(Err(_))) {
            // Changes come in many steps.
            tokio::time::sleep(SETTLED).await;
            change.mark_unchanged();
            match introduction(client.clone()).await {
                Ok(now) if now.vm_uid == told.vm_uid && now != told => {
                    known(&now);
                    told = now;
                }
                _ => {}
            }
        }
        std::future::pending::<()>().await;
    };
    let ended = tokio::select! {
        () = over => Ok(()),
        ended = connection.ended() => ended.map_err(Error::Stream),
        () = again => Ok(()),
    };
    holder.detach(number);
    ended
}
