//! Where the programs are reached: by IPv4, by IPv6, and in clusters that have only one of them.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};

use crate::bench::{Bench, NODE, host_without_sockets};
use crate::cluster::wait;
use crate::lab::DEADLINE;
use crate::whole::{MIB, Whole, again, ask};

/// What is answered at an address, if anybody answers there.
fn health(address: SocketAddr) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    write!(stream, "GET /healthz HTTP/1.1\r\nHost: guestlet\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    Some(answer)
}

/// A port that nobody has at the moment.
fn free_port() -> u16 {
    TcpListener::bind("[::]:0").unwrap().local_addr().unwrap().port()
}

#[test]
fn kubelet_reaches_the_health_of_a_node_by_either_family() {
    wait(async {
        let bench = Bench::start().await;
        bench.instance("web", NODE).await;
        for (all, by_ipv6) in [("[::]", true), ("0.0.0.0", false)] {
            let port = free_port();
            let lab = host_without_sockets(bench.turn.plane());
            let lab = lab.set(&format!("metrics = '{all}:{port}'")).start();
            let answers = |ip: std::net::IpAddr| health(SocketAddr::new(ip, port));
            let answer = answers(Ipv4Addr::LOCALHOST.into()).unwrap();
            assert!(answer.starts_with("HTTP/1.1 200"), "{all}: {answer}");
            assert_eq!(answers(Ipv6Addr::LOCALHOST.into()).is_some(), by_ipv6, "{all}");
            drop(lab);
        }
    });
}

#[test]
fn nodes_reach_a_controller_that_has_an_address_of_ipv6() {
    wait(async {
        let whole = Whole::start_at(1, Ipv6Addr::LOCALHOST.into()).await;
        assert!(whole.address().await.starts_with("[::1]:"), "{}", whole.address().await);
        let web = whole.vm("web").await;
        let id = web.with_volume().await;
        let (sidecar, node) = (web.sidecar().await, web.uid.clone());
        ask(move || {
            again(|| sidecar.unpublish(&id, &node));
            again(|| sidecar.delete(&id));
            sidecar.create("pvc-2", 64 * MIB).unwrap();
        })
        .await;
    });
}
