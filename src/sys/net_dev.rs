//! Parser of /proc/net/dev, `proc_pid_net(5)`: the 64-bit counters of every interface in one read.

use std::collections::HashMap;

/// Counters of one interface since it came up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Bytes received.
    pub receive_bytes: u64,
    /// Packets received.
    pub receive_packets: u64,
    /// Bad packets received.
    pub receive_errors: u64,
    /// Packets dropped on receipt.
    pub receive_dropped: u64,
    /// Bytes sent.
    pub transmit_bytes: u64,
    /// Packets sent.
    pub transmit_packets: u64,
    /// Packets that could not be sent.
    pub transmit_errors: u64,
    /// Packets dropped before they were sent.
    pub transmit_dropped: u64,
}

/// The counters by interface; lines that are none are passed over.
pub fn parse(file: &str) -> HashMap<&str, Statistics> {
    file.lines().filter_map(line).collect()
}

fn line(line: &str) -> Option<(&str, Statistics)> {
    // An interface's own name may hold a ':' (an alias), the counters never do.
    let (name, counters) = line.rsplit_once(':')?;
    let mut values = counters.split_ascii_whitespace().map(str::parse::<u64>);
    let mut columns = [0; 16];
    for column in &mut columns {
        *column = values.next()?.ok()?;
    }
    let [
        receive_bytes,
        receive_packets,
        receive_errors,
        receive_dropped,
        _,
        _,
        _,
        _,
        transmit_bytes,
        transmit_packets,
        transmit_errors,
        transmit_dropped,
        ..,
    ] = columns;
    Some((
        name.trim_start(),
        Statistics {
            receive_bytes,
            receive_packets,
            receive_errors,
            receive_dropped,
            transmit_bytes,
            transmit_packets,
            transmit_errors,
            transmit_dropped,
        },
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPTURED: &str = "Inter-|   Receive                                                |  Transmit\n \
face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed\n    \
lo:   84104     702    0    0    0     0          0         0    84104     702    0    0    0     0       0          0\n  \
eth0: 18446744073709551615 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\neth0:1: 1 2 3\nbroken: x\n";

    #[test]
    fn captured_file() {
        let statistics = parse(CAPTURED);
        assert_eq!(statistics.len(), 2);
        assert_eq!(statistics["lo"].receive_bytes, 84104);
        assert_eq!(
            statistics["eth0"],
            Statistics {
                receive_bytes: u64::MAX,
                receive_packets: 2,
                receive_errors: 3,
                receive_dropped: 4,
                transmit_bytes: 9,
                transmit_packets: 10,
                transmit_errors: 11,
                transmit_dropped: 12,
            }
        );
    }
}
