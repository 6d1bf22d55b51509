//! Traffic of network interfaces.

use crate::guest::metrics::{Things, put, whole};
use crate::metrics::table;

/// Maximum number of interfaces that are reported.
const MOST: usize = 32;

/// Returns the samples of each interface in /proc/net/dev except the loopback: first those with a device behind
/// them, and the busiest of these first.
pub(super) fn samples(file: &str, has_device: impl Fn(&str) -> bool) -> Things {
    let mut all: Vec<_> = file.lines().filter_map(line).filter(|(name, _)| *name != "lo").collect();
    all.sort_by_cached_key(|(name, numbers)| {
        (!has_device(name), std::cmp::Reverse(numbers[0].saturating_add(numbers[8])))
    });
    all.truncate(MOST);
    let interface = |(name, numbers): (&str, [u64; 16])| {
        let mut samples = Vec::new();
        let rows = [
            (&table::NET_RECEIVED, 0),
            (&table::NET_SENT, 8),
            (&table::NET_RECEIVED_PACKETS, 1),
            (&table::NET_SENT_PACKETS, 9),
            (&table::NET_RECEIVE_ERRORS, 2),
            (&table::NET_SEND_ERRORS, 10),
            (&table::NET_RECEIVE_DROPPED, 3),
            (&table::NET_SEND_DROPPED, 11),
        ];
        for (family, place) in rows {
            put(&mut samples, family, &[name], whole(numbers[place]));
        }
        samples
    };
    all.into_iter().map(interface).collect()
}

/// Parses a line `  eth0: 1 2 … 16`: eight numbers for received and eight for sent traffic.
fn line(line: &str) -> Option<(&str, [u64; 16])> {
    // Names of aliases contain a colon themselves.
    let (name, rest) = line.rsplit_once(':')?;
    let mut words = rest.split_ascii_whitespace().map(str::parse);
    let mut numbers = [0; 16];
    for number in &mut numbers {
        *number = words.next()?.ok()?;
    }
    Some((name.trim(), numbers))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::guest::metrics::told;

    const CAPTURED: &str = "Inter-|   Receive                                                |  Transmit\n face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed\n\
          lo: 500 5 0 0 0 0 0 0 500 5 0 0 0 0 0 0\n  veth1: 9000 9 0 0 0 0 0 0 9000 9 0 0 0 0 0 0\n  eth0: 100 1 2 3 0 0 0 0 200 4 5 6 0 0 0 0\n eth1: 1 2\n";

    #[test]
    fn interfaces_with_devices_come_first() {
        let found = samples(CAPTURED, |name| name == "eth0");
        let told: Vec<_> = found.iter().map(|interface| told(interface)).collect();
        let expected = [
            "network_received_bytes eth0 100",
            "network_sent_bytes eth0 200",
            "network_received_packets eth0 1",
            "network_sent_packets eth0 4",
            "network_receive_errors eth0 2",
            "network_send_errors eth0 5",
            "network_receive_dropped eth0 3",
            "network_send_dropped eth0 6",
        ];
        assert_eq!(told[0], expected);
        assert_eq!((told.len(), told[1][0].as_str()), (2, "network_received_bytes veth1 9000"));
    }

    proptest! {
        #[test]
        fn any_text_will_do(text in "(eth|:|[0-9]{1,21}|-| |\n|\\PC){0,80}") {
            prop_assert!(samples(&text, |_| true).len() <= MOST);
        }
    }
}
