//! Tests what an agent that has ended leaves behind.

use super::*;
use crate::guest::freeze::begin;
use crate::guest::freeze::end::End;
use crate::guest::freeze::marker::Frozen;
use crate::guest::freeze::recover::{Whose, recover};

#[tokio::test]
async fn an_agent_that_finds_a_marker_starts_frozen() {
    for of_qemu_ga in [false, true] {
        let lab = Lab::new(&[]);
        lab.leave_marker((1, 1));
        if of_qemu_ga {
            std::fs::write(Marker::new(lab.folder.path(), &lab.guest.root).path(), "").unwrap();
        }
        begin(&lab.guest).unwrap();
        assert!(lab.guest.freezer.restricts());
        assert_eq!(lab.thaw().await.unwrap(), 1);
        lab.is_clean();
    }
}

impl Lab {
    /// Creates what an agent that had frozen `/b` for libvirt leaves behind.
    fn leave_marker(&self, process: (u32, u64)) {
        let marker = Marker::new(self.folder.path(), &self.guest.root);
        let mut freeze = marker.begin("libvirt");
        freeze.process = process;
        freeze.file_systems.push(Frozen { device: (254, 2), mount_point: "/b".to_owned() });
        marker.write(&freeze).unwrap();
        self.machine.state.lock().unwrap().frozen.push("/b".to_owned());
    }
}

#[tokio::test]
async fn no_new_freeze_overtakes_one_that_was_left() {
    let lab = Lab::new(&[]);
    begin(&lab.guest).unwrap();
    // As if left by another agent after this one has begun.
    lab.leave_marker((1, 1));
    let error = words(&lab.freeze().await.unwrap_err());
    assert!(
        error.starts_with("an agent that is no longer running began a freeze")
            && error.ends_with("thaw first"),
        "{error}"
    );
    assert!(lab.guest.freezer.restricts(), "it is this one's now");
    let held = lab.guest.freezer.held();
    assert!(held.starts_with("libvirt requested a freeze"), "{held}");
    assert_eq!(lab.thaw().await.unwrap(), 1);
    lab.is_clean();
    // A thaw checks for a marker, too.
    lab.leave_marker((1, 1));
    assert_eq!(lab.thaw().await.unwrap(), 1);
    lab.is_clean();
    assert_eq!(lab.freeze().await.unwrap(), 3);
    assert_eq!(lab.thaw().await.unwrap(), 3);
}

#[tokio::test]
async fn the_freeze_of_another_agent_that_runs_is_left_alone() {
    let lab = Lab::new(&[]);
    let stat = lab.guest.root.path("/proc/77/stat");
    std::fs::create_dir_all(stat.parent().unwrap()).unwrap();
    std::fs::write(&stat, format!("77 (qemu-ga) S {} 5 0", ["0"; 18].join(" "))).unwrap();
    lab.leave_marker((77, 5));
    begin(&lab.guest).unwrap();
    let error = words(&lab.freeze().await.unwrap_err());
    assert!(error.starts_with("the agent with process 77 began a freeze"), "{error}");
    assert!(!lab.guest.freezer.restricts());
    assert_eq!(lab.machine.frozen(), ["/b"]);
    assert!(matches!(lab.marker(), Found::Freeze(freeze) if freeze.process == (77, 5)));
}

#[tokio::test]
async fn a_freeze_that_ended_with_the_agent_is_an_event_of_the_next_run_once() {
    let lab = Lab::new(&[]);
    lab.leave_marker((1, 1));
    let recover =
        |whose| recover(&lab.guest, lab.folder.path(), whose, Duration::from_secs(1), End::Crash).unwrap();
    assert!(recover(Whose::Of(2)).is_none(), "another run has taken it over");
    assert_eq!(recover(Whose::Of(1)).unwrap().thawed, ["/b"]);
    for told in [true, false] {
        let events = Arc::default();
        let guest = Guest { events: Arc::clone(&events), ..lab.guest.clone() };
        begin(&guest).unwrap();
        let freeze = events.state().1.freeze.clone();
        assert_eq!(freeze.is_some(), told);
        if let Some(freeze) = freeze {
            assert!(freeze.ended.is_some());
            assert_eq!((freeze.holder.as_str(), freeze.end.as_str()), ("libvirt", "crash"));
        }
        assert!(matches!(guest.freezer.status(), Status::Thawed { spoiled: Some(_) }));
    }
    assert!(words(&lab.thaw().await.unwrap_err()).contains("the agent crashed"));
    lab.is_clean();
}

/// A file system that had not quite been frozen when the agent was killed becomes frozen only after its thaw. The
/// thaw of the one stored on it used to wait for it for half a minute.
#[tokio::test]
async fn what_is_frozen_late_does_not_keep_waiting_what_is_on_it() {
    let lab = Lab::new(&[]);
    let marker = Marker::new(lab.folder.path(), &lab.guest.root);
    let mut freeze = marker.begin("libvirt");
    freeze.process = (1, 1);
    for (device, mount_point) in [((254, 3), "/c"), ((254, 1), "/a")] {
        freeze.file_systems.push(Frozen { device, mount_point: mount_point.to_owned() });
    }
    marker.write(&freeze).unwrap();
    {
        let mut state = lab.machine.state.lock().unwrap();
        state.frozen.push("/c".to_owned());
        state.late = Some(("/a".to_owned(), "/c".to_owned()));
    }
    let (guest, folder) = (lab.guest.clone(), lab.folder.path().to_owned());
    let begun = Instant::now();
    let done = tokio::task::spawn_blocking(move || {
        recover(&guest, &folder, Whose::Gone, Duration::from_secs(1), End::Hang).unwrap().unwrap()
    });
    let mut done = done.await.unwrap();
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    // Both end at the same time, in either order.
    done.thawed.sort();
    assert_eq!((done.thawed, done.problems), (vec!["/a".to_owned(), "/c".to_owned()], Vec::new()));
    assert_eq!(lab.machine.frozen(), [""; 0]);
    assert_eq!(lab.marker(), Found::Nothing);
}
