//! Commands that identify the operating system and the host name.

use serde::Serialize;

use crate::guest::{identity, system};
use crate::policy::Role;
use crate::qga::call::Call;
use crate::qga::reply::Reply;
use crate::qga::table::{Command, Outcome, Pending, Run};
use crate::sys::blocking;

/// Rows of the command table.
pub const COMMANDS: &[Command] = &[
    Command {
        name: "guest-get-host-name",
        role: Some(Role::Status),
        since: "2.10",
        returns: "host-name",
        summary: "The kernel's host name.",
        run: Run::Now(get_host_name),
        ..Command::USUAL
    },
    Command {
        name: "guest-get-osinfo",
        role: Some(Role::Status),
        since: "2.10",
        returns: "kernel-release?, kernel-version?, machine?, id?, name?, pretty-name?, version?, version-id?, variant?, variant-id?",
        summary: "The kernel, and the operating system as os-release(5) names it.",
        run: Run::Later(get_osinfo),
        ..Command::USUAL
    },
];

/// Implements `guest-get-host-name`.
pub fn get_host_name(call: &Call<'_>) -> Outcome {
    #[derive(Serialize)]
    #[serde(rename_all = "kebab-case")]
    struct HostName {
        host_name: String,
    }
    call.arguments.none()?;
    Reply::value(&HostName { host_name: identity::host_name() })
}

/// Implements `guest-get-osinfo`.
pub fn get_osinfo<'a>(call: &'a Call<'a>) -> Pending<'a> {
    #[derive(Serialize)]
    #[serde(rename_all = "kebab-case")]
    struct OsInfo {
        kernel_release: String,
        kernel_version: String,
        machine: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        pretty_name: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        version: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        version_id: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        variant: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        variant_id: Option<String>,
    }
    Box::pin(async move {
        call.arguments.none()?;
        let kernel = system::kernel()?;
        let root = call.context.guest.root.clone();
        // The file may be on a disk that hangs.
        let release = blocking::run(move || system::os_release(&root)).await;
        Reply::value(&OsInfo {
            kernel_release: kernel.release,
            kernel_version: kernel.version,
            machine: kernel.machine,
            id: release.get("ID"),
            name: release.get("NAME"),
            pretty_name: release.get("PRETTY_NAME"),
            version: release.get("VERSION"),
            version_id: release.get("VERSION_ID"),
            variant: release.get("VARIANT"),
            variant_id: release.get("VARIANT_ID"),
        })
    })
}
