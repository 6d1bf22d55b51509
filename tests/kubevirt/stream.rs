//! Volumes that are wanted faster than `KubeVirt` carries changes out.

use std::sync::Arc;
use std::time::Duration;

use guestlet::host::backends::kubevirt::hotplug::Patience;
use tokio::task::JoinSet;

use crate::claims::{domains, make, place, plug, quick, volumes_with};
use crate::lab::{Lab, wait};
use crate::model::pace::Step;

/// kubevirt/kubevirt#16937: of changes that come faster than they are carried out none is, as each makes another pod necessary.
#[test]
fn while_a_change_is_carried_out_no_other_is_asked_for() {
    wait(async {
        let lab = Lab::start().await;
        lab.running("web").await;
        let patience = Patience { settle: Duration::from_secs(60), ..quick() };
        let volumes = volumes_with(&lab, patience).await;
        let web = place(&lab, "web").await;
        let ours = async || {
            let instance = lab.instance("web").await.unwrap();
            let all = instance["spec"]["volumes"].as_array().unwrap().clone();
            all.iter().filter(|volume| volume["name"].as_str().unwrap().starts_with("guestlet-")).count()
        };
        let mut ids = Vec::new();
        for number in 0..6 {
            ids.push(make(&volumes, &format!("data-{number}")).await.id);
        }
        lab.model.hold(Step::RunPod, "web");
        let mut plugging = JoinSet::new();
        for (number, id) in ids.iter().cloned().enumerate() {
            let (volumes, web) = (Arc::clone(&volumes), web.clone());
            plugging.spawn(async move { plug(&volumes, &id, &web).await });
            if number == 0 {
                lab.model.reaches(Step::RunPod, "web").await;
            }
            // Longer than is waited for others to come along.
            tokio::time::sleep(quick().gather * 2).await;
            assert_eq!(ours().await, 1, "the first one is not plugged yet");
        }
        lab.model.release(Step::RunPod, "web");
        while let Some(plugged) = plugging.join_next().await {
            plugged.unwrap().unwrap();
        }
        for id in &ids {
            assert_eq!(domains(&lab, id), [web.vm.as_str()]);
        }
        assert_eq!(lab.model.journal().generations(&web.vm), 2);
    });
}
