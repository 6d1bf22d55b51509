use proptest::prelude::*;

use super::*;

/// Messages as the kernel writes them.
fn message(kind: u16, flags: u16, sequence: u32, body: &[u8]) -> Vec<u8> {
    let mut message = request(kind, sequence, body);
    message[6..8].copy_from_slice(&flags.to_ne_bytes());
    message.resize(aligned(message.len()), 0xee);
    message
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(ATTRIBUTE_HEAD + value.len()).unwrap();
    let mut attribute = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
    attribute.extend_from_slice(value);
    attribute.resize(aligned(attribute.len()), 0xee);
    attribute
}

fn link_message(link: &Link, other: &[u8]) -> Vec<u8> {
    let mut body = vec![0; LINK_HEAD];
    body[4..8].copy_from_slice(&link.index.to_ne_bytes());
    body[8..12].copy_from_slice(&link.flags.to_ne_bytes());
    body.extend_from_slice(other);
    body.extend(attribute(libc::IFLA_IFNAME, &[link.name.as_bytes(), b"\0"].concat()));
    if let Some(told) = link.statistics {
        let mut counters = [7; 24];
        counters[..8].copy_from_slice(&[
            told.receive_packets,
            told.transmit_packets,
            told.receive_bytes,
            told.transmit_bytes,
            told.receive_errors,
            told.transmit_errors,
            told.receive_dropped - 1,
            told.transmit_dropped,
        ]);
        // Packets that the device missed.
        counters[15] = 1;
        body.extend(attribute(libc::IFLA_STATS64, &counters.map(u64::to_ne_bytes).concat()));
    }
    body.extend_from_slice(other);
    body.extend(attribute(libc::IFLA_ADDRESS, &link.address));
    message(libc::RTM_NEWLINK, 2, 5, &body)
}

fn address_message(address: &Address, peer: Option<IpAddr>) -> Vec<u8> {
    let bytes = |ip| match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    let family = if address.ip.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let mut body = vec![u8::try_from(family).unwrap(), address.prefix, 0, 0];
    body.extend_from_slice(&address.link.to_ne_bytes());
    body.extend(attribute(libc::IFA_ADDRESS, &bytes(peer.unwrap_or(address.ip))));
    if peer.is_some() {
        body.extend(attribute(libc::IFA_LOCAL, &bytes(address.ip)));
    }
    if let Some(label) = &address.label {
        body.extend(attribute(libc::IFA_LABEL, &[label.as_bytes(), b"\0"].concat()));
    }
    message(libc::RTM_NEWADDR, 2, 5, &body)
}

fn links() -> impl Strategy<Value = Link> {
    let statistics = proptest::option::of((1_u64.., any::<[u64; 7]>()));
    let address = proptest::collection::vec(any::<u8>(), 0..=32);
    (any::<u32>(), "[a-z0-9.:]{1,15}", any::<u32>(), address, statistics).prop_map(
        |(index, name, flags, address, statistics)| {
            let statistics = statistics.map(|(receive_dropped, counters)| {
                let [
                    receive_bytes,
                    receive_packets,
                    receive_errors,
                    transmit_bytes,
                    transmit_packets,
                    transmit_errors,
                    transmit_dropped,
                ] = counters;
                Statistics {
                    receive_bytes,
                    receive_packets,
                    receive_errors,
                    receive_dropped,
                    transmit_bytes,
                    transmit_packets,
                    transmit_errors,
                    transmit_dropped,
                }
            });
            Link { index, name, flags, address, statistics }
        },
    )
}

fn addresses() -> impl Strategy<Value = (Address, Option<IpAddr>)> {
    let v4 = (any::<u32>(), proptest::option::of("[a-z0-9:]{1,15}"), any::<[[u8; 4]; 2]>(), 0..=32_u8)
        .prop_map(|(link, label, [ip, peer], prefix)| {
            (Address { link, label, ip: ip.into(), prefix }, peer.into())
        });
    let v6 = (any::<u32>(), any::<[[u8; 16]; 2]>(), 0..=128_u8).prop_map(|(link, [ip, peer], prefix)| {
        (Address { link, label: None, ip: ip.into(), prefix }, peer.into())
    });
    (prop_oneof![v4, v6], any::<bool>()).prop_map(|((address, peer), has)| (address, has.then_some(peer)))
}

fn unknown() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec((1000..0x3fff_u16, proptest::collection::vec(any::<u8>(), 0..50)), 0..4)
        .prop_map(|all| all.iter().flat_map(|(kind, value)| attribute(*kind, value)).collect())
}

proptest! {
    #[test]
    fn what_is_written_is_read(
        links in proptest::collection::vec((links(), unknown()), 0..8),
        addresses in proptest::collection::vec(addresses(), 0..8),
        together in any::<bool>(),
    ) {
        let mut messages: Vec<_> = links.iter().map(|(link, other)| link_message(link, other)).collect();
        messages.extend(addresses.iter().map(|(address, peer)| address_message(address, *peer)));
        // Messages for another port are skipped.
        messages.push(message(libc::RTM_NEWLINK, 2, 6, &[1; 40]));
        messages.push(message(DONE, 2, 5, &[0; 4]));
        if together {
            messages = vec![messages.concat()];
        }
        let mut answer = Answer::default();
        let (last, others) = messages.split_last().unwrap();
        for message in others {
            prop_assert_eq!(answer.take(message, 5), Ok(false));
        }
        prop_assert_eq!(answer.take(last, 5), Ok(true));
        prop_assert_eq!(&answer.links, &links.into_iter().map(|(link, _)| link).collect::<Vec<_>>());
        prop_assert_eq!(&answer.addresses, &addresses.into_iter().map(|(address, _)| address).collect::<Vec<_>>());
        prop_assert!(!answer.interrupted);
    }

    #[test]
    fn cut_off_messages_are_refused(link in links(), other in unknown(), cut in any::<prop::sample::Index>()) {
        let whole = link_message(&link, &other);
        // The bytes that may be cut off at the end of an attribute are padding.
        let end = HEAD + LINK_HEAD + 2 * other.len() + link.statistics.map_or(0, |_| 196)
            + aligned(5 + link.name.len()) + 4 + link.address.len();
        let length = 1 + cut.index(end - 1);
        let mut answer = Answer::default();
        prop_assert_eq!(answer.take(&whole[..length], 5), Err(Wrong::Malformed));
        prop_assert_eq!(answer, Answer::default());
    }

    #[test]
    fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..200), length in 0..60_u32, kind in 0..40_u16) {
        let _ = Answer::default().take(&bytes, 0);
        let mut bytes = bytes;
        if let Some(start) = bytes.get_mut(..12) {
            start[..4].copy_from_slice(&length.to_ne_bytes());
            start[4..6].copy_from_slice(&kind.to_ne_bytes());
            start[8..12].fill(0);
        }
        let _ = Answer::default().take(&bytes, 0);
    }
}

#[test]
fn the_kernel_says_how_it_ends() {
    let code = |errno: i32| (-errno).to_ne_bytes();
    let take = |message: &[u8]| Answer::default().take(message, 5);
    assert_eq!(take(&message(DONE, 2, 5, &code(0))), Ok(true));
    assert_eq!(take(&message(DONE, 2, 5, &[])), Ok(true));
    assert_eq!(take(&message(DONE, 2, 5, &code(libc::EMSGSIZE))), Err(Wrong::Refused(libc::EMSGSIZE)));
    assert_eq!(take(&message(ERROR, 0, 5, &code(libc::EPERM))), Err(Wrong::Refused(libc::EPERM)));
    assert_eq!(take(&message(ERROR, 0, 5, &code(0))), Err(Wrong::Malformed));
    assert_eq!(take(&message(small(libc::NLMSG_NOOP), 0, 5, &[])), Ok(false));
    assert_eq!(take(&[]), Ok(false));
    assert_eq!(take(&[0; 16]), Err(Wrong::Malformed));
}

#[test]
fn what_is_not_of_one_moment_is_not_whole() {
    let link = Link { index: 1, name: "lo".into(), flags: 0, address: vec![0; 6], statistics: None };
    let address = Address { link: 1, label: None, ip: [127, 0, 0, 1].into(), prefix: 8 };
    let taken = |messages: &[Vec<u8>]| {
        let mut answer = Answer::default();
        answer.take(&messages.concat(), 5).unwrap();
        answer
    };
    let (link, address) = (link_message(&link, &[]), address_message(&address, None));
    assert!(taken(&[link.clone(), address.clone()]).is_whole());
    assert!(!taken(std::slice::from_ref(&address)).is_whole());
    assert!(!taken(&[link.clone(), address, message(OVERRUN, 0, 5, &[])]).is_whole());
    let interrupted = small(libc::NLM_F_DUMP_INTR);
    assert!(!taken(&[link, message(DONE, interrupted, 5, &[0; 4])]).is_whole());
}
