//! Prints settings as qemu-ga does.

use std::fmt::Write as _;

use crate::config::agent::{AgentSettings, QgaChannel};
use crate::config::key_file::quote;

/// Returns a key file with the group `general`, and its keys in qemu-ga's order.
pub fn text(settings: &AgentSettings) -> String {
    let (method, path) = match &settings.qga {
        QgaChannel::VirtioSerial(path) => ("virtio-serial", Some(path.display().to_string())),
        QgaChannel::IsaSerial(path) => ("isa-serial", Some(path.display().to_string())),
        QgaChannel::UnixListen(path) => ("unix-listen", Some(path.display().to_string())),
        QgaChannel::VsockListen { cid, port } => ("vsock-listen", Some(format!("{cid}:{port}"))),
        QgaChannel::None => ("none", None),
    };
    let list = |names: &[String]| names.join(&settings.separator.to_string());
    let shown = |path: &std::path::PathBuf| path.display().to_string();
    let lines = [
        ("daemon", Some(settings.daemon.wanted.to_string())),
        ("method", Some(method.to_owned())),
        ("path", path),
        ("logfile", settings.log_file.as_ref().map(shown)),
        ("pidfile", Some(shown(&settings.daemon.pid_file))),
        ("fsfreeze-hook", settings.fsfreeze_hook.as_ref().map(shown)),
        ("statedir", Some(shown(&settings.state_folder))),
        ("verbose", Some(settings.verbose.to_string())),
        ("retry-path", Some(settings.retry_path.to_string())),
        ("block-rpcs", Some(list(&settings.block))),
        ("allow-rpcs", Some(list(settings.allow.as_deref().unwrap_or_default()))),
    ];
    let mut text = String::from("[general]\n");
    for (key, value) in lines {
        if let Some(value) = value {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{key}={}", quote(&value));
        }
    }
    if settings.separator != ',' {
        text.push_str("# Lists are separated by semicolons, as in the file. qemu-ga reads each list as one unknown name.\n");
    }
    if settings.allow.as_ref().is_some_and(Vec::is_empty) {
        text.push_str(
            "# The settings of guestlet allow no command at all, which this format cannot express.\n",
        );
    }
    text
}
