//! On a machine whose inotify instances other programs have used up.

use crate::agent::{Agent, lab, until_speaks};
use crate::host::uuid;
use crate::namespace::run_inside;

/// How many inotify instances the users of this user namespace may have.
const INSTANCES: &str = "/proc/sys/user/max_inotify_instances";
/// What is said of that.
const WORDS: &str = "no inotify instances";

/// Neither started where the pods of a node had them all.
#[test]
fn changed_files_are_noticed_though_the_kernel_has_no_room_to_tell_of_them() {
    if crate::namespace::inside().is_none() {
        run_inside(&["--user", "--map-root-user"], &[]);
        return;
    }
    std::fs::write(INSTANCES, "0").unwrap();
    let mut lab = lab(&["web"]).start();
    let mut web = Agent::new(&lab, "web");
    web.start();
    until_speaks(&lab, "web", "plain");
    assert!(web.log().contains(WORDS) && lab.log().contains(WORDS), "{}{}", web.log(), lab.log());

    // A session that is refused from now on has to end.
    web.know(&lab);
    until_speaks(&lab, "web", "keyed");

    lab.edit("name = 'web'", "name = 'web'\ncluster = 'shop'");
    lab.until_vm("web", |vm| vm["cluster"] == "shop");
    let drop_ins = lab.path("host.d");
    std::fs::create_dir(&drop_ins).unwrap();
    let other = format!("[[vm]]\nname = 'other'\nuuid = '{}'\nunix-socket = '/nowhere'\n", uuid(9));
    std::fs::write(drop_ins.join("other.toml"), other).unwrap();
    lab.until("the new VM is listed", || lab.words(&["ls"]).contains("other "));
    assert_eq!(web.log().matches(WORDS).count(), 1, "{}", web.log());
}
