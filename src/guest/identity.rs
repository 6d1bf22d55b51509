//! Identity of this guest: the identifiers that persist, and the one that changes with every boot.

use std::io;
use std::path::Path;

use nix::sys::utsname::uname;

use crate::sys::files;
use crate::sys::root::Root;

/// Identifiers of the guest; empty where the system has none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Contents of /etc/machine-id; see machine-id(5).
    pub machine_id: String,
    /// Identifier that the kernel generates at every boot.
    pub boot_id: String,
    /// SMBIOS system UUID in lower case.
    pub dmi_uuid: String,
}

/// Reads the identifiers. One that cannot be read is empty.
pub fn identity(root: &Root) -> Identity {
    Identity {
        machine_id: root.line("/etc/machine-id"),
        boot_id: root.line("/proc/sys/kernel/random/boot_id"),
        dmi_uuid: root.line("/sys/class/dmi/id/product_uuid").to_ascii_lowercase(),
    }
}

/// Returns whether this is the agent's first run since the guest booted, by a mark in the directory `folder`,
/// which is in memory (tmpfs).
///
/// # Errors
/// If the mark cannot be written.
pub fn first_run(root: &Root, folder: &Path) -> io::Result<bool> {
    let boot_id = identity(root).boot_id;
    let mark = folder.join("boot-id");
    let known = root.line(&mark.to_string_lossy());
    if known == boot_id {
        return Ok(false);
    }
    files::replace(&mark, boot_id.as_bytes())?;
    Ok(true)
}

/// Returns the kernel's host name; see gethostname(2).
pub fn host_name() -> String {
    uname().map(|name| name.nodename().to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_from_a_tree_and_empty_without_one() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        let nothing = identity(&root);
        assert_eq!((nothing.machine_id.as_str(), nothing.dmi_uuid.as_str()), ("", ""));
        for (path, text) in [
            ("/etc/machine-id", "0123456789abcdef0123456789abcdef\n"),
            ("/proc/sys/kernel/random/boot_id", "a3c7d9a4-4b42-4a54-9d6d-30d9ab2ed2b8\n"),
            ("/sys/class/dmi/id/product_uuid", "6F1C6A4E-0000-4000-8000-000000000001\n"),
        ] {
            let path = root.path(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            #[allow(clippy::disallowed_methods)]
            std::fs::write(path, text).unwrap();
        }
        let read = identity(&root);
        assert_eq!(read.machine_id, "0123456789abcdef0123456789abcdef");
        assert_eq!(read.boot_id, "a3c7d9a4-4b42-4a54-9d6d-30d9ab2ed2b8");
        assert_eq!(read.dmi_uuid, "6f1c6a4e-0000-4000-8000-000000000001");
    }
}
