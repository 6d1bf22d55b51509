//! docs/events.md: every kind of event, and the keys that programs read of it.

use std::collections::{BTreeMap, BTreeSet};

use guestlet::ctl::json;
use guestlet::ctl::kinds;
use guestlet::wire::proto::v1::{Event, VirtualMachineEvent, VolumeAction, virtual_machine_event::Kind};
use prost::Message as _;
use prost_types::FileDescriptorSet;

/// Keys that all events have, and those that all events of guests have besides.
const COMMON: [&str; 3] = ["event", "name", "time"];
const OF_GUESTS: [&str; 2] = ["guest_time", "sequence"];

/// The numbers of the fields of this message's `kind`.
fn kinds_of(message: &str) -> Vec<u32> {
    let all = FileDescriptorSet::decode(super::DESCRIPTORS).unwrap();
    let found = all.file.iter().filter(|file| file.package() == "guestlet.v1");
    let found = found.flat_map(|file| &file.message_type).find(|found| found.name() == message).unwrap();
    let numbers = found.field.iter().filter(|field| field.oneof_index.is_some());
    numbers.map(|field| u32::try_from(field.number()).unwrap()).collect()
}

/// A message that has nothing but this field, which is an empty message.
fn with_empty<M: prost::Message + Default>(field: u32) -> M {
    let mut bytes = Vec::new();
    prost::encoding::encode_key(field, prost::encoding::WireType::LengthDelimited, &mut bytes);
    bytes.push(0);
    M::decode(&bytes[..]).unwrap()
}

/// One of each kind.
fn all() -> Vec<VirtualMachineEvent> {
    let mut events = vec![VirtualMachineEvent::default()];
    for field in kinds_of("VirtualMachineEvent") {
        let event: VirtualMachineEvent = with_empty(field);
        match event.kind.clone().unwrap() {
            Kind::GuestEvent(_) => events.extend(kinds_of("Event").into_iter().map(|field| {
                let kind = Kind::GuestEvent(with_empty::<Event>(field));
                VirtualMachineEvent { kind: Some(kind), ..VirtualMachineEvent::default() }
            })),
            Kind::VolumeChanged(changed) => {
                let actions = (1..).map_while(|number| VolumeAction::try_from(number).ok());
                events.extend(actions.map(|action| {
                    let mut changed = changed.clone();
                    changed.set_action(action);
                    let kind = Some(Kind::VolumeChanged(changed));
                    VirtualMachineEvent { kind, ..VirtualMachineEvent::default() }
                }));
            }
            _ => events.push(event),
        }
    }
    events
}

fn keys(event: &VirtualMachineEvent) -> String {
    let value = serde_json::to_value(json::Event::from(event.clone())).unwrap();
    let is_of_guest = matches!(event.kind, Some(Kind::GuestEvent(_)));
    let known =
        |key: &&String| COMMON.contains(&key.as_str()) || (is_of_guest && OF_GUESTS.contains(&key.as_str()));
    let own: BTreeSet<_> = value.as_object().unwrap().keys().filter(|key| !known(key)).collect();
    own.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ")
}

#[test]
fn the_page_of_events_has_every_kind_with_its_keys() {
    let wanted: BTreeMap<_, _> = all().iter().map(|event| (kinds::name(event), keys(event))).collect();
    assert_eq!(wanted.keys().copied().collect::<BTreeSet<_>>(), kinds::names().collect());
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/events.md");
    let page = std::fs::read_to_string(page).unwrap();
    let mut found = BTreeMap::new();
    let mut above = String::new();
    for row in page.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<_> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [name, when, keys] = cells[..] else { panic!("a row with another number of cells: {row}") };
        assert!(!when.is_empty(), "{row}");
        if keys != "as above" {
            keys.clone_into(&mut above);
        }
        found.insert(name.trim_matches('`'), above.clone());
    }
    assert_eq!(found, wanted);
}
