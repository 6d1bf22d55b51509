//! Load balancers that nobody takes up: Harvester's controller is slow, or there is none.

use guestlet::wire::proto::v1::load_balancer::State;

use super::{Site, service, wanted};
use crate::cluster::wait;
use crate::harvester::{of_pool, path};
use crate::lab::Watch;
use crate::patience::until;

/// An address may be reserved for it at any moment, of which nobody would know once it is gone.
#[test]
fn a_service_is_not_kept_for_ever_where_nobody_takes_up_its_load_balancer_and_nothing_leaks_if_somebody_does()
{
    wait(async {
        let site = Site::start().await;
        let (dev, api) = (&site.dev, &site.whole.cluster.api);
        let leader = &site.whole.controllers[0];
        let watch = Watch::quiet(leader, &["-o", "json"]);
        site.harvester.hold(true);
        for uid in ["u1", "u2"] {
            dev.ensure(wanted(uid, uid, 80)).await.unwrap();
            assert!(!dev.release(service(uid, uid)).await.unwrap(), "it may be taken up just now");
        }
        let told = dev.all().await.unwrap();
        assert!(told.len() == 2 && told.iter().all(|one| one.state() == State::Releasing), "{told:?}");
        for uid in ["u1", "u2"] {
            until("its Service is kept no more", async || {
                dev.release(service(uid, uid)).await.unwrap().then_some(())
            })
            .await;
        }
        assert_eq!(dev.all().await.unwrap(), [], "its cluster has nothing to do with it any more");
        assert_eq!(site.objects().await.len(), 2, "they are not deleted: something may be reserved for them");
        // Whoever looks after the host is told what to do.
        let line = watch.until(|line| line.contains("NotTakenUp"));
        assert!(line.contains("guestctl lb rm u") && line.contains("harvester-load-balancer"), "{line}");
        let shown = leader.words(&["lb", "ls", "-o", "wide"]);
        assert!(shown.contains("shop/u1") && shown.contains("has not processed the LoadBalancer"), "{shown}");
        assert!(
            leader.log().contains("has not processed the LoadBalancer default/dev-shop-u1-"),
            "{}",
            leader.log()
        );
        // There is none, as somebody knows.
        let removed = leader.ctl(&["lb", "rm", "u2", "--cluster", "default/dev"]);
        assert!(removed.status.success(), "{removed:?}");
        let left = site.objects().await;
        assert!(left.len() == 1 && path(&left[0]).contains("-u1-"), "{left:?}");
        // It was merely slow.
        site.harvester.hold(false);
        until("it is gone", async || site.objects().await.is_empty().then_some(())).await;
        let pool = of_pool(api, "dev").await;
        assert_eq!(pool["status"]["available"], 3, "{pool}");
        // And all is well.
        dev.ensure(wanted("u1", "u1", 80)).await.unwrap();
        dev.ready("u1").await;
    });
}
