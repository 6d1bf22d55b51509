//! `kubectl guestlet console`: the console of KubeVirt, by the real API server, which passes it on and decides who may.

use std::path::Path;
use std::process::Stdio;

use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::Child;

use crate::bench::grant;
use crate::cluster::{Lab, wait};
use crate::kubectl::{ctl, program};
use crate::lab::assert_fails;
use crate::model::objects::Kind;
use crate::patience::until;

const WEB: &str = "default/web";

/// guestctl at a console.
struct Sitter(Child);

impl Sitter {
    fn start(kubeconfig: &Path) -> Self {
        let mut command = program(env!("CARGO_BIN_EXE_guestctl"));
        command.arg("--kubeconfig").arg(kubeconfig).args(["console", "web"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self(command.spawn().unwrap())
    }

    async fn types(&mut self, bytes: &[u8]) {
        self.0.stdin.as_mut().unwrap().write_all(bytes).await.unwrap();
    }

    async fn sees(&mut self, wanted: &[u8]) {
        let mut seen = vec![0; wanted.len()];
        self.0.stdout.as_mut().unwrap().read_exact(&mut seen).await.unwrap();
        assert!(seen == wanted, "what was seen differs");
    }

    /// How it ends, with its complaints.
    async fn end(mut self) -> (Option<i32>, String) {
        // The input goes on: it is not the end of that which ends a console.
        let input = self.0.stdin.take();
        let output = self.0.wait_with_output().await.unwrap();
        drop(input);
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    }
}

#[test]
fn the_console_of_kubevirt_is_the_guests() {
    wait(async {
        let lab = Lab::start().await;
        lab.running("web").await;
        let kubeconfig = lab.turn.plane().kubeconfig("sitter", "sitter", "people");
        let refused = ctl(&kubeconfig, &["console", "web"]).await;
        assert_fails(
            &refused,
            1,
            "the verb get on virtualmachineinstances/console.subresources.kubevirt.io in the namespace default is needed: KubeVirt's",
        );
        let rules = json!([
            { "apiGroups": ["subresources.kubevirt.io"], "resources": ["virtualmachineinstances/console"], "verbs": ["get"] },
            { "apiGroups": ["kubevirt.io"], "resources": ["virtualmachineinstances"], "verbs": ["get"] },
        ]);
        grant(&lab.api, "sitter", "consoles", &rules).await;
        let none = ctl(&kubeconfig, &["console", "other"]).await;
        assert_fails(&none, 1, "\"other\" not found");
        assert_fails(&ctl(&kubeconfig, &["console", "web?x"]).await, 4, "\"default/web?x\"");
        assert_fails(&ctl(&kubeconfig, &["console", "web"]).await, 1, "No serial consoles are present");

        let mut ports = lab.model.console(WEB);
        let mut sitter = Sitter::start(&kubeconfig);
        let mut guest = ports.recv().await.unwrap();
        // More than is on its way anywhere, both ways, every byte.
        let text: Vec<u8> = (0..1_u32 << 18).flat_map(u32::to_le_bytes).collect();
        guest.write_all(b"login: ").await.unwrap();
        sitter.sees(b"login: ").await;
        let (mut from_sitter, mut to_sitter) = tokio::io::split(guest);
        let echo = tokio::spawn(async move {
            let _ = tokio::io::copy(&mut from_sitter, &mut to_sitter).await;
        });
        let mut input = sitter.0.stdin.take().unwrap();
        let (typed, ()) = tokio::join!(input.write_all(&text), sitter.sees(&text));
        typed.unwrap();
        sitter.0.stdin = Some(input);

        // Whoever comes later has it, and the first one says what may have been.
        let mut second = Sitter::start(&kubeconfig);
        let mut guest = ports.recv().await.unwrap();
        let (code, complaint) = sitter.end().await;
        assert_eq!(code, Some(255), "{complaint}");
        assert!(
            complaint.contains("lost the console of default/web") && complaint.contains("another client"),
            "{complaint}"
        );
        echo.abort();
        second.types(b"x").await;
        assert_eq!(guest.read_u8().await.unwrap(), b'x');
        guest.write_all(b"bye").await.unwrap();
        second.sees(b"bye").await;
        drop(guest);
        let (code, complaint) = second.end().await;
        assert_eq!(code, Some(255), "{complaint}");

        let mut third = Sitter::start(&kubeconfig);
        let mut guest = ports.recv().await.unwrap();
        guest.write_all(b"stopping").await.unwrap();
        third.sees(b"stopping").await;
        let halted = json!({ "spec": { "runStrategy": "Halted" } });
        lab.api.patch(&Kind::Vm.path(WEB), &halted).await.unwrap();
        drop(guest);
        let (code, complaint) = third.end().await;
        assert_eq!(code, Some(6), "{complaint}");
        assert!(complaint.contains("the VM default/web has ended"), "{complaint}");
        // Until then its console can be opened again.
        until("the instance is gone", async || lab.instance("web").await.is_none().then_some(())).await;
        assert_fails(&ctl(&kubeconfig, &["console", "web"]).await, 1, "web");
    });
}
