//! Tests of behavior that is not visible from outside: the order of calls on a file, and pieces that nobody
//! receives.

#![allow(clippy::disallowed_methods)]

use std::sync::Arc;

use super::reading::PIECE;
use std::path::Path;

use super::*;

async fn open(files: &Files, path: &Path, mode: &str) -> i64 {
    files.open::<Error>(path.to_owned(), mode.parse().unwrap(), |_| Ok(())).await.unwrap()
}

#[tokio::test]
async fn what_nobody_takes_is_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let bytes: Vec<u8> = (0..PIECE * 8).map(|place| place.to_le_bytes()[1]).collect();
    std::fs::write(&path, &bytes).unwrap();
    let files = Files::default();
    let handle = open(&files, &path, "r").await;
    let mut pieces = files.read(handle, bytes.len(), <[u8]>::to_vec).await.unwrap();
    assert_eq!(pieces.first.converted, bytes[..PIECE]);
    let second = pieces.rest.as_mut().unwrap().recv().await.unwrap();
    assert_eq!((second.length, second.end, second.last), (PIECE, false, false));
    assert_eq!(second.converted, bytes[PIECE..2 * PIECE]);
    drop(pieces);
    // At most one piece waited to be taken, and is lost.
    let position = files.seek(handle, SeekFrom::Current(0)).await.unwrap();
    assert!([2 * PIECE as u64, 3 * PIECE as u64].contains(&position), "{position}");
}

#[tokio::test]
async fn calls_for_one_file_take_turns_and_others_do_not_wait_for_them() {
    let folder = tempfile::tempdir().unwrap();
    let files = Arc::new(Files::default());
    std::fs::write(folder.path().join("slow"), vec![1; PIECE * 8]).unwrap();
    let slow = open(&files, &folder.path().join("slow"), "r").await;
    let other = open(&files, &folder.path().join("other"), "w").await;
    let mut pieces = files.read(slow, PIECE * 8, <[u8]>::to_vec).await.unwrap();
    let again = tokio::spawn({
        let files = Arc::clone(&files);
        async move { files.read(slow, 10, <[u8]>::to_vec).await }
    });
    files.write(other, b"x".to_vec()).await.unwrap();
    files.close(other).await.unwrap();
    assert!(!again.is_finished());
    let mut length = pieces.first.length;
    while let Some(piece) = pieces.rest.as_mut().unwrap().recv().await {
        length += piece.length;
    }
    assert_eq!(length, PIECE * 8);
    let second = again.await.unwrap().unwrap().first;
    assert_eq!((second.length, second.end), (0, true));
}

#[tokio::test]
async fn handles_of_an_earlier_run_are_not_given_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, "").unwrap();
    let first = Files::default();
    let mut last = 0;
    for _ in 0..100 {
        last = open(&first, &path, "r").await;
    }
    assert!((1000..1 << 31).contains(&last), "{last}");
    // No process ends and another one begins within a millisecond.
    tokio::time::sleep(Duration::from_millis(2)).await;
    let second = Files::default();
    assert!(open(&second, &path, "r").await > last);
}

#[test]
fn handles_fit_31_bits_however_long_the_machine_runs() {
    let year = 365 * 24 * 3600;
    for seconds in [0, 1, 60, 36 * 60, 2_147_482, 2_147_483, 2_147_484, year, 30 * year] {
        let handle = handle_at(Duration::from_secs(seconds));
        assert!((1000..1 << 31).contains(&handle), "{seconds} s: {handle}");
    }
    let all: std::collections::HashSet<_> =
        (0..5000).map(|ms| handle_at(Duration::from_millis(2_147_480_000 + ms))).collect();
    assert_eq!(all.len(), 5000);
}
