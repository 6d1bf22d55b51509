//! `guestlet.v1.Admin` for `guestctl`, on a unix socket that only its owner can open.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio_stream::wrappers::BroadcastStream;
use tokio_stream::{Stream, StreamExt as _};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::fleet::{Handle, Stopped};
use crate::supervise::Scope;
use crate::transport::http2;
use crate::transport::unix::Listener;
use crate::wire::proto::v1::admin_server::{Admin, AdminServer};
use crate::wire::proto::v1::{
    GetVirtualMachineRequest, ListVirtualMachinesRequest, ListVirtualMachinesResponse, VirtualMachine,
    VirtualMachineEvent, WatchVirtualMachinesRequest,
};

/// Connections at a time; a further one is closed at once.
const MAX_CLIENTS: usize = 64;
/// Bytes of one request.
const MAX_REQUEST: usize = 4 * 1024;
/// The wait after a connection could not be accepted, for example for want of descriptors.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// Serves `socket` until `shutdown`, and then closes every connection within moments. Removes the socket.
pub async fn run(socket: Listener, fleet: Handle, shutdown: CancellationToken) {
    let service = AdminServer::new(Api { fleet }).max_decoding_message_size(MAX_REQUEST);
    let places = Arc::new(Semaphore::new(MAX_CLIENTS));
    let clients = Scope::new();
    loop {
        let accepted = tokio::select! {
            () = shutdown.cancelled() => break,
            accepted = socket.accept() => accepted,
        };
        let stream = match accepted {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a client");
                tokio::time::sleep(ACCEPT_AGAIN).await;
                continue;
            }
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            tracing::debug!("a client was turned away: there are {MAX_CLIENTS}");
            continue;
        };
        let (service, shutdown) = (service.clone(), shutdown.clone());
        clients.children().spawn(async move {
            if let Err(error) = http2::serve(stream, service, shutdown).await {
                tracing::debug!(%error, "a client's connection broke");
            }
            drop(place);
        });
    }
    // The connections end by themselves; the socket must not promise anything meanwhile.
    drop(socket);
    drop(places.acquire_many(u32::try_from(MAX_CLIENTS).unwrap_or(u32::MAX)).await);
}

struct Api {
    fleet: Handle,
}

impl From<Stopped> for Status {
    fn from(stopped: Stopped) -> Self {
        Self::unavailable(stopped.to_string())
    }
}

fn unknown() -> Status {
    Status::not_found("no VM of this name is known")
}

#[tonic::async_trait]
impl Admin for Api {
    async fn list_virtual_machines(
        &self,
        _request: Request<ListVirtualMachinesRequest>,
    ) -> Result<Response<ListVirtualMachinesResponse>, Status> {
        let virtual_machines = self.fleet.list().await?;
        Ok(Response::new(ListVirtualMachinesResponse { virtual_machines }))
    }

    async fn get_virtual_machine(
        &self,
        request: Request<GetVirtualMachineRequest>,
    ) -> Result<Response<VirtualMachine>, Status> {
        let found = self.fleet.get(request.into_inner().name).await?;
        Ok(Response::new(found.ok_or_else(unknown)?))
    }

    type WatchVirtualMachinesStream = Pin<Box<dyn Stream<Item = Result<VirtualMachineEvent, Status>> + Send>>;

    async fn watch_virtual_machines(
        &self,
        request: Request<WatchVirtualMachinesRequest>,
    ) -> Result<Response<Self::WatchVirtualMachinesStream>, Status> {
        let name = Some(request.into_inner().name).filter(|name| !name.is_empty());
        let events = self.fleet.watch(name.clone()).await?.ok_or_else(unknown)?;
        let events = BroadcastStream::new(events).filter_map(move |event| match event {
            Ok(event) if name.as_ref().is_some_and(|name| *name != event.name) => None,
            Ok(event) => Some(Ok(event)),
            Err(_) => Some(Err(Status::data_loss("events were lost: they came faster than they were read"))),
        });
        Ok(Response::new(Box::pin(events)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::backends::{Change, Vm};
    use crate::host::fleet::Fleet;
    use crate::transport::dial::Target;

    #[tokio::test]
    async fn a_watcher_that_is_too_slow_is_told_so() {
        let (fleet, changes, handle) = Fleet::new();
        let shutdown = CancellationToken::new();
        let watching = async {
            let target = Target::Unix { path: "/nowhere/a".into() };
            let vm = Vm { name: "a".into(), uuid: String::new(), cluster: String::new(), target };
            changes.send(Change::Listed(vec![vm])).await.unwrap();
            let api = Api { fleet: handle.clone() };
            let request = WatchVirtualMachinesRequest::default();
            let mut events = api.watch_virtual_machines(Request::new(request)).await.unwrap().into_inner();
            for _ in 0..2000 {
                changes.send(Change::Reset { name: "a".into() }).await.unwrap();
            }
            // All of them are through when the changes' inbox has been emptied.
            while changes.capacity() < changes.max_capacity() {
                tokio::task::yield_now().await;
            }
            let lost = events.next().await.unwrap().unwrap_err();
            assert_eq!(lost.code(), tonic::Code::DataLoss);
            shutdown.cancel();
        };
        tokio::join!(fleet.run(shutdown.clone()), watching);
    }
}
