//! VMs without vsock, and what `guestctl doctor` says about it.

use serde_json::{Value, json};

use crate::bench::{Bench, GUESTS, MACHINES, NODE, grant, host_without_sockets, one, without_sockets};
use crate::cluster::wait;
use crate::lab::Lab;
use crate::patience::until;

const KUBEVIRTS: &str = "/apis/kubevirt.io/v1/namespaces/harvester-system/kubevirts";

/// Something that the doctor found.
#[derive(Debug, Clone)]
struct Finding(Value);

impl Finding {
    fn says(&self) -> &str {
        self.0["says"].as_str().unwrap()
    }

    fn remedy(&self) -> &str {
        self.0["remedy"].as_str().unwrap()
    }

    /// What the command that it tells, which begins with this, would patch.
    fn patch(&self, command: &str) -> Value {
        let (_, rest) = self.remedy().split_once(command).unwrap_or_else(|| panic!("{self:?}"));
        let patch = rest.strip_prefix("--type merge --patch '").unwrap();
        serde_json::from_str(patch.split('\'').next().unwrap()).unwrap()
    }
}

fn findings(lab: &Lab) -> Vec<Finding> {
    let found: Value = serde_json::from_slice(&lab.ctl(&["doctor", "-o", "json"]).stdout).unwrap();
    found["findings"].as_array().unwrap_or_else(|| panic!("{found}")).iter().cloned().map(Finding).collect()
}

fn one_about(found: &[Finding], subject: &str) -> Finding {
    found
        .iter()
        .find(|one| one.0["subject"] == subject)
        .unwrap_or_else(|| panic!("{subject}: {found:?}"))
        .clone()
}

/// What is said of `KubeVirt`, once that has these words.
fn of_kubevirt(lab: &Lab, words: &str) -> Vec<Finding> {
    let all = || findings(lab).into_iter().filter(|one| one.0["subject"] == "KubeVirt").collect::<Vec<_>>();
    lab.until(words, || all().iter().any(|one| one.says().contains(words)));
    all()
}

#[test]
fn vms_without_vsock_are_listed_with_what_to_do() {
    wait(async {
        let bench = Bench::start().await;
        bench.instance("web", NODE).await;
        bench
            .instance_with("asks", NODE, |asks| {
                asks["spec"]["domain"]["devices"]["autoattachVSOCK"] = json!(true);
            })
            .await;
        bench
            .instance_with("has", NODE, |has| {
                has["status"]["VSOCKCID"] = json!(4711);
                has["status"]["activePods"] = json!({ "cccccccc-0000-4000-8000-000000000003": NODE });
            })
            .await;
        bench.instance_with("odd", NODE, |odd| odd["status"]["VSOCKCID"] = json!(1_u64 << 40)).await;
        let lab = host_without_sockets(bench.turn.plane()).start();
        for (name, session, words) in [
            ("odd", "connecting", "its VirtualMachineInstance cannot be read: "),
            ("web", "no-vsock", "set spec.template.spec.domain.devices.autoattachVSOCK to true"),
            ("asks", "no-vsock", "KubeVirt gave it none (no status.VSOCKCID)"),
            (
                "has",
                "connecting",
                "no process on this node is one of the VM's launcher pod cccccccc-0000-4000-8000-000000000003",
            ),
        ] {
            let has = |vm: &Value| vm["reason"].as_str().is_some_and(|reason| reason.contains(words));
            let vm = lab.until_vm(&format!("default/{name}"), has);
            assert_eq!(vm["session"], session, "{name}");
        }
        let shown = lab.words(&["ls"]);
        assert_eq!(shown.matches("no-vsock").count(), 2, "{shown}");
        let found = findings(&lab);
        assert!(one_about(&found, "guestlet-host").says().ends_with("0 of 4 VMs connected, 2 without vsock"));
        let web = one_about(&found, "VM default/web");
        assert_eq!(web.0["level"], "note", "{web:?}");
        // Whoever has asked for it should hear of it, and so should whoever can be asked nothing.
        for name in ["asks", "odd"] {
            let found = one_about(&found, &format!("VM default/{name}"));
            assert_eq!(found.0["level"], "wrong", "{found:?}");
        }
        // What it says is done, and the VM is reached once it has been started again.
        let vm = format!("{MACHINES}/web");
        bench
            .api
            .patch(&vm, &web.patch("kubectl --namespace default patch virtualmachine web "))
            .await
            .unwrap();
        let set = bench.api.get(&vm).await.unwrap();
        assert_eq!(set["spec"]["template"]["spec"]["domain"]["devices"]["autoattachVSOCK"], true);
        let asks = one_about(&found, "VM default/asks");
        assert!(asks.remedy().ends_with("virtctl --namespace default restart asks"), "{asks:?}");
        bench.delete("web").await;
        bench.instance_with("web", NODE, |web| web["status"]["VSOCKCID"] = json!(4712)).await;
        lab.until_session("default/web", "connecting");
        // The cluster sees it as well.
        until("the Guest says that there is no vsock", async || {
            let guest = bench.api.get(&format!("{GUESTS}/asks")).await?;
            (guest["status"]["session"] == "NoVsock" && guest["status"]["conditions"][0]["status"] == "False")
                .then_some(())
        })
        .await;
        // It can be asked for disks, and says who plugs them.
        let disks = lab.ctl(&["disk", "ls", "default/web"]);
        let words = String::from_utf8(disks.stderr).unwrap();
        assert!(words.contains("plugged by KubeVirt"), "{words}");
    });
}

#[test]
fn the_doctor_names_the_object_and_the_command_and_warns_first() {
    wait(async {
        let bench = Bench::start().await;
        let lab = host_without_sockets(bench.turn.plane()).start();
        of_kubevirt(&lab, "there is no KubeVirt object in the cluster");

        bench.api.ensure("/api/v1/namespaces", &json!({ "metadata": { "name": "harvester-system" } })).await;
        let make = async |name: &str, gates: Value, version: &str| {
            let spec = json!({ "configuration": { "developerConfiguration": { "featureGates": gates } } });
            let metadata = json!({ "name": name });
            let kubevirt = json!({
                "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", "metadata": metadata, "spec": spec,
            });
            bench.api.create(KUBEVIRTS, &kubevirt).await;
            let status = json!({ "status": { "observedKubeVirtVersion": version } });
            bench.api.patch(&format!("{KUBEVIRTS}/{name}/status"), &status).await.unwrap();
        };
        make("kubevirt", json!(["HotplugVolumes", "Snapshot"]), "v1.6.3").await;
        let off = "the feature gate VSOCK is not listed in harvester-system/kubevirt, KubeVirt v1.6.3";
        let found = of_kubevirt(&lab, off);
        let warning = found.iter().find(|one| one.says().contains("kubevirt/kubevirt#16600")).unwrap();
        assert!(warning.remedy().contains("1.6.4"), "{warning:?}");
        let told = found.iter().find(|one| one.says().contains(off)).unwrap();
        assert_eq!((told.0["level"].as_str(), warning.0["level"].as_str()), (Some("wrong"), Some("note")));
        assert!(told.remedy().starts_with("first see below"), "{told:?}");
        let patch = told.patch("kubectl --namespace harvester-system patch kubevirt kubevirt ");
        let object = format!("{KUBEVIRTS}/kubevirt");
        bench.api.patch(&object, &patch).await.unwrap();
        let gates = bench.api.get(&object).await.unwrap();
        let gates = &gates["spec"]["configuration"]["developerConfiguration"]["featureGates"];
        assert_eq!(gates, &json!(["HotplugVolumes", "Snapshot", "VSOCK"]));
        let found = of_kubevirt(&lab, "the feature gate VSOCK is on in harvester-system/kubevirt");
        assert!(
            found.iter().any(|one| one.0["level"] == "wrong" && one.says().contains("16600")),
            "{found:?}"
        );

        make("another", json!([]), "v1.8.4").await;
        let found = of_kubevirt(&lab, "there are 2 KubeVirt objects");
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].says().ends_with("harvester-system/another, harvester-system/kubevirt"),
            "{found:?}"
        );
        bench.api.delete(&object).await;
        let found = of_kubevirt(&lab, "not listed in harvester-system/another, KubeVirt v1.8.4");
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(
            found[0].patch("kubectl --namespace harvester-system patch kubevirt another "),
            json!({ "spec": { "configuration": { "developerConfiguration": { "featureGates": ["VSOCK"] } } } })
        );
    });
}

/// Another account may not read `KubeVirt`'s settings: that is said, and nothing about them.
#[test]
fn settings_that_cannot_be_read_are_not_guessed() {
    wait(async {
        let bench = Bench::start().await;
        let mut rules = one("node.yaml", "ClusterRole")["rules"].take();
        rules.as_array_mut().unwrap().retain(|rule| rule["resources"] != json!(["kubevirts"]));
        grant(&bench.api, "blind", "blind", &rules).await;
        let lab = without_sockets(&bench.turn.plane().kubeconfig("blind", "blind", "nobody"), NODE).start();
        let unread =
            |one: &Finding| one.says().contains("cannot find out whether KubeVirt gives VMs vsock: ");
        lab.until("it is said", || findings(&lab).iter().any(unread));
        assert!(findings(&lab).iter().all(|one| one.0["subject"] != "KubeVirt"));
    });
}
