//! `guestlet.v1.FileSystems`: the file systems on disks, for the host half, by the verbs that QGA clients have.

use tonic::{Request, Response, Status};

use crate::guest::file_systems::{self, FileSystem, NotTrimmed, Trim};
use crate::guest::{Guest, block_devices};
use crate::rpc::guard;
use crate::rpc::guest::may_work;
use crate::sys::{blocking, error_chain};
use crate::wire::proto::v1;
use crate::wire::proto::v1::file_systems_server::{self, FileSystemsServer};
use crate::wire::proto::v1::trimmed_file_system::Outcome;

/// Implementation of the gRPC service.
#[derive(Debug, Clone)]
pub struct Service(Guest);

impl Service {
    /// A service over this guest.
    pub fn new(guest: Guest) -> Self {
        Self(guest)
    }

    /// The service as HTTP/2 serves it.
    pub fn into_server(self) -> FileSystemsServer<Self> {
        FileSystemsServer::new(self)
    }

    /// Runs `work`, which may block for as long as a disk hangs, outside the event loop.
    async fn away<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Guest) -> Result<T, block_devices::Error> + Send + 'static,
    ) -> Result<T, Status> {
        may_work()?;
        let guest = self.0.clone();
        let done = blocking::attempt(move || work(&guest)).await;
        let done = done.map_err(|error| Status::internal(error.to_string()))?;
        done.map_err(|error| Status::internal(error_chain::words(&error)))
    }
}

fn file_system(file_system: FileSystem) -> v1::FileSystemOnDisk {
    let usage = file_system.usage;
    let disks = file_system.device.disks.iter().map(|disk| v1::DiskOfFileSystem {
        file: disk.file.clone(),
        serial: disk.serial.clone().unwrap_or_default(),
    });
    v1::FileSystemOnDisk {
        device: file_system.device.name.clone(),
        used_bytes: usage.map(|usage| usage.used),
        total_bytes: usage.map(|usage| usage.total),
        total_bytes_privileged: usage.map(|usage| usage.total_privileged),
        disks: disks.collect(),
        mount_point: file_system.mount_point,
        r#type: file_system.kind,
    }
}

fn trimmed(trim: Trim) -> v1::TrimmedFileSystem {
    let unsupported = matches!(&trim.outcome, Err(NotTrimmed::Unsupported));
    let outcome = match trim.outcome {
        Ok(trimmed) => Outcome::Trimmed(trimmed.bytes),
        Err(why) => Outcome::Problem(why.to_string()),
    };
    v1::TrimmedFileSystem { mount_point: trim.mount_point, outcome: Some(outcome), unsupported }
}

#[tonic::async_trait]
impl file_systems_server::FileSystems for Service {
    async fn list_file_systems(
        &self,
        _: Request<v1::ListFileSystemsRequest>,
    ) -> Result<Response<v1::ListFileSystemsResponse>, Status> {
        let found = self.away(file_systems::list).await?;
        let file_systems = found.into_iter().map(file_system).collect();
        Ok(Response::new(v1::ListFileSystemsResponse { file_systems }))
    }

    async fn trim_file_systems(
        &self,
        request: Request<v1::TrimFileSystemsRequest>,
    ) -> Result<Response<v1::TrimFileSystemsResponse>, Status> {
        guard::concerns(&request, || request.get_ref().mount_points.join(" "));
        let v1::TrimFileSystemsRequest { mount_points, minimum, .. } = request.into_inner();
        let trims = self.away(move |guest| file_systems::trim(guest, minimum, &mount_points)).await?;
        let file_systems = trims.into_iter().map(trimmed).collect();
        Ok(Response::new(v1::TrimFileSystemsResponse { file_systems }))
    }
}
