//! The crate `qapi`, an independent client of QGA, asks for what would change the machine that runs the tests:
//! see tests/qga/qapi.rs for the rest.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use qapi::qga::*;
use qapi::{Command, ErrorClass, ExecuteError, Qga};

use crate::harness::vm::{SOON, Vm};
use crate::real;

/// The crate's client of a guest.
struct Client {
    stream: UnixStream,
}

impl Client {
    fn connect(vm: &Vm) -> Self {
        let stream = UnixStream::connect(vm.qga_socket()).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        Qga::from_stream(&stream).guest_sync(4711).unwrap();
        Self { stream }
    }

    /// What a command returns.
    fn ask<C: Command>(&self, command: &C) -> C::Ok {
        let answer = Qga::from_stream(&self.stream).execute(command);
        answer.unwrap_or_else(|error| panic!("{}: {error}", C::NAME))
    }
}

#[test]
fn a_foreign_client_changes_a_guest() {
    let vm = real("typed");
    let client = Client::connect(&vm);
    let time = 1_700_000_000_000_000_000;
    client.ask(&guest_set_time { time: Some(time) });
    let now = client.ask(&guest_get_time {});
    assert!((0..30_000_000_000).contains(&(now - time)), "{now}");
    client.ask(&guest_set_time { time: None });
    vm.plug_processor().unwrap();
    let vcpus = client.ask(&guest_get_vcpus {}).into_iter();
    let mut vcpus: Vec<_> = vcpus.filter(|processor| processor.can_offline == Some(true)).collect();
    for processor in &mut vcpus {
        processor.online = true;
    }
    let count = i64::try_from(vcpus.len()).unwrap();
    assert!(count > 0);
    assert_eq!(client.ask(&guest_set_vcpus { vcpus }), count);
    assert_eq!(vm.run("cat /sys/devices/system/cpu/online").unwrap(), "0-1\n");
    let blocks = client.ask(&guest_get_memory_blocks {});
    assert!(client.ask(&guest_get_memory_block_info {}).size >= 1 << 27);
    let responses = client.ask(&guest_set_memory_blocks { mem_blks: blocks.clone() });
    assert_eq!(responses.len(), blocks.len());
    let trimmed = client.ask(&guest_fstrim { minimum: None });
    assert!(trimmed.paths.iter().any(|path| path.path == "/"), "{trimmed:?}");
    let count = client.ask(&guest_fsfreeze_freeze {});
    let status = client.ask(&guest_fsfreeze_status {});
    assert_eq!(client.ask(&guest_fsfreeze_thaw {}), count);
    assert!(matches!(status, GuestFsfreezeStatus::frozen) && count >= 1);
    let mountpoints = Some(vec!["/".to_owned()]);
    let frozen = client.ask(&guest_fsfreeze_freeze_list { mountpoints });
    client.ask(&guest_fsfreeze_thaw {});
    assert_eq!(frozen, 1);
}

#[test]
fn a_foreign_client_lets_users_in_and_ends_the_guest() {
    let vm = real("typed");
    vm.run("useradd --create-home alice").unwrap();
    let client = Client::connect(&vm);
    let (username, password) = ("alice".to_owned(), b"secret".to_vec());
    client.ask(&guest_set_user_password { username: username.clone(), password, crypted: false });
    let keys = vec!["ssh-ed25519 AAAA one".to_owned(), "ssh-ed25519 BBBB two".to_owned()];
    let add = guest_ssh_add_authorized_keys { username: username.clone(), keys: keys.clone(), reset: None };
    client.ask(&add);
    let there = || client.ask(&guest_ssh_get_authorized_keys { username: username.clone() }).keys;
    assert_eq!(there(), keys);
    let keys = keys[..1].to_vec();
    client.ask(&guest_ssh_remove_authorized_keys { username: username.clone(), keys });
    assert_eq!(there(), ["ssh-ed25519 BBBB two"]);
    // Without swap there is nothing to hibernate to.
    for error in [
        Qga::from_stream(&client.stream).execute(&guest_suspend_disk {}).map(drop),
        Qga::from_stream(&client.stream).execute(&guest_suspend_hybrid {}).map(drop),
    ] {
        let Err(ExecuteError::Qapi(error)) = error else { panic!("{error:?}") };
        assert_eq!(error.class, ErrorClass::GenericError, "{error}");
    }
    // A success is not answered.
    Qga::from_stream(&client.stream)
        .write_command(&guest_shutdown { mode: Some(GuestShutdownMode::Powerdown) })
        .unwrap();
    vm.wait_off(Duration::from_secs(60)).unwrap();
}
