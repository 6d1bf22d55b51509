//! A file system whose server does not answer: FUSE, whose other end the agent has open, and never reads.

use crate::lab::{Lab, find, value};

/// The file system on a loop device in the agents' own namespaces: it has a size that nobody else changes.
const MOUNTS: &str = "exec 9<>/dev/fuse; mount -o loop,ro,noload @/image @/ro; \
    mount -i -t fuse.hangs -o fd=9,rootmode=40000,user_id=0,group_id=0 hangs @/hung";

#[test]
fn one_that_hangs_is_counted_and_the_others_are_told() {
    let host = crate::host::Lab::new();
    for name in ["hung", "ro"] {
        std::fs::create_dir(host.path(name)).unwrap();
    }
    let image = host.path("image");
    std::fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
    let made = std::process::Command::new("mkfs.ext4").args(["-q", "-N", "64"]).arg(&image).status();
    assert!(made.unwrap().success());
    let lab = Lab::made("", MOUNTS, host);
    for _ in 0..3 {
        let samples = lab.metrics("web");
        assert!((value(&samples, "filesystems_unresponsive", &[]) - 1.0).abs() < f64::EPSILON);
        assert!(find(&samples, "filesystem_size_bytes", &[("fstype", "fuse.hangs")]).is_empty());
        let place = lab.host.path("ro");
        let place = [("mountpoint", place.to_str().unwrap())];
        assert!((value(&samples, "filesystem_readonly", &place) - 1.0).abs() < f64::EPSILON);
        assert!((value(&samples, "filesystem_inodes", &place) - 64.0).abs() < f64::EPSILON);
        assert!(value(&samples, "filesystem_errors_total", &place).abs() < f64::EPSILON);
        let (size, available) = (
            value(&samples, "filesystem_size_bytes", &place),
            value(&samples, "filesystem_available_bytes", &place),
        );
        assert!(size > 4e6 && size < 8.4e6 && available < size, "{size} {available}");
    }
}
