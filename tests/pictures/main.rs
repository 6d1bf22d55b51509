//! Pictures of terminals for the documentation, docs/pictures/*.svg: `make pictures` draws them anew, of what the real programs say.
//!
//! The guests are agents on this machine, each in namespaces of its own with a name, an interface and files of /proc that are made up;
//! of the demo its output is drawn, which the file named by `DEMO_LOG` has. Nothing here opens an `AF_VSOCK` socket, and nothing is
//! frozen or mounted outside of those namespaces.

#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::print_stderr,
    missing_docs,
    reason = "a test program"
)]

mod guests;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../host/lab.rs"]
mod host;
mod lab;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../fixtures/launch.rs"]
mod launch;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../exec/screen.rs"]
mod screen;
mod svg;
mod terminal;

use std::fmt::Write as _;
use std::path::Path;

use guestlet::sys::terminal::Size;
use nix::sys::signal::Signal;

use lab::Lab;
use terminal::Terminal;

/// Wide enough for most lines, narrow enough to be read in a page.
const COLUMNS: u16 = 100;
/// More makes a page slow.
const MOST_BYTES: usize = 60_000;

fn main() {
    let demo = std::env::var_os("DEMO_LOG").expect("DEMO_LOG names a file with the output of make demo");
    save("demo", "make demo", &demo_excerpt(&std::fs::read_to_string(demo).unwrap()));
    let mut lab = Lab::new();
    save("doctor", "guestctl doctor", &lab.run(&["doctor"], 30));
    save("top", "guestctl top", &top(&lab));
    save("watch", "guestctl watch", &watch(&mut lab));
}

/// Writes the picture, without what is of this machine.
fn save(name: &str, title: &str, terminal: &Terminal) {
    let picture = svg::picture(title, terminal);
    let size = picture.len();
    assert!(size <= MOST_BYTES, "{name} has {size} bytes");
    for foreign in ["/tmp/", "/root", "/home"] {
        assert!(!picture.contains(foreign), "{name} shows {foreign}");
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("docs/pictures/{name}.svg"));
    std::fs::write(&file, picture).unwrap();
    println!("  docs/pictures/{name}.svg: {size} bytes");
}

/// What the demo shows of its steps in `STEPS`, without lines that say only that it waits, or that are too long for a picture.
fn demo_excerpt(log: &str) -> Terminal {
    const STEPS: [&str; 3] = ["Power on", "Where the guest runs", "A disk is plugged"];
    // Tables of what is shown elsewhere.
    const LEFT_OUT: [&str; 3] = ["$ guestctl info", "$ guestctl disks", "guest # guestlet disks"];
    let (mut is_shown, mut is_left_out) = (false, false);
    let mut text = String::new();
    for line in log.lines() {
        if let Some((_, title)) = line.split_once(" s] ").filter(|_| line.starts_with('[')) {
            is_shown = STEPS.iter().any(|step| title.starts_with(step));
            if is_shown {
                writeln!(text, "\x1b[1;33m{line}\x1b[0m").unwrap();
            }
            continue;
        }
        let words = line.trim_start();
        // Answers are indented more than commands.
        is_left_out &= line.starts_with("    ");
        is_left_out |= LEFT_OUT.iter().any(|command| words.starts_with(command));
        if !is_shown || is_left_out || line.is_empty() || words.starts_with('…') {
            continue;
        }
        let line = without_paths(line);
        if line.chars().count() > COLUMNS.into() {
            continue;
        }
        let is_typed = ["$ ", "guest # "].iter().any(|prompt| words.starts_with(prompt));
        let style = match words.chars().next() {
            Some(_) if is_typed => "1",
            Some('│') => "36",
            _ => "0",
        };
        writeln!(text, "\x1b[{style}m{line}\x1b[0m").unwrap();
    }
    let rows = u16::try_from(text.lines().count()).unwrap();
    assert!(rows > 20, "this is no output of make demo: {log}");
    let mut terminal = Terminal::new(Size { rows, columns: COLUMNS });
    terminal.write(text.trim_end());
    terminal
}

/// Directories of one run are those that the packages have.
fn without_paths(line: &str) -> String {
    line.split_inclusive(' ')
        .map(|word| match word.strip_prefix("/tmp/").and_then(|rest| rest.split_once('/')) {
            Some((_, rest)) => format!("/var/lib/guestlet-host/{rest}"),
            None => word.to_owned(),
        })
        .collect()
}

/// Once there are two answers of each guest.
fn top(lab: &Lab) -> Terminal {
    let size = Size { rows: 12, columns: 80 };
    let mut screen = lab.screen(&["top", "--every", "2s"], size);
    screen.until("q quit");
    let so_far = screen.seen().matches("q quit").count();
    lab::until("two more answers", || screen.seen().matches("q quit").count() >= so_far + 2);
    let mut terminal = Terminal::new(size);
    // The last screen that is whole.
    let seen = screen.seen();
    terminal.write(&seen[..seen.rfind("\x1b[H").unwrap()]);
    screen.kill();
    terminal
}

/// An address, a zone and an agent that come and go.
fn watch(lab: &mut Lab) -> Terminal {
    let size = Size { rows: 14, columns: COLUMNS };
    let mut screen = lab.screen(&["watch"], size);
    // A session that ends and begins shows that it watches.
    lab.signal("db-1", Signal::SIGTERM);
    lab.host.until_vm("db-1", |vm| vm["session"] != "connected");
    lab.start("db-1");
    lab.host.until_session("db-1", "connected");
    screen.until("db-1\x1b[0m  agent ready");
    lab.inside("web-1", "ip address add 198.51.100.4/24 dev eth0");
    screen.until("198.51.100.4");
    lab.host.edit("zone = 'rack-3'", "zone = 'rack-7'");
    screen.until("web-2\x1b[0m  runs in region eu, zone rack-7");
    screen.until("cache-1\x1b[0m  runs in region eu, zone rack-7");
    lab.signal("web-2", Signal::SIGKILL);
    screen.until("web-2\x1b[0m  session closed");
    let seen = screen.seen();
    screen.kill();
    let mut terminal = Terminal::new(size);
    terminal.write(&format!("\x1b[1m# guestctl watch\x1b[0m\n{seen}"));
    terminal
}
