use guestlet::guest::Guest;
use guestlet::guest::events::{Kind, Watcher};
use guestlet::guest::monitor::Settings;

use crate::{beside, event, idle, is_outside_of, run, silence};

/// Waits until the links are as `expected` says, in one line; states on the way there may be told or not.
async fn until(watcher: &mut Watcher, expected: &str) {
    loop {
        let Kind::InterfacesChanged(changed) = event(watcher).await else { panic!("another event") };
        let told: Vec<String> = changed
            .interfaces
            .iter()
            .map(|link| {
                let mut words = vec![link.name.clone(), if link.running { "up" } else { "down" }.to_owned()];
                words.extend(link.addresses.iter().cloned());
                words.join(" ")
            })
            .collect();
        if told.join(", ") == expected {
            return;
        }
    }
}

#[tokio::test]
async fn links_and_addresses_that_come_and_go() {
    if is_outside_of("--net") {
        return;
    }
    // Without this, the kernel adds addresses of its own when it likes.
    run("for all in all default; do echo 1 > /proc/sys/net/ipv6/conf/$all/addr_gen_mode || true; done");
    run(
        "ip link set lo up; ip link add eth0 type veth peer name veth0; ip address add 192.0.2.7/24 dev eth0",
    );
    let guest = Guest::default();
    let (_, mut watcher) = guest.events.watch(None);
    beside(&guest, "links", Settings::default(), async {
        until(&mut watcher, "eth0 down 192.0.2.7/24").await;

        run("ip link set veth0 up; ip link set eth0 up");
        until(&mut watcher, "eth0 up 192.0.2.7/24").await;

        run("ip address add 2001:db8::7/64 dev eth0 nodad; ip address add 10.0.0.1/8 dev eth0 label eth0:1");
        until(&mut watcher, "eth0 up 10.0.0.1/8 192.0.2.7/24 2001:db8::7/64").await;

        run("ip link add docker0 type bridge; ip link add veth1 type veth peer name veth2; ip link set veth1 up");
        silence(&mut watcher).await;

        run("ip link add bond0 type bridge");
        until(&mut watcher, "bond0 down, eth0 up 10.0.0.1/8 192.0.2.7/24 2001:db8::7/64").await;

        // More than the socket's buffer holds, and in the end all is as before but for one address.
        run("for round in 1 2 3; do for low in $(seq 250); do echo address add 10.1.$round.$low/32 dev eth0; done; \
             for low in $(seq 250); do echo address del 10.1.$round.$low/32 dev eth0; done; done > \
             /proc/self/fd/1 | ip -batch -; ip address del 10.0.0.1/8 dev eth0; ip link del bond0");
        until(&mut watcher, "eth0 up 192.0.2.7/24 2001:db8::7/64").await;
        assert!(guest.events.state().0.sequence < 30, "a burst is few events");

        idle(&mut watcher).await;

        run("ip link del eth0");
        until(&mut watcher, "").await;
    })
    .await;
}
