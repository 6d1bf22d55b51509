//! Services that a host half can call on its session: all services of the control channel, told apart by the paths
//! of calls. To add one: its place in [`Services`], and in [`all`].

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::copies::records::Records;
use crate::guest::Guest;
use crate::qga;
use crate::rpc::guard::Gate;
use crate::rpc::qga::Engine;
use crate::rpc::{
    self, accounts, exec, file_systems, files, forward, freeze, guest, health_checks, journal, machine,
    metrics, network, power,
};
use crate::transport::Both;
use crate::wire::proto::v1::accounts_server::AccountsServer;
use crate::wire::proto::v1::exec_server::ExecServer;
use crate::wire::proto::v1::file_systems_server::FileSystemsServer;
use crate::wire::proto::v1::files_server::FilesServer;
use crate::wire::proto::v1::forward_server::ForwardServer;
use crate::wire::proto::v1::freeze_server::FreezeServer;
use crate::wire::proto::v1::health_checks_server::HealthChecksServer;
use crate::wire::proto::v1::journal_server::JournalServer;
use crate::wire::proto::v1::machine_server::MachineServer;
use crate::wire::proto::v1::metrics_server::MetricsServer;
use crate::wire::proto::v1::network_server::NetworkServer;
use crate::wire::proto::v1::power_server::PowerServer;
use crate::wire::proto::v1::qga_server::QgaServer;

/// Combination of all services.
pub type Services = Both<
    ExecServer<exec::Service>,
    Both<
        FilesServer<files::Service>,
        Both<
            ForwardServer<forward::Service>,
            Both<JournalServer<journal::Service>, Both<MetricsServer<metrics::Service>, Machine>>,
        >,
    >,
>;

/// Services whose verbs QGA clients have as well, and those that keep up a session.
type Machine = Both<QgaServer<rpc::qga::Service>, Both<FreezeServer<freeze::Service>, Reading>>;

/// Services that read and set properties of the machine.
type Reading = Both<
    FileSystemsServer<file_systems::Service>,
    Both<
        NetworkServer<network::Service>,
        Both<MachineServer<machine::Service>, Both<AccountsServer<accounts::Service>, Before>>,
    >,
>;

/// Remaining services.
type Before =
    Both<PowerServer<power::Service>, Both<HealthChecksServer<health_checks::Service>, guest::Served>>;

/// Builds the services for this guest. QGA commands are carried out by the same engine as those of QGA clients.
/// Programs, copies and forwarded connections are subject to the rules of `gate`, and have clients until
/// `stopping`. `records` has the interrupted copies.
pub fn all(
    guest: &Guest,
    context: Arc<qga::Context>,
    checks: health_checks::Service,
    api: guest::Service,
    gate: &Gate,
    records: Records,
    stopping: CancellationToken,
) -> Services {
    let before = Both(checks.into_server(), api.into_server());
    let power = Both(power::Service::new(guest.clone()).into_server(), before);
    let accounts = Both(accounts::Service::new(guest.clone()).into_server(), power);
    let hardware = Both(machine::Service::new(guest.clone()).into_server(), accounts);
    let network = Both(network::Service::new(guest.clone()).into_server(), hardware);
    let file_systems = Both(file_systems::Service::new(guest.clone()).into_server(), network);
    let freeze = Both(freeze::Service::new(guest.clone()).into_server(), file_systems);
    let qga = Both(rpc::qga::Service::new(engine(context)).into_server(), freeze);
    let forward = forward::Service::new(guest.clone(), gate.clone(), stopping.clone()).into_server();
    let files = files::Service::new(guest.clone(), gate.clone(), records, stopping.clone()).into_server();
    let metrics = Both(metrics::Service::new(guest.clone()).into_server(), qga);
    let journal = Both(journal::Service::default().into_server(), metrics);
    let exec = exec::Service::new(guest.clone(), gate.clone(), stopping).into_server();
    Both(exec, Both(files, Both(forward, journal)))
}

fn engine(context: Arc<qga::Context>) -> Engine {
    Arc::new(move |command, asker| {
        let context = Arc::clone(&context);
        Box::pin(async move { qga::once::answer(&context, command, &asker).await })
    })
}
