//! What shells are told when Tab is typed.

use std::fs;

use crate::lab::{Lab, text};

#[test]
fn names_of_vms_and_of_files_in_their_guests_are_completed() {
    let lab = Lab::new();
    fs::create_dir_all(lab.file("dir/sub")).unwrap();
    for name in ["one", "other", ".hidden"] {
        fs::write(lab.file("dir").join(name), "").unwrap();
    }
    let folder = lab.file("dir").to_str().unwrap().to_owned();
    let complete = |word: &str| {
        let mut command = lab.host.ctl_command(&[]);
        let socket = lab.host.socket();
        command = {
            let mut plain = std::process::Command::new(command.get_program());
            plain.args(["__complete", "--", "guestctl", "--socket"]).arg(socket).args(["cp", word]);
            plain
        };
        let found = text(&command.output().unwrap());
        found.lines().map(|line| line.split('\t').next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert!(complete("we").contains(&"web:".to_owned()), "{:?}", complete("we"));
    assert_eq!(
        complete(&format!("web:{folder}/o")),
        [format!("web:{folder}/one"), format!("web:{folder}/other")]
    );
    assert_eq!(complete(&format!("web:{folder}/s")), [format!("web:{folder}/sub/")]);
    assert_eq!(complete(&format!("web:{folder}/.h")), [format!("web:{folder}/.hidden")]);
    assert!(complete(&format!("{folder}/o")).iter().any(|found| found.ends_with("/one")));
}
