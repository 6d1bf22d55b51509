//! How the connection of `guestctl --kubeconfig` with a program in a pod ends: it is noticed at once, whatever ended it.

use std::process::{Command, Stdio};
use std::time::Duration;

use crate::cluster::wait;
use crate::kubectl::{Desk, ctl, value};
use crate::kubectl_nodes::node_changed;
use crate::lab::{Watch, assert_fails};
use crate::patience::until;

/// The program's last words arrive although it takes a while to start: what was sent to it before it said anything would have
/// met a program that had ended, and the reset for that would have come before the words.
#[test]
fn nothing_is_sent_to_a_program_that_has_not_begun() {
    wait(async {
        let desk = Desk::start().await;
        desk.kubelet.pods.lock().unwrap().delay = Duration::from_millis(500);
        assert_eq!(value(&desk.admin, &["info", "web"]).await["name"], "default/web");
        desk.kubelet.run("guestlet-node-host-1", "/nonexistent/api.sock".into());
        let refused = ctl(&desk.admin, &["info", "web"]).await;
        assert_fails(&refused, 3, "on the node host-1: guestlet-host is not running");
    });
}

/// kube says nothing of it to who reads a program's output: a watch stood still for ever, and an answer was waited for until
/// its deadline.
#[test]
fn a_connection_that_breaks_is_noticed_at_once() {
    wait(async {
        let desk = Desk::start().await;
        let mut command = Command::new(env!("CARGO_BIN_EXE_guestctl"));
        command.env_remove("HTTPS_PROXY").env_remove("https_proxy").arg("--kubeconfig").arg(&desk.admin);
        command.args(["watch", "web", "-o", "json"]).stdin(Stdio::null());
        let watch = Watch::of(command);
        let mut number = 0;
        let mut shown = async |prefix: &str| {
            until("an event is shown", async || {
                number += 1;
                desk.guests[0].happen(node_changed(&format!("{prefix}-{number}")));
                watch.so_far().iter().any(|line| line.contains(prefix)).then_some(())
            })
            .await;
        };
        shown("before").await;
        // What happens from now on may yet come over the old connection.
        let before = desk.kubelet.pods.lock().unwrap().asked.len();
        desk.kubelet.break_connections();
        let asked = || desk.kubelet.pods.lock().unwrap().asked.len();
        until("another connection", async || (asked() > before).then_some(())).await;
        shown("after").await;
        watch.stop();
        let (_, complaint) = watch.end();
        assert!(
            complaint.contains("default/web: guestlet-host closed the connection; events may be missing"),
            "{complaint}"
        );

        let before = asked();
        let (failed, ()) = tokio::join!(ctl(&desk.admin, &["ping", "web", "-c", "100"]), async {
            until("a program runs for it", async || (asked() > before).then_some(())).await;
            desk.kubelet.break_connections();
        });
        assert_fails(&failed, 1, "guestlet-host closed the connection");
    });
}
