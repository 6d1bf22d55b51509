//! Load averages of this guest.

use std::io;

use crate::sys::root::Root;

/// Returns the load averages over the last 1, 5 and 15 minutes: processes that ran, or waited to run or for I/O.
///
/// # Errors
/// If /proc/loadavg cannot be read or parsed.
pub fn load(root: &Root) -> io::Result<[f64; 3]> {
    let file = root.read("/proc/loadavg")?;
    averages(&String::from_utf8_lossy(&file))
        .ok_or_else(|| io::Error::other("/proc/loadavg holds no averages"))
}

fn averages(file: &str) -> Option<[f64; 3]> {
    let mut fields = file.split_ascii_whitespace().map(|field| field.parse::<f64>().ok());
    let mut next = || fields.next().flatten().filter(|average| average.is_finite());
    Some([next()?, next()?, next()?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_numbers() {
        assert_eq!(averages("3.32 1.68 1.56 2/345 6789\n"), Some([3.32, 1.68, 1.56]));
        for wrong in ["", "1 2", "1 2 x", "nan 1 2", "inf 1 2"] {
            assert_eq!(averages(wrong), None, "{wrong:?}");
        }
    }
}
