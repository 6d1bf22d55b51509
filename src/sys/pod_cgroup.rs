//! Parser of /proc/*/cgroup, as far as it says to which pod of Kubernetes a process belongs.
//!
//! kubelet gives each pod a control group, which its containers' groups are below. Its name has the pod's UID, and depends
//! on who makes groups for kubelet:
//!
//! ```text
//!  cgroupfs  /kubepods/burstable/pod6f1c0a52-5c0f-…/<container>
//!  systemd   /kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod6f1c0a52_5c0f_….slice/cri-containerd-<container>.scope
//! ```
//!
//! A reader in a namespace of control groups sees others' paths relative to its own (`/../..`).

/// The UID of the pod that a process is in, by the contents of its /proc/*/cgroup; in lower case.
///
/// A container may be able to make groups below its own and give them any name. So of several names in a path that could
/// be those of pods the first counts, which kubelet gave.
pub fn pod(file: &str) -> Option<String> {
    // All hierarchies of version 1 name the same group, except those that kubelet does not use.
    file.lines().filter_map(|line| line.splitn(3, ':').nth(2)).find_map(of_path)
}

fn of_path(path: &str) -> Option<String> {
    path.split('/').find_map(of_component)
}

fn of_component(component: &str) -> Option<String> {
    let uid = match component.strip_suffix(".slice") {
        // The part before the last hyphen is the name of the parent slice.
        Some(slice) => {
            let (parent, pod) = slice.rsplit_once('-')?;
            parent.split('-').any(|part| part == "kubepods").then_some(())?;
            pod.strip_prefix("pod")?.replace('_', "-")
        }
        None => component.strip_prefix("pod")?.to_owned(),
    };
    is_uid(&uid).then(|| uid.to_ascii_lowercase())
}

/// Returns whether the text can be a pod's UID: a UUID, or the hash that static pods have.
fn is_uid(text: &str) -> bool {
    let is_hex = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let lengths = text.split('-').map(str::len);
    let is_uuid = lengths.eq([8, 4, 4, 4, 12]) && text.split('-').all(is_hex);
    is_uuid || (text.len() == 32 && is_hex(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: &str = "6f1c0a52-5c0f-4a8e-9d1b-0d7a2f3b4c5d";
    const OTHER: &str = "11111111-2222-3333-4444-555555555555";

    #[test]
    fn the_pod_of_a_process() {
        let systemd = |uid: &str, class: &str| format!("kubepods{class}-pod{}.slice", uid.replace('-', "_"));
        let cases = [
            (
                "cgroupfs, version 1",
                format!(
                    "12:pids:/kubepods/burstable/pod{POD}/c0\n1:name=systemd:/kubepods/burstable/pod{POD}/c0\n"
                ),
                true,
            ),
            ("cgroupfs, guaranteed", format!("0::/kubepods/pod{POD}/c0\n"), true),
            (
                "systemd, version 2",
                format!(
                    "0::/kubepods.slice/kubepods-burstable.slice/{}/cri-containerd-c0.scope\n",
                    systemd(POD, "-burstable")
                ),
                true,
            ),
            ("systemd, guaranteed", format!("0::/kubepods.slice/{}/crio-c0.scope\n", systemd(POD, "")), true),
            (
                "below another group",
                format!(
                    "0::/kubelet.slice/kubelet-kubepods.slice/{}/x\n",
                    systemd(POD, "").replace("kubepods", "kubelet-kubepods")
                ),
                true,
            ),
            (
                "seen from another pod's namespace",
                format!("0::/../../{}/cri-containerd-c0.scope\n", systemd(POD, "-besteffort")),
                true,
            ),
            (
                "a hybrid: only some hierarchies are kubelet's",
                format!(
                    "2:rdma:/\n1:name=systemd:/kubepods/pod{POD}/c0\n0::/system.slice/containerd.service\n"
                ),
                true,
            ),
            ("the UID in upper case", format!("0::/kubepods/pod{}/c0\n", POD.to_uppercase()), true),
            (
                "what a container makes below its own",
                format!("0::/kubepods/pod{POD}/c0/kubepods/pod{OTHER}/c0\n"),
                true,
            ),
            (
                "the same with systemd",
                format!("0::/{}/c0.scope/{}/c0.scope\n", systemd(POD, ""), systemd(OTHER, "")),
                true,
            ),
            ("no pod", "0::/system.slice/sshd.service\n".to_owned(), false),
            (
                "the UID of a pod in another name",
                format!("0::/system.slice/run-pod{}.service\n", POD.replace('-', "_")),
                false,
            ),
            (
                "a slice that is not kubelet's",
                format!("0::/user-pod{}.slice/x\n", POD.replace('-', "_")),
                false,
            ),
            ("the UID without its word", format!("0::/kubepods/{POD}/c0\n"), false),
            ("more than a UID", format!("0::/kubepods/pod{POD}0/c0\n"), false),
            ("nothing", String::new(), false),
            ("no path", "0:\n::\n".to_owned(), false),
        ];
        for (case, file, is_it) in cases {
            assert_eq!(pod(&file).as_deref(), is_it.then_some(POD), "{case}: {file}");
        }
        let hash = "0123456789abcdef0123456789abcdef";
        assert_eq!(
            pod(&format!("0::/kubepods/besteffort/pod{hash}/c0\n")).as_deref(),
            Some(hash),
            "a static pod"
        );
    }
}
