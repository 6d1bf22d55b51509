//! The seccomp profile of the node's container: it allows vsock and entering a network namespace, and is where kubelet looks.

use std::collections::BTreeSet;

use k8s_openapi::api::apps::v1::DaemonSet;
use serde_json::{Value, json};

use crate::manifests::object;

/// Numbers of address families, and the flag of setns(2) that stands for network namespaces.
const AF_VSOCK: u64 = 40;
const FAMILIES: [u64; 4] = [1, 2, 10, AF_VSOCK];
const NETWORK_NAMESPACE: u64 = 0x4000_0000;
/// Flags of clone(2) that make namespaces.
const NAMESPACES: u64 = 0x7e02_0000;
/// What nobody needs who dials guests. Signals among them: the processes of the host are seen (hostPID).
const DANGEROUS: &str = "add_key bpf chroot create_module delete_module finit_module fsconfig fsmount fsopen init_module io_uring_setup \
    ioperm iopl kcmp kexec_file_load kexec_load keyctl kill lookup_dcookie mount mount_setattr move_mount name_to_handle_at \
    open_by_handle_at open_tree perf_event_open pidfd_getfd pidfd_send_signal pivot_root process_madvise process_vm_readv \
    process_vm_writev ptrace quotactl reboot request_key setdomainname sethostname settimeofday swapoff swapon \
    tgkill tkill umount2 unshare uselib userfaultfd vhangup";

/// Has the program write it, as the init container does.
fn written() -> Value {
    let lab = crate::lab::Lab::new();
    let directory = lab.path("profiles");
    std::fs::create_dir(&directory).unwrap();
    let outcome = lab.daemon("log").arg("seccomp-profile").arg(&directory).status().unwrap();
    assert!(outcome.success(), "{}", lab.log());
    let files: Vec<_> = std::fs::read_dir(&directory).unwrap().map(|one| one.unwrap().file_name()).collect();
    assert_eq!(files, ["node.json"]);
    serde_json::from_slice(&std::fs::read(directory.join("node.json")).unwrap()).unwrap()
}

/// The conditions under which a call is allowed.
fn conditions(profile: &Value, call: &str) -> Vec<Value> {
    let rules = profile["syscalls"].as_array().unwrap().iter();
    let of_it = rules.filter(|rule| rule["names"].as_array().unwrap().iter().any(|name| name == call));
    of_it.filter(|rule| rule["action"] == "SCMP_ACT_ALLOW").map(|rule| rule["args"].clone()).collect()
}

#[test]
fn the_profile_allows_vsock_and_little_else() {
    let profile = written();
    assert_eq!(profile["defaultAction"], "SCMP_ACT_ERRNO");
    let equal = |index: u64, value: u64| json!([{"index": index, "value": value, "op": "SCMP_CMP_EQ"}]);
    assert_eq!(conditions(&profile, "socket"), FAMILIES.map(|family| equal(0, family)));
    assert_eq!(conditions(&profile, "setns"), [equal(1, NETWORK_NAMESPACE)]);
    assert_eq!(conditions(&profile, "prlimit64"), [equal(0, 0)]);
    let threads = json!([{"index": 0, "value": NAMESPACES, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}]);
    assert_eq!(conditions(&profile, "clone"), [threads]);
    assert_eq!(conditions(&profile, "clone3"), Vec::<Value>::new());
    for call in DANGEROUS.split_whitespace() {
        assert_eq!(conditions(&profile, call), Vec::<Value>::new(), "{call}");
    }
    // Each of the others once, so that no later rule takes back a condition.
    let rules = profile["syscalls"].as_array().unwrap();
    let free: Vec<_> = rules
        .iter()
        .filter(|rule| rule["args"].is_null())
        .flat_map(|rule| rule["names"].as_array().unwrap())
        .collect();
    assert_eq!(free.len(), free.iter().map(|name| name.as_str().unwrap()).collect::<BTreeSet<_>>().len());
    for call in ["openat", "connect", "bind", "epoll_wait", "futex", "execve"] {
        assert_eq!(conditions(&profile, call), [Value::Null], "{call}");
    }
}

#[test]
fn the_init_container_puts_the_profile_where_the_container_names_it() {
    let set: DaemonSet = object("node.yaml", "DaemonSet");
    let pod = set.spec.unwrap().template.spec.unwrap();
    let [init] = pod.init_containers.as_deref().unwrap() else { panic!("{:?}", pod.init_containers) };
    let container = &pod.containers[0];
    assert_eq!(init.image, container.image);
    let [command, place] = init.args.as_deref().unwrap() else { panic!("{:?}", init.args) };
    let [mount] = init.volume_mounts.as_deref().unwrap() else { panic!("{:?}", init.volume_mounts) };
    assert_eq!((command.as_str(), place), ("seccomp-profile", &mount.mount_path));
    let volume = pod.volumes.as_ref().unwrap().iter().find(|one| one.name == mount.name).unwrap();
    let directory = &volume.host_path.as_ref().unwrap().path;
    let named = container.security_context.as_ref().unwrap().seccomp_profile.as_ref().unwrap();
    assert_eq!(named.type_, "Localhost");
    let wanted = format!("/var/lib/kubelet/seccomp/{}", named.localhost_profile.as_ref().unwrap());
    assert_eq!(format!("{directory}/node.json"), wanted);
    // Before there is the profile, the runtime's own.
    let whole = pod.security_context.unwrap().seccomp_profile.unwrap();
    assert_eq!(whole.type_, "RuntimeDefault");
}
