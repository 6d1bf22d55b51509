//! cloud-init's files, and a systemd of the test's own.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::StreamExt as _;
use guestlet::guest::Guest;
use guestlet::guest::events::Kind;
use guestlet::guest::monitor::Settings;
use guestlet::sys::root::Root;
use guestlet::wire::proto::v1::Health;
use zbus::message::Type;
use zbus::{MessageStream, ObjectPath};

use crate::logind::Bus;
use crate::{beside, event, silence};

async fn next(watcher: &mut guestlet::guest::events::Watcher) -> Health {
    match event(watcher).await {
        Kind::HealthChanged(changed) => changed.health.unwrap(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn units_that_fail_and_the_end_of_cloud_init() {
    let folder = tempfile::tempdir().unwrap();
    let bus = Bus::begin(folder.path());
    let connection = bus.connect().await;
    let mut calls = MessageStream::from(&connection);
    let failed: Arc<Mutex<Vec<&str>>> = Arc::new(Mutex::new(vec!["b.service", "a.mount"]));
    let (server, units) = (connection.clone(), Arc::clone(&failed));
    let server = tokio::spawn(async move {
        while let Some(Ok(call)) = calls.next().await {
            let header = call.header();
            if call.message_type() != Type::MethodCall {
                continue;
            }
            assert_eq!(header.member().unwrap().as_str(), "ListUnitsFiltered");
            let (states,): (Vec<String>,) = call.body().deserialize().unwrap();
            assert_eq!(states, ["failed"]);
            let path = || ObjectPath::try_from("/x").unwrap();
            let row = |name: &&str| {
                (name.to_string(), "", "loaded", "failed", "failed", "", path(), 0_u32, "", path())
            };
            let rows: Vec<_> = units.lock().unwrap().iter().map(row).collect();
            server.reply(&header, &rows).await.unwrap();
        }
    });
    connection.request_name("org.freedesktop.systemd1").await.unwrap();
    let guest = Guest { root: Root::at(folder.path()), ..Guest::default() };
    let (_, mut watcher) = guest.events.watch(None);
    let settings = Settings { bus_address: Some(bus.address.clone()), ..Settings::default() };
    beside(&guest, "health", settings, async {
        let health = next(&mut watcher).await;
        assert_eq!(
            (health.failed_units, health.cloud_init.as_str()),
            (vec!["a.mount".into(), "b.service".into()], "")
        );

        std::fs::create_dir_all(folder.path().join("run/cloud-init")).unwrap();
        std::fs::write(folder.path().join("run/cloud-init/status.json"), "{\"v1\": {}}").unwrap();
        assert_eq!(next(&mut watcher).await.cloud_init, "running");
        let result = "{\"v1\": {\"errors\": [\"it went wrong\"]}}";
        std::fs::write(folder.path().join("run/cloud-init/result.json"), result).unwrap();
        let health = next(&mut watcher).await;
        assert_eq!(
            (health.cloud_init.as_str(), health.cloud_init_errors),
            ("error", vec!["it went wrong".into()])
        );

        failed.lock().unwrap().clear();
        silence(&mut watcher).await;
        // A minute later.
        let ticks = async {
            loop {
                guest.events.tick();
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::select! {
            health = next(&mut watcher) => assert!(health.failed_units.is_empty(), "{health:?}"),
            () = ticks => {}
        }
    })
    .await;
    server.abort();
}
