//! Files of nodes that are to join, in an /etc that only this test sees.

use std::path::Path;

use crate::agent::{Agent, PATIENCE};
use crate::lab::{Holder, ask, told, zone};
use crate::namespace;

/// Runs the test that calls this again where /etc is an overlay in memory; false in there.
fn is_outside() -> bool {
    let script = "mount -t tmpfs none /mnt && mkdir /mnt/new /mnt/work && \
                  mount -t overlay -o lowerdir=/etc,upperdir=/mnt/new,workdir=/mnt/work none /etc && exec \"$@\"";
    namespace::inside().is_none() && namespace::run_inside(&["--mount"], &["sh", "-c", script, "sh"])
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

const RKE2: &str = "/etc/rancher/rke2/config.yaml.d/90-guestlet.yaml";
const K3S: &str = "/etc/rancher/k3s/config.yaml.d/90-guestlet.yaml";
const KUBELET: &str = "/etc/default/kubelet";

/// What an agent does before it says that it is ready; its sockets answer before that.
fn until_ready(done: impl Fn() -> bool) {
    let end = std::time::Instant::now() + PATIENCE;
    while !done() {
        assert!(std::time::Instant::now() < end, "it is gone when the agent is ready");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

#[test]
fn nodes_that_are_to_join_find_the_labels_of_this_boot() {
    if is_outside() {
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        // What a boot on another host has left.
        std::fs::create_dir_all(Path::new(RKE2).parent().unwrap()).unwrap();
        let old = "topology.kubernetes.io/zone=old";
        std::fs::write(RKE2, format!("node-label+:\n  - \"{old}\"\n")).unwrap();
        std::fs::write(KUBELET, "KUBELET_EXTRA_ARGS=\"--v=2\"\n").unwrap();
        let mut agent = Agent::start_set(&[], "[topology]\ndrop-ins = [\"rke2\", \"kubeadm\"]\n");
        until_ready(|| !Path::new(RKE2).exists());

        let holder = Holder::take(&agent, "one").await;
        holder.tell(zone("a")).await.unwrap();
        assert!(ask(&agent, &["--wait", "60s"]).status.success());
        assert!(
            read(RKE2).contains("node-label+:\n  - \"topology.kubernetes.io/region=eu\"\n"),
            "{}",
            read(RKE2)
        );
        assert!(
            read(KUBELET).ends_with(
                "KUBELET_EXTRA_ARGS=\"--v=2 \
                 --node-labels=topology.kubernetes.io/region=eu,topology.kubernetes.io/zone=a\"\n"
            ),
            "{}",
            read(KUBELET)
        );
        assert!(!Path::new(K3S).exists(), "nobody asked for it");
        let files: Vec<_> =
            told(&agent)["files"].as_array().unwrap().iter().map(|f| f["path"].clone()).collect();
        assert_eq!(files, [RKE2, KUBELET]);

        // The same boot: another run of the agent knows, and goes on.
        drop(holder);
        agent.kill_and_start();
        assert!(read(RKE2).contains("zone=a"));
        let holder = Holder::take(&agent, "two").await;
        holder.tell(zone("b")).await.unwrap();
        assert!(ask(&agent, &["--wait", "60s"]).status.success());
        assert!(read(RKE2).contains("zone=b") && read(KUBELET).contains("zone=b"));
        assert!(!read(RKE2).contains("zone=a") && !read(KUBELET).contains("zone=a"));

        // Turned off: gone with the next start.
        let settings = agent.folder.path().join("agent.toml");
        let text = read(settings.to_str().unwrap());
        std::fs::write(&settings, text.replace("\"rke2\", ", "")).unwrap();
        agent.kill_and_start();
        until_ready(|| !Path::new(RKE2).exists());
        assert!(read(KUBELET).contains("zone=b"));

        let removed = ask(&agent, &["--remove"]);
        assert!(removed.status.success(), "{removed:?}");
        assert!(!Path::new(RKE2).exists());
        assert_eq!(read(KUBELET), "KUBELET_EXTRA_ARGS=\"--v=2\"\n");
    });
}
