//! Keys that the guest is given, and its own key: where this machine keeps them.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use rustls::pki_types::UnixTime;

use crate::agent::words::{self, Words};
use crate::config::agent::TrustSettings;
use crate::guest::{Guest, freeze, identity};
use crate::rpc::keys::Keys;
use crate::supervise::Supervisor;
use crate::sys::folder_news::FolderNews;
use crate::sys::root::Root;
use crate::sys::{clock, error_chain, files};
use crate::text::{or_dash, table};
use crate::trust::Fingerprint;
use crate::trust::anchors::Anchor;
use crate::trust::guest::Clock;
use crate::trust::keyring::{Keyring, Machine, Sources, Text};
use crate::trust::provided::{self, Provided};

/// File that changes with each copy of the VM's memory, where the hypervisor provides it (VM generation ID).
const GENERATION: &str = "/sys/firmware/qemu_fw_cfg/by_name/etc/vmgenid_guid/raw";
/// Time without changes before a file is read: editors write a file in several steps.
const QUIET: Duration = Duration::from_millis(100);

/// Returns the keyring of this machine. With `plain`, peers without a key are accepted as well. Reads nothing yet.
pub fn keyring(settings: TrustSettings, plain: bool, guest: &Guest) -> Keyring {
    let given = guest.root.clone();
    let (root, freezer) = (guest.root.clone(), guest.freezer.clone());
    Keyring::new(Sources {
        hosts: settings.hosts,
        folder: settings.state_folder,
        platform: Box::new(move || platform(&given)),
        machine: Box::new(move || machine(&root)),
        is_writable: Box::new(move || matches!(freezer.status(), freeze::Status::Thawed { .. })),
        clock: clock_of_the_day,
        plain,
    })
}

/// Subcommand of `guestlet trust`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// List the keys.
    List {
        /// True to print JSON, for programs.
        json: bool,
    },
    /// Delete this guest's own key, and the record that keys were ever given.
    Reset,
}

/// Command line after `guestlet trust`.
#[derive(Debug)]
pub struct Asked {
    /// Subcommand to run.
    pub action: Action,
    /// Settings file given on the command line.
    pub settings: Option<PathBuf>,
}

/// Parses the command line after `guestlet trust`.
///
/// # Errors
/// A message for people.
pub fn parse(words: &[OsString]) -> Result<Asked, String> {
    let Words { plain, json, settings } = words::read(words, 1)?;
    let action = match plain.first().and_then(|verb| verb.to_str()) {
        Some("ls") => Action::List { json },
        Some("reset") => Action::Reset,
        _ => {
            return Err(
                "specify what to do with the keys: guestlet trust ls, or guestlet trust reset".to_owned()
            );
        }
    };
    Ok(Asked { action, settings })
}

/// Lists the keys of this machine, for people or as JSON. Blocks.
pub fn list(settings: TrustSettings, json: bool) -> String {
    let found = keyring(settings, false, &Guest::default()).list();
    let own = found.own.map(|key| key.fingerprint().to_string());
    if json {
        let anchors: Vec<_> = found.anchors.iter().map(anchor_json).collect();
        let value = serde_json::json!({
            "keyed": found.is_keyed, "own": own, "hosts": anchors, "problems": found.problems,
        });
        return format!("{value:#}\n");
    }
    let mut text = match (found.is_keyed, own) {
        (false, _) => {
            "This guest was given no key: anyone who can reach its vsock port can control it.\n".to_owned()
        }
        (true, None) => {
            "This guest has no key of its own yet; it creates one for its first connection.\n".to_owned()
        }
        (true, Some(own)) => format!("This guest: {own}\n"),
    };
    if !found.anchors.is_empty() {
        let mut rows = vec![["KEY", "KIND", "ROLES", "FROM", "COMMENT"].map(str::to_owned)];
        rows.extend(found.anchors.iter().map(|anchor| {
            [
                anchor.fingerprint.to_string(),
                if anchor.is_ca { "CA" } else { "host half" }.to_owned(),
                or_dash(&anchor.roles.join(",")),
                anchor.origin.to_string(),
                or_dash(&anchor.comment),
            ]
        }));
        text = format!("{text}\n{}", table(&rows));
    } else if found.is_keyed {
        text += "It was given keys, but has none now: no host half is accepted. See guestlet trust reset.\n";
    }
    for problem in &found.problems {
        text.extend(["wrong: ", problem, "\n"]);
    }
    text
}

fn anchor_json(anchor: &Anchor) -> serde_json::Value {
    serde_json::json!({
        "key": anchor.fingerprint.to_string(),
        "ca": anchor.is_ca,
        "roles": anchor.roles,
        "from": anchor.origin.to_string(),
        "comment": anchor.comment,
    })
}

/// Deletes this guest's own key and the record that it was ever given keys, where no agent runs. Returns whether a
/// source still gives this guest keys. Blocks.
///
/// # Errors
/// If a file cannot be removed.
pub fn forget(settings: TrustSettings) -> anyhow::Result<bool> {
    let keyring = keyring(settings, false, &Guest::default());
    keyring.forget().context("cannot forget the keys")?;
    Ok(keyring.list().is_keyed)
}

/// Returns the message of `guestlet trust reset`, for people.
pub fn forgotten(is_keyed: bool) -> String {
    let mut text = "Forgotten: this guest's own key, and that it was ever given keys.\n".to_owned();
    if is_keyed {
        text += "It is still given keys, so it creates a new one (guestlet trust ls).\n";
    }
    text
}

/// Returns the part of the guestlet API that handles keys.
pub fn of_the_api(keyring: &Keyring, guest: &Guest) -> Keys {
    let root = guest.root.clone();
    Keys::new(keyring.clone(), move || {
        let found = provided::enrollment_token(&root, credentials().as_deref());
        found.map_err(|problem| error_chain::words(&problem))
    })
}

/// Returns the directory of this service's credentials, from systemd (systemd.exec(5)).
fn credentials() -> Option<PathBuf> {
    std::env::var_os("CREDENTIALS_DIRECTORY").map(PathBuf::from)
}

/// Returns the texts with public keys of host halves that the platform provides, such as credentials from systemd.
fn platform(root: &Root) -> Vec<Text> {
    let text = |given: Result<Provided, provided::Problem>| match given {
        Ok(Provided { place, text }) => (place, Ok(text)),
        Err(problem) => (problem.place().to_owned(), Err(error_chain::words(&problem))),
    };
    provided::hosts(root, credentials().as_deref()).into_iter().map(text).collect()
}

/// Returns the values that distinguish this machine from its clones.
fn machine(root: &Root) -> Machine {
    let identity::Identity { machine_id, dmi_uuid, .. } = identity::identity(root);
    let generation = files::read(&root.path(GENERATION)).map(|bytes| Fingerprint::of(&bytes).to_string());
    Machine { dmi: dmi_uuid, id: machine_id, generation: generation.unwrap_or_default() }
}

fn clock_of_the_day() -> Clock {
    match SystemTime::now().duration_since(UNIX_EPOCH) {
        Ok(now) if clock::is_synchronized() => Clock::Set(UnixTime::since_unix_epoch(now)),
        _ => Clock::Unset,
    }
}

/// Reads the keys again whenever root has changed their files. A host half whose key is no longer accepted is
/// disconnected.
pub fn follow(keyring: &Keyring, supervisor: &mut Supervisor) {
    let mut news = FolderNews::begin(keyring.hosts());
    let (keyring, shutdown) = (keyring.clone(), supervisor.shutdown());
    supervisor.spawn("keys", async move {
        loop {
            drop(keyring.read().await);
            let Some(changed) = shutdown.run_until_cancelled(news.changed()).await else { return Ok(()) };
            changed.context("files are no longer watched")?;
            while let Ok(Ok(())) = tokio::time::timeout(QUIET, news.changed()).await {}
        }
    });
}
