//! Compiles the protobuf definitions without needing `protoc`.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write as _;
use std::path::Path;

use protox::prost::Message as _;
use protox::prost_reflect::prost_types::field_descriptor_proto::{Label, Type};
use protox::prost_reflect::prost_types::{DescriptorProto, FieldDescriptorProto, FileDescriptorSet};

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
    let messages = Messages::of_api(&descriptors);
    #[allow(clippy::disallowed_methods, reason = "a build script has no other way to write")]
    std::fs::write(Path::new(&out).join("messages.rs"), messages.tables()?)?;
    let mut configured = tonic_prost_build::configure();
    for path in messages.printed() {
        configured = configured.type_attribute(path, "#[derive(serde::Serialize)]");
    }
    configured
        .type_attribute(".guestlet.v1.Event.kind", "#[derive(serde::Serialize)] #[serde(untagged)]")
        // What the state is made of is told by the events themselves.
        .field_attribute(".guestlet.v1.AgentReady.state", "#[serde(skip)]")
        .field_attribute(".guestlet.v1.Topology.labels", SORTED)
        .field_attribute(".guestlet.v1.Node.labels", SORTED)
        .build_transport(false)
        .codec_path("crate::wire::codec::Prost")
        .btree_map(".guestlet.v1.VirtualMachine.labels")
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

const SORTED: &str = "#[serde(serialize_with = \"crate::wire::messages::sorted\")]";

/// The messages of guests and hypervisors, beside events, whose memory is counted before they are decoded.
const OTHERS: [&str; 6] = [
    "FindDiskResponse",
    "GuestInfo",
    "IoError",
    "LoadBalancerChanged",
    "ReleaseDiskResponse",
    "VolumeChanged",
];

/// Lists whose length the settings of a host limit, by the name of their limit (`List` in src/wire/weigh.rs).
const LIMITED: [(&str, &str); 6] = [
    ("GuestState.disks", "Disks"),
    ("GuestState.file_systems", "FileSystems"),
    ("GuestState.interfaces", "Interfaces"),
    ("GuestState.users", "Users"),
    ("InterfacesChanged.interfaces", "Interfaces"),
    ("NetworkInterface.addresses", "Addresses"),
];

/// Keys that each event has in JSON beside its own fields: no field may have one of these names.
const OF_ALL_EVENTS: [&str; 5] = ["event", "guest_time", "name", "sequence", "time"];

/// The messages of guestlet.v1, by their names.
struct Messages<'d>(BTreeMap<&'d str, &'d DescriptorProto>);

impl<'d> Messages<'d> {
    fn of_api(descriptors: &'d FileDescriptorSet) -> Self {
        let api = descriptors.file.iter().filter(|file| file.package() == "guestlet.v1");
        Self(api.flat_map(|file| &file.message_type).map(|message| (message.name(), message)).collect())
    }

    /// The message of this package that a field has.
    fn within(field: &FieldDescriptorProto) -> Option<&str> {
        field.type_name.as_deref()?.strip_prefix(".guestlet.v1.").filter(|_| field.r#type() == Type::Message)
    }

    fn fields(&self, name: &str) -> &'d [FieldDescriptorProto] {
        self.0.get(name).map_or(&[], |message| &message.field)
    }

    /// The kinds of events of guests: fields of a oneof.
    fn kinds(&self) -> impl Iterator<Item = &'d FieldDescriptorProto> {
        self.fields("Event").iter().filter(|field| field.oneof_index.is_some())
    }

    /// Adds a message, and all that are within it.
    fn collect(&self, name: &str, skipped: &str, found: &mut BTreeMap<String, &'d DescriptorProto>) {
        let Some(message) = self.0.get(name).filter(|_| name != skipped) else { return };
        if found.insert(name.to_owned(), message).is_none() {
            let inner = message.field.iter().filter_map(Self::within);
            inner.for_each(|inner| self.collect(inner, skipped, found));
        }
    }

    /// The paths of messages that programs read as JSON.
    fn printed(&self) -> Vec<String> {
        let mut found = BTreeMap::new();
        self.kinds().filter_map(Self::within).for_each(|kind| self.collect(kind, "GuestState", &mut found));
        found.into_keys().map(|name| format!(".guestlet.v1.{name}")).collect()
    }

    /// Two lists for macros of src/: `event_kinds` has all kinds of events, `messages` all messages that events and [`OTHERS`]
    /// have, with the fields that take memory of their own.
    ///
    /// # Errors
    /// If there is something in a message that nobody would bound or show.
    fn tables(&self) -> Result<String, String> {
        let mut kinds = String::new();
        let mut found = BTreeMap::new();
        for (field, message) in self.kinds().filter_map(|field| Some((field, Self::within(field)?))) {
            // Writing to a String cannot fail.
            let _ = writeln!(kinds, "{message} {:?} = {};", field.name().replace('_', "-"), field.number());
            if let Some(taken) =
                self.fields(message).iter().find(|field| OF_ALL_EVENTS.contains(&field.name()))
            {
                return Err(format!(
                    "{message}.{}: all events have this key; name the field otherwise",
                    taken.name()
                ));
            }
            self.collect(message, "", &mut found);
        }
        for name in OTHERS {
            self.collect(name, "", &mut found);
        }
        let mut messages = String::new();
        for (name, message) in &found {
            let rows = message.field.iter().map(|field| row(name, message, field));
            let _ = writeln!(messages, "{name} {{ {} }}", rows.collect::<Result<String, _>>()?);
        }
        let list = |name: &str, rows: String| {
            format!("macro_rules! {name} {{ ($callback:ident) => {{ $callback! {{\n{rows}}} }}; }}\n")
        };
        Ok(list("event_kinds", kinds) + &list("messages", messages))
    }
}

/// A field as `name: kind (message, limit) = number;`; empty for what is within the message itself, such as a number.
fn row(of: &str, message: &DescriptorProto, field: &FieldDescriptorProto) -> Result<String, String> {
    let name = if field.name() == "type" { "r#type" } else { field.name() };
    let is_list = field.label() == Label::Repeated;
    let is_map = || {
        let entry = field.type_name().rsplit('.').next();
        message.nested_type.iter().any(|nested| Some(nested.name()) == entry)
    };
    let (kind, inner) = match (field.r#type(), Messages::within(field)) {
        (Type::String, _) if is_list => ("texts", "None"),
        (Type::String, _) => ("text", "None"),
        (Type::Message, Some(_)) if is_map() => ("map", "None"),
        (Type::Message, Some(inner)) => (if is_list { "many" } else { "one" }, inner),
        (Type::Bytes, _) => {
            return Err(format!("{of}.{name}: the memory of bytes is not counted; add a kind of field"));
        }
        _ if is_list => {
            return Err(format!("{of}.{name}: the memory of such lists is not counted; add a kind of field"));
        }
        _ => return Ok(String::new()),
    };
    let path = format!("{of}.{}", field.name());
    let limit = LIMITED.iter().find(|(limited, _)| *limited == path).map_or("None", |(_, limit)| limit);
    Ok(format!("{name}: {kind} ({inner}, {limit}) = {};", field.number()))
}
