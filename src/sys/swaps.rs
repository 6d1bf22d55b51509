//! Active swap spaces of the kernel, `proc_swaps(5)`.

use std::io;

use crate::sys::mountinfo::unescape;
use crate::sys::root::Root;

const PATH: &str = "/proc/swaps";

/// Returns the paths of the devices that are used as swap space, without swap files.
///
/// # Errors
/// If the list exists and cannot be read.
pub fn devices(root: &Root) -> io::Result<Vec<String>> {
    match root.read(PATH) {
        Ok(file) => Ok(parse(&file)),
        // A kernel without swap.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// After a line of headings: path, kind, and numbers.
fn parse(file: &[u8]) -> Vec<String> {
    let line = |line: &[u8]| {
        let mut fields = line.split(u8::is_ascii_whitespace).filter(|field| !field.is_empty());
        let (path, kind) = (fields.next()?, fields.next()?);
        (kind == b"partition").then(|| unescape(path))
    };
    file.split(|byte| *byte == b'\n').skip(1).filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_that_are_swapped_to() {
        let file = b"Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n\
            /dev/vdb                                partition\t65532\t\t0\t\t-2\n\
            /swapfile                               file\t\t1024\t0\t-3\n/dev/dm-1 partition 1 0 -4\n\
            /dev/my\\040disk\\040(deleted) partition 1 0 -5\n";
        assert_eq!(parse(file), ["/dev/vdb", "/dev/dm-1", "/dev/my disk (deleted)"]);
        assert!(parse(b"").is_empty());
    }

    #[test]
    fn a_kernel_without_swap_swaps_to_nothing_and_a_list_that_cannot_be_read_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        assert!(devices(&root).unwrap().is_empty());
        std::fs::create_dir_all(root.path(PATH)).unwrap();
        assert!(devices(&root).is_err());
    }
}
