//! Volumes that another program plugs without coordination, ignoring all records.

use super::*;

impl Bench {
    async fn record(&self, id: &str) -> Option<String> {
        self.keeper.get(&Asker::Host, id).await.unwrap().published.map(|published| published.vm)
    }

    async fn unpublish_from(&self, id: &str, node: &str) -> Result<(), Problem> {
        self.keeper.unpublish(&Asker::Host, id, Some(&place(node).uuid), false).await
    }

    /// Creates a volume that is published to `a`, which no longer has it, and that another program has plugged into
    /// `b`.
    async fn overtaken(&self) -> String {
        let id = self.create("v").await.unwrap().id;
        self.publish(&id, "a").await.unwrap();
        self.memory.unplug_behind("a", &id);
        self.memory.plug_behind("b", &id);
        id
    }
}

/// Regression: the volume could neither be unpublished from the node that had lost it, nor published to the one
/// that had it.
#[tokio::test(start_paused = true)]
async fn a_node_that_has_lost_a_volume_to_another_program_can_be_left() {
    let bench = Bench::new().await;
    let id = bench.overtaken().await;
    is(bench.publish(&id, "b").await, Kind::Precondition);
    is(bench.unpublish_from(&id, "b").await, Kind::Precondition);
    assert_eq!(bench.record(&id).await.as_deref(), Some("a"), "it was not taken from that node");
    for _ in 0..2 {
        bench.unpublish_from(&id, "a").await.unwrap();
        assert_eq!(bench.record(&id).await, None);
        bench.plugged(&[("b", &id)]);
    }
    bench.publish(&id, "b").await.unwrap();
    assert_eq!(bench.record(&id).await.as_deref(), Some("b"));
    bench.plugged(&[("b", &id)]);
}

/// A request without a node means the VM that has the volume, and the caller first has to learn which one that is.
#[tokio::test(start_paused = true)]
async fn who_names_no_node_hears_which_vm_has_a_volume_that_was_elsewhere() {
    for forced in [false, true] {
        let bench = Bench::new().await;
        let id = bench.overtaken().await;
        let problem = bench.unpublish(&id, forced).await.unwrap_err();
        assert_eq!(problem.kind, Kind::Precondition);
        assert!(
            problem.words_for_host().contains("plugged it into the VM b"),
            "{}",
            problem.words_for_host()
        );
        assert!(!problem.to_string().contains("VM b"), "a guest may be another cluster's: {problem}");
        assert_eq!(bench.record(&id).await, None);
        bench.plugged(&[("b", &id)]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_record_stays_while_it_is_not_proved_that_another_vm_has_the_volume() {
    let bench = Bench::new().await;
    let id = bench.overtaken().await;
    bench.memory.be_silent("b");
    is(bench.unpublish_from(&id, "a").await, Kind::Unavailable);
    assert_eq!(bench.record(&id).await.as_deref(), Some("a"));
    // A volume that the host half has plugged itself is handled as usual.
    let own = bench.create("w").await.unwrap().id;
    bench.publish(&own, "a").await.unwrap();
    bench.memory.be_silent("a");
    is(bench.unpublish_from(&own, "a").await, Kind::Unavailable);
    assert_eq!(bench.record(&own).await.as_deref(), Some("a"));
}

/// The agents of these VMs never connect. Without a guest's consent, a disk of another program is unplugged only
/// by force.
#[tokio::test(start_paused = true)]
async fn what_stays_with_another_program_is_not_remembered() {
    let bench = Bench::new().await;
    let id = bench.create("v").await.unwrap().id;
    bench.memory.plug_behind("a", &id);
    for node in [Some("a"), None] {
        let node = node.map(|node| place(node).uuid);
        let outcome = bench.keeper.unpublish(&Asker::Host, &id, node.as_deref(), false).await;
        is(outcome, Kind::Precondition);
        assert_eq!(
            bench.record(&id).await,
            None,
            "repair would plug it again when that program has unplugged it"
        );
        bench.plugged(&[("a", &id)]);
    }
    // A volume that was published before stays published.
    bench.publish(&id, "a").await.unwrap();
    is(bench.unpublish_from(&id, "a").await, Kind::Precondition);
    assert_eq!(bench.record(&id).await.as_deref(), Some("a"));
    bench.unpublish(&id, true).await.unwrap();
    bench.plugged(&[]);
}
