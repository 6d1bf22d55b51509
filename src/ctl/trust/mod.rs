//! `guestctl trust`: the keys by which host halves and guests trust each other, and the initial trust.

use std::time::SystemTime;

use serde::Serialize;

use super::client::{Client, answer};
use super::print::Printer;
use super::{Error, json, words};
use crate::text;
use crate::wire::proto::v1::{
    AcceptKeyRequest, ForgetKeyRequest, GetTrustBootstrapRequest, GuestKey, ListKeysRequest,
    ListKeysResponse, RotateGuestKeyRequest, RotateHostKeyRequest,
};

pub mod bootstrap;

/// Operation on keys.
#[derive(Debug, Clone)]
pub enum Action {
    /// List all keys.
    List,
    /// Show what is known of one guest's key.
    Show {
        /// Name of the VM.
        name: String,
    },
    /// Accept the key with which a guest was refused.
    Accept {
        /// Name of the VM.
        name: String,
        /// Expected key; empty for any.
        key: String,
    },
    /// Forget the key of a guest.
    Forget {
        /// Name of the VM, or its UUID.
        name: String,
    },
    /// Forget the keys of all VMs that the settings no longer list.
    ForgetUnlisted,
    /// Make a guest generate a new key.
    Rotate {
        /// Name of the VM.
        name: String,
    },
    /// Change the key of the host half.
    RotateHost {
        /// True to use the next key from now on.
        finish: bool,
        /// True to change it even if some guests do not know the next key.
        force: bool,
    },
    /// Print what a guest needs for the initial trust.
    Bootstrap {
        /// Name of the VM.
        name: String,
        /// Format of the output; `None` for all formats.
        format: Option<bootstrap::Format>,
        /// True to include a token for the first contact.
        with_token: bool,
        /// Roles that the guest is to grant to the host half.
        roles: Vec<String>,
    },
}

/// Carries out an operation on keys.
///
/// # Errors
/// Fails if the daemon does not answer or refuses, or standard output cannot be written.
pub async fn run(mut client: Client, printer: &mut Printer, action: Action) -> Result<(), Error> {
    match action {
        Action::List => list(client, printer).await,
        Action::Show { name } => {
            let request = ListKeysRequest { name: name.clone() };
            let list = answer(client.list_keys(request), &name).await?;
            let guest = list.guests.into_iter().next().unwrap_or_default();
            show(printer, &guest)
        }
        Action::Accept { name, key } => {
            let guest =
                answer(client.accept_key(AcceptKeyRequest { name: name.clone(), key }), &name).await?;
            show(printer, &guest)
        }
        Action::Forget { name } => {
            let request = ForgetKeyRequest { name: name.clone(), unlisted: false };
            let was_there = answer(client.forget_key(request), &name).await?.was_there;
            let words = if was_there { "forgotten" } else { "nothing was known" };
            Ok(printer.value(&Forgotten { name: &name, was_there }, || format!("{name}: {words}\n"))?)
        }
        Action::ForgetUnlisted => {
            let request = ForgetKeyRequest { name: String::new(), unlisted: true };
            let forgotten = answer(client.forget_key(request), "").await?.forgotten;
            let line =
                |key: &GuestKey| format!("{}: forgotten ({})\n", or_uuid(key), text::or_dash(&key.key));
            let words = || match &forgotten[..] {
                [] => "every VM whose key is known is in the settings\n".to_owned(),
                some => some.iter().map(line).collect(),
            };
            let all: Vec<_> = forgotten.iter().cloned().map(One::from).collect();
            Ok(printer.value(&all, words)?)
        }
        Action::Rotate { name } => {
            let guest =
                answer(client.rotate_guest_key(RotateGuestKeyRequest { name: name.clone() }), &name).await?;
            show(printer, &guest)
        }
        Action::RotateHost { finish, force } => {
            let request = RotateHostKeyRequest { finish, force };
            let done = answer(client.rotate_host_key(request), "").await?;
            let told = Rotated { key: &done.key, known_to: &done.known_to, unknown_to: &done.unknown_to };
            Ok(printer.value(&told, || told.words(finish))?)
        }
        Action::Bootstrap { name, format, with_token, roles } => {
            let request = GetTrustBootstrapRequest { name: name.clone(), with_token, roles };
            let found = answer(client.get_trust_bootstrap(request), &name).await?;
            let token = with_token.then_some(found.token.as_str());
            let told = Bootstrap { name: &name, key_line: &found.key_line, token };
            Ok(printer.value(&told, || match format {
                Some(format) => bootstrap::text(format, &name, &found.key_line, token),
                None => bootstrap::all(&name, &found.key_line, token),
            })?)
        }
    }
}

#[derive(Debug, Serialize)]
struct Forgotten<'a> {
    name: &'a str,
    was_there: bool,
}

#[derive(Debug, Serialize)]
struct Rotated<'a> {
    key: &'a str,
    known_to: &'a [String],
    unknown_to: &'a [String],
}

impl Rotated<'_> {
    fn words(&self, is_finished: bool) -> String {
        if is_finished {
            return format!("This host half: {}\n", self.key);
        }
        let list = |names: &[String]| text::or_dash(&names.join(", "));
        format!(
            "Next key:  {}\nKnown to:  {}\nNot yet:   {}\nWhen all guests know it: guestctl trust rotate --host --finish\n",
            self.key,
            list(self.known_to),
            list(self.unknown_to)
        )
    }
}

#[derive(Debug, Serialize)]
struct Bootstrap<'a> {
    name: &'a str,
    key_line: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    token: Option<&'a str>,
}

#[derive(Debug, Serialize)]
struct List {
    host_key: String,
    ca_key: String,
    /// Host halves of the nodes of a cluster.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    nodes: Vec<HostHalf>,
    guests: Vec<One>,
}

/// Keys of a host half.
#[derive(Debug, Clone, Default, Serialize)]
pub struct HostHalf {
    /// Node of the host half, in a cluster.
    pub node: String,
    /// Key by which guests know the host half.
    pub host_key: String,
    /// Key of the CA that has signed it, if there is one.
    pub ca_key: String,
}

#[derive(Debug, Serialize)]
struct One {
    name: String,
    uuid: String,
    session: String,
    key: String,
    how: String,
    since: Option<String>,
    next: String,
    previous: String,
    previous_until: Option<String>,
    offered: String,
    has_token: bool,
    problem: String,
    no_vm: bool,
}

impl From<GuestKey> for One {
    fn from(key: GuestKey) -> Self {
        Self {
            name: key.name,
            uuid: key.uuid,
            session: key.session,
            key: key.key,
            how: key.how,
            since: key.since.map(json::rfc3339),
            next: key.next,
            previous: key.previous,
            previous_until: key.previous_until.map(json::rfc3339),
            offered: key.offered,
            has_token: key.has_token,
            problem: key.problem,
            no_vm: key.no_vm,
        }
    }
}

/// Returns all keys that a host half knows.
///
/// # Errors
/// Fails if it does not answer or refuses.
pub async fn keys(mut client: Client) -> Result<ListKeysResponse, Error> {
    answer(client.list_keys(ListKeysRequest::default()), "").await
}

async fn list(client: Client, printer: &mut Printer) -> Result<(), Error> {
    let ListKeysResponse { host_key, ca_key, guests } = keys(client).await?;
    let half = HostHalf { node: String::new(), host_key, ca_key };
    show_all(printer, &[half], &guests)
}

/// Writes the keys of host halves and of guests. Host halves of a cluster have nodes.
///
/// # Errors
/// Fails if standard output cannot be written.
pub fn show_all(printer: &mut Printer, halves: &[HostHalf], guests: &[GuestKey]) -> Result<(), Error> {
    let (this, of_nodes) = match halves {
        [this] if this.node.is_empty() => (this.clone(), &[][..]),
        nodes => (HostHalf::default(), nodes),
    };
    let all = List {
        host_key: this.host_key,
        ca_key: this.ca_key,
        nodes: of_nodes.to_vec(),
        guests: guests.iter().cloned().map(One::from).collect(),
    };
    Ok(printer.value(&all, || {
        let mut words = String::new();
        for HostHalf { node, host_key, ca_key } in halves {
            let (own, signer) = match node.as_str() {
                "" => ("This host half: ".to_owned(), "Its CA:         ".to_owned()),
                node => (format!("Host half of {node}: "), format!("CA of {node}: ")),
            };
            words.extend([own.as_str(), host_key, "\n"]);
            if !ca_key.is_empty() {
                words.extend([signer.as_str(), ca_key, "\n"]);
            }
        }
        let mut rows = vec![["NAME", "SESSION", "PINNED", "AGE", "KEY", "NOTE"].map(str::to_owned)];
        let now = SystemTime::now();
        rows.extend(guests.iter().map(|key| {
            let age = key.since.as_ref().map_or(String::new(), |since| words::age(Some(since), now));
            [
                or_uuid(key),
                text::or_dash(&key.session),
                text::or_dash(&key.how),
                text::or_dash(&age),
                text::or_dash(&key.key),
                notes(key).join("; "),
            ]
        }));
        words + "\n" + &text::table(&rows)
    })?)
}

/// Returns the name of the VM if it is known, and its UUID otherwise.
fn or_uuid(key: &GuestKey) -> String {
    if key.name.is_empty() { key.uuid.clone() } else { key.name.clone() }
}

/// Describes anything unusual about a key.
fn notes(key: &GuestKey) -> Vec<String> {
    let mut notes = Vec::new();
    if key.no_vm {
        notes.push(format!("unknown VM {}", key.uuid));
    }
    if !key.offered.is_empty() {
        notes.push(format!("refused with {}", key.offered));
    }
    if key.has_token {
        notes.push("a token awaits its first contact".to_owned());
    }
    if !key.next.is_empty() {
        notes.push("has a new key for its next session".to_owned());
    }
    if !key.problem.is_empty() {
        notes.push(key.problem.clone());
    }
    notes
}

fn show(printer: &mut Printer, key: &GuestKey) -> Result<(), Error> {
    let rows = || {
        let now = SystemTime::now();
        let mut lines = vec![
            ("Name:", key.name.clone()),
            ("UUID:", key.uuid.clone()),
            ("Session:", text::or_dash(&key.session)),
            ("Key:", text::or_dash(&key.key)),
        ];
        if let Some(since) = &key.since {
            lines.push(("Pinned:", format!("{} ago, by {}", words::age(Some(since), now), key.how)));
        }
        if !key.next.is_empty() {
            lines.push(("Next:", format!("{}, in use from the next session on", key.next)));
        }
        if let Some(until) = &key.previous_until {
            let until = words::time(Some(until));
            lines.push(("Previous:", format!("{}, accepted until {until}", key.previous)));
        }
        if !key.offered.is_empty() {
            lines.push(("Refused:", key.offered.clone()));
        }
        if key.has_token {
            lines.push(("Token:", "awaits the first contact".to_owned()));
        }
        if !key.problem.is_empty() {
            lines.push(("Problem:", key.problem.clone()));
        }
        text::table(&lines.into_iter().map(|(name, value)| [name.to_owned(), value]).collect::<Vec<_>>())
    };
    Ok(printer.value(&One::from(key.clone()), rows)?)
}
