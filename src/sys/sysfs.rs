//! Access to files and directories of /sys.

use std::fs::{OpenOptions, read_dir};
use std::io::{self, Write as _};

use crate::sys::root::Root;

/// Writes to an existing file with a single write(2), as the kernel requires. May block for as long as the
/// kernel needs to apply the value.
///
/// # Errors
/// The errors of open(2) and write(2): the kernel's verdict on the value.
pub fn write(root: &Root, path: &str, value: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).truncate(true).open(root.path(path))?;
    let written = file.write(value.as_bytes())?;
    if written == value.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Returns the numbers that follow `prefix` in the names of a directory's entries, in ascending order: 0 and 1
/// for cpu0 and cpu1.
///
/// # Errors
/// The errors of open(2) and getdents(2).
pub fn numbers(root: &Root, folder: &str, prefix: &str) -> io::Result<Vec<u64>> {
    let mut numbers = Vec::new();
    for entry in read_dir(root.path(folder))? {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|name| number(name.strip_prefix(prefix)?));
        numbers.extend(number);
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// As the kernel writes them: digits only, and no zeros in front.
fn number(text: &str) -> Option<u64> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    if plain { text.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_names() {
        let folder = tempfile::tempdir().unwrap();
        for name in
            ["cpu0", "cpu10", "cpu2", "cpufreq", "cpu", "cpu+1", "cpu01", "cpu99999999999999999999", "x1"]
        {
            std::fs::create_dir(folder.path().join(name)).unwrap();
        }
        let root = Root::at(folder.path());
        assert_eq!(numbers(&root, "/", "cpu").unwrap(), [0, 2, 10]);
        assert!(numbers(&root, "/nothing", "cpu").is_err());
    }

    #[test]
    fn only_what_is_there_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        assert!(write(&root, "/state", "on").is_err());
        #[allow(clippy::disallowed_methods)]
        std::fs::write(folder.path().join("state"), "offline\n").unwrap();
        write(&root, "/state", "on").unwrap();
        assert_eq!(root.line("/state"), "on");
    }
}
