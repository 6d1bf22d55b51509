//! Calls of the guest's API that are about disks, as a host half makes them.

use guestlet::transport::http2::{Client, ORIGIN};
use guestlet::wire::proto::v1::disk_selector::By;
use guestlet::wire::proto::v1::guest_client::GuestClient;
use guestlet::wire::proto::v1::{
    Disk, DiskSelector, FindDiskRequest, ReleaseDiskRequest, ReleaseDiskResponse,
};

use crate::harness::grpc::{Answer, call};
use crate::harness::vm::Vm;

fn by_serial(serial: &str) -> DiskSelector {
    DiskSelector { by: Some(By::Serial(serial.to_owned())) }
}

fn ask<T>(vm: &Vm, ask: impl AsyncFnOnce(GuestClient<Client>) -> Answer<T>) -> anyhow::Result<T> {
    let client = |client| GuestClient::with_origin(client, http::Uri::from_static(ORIGIN));
    Ok(call(vm, 970, async |channel| ask(client(channel)).await)?)
}

/// Has the guest release a disk that nobody detaches then.
pub fn release(vm: &Vm, serial: &str) -> ReleaseDiskResponse {
    let request = ReleaseDiskRequest { disk: Some(by_serial(serial)) };
    ask(vm, async |mut client| client.release_disk(request).await).unwrap()
}

/// The disk that the guest has, or gets within the time.
pub fn find(vm: &Vm, serial: &str, wait_milliseconds: u32) -> Option<Disk> {
    try_find(vm, serial, wait_milliseconds).unwrap()
}

/// The same, of an agent that may be starting.
pub fn try_find(vm: &Vm, serial: &str, wait_milliseconds: u32) -> anyhow::Result<Option<Disk>> {
    let request = FindDiskRequest { disk: Some(by_serial(serial)), wait_milliseconds };
    Ok(ask(vm, async |mut client| client.find_disk(request).await)?.disk)
}
