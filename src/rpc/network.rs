//! `guestlet.v1.Network`: interfaces and routes, for the host half, by the verbs that QGA clients have.

use tonic::{Request, Response, Status};

use crate::guest::network::{self, Interface};
use crate::guest::{Guest, routes};
use crate::rpc::guest::may_work;
use crate::sys::error_chain;
use crate::sys::routes::{Route4, Route6};
use crate::wire::proto::v1;
use crate::wire::proto::v1::network_server::{self, NetworkServer};

/// Implementation of the gRPC service.
#[derive(Debug, Clone)]
pub struct Service(Guest);

impl Service {
    /// A service over this guest.
    pub fn new(guest: Guest) -> Self {
        Self(guest)
    }

    /// The service as HTTP/2 serves it.
    pub fn into_server(self) -> NetworkServer<Self> {
        NetworkServer::new(self)
    }
}

fn interface(interface: Interface) -> v1::InterfaceOfGuest {
    let counters = interface.statistics.as_ref().map(|counters| v1::InterfaceCounters {
        received_bytes: counters.receive_bytes,
        received_packets: counters.receive_packets,
        received_errors: counters.receive_errors,
        received_dropped: counters.receive_dropped,
        sent_bytes: counters.transmit_bytes,
        sent_packets: counters.transmit_packets,
        sent_errors: counters.transmit_errors,
        sent_dropped: counters.transmit_dropped,
    });
    let addresses = interface.addresses.iter().map(|one| format!("{}/{}", one.ip, one.prefix));
    v1::InterfaceOfGuest {
        hardware_address: interface.hardware_address().map(network::hardware_address).unwrap_or_default(),
        running: interface.running,
        addresses: addresses.collect(),
        counters,
        name: interface.name,
    }
}

fn route4(route: Route4) -> v1::Route {
    let prefix = u32::from(route.mask).count_ones();
    v1::Route {
        interface: route.interface,
        destination: format!("{}/{prefix}", route.destination),
        gateway: if route.gateway.is_unspecified() { String::new() } else { route.gateway.to_string() },
        metric: route.metric,
    }
}

fn route6(route: Route6) -> v1::Route {
    v1::Route {
        interface: route.interface,
        destination: format!("{}/{}", route.destination, route.destination_prefix),
        gateway: if route.next_hop.is_unspecified() { String::new() } else { route.next_hop.to_string() },
        metric: route.metric.into(),
    }
}

#[tonic::async_trait]
impl network_server::Network for Service {
    async fn list_interfaces(
        &self,
        _: Request<v1::ListInterfacesRequest>,
    ) -> Result<Response<v1::ListInterfacesResponse>, Status> {
        let found = network::interfaces().map_err(|error| Status::internal(error.to_string()))?;
        let interfaces = found.into_iter().map(interface).collect();
        Ok(Response::new(v1::ListInterfacesResponse { interfaces }))
    }

    async fn list_routes(
        &self,
        _: Request<v1::ListRoutesRequest>,
    ) -> Result<Response<v1::ListRoutesResponse>, Status> {
        may_work()?;
        let found = routes::list(&self.0).await;
        let (four, six) = found.map_err(|error| Status::internal(error_chain::words(&error)))?;
        let routes = four.into_iter().map(route4).chain(six.into_iter().map(route6)).collect();
        Ok(Response::new(v1::ListRoutesResponse { routes }))
    }
}
