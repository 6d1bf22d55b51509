//! Failed units, as systemd tells them on a bus of the test's own.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::StreamExt as _;
use guestlet::guest::Guest;
use guestlet::guest::metrics::Collector;
use guestlet::metrics::MOST_OF_GUEST;
use guestlet::sys::root::Root;
use zbus::message::Type;
use zbus::{Connection, MessageStream, ObjectPath, Variant, connection};

use crate::bus_daemon::{self, BusDaemon};

/// As much of systemd as is asked for; how often it was, for the count and for the list.
async fn serve(connection: Connection, failed: Vec<&'static str>, asked: Arc<[AtomicUsize; 2]>) {
    let mut calls = MessageStream::from(&connection);
    while let Some(Ok(call)) = calls.next().await {
        let header = call.header();
        if call.message_type() != Type::MethodCall {
            continue;
        }
        match header.member().unwrap().as_str() {
            "Get" => {
                asked[0].fetch_add(1, Ordering::SeqCst);
                let body: (String, String) = call.body().deserialize().unwrap();
                assert_eq!(body.1, "NFailedUnits");
                let count = u32::try_from(failed.len()).unwrap();
                connection.reply(&header, &Variant::from(count)).await.unwrap();
            }
            "ListUnitsFiltered" => {
                asked[1].fetch_add(1, Ordering::SeqCst);
                let path = || ObjectPath::try_from("/x").unwrap();
                let row = |name: &&'static str| {
                    (*name, "a unit", "loaded", "failed", "failed", "", path(), 0_u32, "", path())
                };
                connection.reply(&header, &failed.iter().map(row).collect::<Vec<_>>()).await.unwrap();
            }
            other => panic!("{other} was called"),
        }
    }
}

fn told(samples: &[guestlet::metrics::Sample]) -> Vec<String> {
    let of_units = samples.iter().filter(|sample| sample.family.name.contains("_failed"));
    of_units.map(|one| format!("{} {} {}", one.family.name, one.labels.join(","), one.value)).collect()
}

#[tokio::test]
async fn failed_units_are_counted_and_the_first_ones_named() {
    let folder = tempfile::tempdir().unwrap();
    let guest = Guest { root: Root::at(folder.path()), ..Guest::default() };
    let collector = Collector::default();
    assert!(
        told(&collector.collect(&guest, MOST_OF_GUEST).await.unwrap()).is_empty(),
        "without a bus nothing is known, and not zero"
    );

    let socket = folder.path().join("run/dbus/system_bus_socket");
    std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
    let daemon = BusDaemon::begin(&socket);
    let connect = || async {
        connection::Builder::address(bus_daemon::address(&socket).as_str()).build().await.unwrap()
    };
    let asked = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
    assert!(
        told(&collector.collect(&guest, MOST_OF_GUEST).await.unwrap()).is_empty(),
        "without systemd neither"
    );

    let connection = connect().await;
    connection.request_name("org.freedesktop.systemd1").await.unwrap();
    let server = tokio::spawn(serve(connection, vec!["b.service", "a.service"], Arc::clone(&asked)));
    for _ in 0..2 {
        let samples = collector.collect(&guest, MOST_OF_GUEST).await.unwrap();
        assert_eq!(told(&samples), ["units_failed  2", "unit_failed a.service 1", "unit_failed b.service 1"]);
    }
    server.abort();
    drop(server.await);

    let connection = connect().await;
    connection.request_name("org.freedesktop.systemd1").await.unwrap();
    let listed = asked[1].load(Ordering::SeqCst);
    let server = tokio::spawn(serve(connection, Vec::new(), Arc::clone(&asked)));
    assert_eq!(told(&collector.collect(&guest, MOST_OF_GUEST).await.unwrap()), ["units_failed  0"]);
    assert_eq!(asked[1].load(Ordering::SeqCst), listed, "where none has failed none is listed");

    // A bus that is gone is no bus; one that is there again is asked again.
    drop(daemon);
    assert!(told(&collector.collect(&guest, MOST_OF_GUEST).await.unwrap()).is_empty());
    server.abort();
}
