//! What is told of file systems that are trimmed, and when that is an error.

use serde_json::json;

use super::Inside;
use crate::lab::assert_fails;

const WELL: &str = "27 1 254:1 / / rw - ext4 /dev/vda1 rw\n29 27 8:1 / /old rw - ext3 /dev/sda1 rw\n";
const BROKEN: &str = "33 27 8:2 / /broken rw - xfs /dev/sda2 rw\n";

#[test]
fn a_file_system_that_fails_is_an_error_whether_or_not_it_was_named() {
    let inside = Inside::new();
    inside.write("proc/self/mountinfo", WELL);
    let old = json!({
        "mount_point": "/old", "trimmed": null, "problem": "trim not supported", "unsupported": true
    });
    let root = json!({"mount_point": "/", "trimmed": 1 << 20, "problem": null, "unsupported": false});
    // One that cannot be trimmed has not failed, unless somebody wanted just that.
    assert_eq!(inside.json(&["trim", "a"]), json!([old, root]));
    inside.fails(&["trim", "a", "--mount", "/old"], "not trimmed: /old");
    inside.lab.words(&["trim", "a", "--mount", "/"]);

    inside.write("proc/self/mountinfo", format!("{WELL}{BROKEN}"));
    let output = inside.lab.ctl(&["trim", "a"]);
    assert_fails(&output, 1, "not trimmed: /broken");
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(shown.contains("failed to trim: ") && shown.contains("1 MiB"), "{shown}");
    inside.fails(&["trim", "a", "--mount", "/broken"], "not trimmed: /broken");
    inside.fails(&["trim", "a", "--mount", "/nowhere"], "not trimmed: /nowhere");
}
