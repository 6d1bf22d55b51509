//! Capabilities of this process (capabilities(7)), as `/proc/self/status` has them.

use super::root::Root;

/// The number of `CAP_NET_ADMIN`.
pub const NET_ADMIN: u32 = 12;

/// Returns whether this process has a capability in its effective set; `None` if that cannot be read.
pub fn has(root: &Root, number: u32) -> Option<bool> {
    let status = root.read("/proc/self/status").ok()?;
    let status = String::from_utf8_lossy(&status);
    let all = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    let all = u64::from_str_radix(all.trim(), 16).ok()?;
    Some(all.checked_shr(number)? & 1 == 1)
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_effect_counts() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        assert_eq!(has(&root, NET_ADMIN), None);
        std::fs::create_dir_all(folder.path().join("proc/self")).unwrap();
        let status = "Name:\tguestlet-host\nCapPrm:\t0000000000000000\nCapEff:\t0000000000001400\nCapBnd:\t000001ffffffffff\n";
        std::fs::write(folder.path().join("proc/self/status"), status).unwrap();
        assert_eq!(
            (has(&root, NET_ADMIN), has(&root, 10), has(&root, 11)),
            (Some(true), Some(true), Some(false))
        );
        assert_eq!(has(&root, 64), None);
    }
}
