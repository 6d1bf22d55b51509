//! However much is asked for, it costs a bounded amount.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::lab::Lab;

#[test]
fn many_at_a_time_are_refused_and_cost_little() {
    let lab = Lab::new();
    std::fs::write(lab.file("a"), crate::lab::pattern(100_000, 1)).unwrap();
    lab.copies(&["web:@/a", "@/b"]);
    let before = lab.agent_memory();
    let [done, refused] = [0; 2].map(AtomicU64::new);
    std::thread::scope(|scope| {
        for _ in 0..40 {
            scope.spawn(|| {
                for _ in 0..10 {
                    let output = lab.cp(&["web:@/a", "-"]);
                    if output.status.success() {
                        assert_eq!(output.stdout.len(), 100_000);
                        done.fetch_add(1, Ordering::Relaxed);
                    } else {
                        let words = String::from_utf8_lossy(&output.stderr);
                        assert!(
                            words.contains("which is the limit") || words.contains("at a time"),
                            "{words}"
                        );
                        refused.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let more = lab.agent_memory().saturating_sub(before);
    assert!(more < 64 << 10, "{more} KiB more");
    assert_eq!(done.into_inner() + refused.into_inner(), 400);
    // Everything is given back.
    for _ in 0..20 {
        lab.copies(&["web:@/a", "@/b"]);
    }
}

#[test]
fn a_directory_of_thousands_of_files_is_listed_in_parts() {
    let lab = Lab::new();
    std::fs::create_dir(lab.file("many")).unwrap();
    for number in 0..3_000 {
        std::fs::File::create(lab.file(&format!("many/{number:05}-{}", "x".repeat(100)))).unwrap();
    }
    lab.copies(&["-r", "web:@/many", "@/copy"]);
    assert_eq!(std::fs::read_dir(lab.file("copy")).unwrap().count(), 3_000);
}
