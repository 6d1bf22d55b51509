//! `guestctl top`, once and on a terminal.

use guestlet::sys::terminal::Size;
use serde_json::Value;

use crate::host::{assert_fails, wait};
use crate::lab::Lab;
use crate::screen::Screen;

#[test]
fn once_it_says_what_guests_do_now() {
    let lab = Lab::new();
    let all: Value =
        serde_json::from_str(&lab.host.words(&["top", "--once", "--sort", "name", "-o", "json"])).unwrap();
    let names: Vec<_> = all.as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["db", "web"]);
    for one in all.as_array().unwrap() {
        assert_eq!(one["answers"], true);
        for ratio in ["cpu_ratio", "waiting_cpu_ratio", "waiting_memory_ratio", "waiting_io_ratio"] {
            assert!((0.0..=1.0).contains(&one[ratio].as_f64().unwrap()), "{ratio}: {one:#}");
        }
        assert!(one["memory_used_bytes"].as_f64().unwrap() < one["memory_total_bytes"].as_f64().unwrap());
    }
    let table = lab.host.words(&["top", "--once"]);
    assert!(table.starts_with("CPU ") && table.lines().count() == 3, "{table}");
    assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
    // Where there is no terminal it says what to do.
    assert_fails(&lab.host.ctl(&["top"]), 1, "--once");
}

#[test]
fn on_a_terminal_keys_sort_and_q_leaves_it_as_it_was() {
    let lab = Lab::new();
    let mut screen =
        Screen::of(lab.host.ctl_command(&["top", "--every", "1s"]), Size { rows: 24, columns: 80 });
    screen.until("2 VMs, 2 answer; by cpu");
    // What needs two answers is there with the second one.
    screen.until("%");
    assert!(screen.is_raw());
    screen.until("q quit");
    for (key, sort) in [("m", "memory"), ("p", "pressure"), ("a", "name")] {
        screen.type_keys(key);
        screen.until(&format!("; by {sort}"));
    }
    screen.type_keys("q");
    let status = wait(&mut screen.child);
    assert!(status.success(), "{status:?}");
    // The first screen is back, with its cursor.
    screen.until("\u{1b}[?25h\u{1b}[?1049l");
    assert!(!screen.is_raw());
}

/// What somebody asks for is kept for a while: bars show it, as the locale can.
#[test]
fn the_last_minutes_are_shown_as_far_as_somebody_has_asked() {
    let lab = Lab::new();
    let info = |name: &str| -> Value {
        serde_json::from_str(&lab.host.words(&["info", name, "-o", "json"])).unwrap()
    };
    lab.host.until("two answers that are far enough apart", || {
        lab.scrape("/guests/web/metrics");
        std::thread::sleep(std::time::Duration::from_secs(1));
        !info("web")["recent"].as_array().unwrap().is_empty()
    });
    let recent = info("web")["recent"][0].clone();
    assert!(recent["seconds"].as_u64().unwrap() >= 15, "{recent}");
    for ratio in ["cpu_ratio", "memory_used_ratio", "waiting_ratio"] {
        assert!((0.0..=1.0).contains(&recent[ratio].as_f64().unwrap()), "{ratio}: {recent}");
    }
    // Nobody has asked for the other one.
    assert!(info("db")["recent"].as_array().unwrap().is_empty());

    let words = |locale: &str| {
        let output = lab.host.ctl_command(&["info", "web"]).env("LC_ALL", locale).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let (unicode, ascii) = (words("C.UTF-8"), words("C"));
    let line = |words: &str| {
        let found = words.lines().find(|line| line.starts_with("Last 15 min:")).map(str::to_owned);
        found.unwrap_or_else(|| panic!("{words}"))
    };
    assert!(line(&unicode).contains(['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█']), "{unicode}");
    assert!(line(&ascii).is_ascii() && line(&ascii).contains("processors"), "{ascii}");
    assert!(ascii.lines().all(|line| !line.contains('%') || line.len() <= 80), "{ascii}");

    let mut command = lab.host.ctl_command(&["top", "--every", "1s"]);
    command.env("LC_ALL", "C.UTF-8");
    let mut screen = Screen::of(command, Size { rows: 24, columns: 80 });
    screen.until("2 VMs, 2 answer");
    screen.type_keys("h");
    screen.until("CPU 15 MIN");
    screen.type_keys("q");
    assert!(wait(&mut screen.child).success());
}

#[test]
fn colours_are_for_terminals_whose_users_want_them() {
    let lab = Lab::new();
    let shown = |no_color: Option<&str>| {
        let mut command = lab.host.ctl_command(&["ls"]);
        command.env_remove("NO_COLOR");
        if let Some(value) = no_color {
            command.env("NO_COLOR", value);
        }
        let mut screen = Screen::of(command, Size { rows: 24, columns: 120 });
        screen.until("\nweb ");
        assert!(wait(&mut screen.child).success());
        screen.until("\r\n");
        screen.seen()
    };
    let (bold, green) = ("\x1b[1mNAME\x1b[0m", "\x1b[32mconnected\x1b[0m");
    assert!([bold, green].iter().all(|code| shown(None).contains(code)));
    assert!(!shown(Some("1")).contains('\x1b'));
    assert!(!lab.host.words(&["ls"]).contains('\x1b'));
}
