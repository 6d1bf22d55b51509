//! `guestlet.v1.Guest`: who this guest is, and what happens in it.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::SystemTime;

use tokio_stream::Stream;
use tokio_stream::wrappers::BroadcastStream;
use tokio_stream::wrappers::errors::BroadcastStreamRecvError;
use tonic::{Request, Response, Status};

use crate::guest::{Guest, events, identity, system};
use crate::wire::proto::v1;
use crate::wire::proto::v1::event::Kind;
use crate::wire::proto::v1::guest_server::{self, GuestServer};

/// Bytes of one request; they are all small.
const MAX_REQUEST: usize = 64 * 1024;

/// The service, for one connection after the other.
#[derive(Debug, Clone)]
pub struct Service {
    guest: Guest,
    capabilities: Vec<String>,
}

impl Service {
    /// A service over this guest whose agent can do `capabilities`.
    pub fn new(guest: Guest, capabilities: Vec<String>) -> Self {
        Self { guest, capabilities }
    }

    /// The service as HTTP/2 serves it.
    pub fn into_server(self) -> GuestServer<Self> {
        GuestServer::new(self).max_decoding_message_size(MAX_REQUEST)
    }
}

#[tonic::async_trait]
impl guest_server::Guest for Service {
    async fn get_info(&self, _: Request<v1::GetInfoRequest>) -> Result<Response<v1::GuestInfo>, Status> {
        let identity = identity::identity(&self.guest.root);
        let kernel = system::kernel().map_err(|error| Status::internal(error.to_string()))?;
        let release = system::os_release(&self.guest.root);
        let field = |key| release.get(key).unwrap_or_default();
        Ok(Response::new(v1::GuestInfo {
            machine_id: identity.machine_id,
            boot_id: identity.boot_id,
            dmi_uuid: identity.dmi_uuid,
            host_name: identity::host_name(),
            operating_system: Some(v1::OperatingSystem {
                id: field("ID"),
                name: field("NAME"),
                pretty_name: field("PRETTY_NAME"),
                version_id: field("VERSION_ID"),
            }),
            kernel_release: kernel.release,
            machine: kernel.machine,
            agent_version: crate::VERSION.to_owned(),
            capabilities: self.capabilities.clone(),
            heartbeat_interval_seconds: u32::try_from(events::TICK.as_secs()).unwrap_or(u32::MAX),
        }))
    }

    type WatchEventsStream = Events;

    async fn watch_events(
        &self,
        _: Request<v1::WatchEventsRequest>,
    ) -> Result<Response<Self::WatchEventsStream>, Status> {
        Ok(Response::new(Events {
            source: BroadcastStream::new(self.guest.events.listen()),
            sequence: 0,
            ended: false,
        }))
    }
}

/// The events of one watcher. Ends after the agent said that it stops, or when the watcher is too slow.
#[derive(Debug)]
pub struct Events {
    source: BroadcastStream<events::Event>,
    sequence: u64,
    ended: bool,
}

impl Stream for Events {
    type Item = Result<v1::Event, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let kind = if self.sequence == 0 {
            Kind::AgentReady(v1::AgentReady {})
        } else {
            match ready!(Pin::new(&mut self.source).poll_next(context)) {
                None => return Poll::Ready(None),
                Some(Err(BroadcastStreamRecvError::Lagged(missed))) => {
                    self.ended = true;
                    let status = Status::data_loss(format!("too slow: {missed} events were missed"));
                    return Poll::Ready(Some(Err(status)));
                }
                Some(Ok(event)) => {
                    self.ended = event == events::Event::Stopping;
                    kind(event)
                }
            }
        };
        self.sequence += 1;
        Poll::Ready(Some(Ok(v1::Event {
            sequence: self.sequence,
            time: Some(SystemTime::now().into()),
            kind: Some(kind),
        })))
    }
}

fn kind(event: events::Event) -> Kind {
    match event {
        events::Event::Tick => Kind::Heartbeat(v1::Heartbeat {}),
        events::Event::Stopping => Kind::AgentStopping(v1::AgentStopping {}),
        events::Event::ShutdownRequested(mode) => {
            Kind::ShutdownRequested(v1::ShutdownRequested { mode: mode.to_string() })
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio_stream::StreamExt as _;

    use super::*;
    use crate::guest::power::Mode;
    use guest_server::Guest as _;

    #[tokio::test]
    async fn events_are_numbered_and_end_when_the_agent_stops() {
        let guest = Guest::default();
        let service = Service::new(guest.clone(), Vec::new());
        let stream =
            service.watch_events(Request::new(v1::WatchEventsRequest {})).await.unwrap().into_inner();
        guest.events.tell(events::Event::Tick);
        guest.events.tell(events::Event::ShutdownRequested(Mode::Reboot));
        guest.events.tell(events::Event::Stopping);
        guest.events.tell(events::Event::Tick);
        let events: Vec<_> = stream.map(Result::unwrap).collect().await;
        let kinds: Vec<_> = events.into_iter().map(|event| (event.sequence, event.kind.unwrap())).collect();
        assert_eq!(
            kinds,
            [
                (1, Kind::AgentReady(v1::AgentReady {})),
                (2, Kind::Heartbeat(v1::Heartbeat {})),
                (3, Kind::ShutdownRequested(v1::ShutdownRequested { mode: "reboot".to_owned() })),
                (4, Kind::AgentStopping(v1::AgentStopping {})),
            ]
        );
    }

    #[tokio::test]
    async fn a_watcher_that_is_too_slow_is_told_so() {
        let guest = Guest::default();
        let service = Service::new(guest.clone(), Vec::new());
        let stream =
            service.watch_events(Request::new(v1::WatchEventsRequest {})).await.unwrap().into_inner();
        for _ in 0..1000 {
            guest.events.tell(events::Event::Tick);
        }
        let last = stream.collect::<Vec<_>>().await.pop().unwrap();
        assert_eq!(last.unwrap_err().code(), tonic::Code::DataLoss);
    }
}
