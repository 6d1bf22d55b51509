//! Compiles the protobuf definitions without needing `protoc`.

use std::error::Error;
use std::path::Path;

use protox::prost::Message as _;

const FILES: [&str; 21] = [
    "csi/v1/csi.proto",
    "guestlet/v1/accounts.proto",
    "guestlet/v1/admin.proto",
    "guestlet/v1/cloud.proto",
    "guestlet/v1/console.proto",
    "guestlet/v1/controller.proto",
    "guestlet/v1/exec.proto",
    "guestlet/v1/file_systems.proto",
    "guestlet/v1/files.proto",
    "guestlet/v1/forward.proto",
    "guestlet/v1/freeze.proto",
    "guestlet/v1/guest.proto",
    "guestlet/v1/host.proto",
    "guestlet/v1/journal.proto",
    "guestlet/v1/local.proto",
    "guestlet/v1/machine.proto",
    "guestlet/v1/metrics.proto",
    "guestlet/v1/network.proto",
    "guestlet/v1/power.proto",
    "guestlet/v1/qga.proto",
    "pluginregistration/registration.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(FILES, ["proto"])?;
    let out = std::env::var_os("OUT_DIR").ok_or("cargo sets no OUT_DIR")?;
    // With the comments, which tests/host/api.rs makes docs/api.md of.
    #[allow(clippy::disallowed_methods, reason = "a build script has no other way to write")]
    std::fs::write(Path::new(&out).join("descriptors.binpb"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        .build_transport(false)
        .codec_path("crate::wire::codec::Prost")
        // Large, and there in few of those messages: events are kept, and wait, in all places of their size.
        .boxed(".guestlet.v1.AgentReady.state")
        .boxed(".guestlet.v1.VirtualMachine.state")
        // Goes through the host half without being copied out of what was received.
        .bytes(".guestlet.v1.ForwardData.data")
        // What is copied stays where it was received.
        .bytes(".guestlet.v1.FileData.data")
        // Has one in src/wire/proto.rs that does not show the password.
        .skip_debug([".guestlet.v1.SetPasswordRequest"])
        .compile_fds(descriptors)?;
    Ok(())
}
