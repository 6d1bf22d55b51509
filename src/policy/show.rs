//! `guestlet policy show`: the rules in force, as text for users or as JSON for programs.

use std::fmt::Write as _;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::policy::grant::{Grant, Host};
use crate::policy::role::{PLAIN, QEMU_GA, Role, Roles};
use crate::policy::rules::{Mode, Rules};
use crate::text;

fn words(roles: Roles) -> String {
    roles.iter().map(Role::word).collect::<Vec<_>>().join(" ")
}

fn mode(mode: Mode) -> &'static str {
    match mode {
        Mode::Enforce => "enforce",
        Mode::Audit => "audit",
    }
}

/// Returns the default roles of a host; none if a grant names it.
fn of_before(rules: &Rules, host: &Host) -> Option<Roles> {
    (!rules.has_grant_for(host)).then_some(if *host == Host::Plain { PLAIN } else { QEMU_GA })
}

fn paths(list: Option<&[PathBuf]>) -> Option<Vec<String>> {
    Some(list?.iter().map(|path| path.display().to_string()).collect())
}

fn targets(grant: &Grant) -> Vec<String> {
    grant.forward.iter().map(ToString::to_string).collect()
}

/// Formats the rules as text for users.
pub fn table(rules: &Rules) -> String {
    let mut text = String::new();
    let meaning = match rules.mode {
        Mode::Enforce => "calls that no grant allows are denied",
        Mode::Audit => "calls that no grant allows are recorded, but not denied",
    };
    // Writing to a string cannot fail.
    let _ = writeln!(text, "mode {}: {meaning}\n", mode(rules.mode));
    let mut rows = vec![["HOST", "CALLER", "BY", "ROLES"].map(str::to_owned)];
    for (host, name) in [(Host::Qga, "qga"), (Host::Plain, "plain")] {
        if let Some(roles) = of_before(rules, &host) {
            let by = if host == Host::Plain { "no grant and no key is for it" } else { "no grant is for it" };
            rows.push([name.to_owned(), "*".to_owned(), by.to_owned(), words(roles)]);
        }
    }
    if !rules.plain.is_empty() {
        let by = "trust.plain, once there are keys";
        rows.push(["plain".to_owned(), "*".to_owned(), by.to_owned(), words(rules.plain)]);
    }
    rows.push(["*", "*", "its key; the line of it may give more", "status"].map(str::to_owned));
    rows.extend(rules.grants.iter().map(row));
    text + &text::table(&rows) + &bounds(rules)
}

fn row(grant: &Grant) -> [String; 4] {
    let mut roles = words(grant.roles);
    let (exec, files) = (paths(grant.exec.as_deref()), paths(grant.files.as_deref()));
    let forward = grant.roles.has(Role::Forward).then(|| targets(grant));
    for (what, list) in [("exec", exec), ("as", grant.users.clone()), ("files", files), ("forward", forward)]
    {
        if let Some(list) = list {
            let _ = write!(
                roles,
                "; {what}: {}",
                if list.is_empty() { "none".to_owned() } else { list.join(" ") }
            );
        }
    }
    [grant.host.to_string(), grant.caller.pattern().to_owned(), grant.origin.clone(), roles]
}

/// Formats the bounds that the settings of `[qga]` set.
fn bounds(rules: &Rules) -> String {
    let bounds = &rules.bounds;
    let mut lines = Vec::new();
    if let Some(allow) = &bounds.allow {
        lines.push(format!("only these commands: {}", allow.join(" ")));
    }
    if !bounds.block.is_empty() {
        lines.push(format!("not these commands: {}", bounds.block.join(" ")));
    }
    let limits = &bounds.limits;
    for (what, list) in [("programs", &limits.exec_paths), ("files", &limits.file_paths)] {
        if let Some(list) = paths(list.as_deref()) {
            lines.push(format!("only these {what}: {}", list.join(" ")));
        }
    }
    if limits.files_read_only {
        lines.push("files for reading only".to_owned());
    }
    if !limits.passwords {
        lines.push("no passwords".to_owned());
    }
    if lines.is_empty() {
        return String::new();
    }
    format!(
        "\nThe settings of [qga] limit everybody who requests what these commands do, whatever the grants allow:\n  {}\n",
        lines.join("\n  ")
    )
}

/// Formats the rules as JSON.
pub fn json(rules: &Rules) -> Value {
    let list = |roles: Roles| roles.iter().map(Role::word).collect::<Vec<_>>();
    let limits = &rules.bounds.limits;
    json!({
        "mode": mode(rules.mode),
        "without_grant": {
            "qga": of_before(rules, &Host::Qga).map(list),
            "plain_without_keys": of_before(rules, &Host::Plain).map(list),
            "plain_with_keys": list(rules.plain),
            "keyed": ["status"],
        },
        "grants": rules.grants.iter().map(|grant| json!({
            "origin": grant.origin,
            "host": grant.host.to_string(),
            "caller": grant.caller.pattern(),
            "roles": list(grant.roles),
            "exec": paths(grant.exec.as_deref()),
            "exec_users": grant.users,
            "files": paths(grant.files.as_deref()),
            "forward": targets(grant),
        })).collect::<Vec<_>>(),
        "qga": {
            "allow": rules.bounds.allow,
            "block": rules.bounds.block,
            "exec": paths(limits.exec_paths.as_deref()),
            "files": paths(limits.file_paths.as_deref()),
            "files_read_only": limits.files_read_only,
            "passwords": limits.passwords,
        },
    })
}
