//! Connection to one exporter in a guest: a call of `guestlet.v1.Forward` with this connection alone.

use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tonic::{Code, Status, Streaming};

use super::{Failure, Job};
use crate::host::beside::{self, BEGIN, Line, origin};
use crate::host::caller::{Behalf, Caller};
use crate::host::fleet::Handle;
use crate::host::forward::MAX_MESSAGE;
use crate::host::machine::{self, Beside, Desks};
use crate::host::metrics::exporters::Outcome;
use crate::host::text;
use crate::sys::socket::Socket;
use crate::transport::carry::flow::Breach;
use crate::transport::carry::{Link, Manner, Outbox, Said, carry};
use crate::wire::proto::v1::forward_client::ForwardClient;
use crate::wire::proto::v1::from_target::Message as Told;
use crate::wire::proto::v1::to_target::Message;
use crate::wire::proto::v1::{ConnectTarget, FromTarget, OpenForward, RefusedBecause, ToTarget};

/// Bytes that the guest may send before they are read.
const WINDOW: usize = 256 << 10;
/// Number of the connection within the call.
const NUMBER: u32 = 1;

/// Connection to an exporter in a guest.
pub(super) struct Connection<'c> {
    pub fleet: &'c Handle,
    pub desks: &'c Desks,
    pub vm: &'c str,
    pub job: &'c Job,
}

/// Message to the guest.
enum Saying {
    First(Message),
    Of(u32, Said),
}

impl From<(u32, Said)> for Saying {
    fn from((number, said): (u32, Said)) -> Self {
        Self::Of(number, said)
    }
}

fn sent(said: mpsc::UnboundedReceiver<Saying>) -> impl tokio_stream::Stream<Item = ToTarget> {
    futures_util::stream::unfold(said, |mut said| async {
        let message = match said.recv().await? {
            Saying::First(message) => message,
            Saying::Of(number, said) => (number, said).into(),
        };
        Some((ToTarget { message: Some(message) }, said))
    })
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        let outcome = match status.code() {
            Code::PermissionDenied => Outcome::Denied,
            _ => Outcome::Unreachable,
        };
        Self::new(outcome, status.message())
    }
}

impl From<Breach> for Failure {
    fn from(breach: Breach) -> Self {
        Self::new(Outcome::Unreachable, format!("the guest violates the protocol: {breach}"))
    }
}

impl Connection<'_> {
    /// Connects, and runs `work` on the connection.
    ///
    /// # Errors
    /// If the guest cannot be reached or does not allow this target, if nothing listens there, or if the connection is
    /// lost before `work` is done.
    pub async fn with<T, W>(&self, work: impl FnOnce(UnixStream) -> W) -> Result<T, Failure>
    where
        W: Future<Output = T>,
    {
        let behalf = Behalf::of(Caller::Told(format!("scrape:{}", self.job.name)));
        let _place =
            machine::place_for_stream(self.desks, self.fleet, self.vm, behalf.caller(), Beside::Forwards)
                .await?;
        let mut call = beside::dial(self.fleet, self.vm).await?;
        let (outbox, said) = Outbox::<Saying>::new();
        outbox.say(Saying::First(Message::Open(OpenForward::default())));
        let connect = ConnectTarget { number: NUMBER, target: self.job.target.clone() };
        outbox.say(Saying::First(Message::Connect(connect)));
        let mut client =
            ForwardClient::with_origin(call.client.clone(), origin()).max_decoding_message_size(MAX_MESSAGE);
        let begun = call.drive(BEGIN, client.forward_connections(behalf.state(sent(said)))).await;
        let mut answers = begun?.into_inner();
        connected(&mut call, &mut answers).await?;

        // A socket pair ends the forwarded connection here, so that `work` can use an ordinary stream.
        let pair = UnixStream::pair();
        let (here, there) = pair
            .map_err(|error| Failure::new(Outcome::Unreachable, format!("cannot open a socket: {error}")))?;
        let link = Link::default();
        let driven = async {
            let manner = Manner { window: WINDOW, patience: None };
            carry(NUMBER, Socket::Unix(there), &link, &outbox, manner).await;
            std::future::pending().await
        };
        tokio::select! {
            done = work(here) => Ok(done),
            lost = read(&mut call, &mut answers, &link) => Err(lost),
            never = driven => never,
        }
    }
}

/// Waits until the guest has connected to the target.
async fn connected(call: &mut Line, answers: &mut Streaming<FromTarget>) -> Result<(), Failure> {
    loop {
        match call.next(answers).await?.and_then(|answer| answer.message) {
            Some(Told::Opened(_)) => {}
            Some(Told::Connected(NUMBER)) => return Ok(()),
            Some(Told::Refused(refused)) => {
                let outcome = match refused.because() {
                    RefusedBecause::Denied => Outcome::Denied,
                    _ => Outcome::Unreachable,
                };
                return Err(Failure::new(outcome, text::clean_words(&refused.reason)));
            }
            _ => return Err(Failure::new(Outcome::Unreachable, "the guest violates the protocol")),
        }
    }
}

/// Reads messages from the guest until the stream ends, and returns the reason.
async fn read(call: &mut Line, answers: &mut Streaming<FromTarget>, link: &Link) -> Failure {
    loop {
        let taken = match call.next(answers).await.map(|answer| answer.and_then(|answer| answer.message)) {
            Ok(Some(Told::Data(data))) => link.receive(&data.data),
            Ok(Some(Told::Credit(credit))) => link.grant(credit.bytes),
            Ok(Some(Told::End(_))) => link.end(),
            Ok(Some(Told::Reset(_))) => {
                link.reset();
                Ok(())
            }
            Ok(_) => return Failure::new(Outcome::Unreachable, "the guest has ended the stream"),
            Err(status) => return status.into(),
        };
        if let Err(breach) = taken {
            return breach.into();
        }
    }
}
