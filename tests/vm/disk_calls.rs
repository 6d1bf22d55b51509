//! Calls of the guest's API that are about disks, as a host half makes them.

use guestlet::transport::http2::{self, Client};
use guestlet::wire::proto::v1::disk_selector::By;
use guestlet::wire::proto::v1::guest_client::GuestClient;
use guestlet::wire::proto::v1::{
    Disk, DiskSelector, FindDiskRequest, ReleaseDiskRequest, ReleaseDiskResponse,
};
use tonic::Status;

use crate::harness::vm::Vm;

fn by_serial(serial: &str) -> Option<DiskSelector> {
    Some(DiskSelector { by: Some(By::Serial(serial.to_owned())) })
}

fn call<T>(
    vm: &Vm,
    call: impl AsyncFnOnce(&mut GuestClient<Client>) -> Result<T, Status>,
) -> anyhow::Result<T> {
    let stream = vm.dial(970)?;
    stream.set_nonblocking(true).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let stream = tokio::net::UnixStream::from_std(stream).unwrap();
        let (client, mut connection) = http2::connect(stream).await?;
        let mut client = GuestClient::with_origin(client, http::Uri::from_static(http2::ORIGIN));
        tokio::select! {
            answer = call(&mut client) => Ok(answer?),
            ended = connection.ended() => anyhow::bail!("{ended:?}"),
        }
    })
}

/// Has the guest release a disk that nobody detaches then.
pub fn release(vm: &Vm, serial: &str) -> ReleaseDiskResponse {
    let request = ReleaseDiskRequest { disk: by_serial(serial) };
    call(vm, async |client| Ok(client.release_disk(request).await?.into_inner())).unwrap()
}

/// The disk that the guest has, or gets within the time.
pub fn find(vm: &Vm, serial: &str, wait_milliseconds: u32) -> Option<Disk> {
    try_find(vm, serial, wait_milliseconds).unwrap()
}

/// The same, of an agent that may be starting.
pub fn try_find(vm: &Vm, serial: &str, wait_milliseconds: u32) -> anyhow::Result<Option<Disk>> {
    let request = FindDiskRequest { disk: by_serial(serial), wait_milliseconds };
    call(vm, async |client| Ok(client.find_disk(request).await?.into_inner().disk))
}
