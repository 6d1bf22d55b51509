//! Parser of the health log of an NVMe disk: NVM Express base specification, log page 02h.

/// Length of the log.
pub const LOG_LENGTH: usize = 512;

/// Health of a disk. Each 128-bit counter is given as its lower and its upper half, in this order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Health {
    /// A bit for each thing that is wrong.
    pub critical_warning: u8,
    /// Composite temperature in kelvins.
    pub temperature: u16,
    /// Remaining spare capacity in per cent.
    pub available_spare: u8,
    /// Per cent; what is below it is critical.
    pub available_spare_threshold: u8,
    /// Per cent of its life, up to 255.
    pub percentage_used: u8,
    /// Thousands of units of 512 bytes.
    pub data_units_read: [u64; 2],
    /// Thousands of units of 512 bytes.
    pub data_units_written: [u64; 2],
    /// Completed read commands.
    pub host_read_commands: [u64; 2],
    /// Completed write commands.
    pub host_write_commands: [u64; 2],
    /// Time in minutes during which commands were in progress.
    pub controller_busy_time: [u64; 2],
    /// Times that it was switched on.
    pub power_cycles: [u64; 2],
    /// Power-on time in hours.
    pub power_on_hours: [u64; 2],
    /// Times that it was switched off without notice.
    pub unsafe_shutdowns: [u64; 2],
    /// Errors of the medium.
    pub media_errors: [u64; 2],
    /// Entries that the log of errors had in its life.
    pub error_log_entries: [u64; 2],
}

/// Parses the fields of the health log.
pub fn parse(log: &[u8; LOG_LENGTH]) -> Health {
    // The counters follow one another from byte 32 on.
    let (halves, _) = log.as_chunks::<8>();
    let mut counters = halves.iter().skip(4).map(|half| u64::from_le_bytes(*half));
    let mut counter = || [counters.next().unwrap_or_default(), counters.next().unwrap_or_default()];
    Health {
        critical_warning: log[0],
        temperature: u16::from_le_bytes([log[1], log[2]]),
        available_spare: log[3],
        available_spare_threshold: log[4],
        percentage_used: log[5],
        data_units_read: counter(),
        data_units_written: counter(),
        host_read_commands: counter(),
        host_write_commands: counter(),
        controller_busy_time: counter(),
        power_cycles: counter(),
        power_on_hours: counter(),
        unsafe_shutdowns: counter(),
        media_errors: counter(),
        error_log_entries: counter(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_where_the_specification_has_them() {
        let mut log = [0; LOG_LENGTH];
        log[..6].copy_from_slice(&[1, 0x43, 0x01, 100, 10, 3]);
        for (number, place) in (0..20_u64).zip((32..).step_by(8)) {
            log[place..place + 8].copy_from_slice(&(number + 1).to_le_bytes());
        }
        let health = parse(&log);
        assert_eq!(health.critical_warning, 1);
        assert_eq!(health.temperature, 0x143);
        assert_eq!((health.available_spare, health.available_spare_threshold), (100, 10));
        assert_eq!(health.percentage_used, 3);
        assert_eq!(health.data_units_read, [1, 2]);
        assert_eq!(health.power_on_hours, [13, 14]);
        assert_eq!(health.error_log_entries, [19, 20]);
    }
}
