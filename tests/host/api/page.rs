//! The services, messages and enumerations as a page.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use guestlet::access::verb::VERBS;
use guestlet::policy::verbs;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{
    DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet, MethodDescriptorProto,
    ServiceDescriptorProto,
};

use super::comments::Comments;

const PACKAGE: &str = "guestlet.v1";
const TIMESTAMP: &str = "[Timestamp](https://protobuf.dev/reference/protobuf/google.protobuf/#timestamp)";

// Where things are in a file, as `SourceCodeInfo.Location.path` says it: numbers of fields of its descriptor.
const MESSAGE: i32 = 4;
const ENUM: i32 = 5;
const SERVICE: i32 = 6;
/// Enumerations of a message.
const NESTED_ENUM: i32 = 4;
/// Methods of a service, fields of a message and values of an enumeration.
const MEMBER: i32 = 2;

/// Something of a file, and where it is there.
struct Found<'d, T> {
    what: &'d T,
    comments: &'d Comments,
    path: Vec<i32>,
}

impl<T> Found<'_, T> {
    fn member(&self, at: usize) -> Vec<i32> {
        [&self.path[..], &[MEMBER, number(at)]].concat()
    }
}

fn number(at: usize) -> i32 {
    i32::try_from(at).unwrap()
}

/// What the package has, by name.
struct All<'d> {
    services: BTreeMap<&'d str, Found<'d, ServiceDescriptorProto>>,
    messages: BTreeMap<&'d str, Found<'d, DescriptorProto>>,
    /// Of one in a message with that one's name before its own.
    enums: BTreeMap<String, Found<'d, EnumDescriptorProto>>,
}

pub fn of(descriptors: &FileDescriptorSet) -> String {
    let files: Vec<_> = descriptors.file.iter().filter(|file| file.package() == PACKAGE).collect();
    assert!(files.len() > 10, "the protos were not found");
    let comments: Vec<_> = files.iter().map(|file| Comments::of(file)).collect();
    let mut all = All { services: BTreeMap::new(), messages: BTreeMap::new(), enums: BTreeMap::new() };
    for (file, comments) in files.iter().zip(&comments) {
        for (at, what) in file.service.iter().enumerate() {
            all.services.insert(what.name(), Found { what, comments, path: vec![SERVICE, number(at)] });
        }
        for (at, what) in file.message_type.iter().enumerate() {
            let path = vec![MESSAGE, number(at)];
            for (place, of_it) in what.enum_type.iter().enumerate() {
                let path = [&path[..], &[NESTED_ENUM, number(place)]].concat();
                let name = format!("{}.{}", what.name(), of_it.name());
                all.enums.insert(name, Found { what: of_it, comments, path });
            }
            all.messages.insert(what.name(), Found { what, comments, path });
        }
        for (at, what) in file.enum_type.iter().enumerate() {
            all.enums.insert(what.name().to_owned(), Found { what, comments, path: vec![ENUM, number(at)] });
        }
    }
    all.page()
}

/// Whether guestlet-host answers this on the socket of its admin API: then each of its methods has a verb.
fn is_served(service: &ServiceDescriptorProto) -> bool {
    service.method.iter().all(|method| VERBS.iter().any(|verb| verb.method == method.name()))
}

impl All<'_> {
    fn page(&self) -> String {
        let (mut served, others): (Vec<_>, Vec<_>) =
            self.services.values().partition(|service| is_served(service.what));
        served.sort_by_key(|service| (service.what.name() != "Admin", service.what.name()));
        assert!(served.len() >= 10 && served[0].what.name() == "Admin", "the services were not found");
        let mut page = String::from("\n# Services\n\n| service | methods |\n|---|---|\n");
        for service in &served {
            let methods = service.what.method.iter().map(|method| link(method.name()));
            let (name, methods) = (link(service.what.name()), methods.collect::<Vec<_>>().join(", "));
            let _ = writeln!(page, "| {name} | {methods} |");
        }
        for service in &served {
            describe(&mut page, service);
        }
        let (messages, enums) = self.reached(&served);
        page += "\n# Messages\n";
        for name in messages {
            message(&mut page, &self.messages[name]);
        }
        page += "\n# Enumerations\n\nA value that is not here comes from a newer peer: take it for the first one.\n";
        for name in enums {
            enumeration(&mut page, name, &self.enums[name]);
        }
        page += "\n# Services that are not for clients\n\n\
                 The other services of the package are between the programs of guestlet. Their files are there, too, as messages of \
                 theirs are used above; they change with the programs.\n\n| service | what it is |\n|---|---|\n";
        for service in others {
            let words = service.comments.paragraphs(&service.path);
            let words = words.first().map_or("", String::as_str).replace('|', "\\|");
            let _ = writeln!(page, "| {} | {words} |", service.what.name());
        }
        page
    }

    /// The names of the messages and enumerations that clients of these services have to do with.
    fn reached(&self, services: &[&Found<ServiceDescriptorProto>]) -> (BTreeSet<&str>, BTreeSet<&str>) {
        let methods = services.iter().flat_map(|service| &service.what.method);
        let mut next: Vec<&str> =
            methods.flat_map(|method| [method.input_type(), method.output_type()]).collect();
        let (mut messages, mut enums) = (BTreeSet::new(), BTreeSet::new());
        while let Some(full_name) = next.pop() {
            let Some(name) = own(full_name) else { continue };
            if let Some((name, _)) = self.enums.get_key_value(name) {
                enums.insert(name.as_str());
            } else if let Some((name, message)) = self.messages.get_key_value(name)
                && messages.insert(*name)
            {
                let nested = message.what.nested_type.iter().flat_map(|nested| &nested.field);
                next.extend(message.what.field.iter().chain(nested).map(FieldDescriptorProto::type_name));
            }
        }
        (messages, enums)
    }
}

fn describe(page: &mut String, service: &Found<ServiceDescriptorProto>) {
    let _ = write!(page, "\n## {}\n", service.what.name());
    let paragraphs = service.comments.paragraphs(&service.path);
    assert!(!paragraphs.is_empty(), "{} has no comment", service.what.name());
    say(page, &paragraphs);
    for (at, method) in service.what.method.iter().enumerate() {
        let path = service.member(at);
        let before = service.comments.before(&path);
        if !before.is_empty() {
            page.push_str("\n---\n");
        }
        say(page, &before);
        let _ = write!(page, "\n### {}\n", method.name());
        let stream = |is_stream: bool| if is_stream { "stream of " } else { "" };
        let input = kind(method.input_type());
        let output = kind(method.output_type());
        let (asked, answered) = (stream(method.client_streaming()), stream(method.server_streaming()));
        let _ = write!(page, "\n{asked}{input} → {answered}{output}\n");
        say(page, &service.comments.paragraphs(&path));
        let _ = write!(page, "\n{}\n", needs(service.what.name(), method));
    }
}

fn message(page: &mut String, message: &Found<DescriptorProto>) {
    let _ = write!(page, "\n## {}\n", message.what.name());
    say(page, &message.comments.paragraphs(&message.path));
    if message.what.field.is_empty() {
        page.push_str("\nNo fields.\n");
        return;
    }
    page.push_str("\n| field | type | |\n|---|---|---|\n");
    for (at, field) in message.what.field.iter().enumerate() {
        let words = message.comments.cell(&message.member(at));
        let kind = field_kind(message.what, field);
        let _ = writeln!(page, "| `{}` | {kind} | {words} |", field.name());
    }
}

fn field_kind(message: &DescriptorProto, field: &FieldDescriptorProto) -> String {
    if field.label() == Label::Repeated {
        // The entries of a map are messages in this one, and there are no others.
        let entry = message
            .nested_type
            .iter()
            .find(|nested| field.type_name().ends_with(&format!(".{}.{}", message.name(), nested.name())));
        return match entry {
            Some(entry) => {
                let (key, value) = (kind_of(&entry.field[0]), kind_of(&entry.field[1]));
                format!("map of {key} to {value}")
            }
            None => format!("list of {}", kind_of(field)),
        };
    }
    let kind = kind_of(field);
    match field.oneof_index {
        _ if field.proto3_optional() => format!("{kind}, optional"),
        Some(index) => {
            let oneof = &message.oneof_decl[usize::try_from(index).unwrap()];
            format!("{kind}, in `{}`", oneof.name())
        }
        None => kind,
    }
}

fn kind_of(field: &FieldDescriptorProto) -> String {
    match field.r#type() {
        Type::Message | Type::Enum => kind(field.type_name()),
        scalar => scalar.as_str_name().trim_start_matches("TYPE_").to_lowercase(),
    }
}

/// The type of this full name.
fn kind(full_name: &str) -> String {
    if full_name == ".google.protobuf.Timestamp" {
        return TIMESTAMP.to_owned();
    }
    let name = own(full_name).unwrap_or_else(|| panic!("{full_name} is of another package"));
    link(name)
}

fn enumeration(page: &mut String, name: &str, found: &Found<EnumDescriptorProto>) {
    let _ = write!(page, "\n## {name}\n");
    say(page, &found.comments.paragraphs(&found.path));
    page.push_str("\n| value | |\n|---|---|\n");
    for (at, value) in found.what.value.iter().enumerate() {
        let words = found.comments.cell(&found.member(at));
        let _ = writeln!(page, "| `{}` | {words} |", value.name());
    }
}

fn say(page: &mut String, paragraphs: &[String]) {
    for paragraph in paragraphs {
        let _ = write!(page, "\n{paragraph}\n");
    }
}

fn own(full_name: &str) -> Option<&str> {
    full_name.strip_prefix('.')?.strip_prefix(PACKAGE)?.strip_prefix('.')
}

/// To a heading of the page, whose anchor has no dots.
fn link(name: &str) -> String {
    format!("[{name}](#{})", name.to_lowercase().replace('.', ""))
}

/// What whoever calls a method needs: on the host, and in the guest.
fn needs(service: &str, method: &MethodDescriptorProto) -> String {
    let verbs = VERBS.iter().filter(|verb| verb.method == method.name());
    let rules = verbs.map(|verb| format!("the verb `{}` (role `{}`)", verb.words, verb.role.name()));
    let mut words = format!("Needs {}", rules.collect::<Vec<_>>().join(" or "));
    match verbs::find(&format!("/{PACKAGE}.{service}/{}", method.name())) {
        // Asks of the guest what each command asks.
        Some(_) if method.name() == "ExecuteQga" => words += "; in the guest the role of the command",
        Some(verb) => drop(write!(words, "; in the guest the role `{}`", verb.role)),
        None => {}
    }
    words + "."
}
