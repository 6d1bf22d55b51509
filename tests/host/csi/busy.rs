//! Guests that ask much: what they ask of volumes costs neither their own session nor their host's log.

use guestlet::wire::proto::csi::ControllerGetCapabilitiesRequest;
use tonic::Code;

use super::{USUAL, started};

const MIB: i64 = 1 << 20;

#[test]
fn many_calls_about_volumes_leave_the_channel_its_own_budget() {
    // Its agent pings 20 times a second.
    let vms = started(&USUAL[..1], "[limits]\ncalls-per-second = 40");
    let a = vms.of("a");
    let answers = vms.guest("a").answers();
    // 160 of them may come at once; for more than a second the others use up whatever there is to use.
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..30 {
                    a.controller_get_capabilities(ControllerGetCapabilitiesRequest {}).unwrap();
                }
            });
        }
    });
    let vm = vms.lab.info("a");
    assert_eq!((&vm["session"], &vm["sessions"]), (&"connected".into(), &1.into()), "{vm}");
    assert!(vms.guest("a").answers() > answers, "its pings were answered meanwhile");
}

#[test]
fn what_a_guest_repeats_in_vain_fills_no_log() {
    let vms = started(&USUAL, "");
    let a = vms.of("a");
    let id = a.create("v", 20 * MIB).unwrap().volume_id;
    std::fs::remove_file(vms.file("fast", &id, "raw")).unwrap();
    for _ in 0..40 {
        assert_ne!(a.publish(&id, "a").unwrap_err().code(), Code::Ok);
    }
    let log = vms.lab.log();
    let lines = |level: &str| {
        log.lines().filter(|line| line.contains(level) && line.contains("cannot plug a volume")).count()
    };
    assert_eq!((lines("WARN"), lines("DEBUG")), (1, 39), "{log}");
}
