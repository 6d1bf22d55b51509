//! Tests of the decision, as single cases and as properties.

use std::path::Path;

use proptest::prelude::*;

use super::bounds::Bound;
use super::grant::{Caller, Grant, Host};
use super::role::{self, QEMU_GA, Role, Roles};
use super::rules::{Asked, By, Decision, Detail, Mode, Rules, Who, Why};
use super::{Bounds, Target, suggest};
use crate::trust::Fingerprint;
use crate::trust::peer::Keyed;

const ROLES: [Role; 12] = [
    Role::Status,
    Role::Metrics,
    Role::Logs,
    Role::Topology,
    Role::Freeze,
    Role::Disks,
    Role::FilesRead,
    Role::FilesWrite,
    Role::Exec,
    Role::Forward,
    Role::Power,
    Role::Accounts,
];
const STRANGER: Who<'static> = Who::Plain { guest_has_keys: true };
const PLAIN: Who<'static> = Who::Plain { guest_has_keys: false };

fn keyed(key: &[u8]) -> Keyed {
    let names = vec![format!("guestlet://shop/host/{}", String::from_utf8_lossy(key))];
    Keyed {
        fingerprint: Fingerprint::of(key),
        anchor: Fingerprint::of(key),
        names,
        roles: Vec::new(),
        until: None,
    }
}

fn grant(host: Host, caller: &str, roles: &[Role]) -> Grant {
    Grant {
        origin: "a.toml:1".to_owned(),
        host,
        caller: Caller::new(caller),
        roles: Roles::of(roles),
        exec: None,
        users: None,
        files: None,
        forward: Vec::new(),
    }
}

/// Returns the roles that a client has.
fn has(rules: &Rules, who: Who<'_>, caller: &str) -> Vec<Role> {
    let passes = |role: &Role| rules.decide(&Asked::new(who, caller, "verb", *role)).passes();
    ROLES.into_iter().filter(passes).collect()
}

fn why(rules: &Rules, asked: Asked<'_>) -> String {
    match rules.decide(&asked) {
        Decision::Denied(why) => why.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn without_grants_and_keys_all_is_as_before() {
    let rules = Rules::default();
    let of_before: Vec<_> = QEMU_GA.iter().collect();
    assert_eq!(has(&rules, Who::Qga, ""), of_before);
    // Clients that have proved no key have no roles for programs and files.
    let plain: Vec<_> = role::PLAIN.iter().collect();
    assert_eq!(has(&rules, PLAIN, ""), plain);
    assert!(
        ![Role::Exec, Role::FilesRead, Role::FilesWrite, Role::Forward]
            .iter()
            .any(|role| plain.contains(role))
    );
}

#[test]
fn a_keyed_host_half_begins_with_status_and_what_the_line_of_its_key_gives() {
    let rules = Rules::default();
    let mut half = keyed(b"one");
    assert_eq!(has(&rules, Who::Keyed(&half), "uid:0 root"), [Role::Status]);
    half.roles = ["volumes", "freeze", "everything"].map(str::to_owned).to_vec();
    assert_eq!(
        has(&rules, Who::Keyed(&half), ""),
        [Role::Status, Role::Topology, Role::Freeze, Role::Disks],
        "a word that is not known gives nothing"
    );
}

#[test]
fn once_a_guest_has_keys_a_stranger_has_what_trust_plain_says_in_every_mode() {
    for mode in [Mode::Enforce, Mode::Audit] {
        let grants = vec![grant(Host::Plain, "*", &[Role::Exec])];
        let rules = Rules { mode, grants, ..Rules::default() };
        assert_eq!(has(&rules, STRANGER, ""), []);
        let rules = Rules { plain: Roles::of(&[Role::Status]), ..rules };
        assert_eq!(has(&rules, STRANGER, ""), [Role::Status]);
        assert!(why(&rules, Asked::new(STRANGER, "", "x", Role::Exec)).contains("trust.plain does not give"));
    }
}

#[test]
fn qga_is_bound_by_the_first_grant_that_is_for_it() {
    let rules = Rules { grants: vec![grant(Host::Qga, "*", &[Role::Freeze])], ..Rules::default() };
    assert_eq!(has(&rules, Who::Qga, ""), [Role::Freeze]);
    let sync = Asked { protocol: true, ..Asked::new(Who::Qga, "", "guest-sync", Role::Status) };
    assert_eq!(rules.decide(&sync), Decision::Allowed(By::Default("the protocol itself")));
    assert_eq!(has(&rules, PLAIN, ""), role::PLAIN.iter().collect::<Vec<_>>(), "others are not");
    let any = Rules { grants: vec![grant(Host::AnyKey, "*", &[Role::Exec])], ..Rules::default() };
    assert_eq!(has(&any, Who::Qga, ""), QEMU_GA.iter().collect::<Vec<_>>());
}

#[test]
fn what_qga_is_forbidden_stays_so_whatever_is_granted_and_in_every_mode() {
    let bounds = Bounds { block: vec!["guest-exec".to_owned()], ..Bounds::default() };
    for mode in [Mode::Enforce, Mode::Audit] {
        let grants = vec![grant(Host::Qga, "*", &ROLES)];
        let rules = Rules { mode, grants, bounds: bounds.clone(), ..Rules::default() };
        let asked = Asked::new(Who::Qga, "", "guest-exec", Role::Exec);
        assert_eq!(rules.decide(&asked), Decision::Denied(Why::Bound(Bound::Command)));
        assert!(rules.decide(&Asked { verb: "guest-exec-status", ..asked }).passes());
        // The lists of commands hold for QGA only.
        let half = keyed(b"one");
        let who = Who::Keyed(&half);
        assert_eq!(rules.decide(&Asked { who, ..asked }).passes(), mode == Mode::Audit);
    }
}

#[test]
fn programs_and_files_are_held_to_the_paths_of_the_grant() {
    let exec = Some(vec!["/usr/bin/journalctl".into()]);
    let files = Some(vec!["/var/log".into()]);
    let mut rules = Rules {
        grants: vec![Grant { exec, files, ..grant(Host::Qga, "*", &[Role::Exec, Role::FilesRead]) }],
        ..Rules::default()
    };
    let program = |path, environment| Asked {
        detail: Detail::Program { path: Path::new(path), environment, directory: false, user: "root" },
        ..Asked::new(Who::Qga, "", "guest-exec", Role::Exec)
    };
    assert!(rules.decide(&program("/usr/bin/journalctl", false)).passes());
    assert_eq!(
        why(&rules, program("/usr/bin/sh", false)),
        "no grant lets QGA clients run /usr/bin/sh as root; see exec.paths and exec.users of the grants in \
         /etc/guestlet/agent.d"
    );
    assert!(!rules.decide(&program("/usr/bin/journalctl", true)).passes(), "with an environment");
    let path = Path::new("/usr/bin/journalctl");
    let detail = Detail::Program { path, environment: false, directory: true, user: "root" };
    let elsewhere = why(&rules, Asked { detail, ..program("/", false) });
    assert!(elsewhere.contains("in a directory of its choice") && elsewhere.contains("--cwd"), "{elsewhere}");
    let file = |path, writes| Asked {
        detail: Detail::File { path: Path::new(path), is_here: true, writes },
        ..Asked::new(Who::Qga, "", "guest-file-open", if writes { Role::FilesWrite } else { Role::FilesRead })
    };
    assert!(rules.decide(&file("/var/log/messages", false)).passes());
    assert!(why(&rules, file("/var/log2", false)).contains("no grant lets QGA clients read /var/log2"));
    assert!(why(&rules, file("/var/log/messages", true)).contains("no grant gives the role files-write"));
    rules.grants.push(grant(Host::Qga, "*", &[Role::Exec]));
    assert!(rules.decide(&program("/usr/bin/sh", true)).passes(), "one grant is enough");
}

#[test]
fn who_is_denied_is_told_what_to_add() {
    let half = keyed(b"key");
    let asked = Asked::new(Who::Keyed(&half), "uid:1000 alice", "FindDisk", Role::Disks);
    assert_eq!(
        why(&Rules::default(), asked),
        "no grant gives the role disks to the host half SHA256:LHDhK3oGRvkiefQnx7OOczTY5Tic/xZ6HcMOc/gmtoM for \
         uid:1000 alice; add a [[grant]] with host = \"SHA256:LHDhK3oGRvkiefQnx7OOczTY5Tic/xZ6HcMOc/gmtoM\" and \
         roles = [\"disks\"] to /etc/guestlet/agent.d"
    );
}

#[test]
fn the_mode_audit_lets_pass_and_says_what_would_be_denied() {
    let rules = Rules { mode: Mode::Audit, ..Rules::default() };
    let half = keyed(b"one");
    let decision = rules.decide(&Asked::new(Who::Keyed(&half), "", "FindDisk", Role::Disks));
    assert!(decision.passes() && decision.word() == "would-deny", "{decision:?}");
    // Trying out grants must not let every process of the host run programs.
    for role in [Role::Exec, Role::FilesRead, Role::FilesWrite] {
        let decision = rules.decide(&Asked::new(PLAIN, "", "RunProgram", role));
        assert!(!decision.passes(), "{decision:?}");
    }
}

#[test]
fn suggestions_have_what_was_seen_and_no_more() {
    let record = |host: &str, caller: &str, role: &str, subject: &str, decision: &str| {
        serde_json::json!({
            "host": host, "caller": caller, "role": role, "subject": subject, "decision": decision, "verb": "x",
        })
        .to_string()
    };
    let records = [
        record("qga", "/dev/x", "freeze", "", "allowed"),
        record("qga", "/dev/x", "exec", "/usr/bin/b", "would-deny"),
        record("qga", "/dev/y", "exec", "/usr/bin/a", "would-deny"),
        record("qga", "", "files-read", "/etc/\"", "allowed"),
        record("qga", "", "accounts", "root", "denied"),
        record("SHA256:x", "uid:0 root", "disks", "serial", "would-deny"),
        record("SHA256:x", "uid:0 root", "forward", "22", "would-deny"),
        record("SHA256:x", "uid:0 root", "forward", "no target", "denied"),
    ];
    let expected = r#"# Grants for what the audit records show, and no more. Review them before use.
# 2 denied calls are left out.

[[grant]]
host = "SHA256:x"
caller = "uid:0 root"
roles = ["disks", "forward"]
forward = ["22"]

[[grant]]
host = "qga"
roles = ["freeze"]

[[grant]]
host = "qga"
roles = ["exec"]
exec = { paths = ["/usr/bin/a", "/usr/bin/b"] }

[[grant]]
host = "qga"
roles = ["files-read"]
files = { paths = ["/etc/\""] }
"#;
    assert_eq!(suggest::tables(&records.join("\n")).unwrap(), expected);
}

fn hosts() -> impl Strategy<Value = Host> {
    prop_oneof![
        Just(Host::Qga),
        Just(Host::Plain),
        Just(Host::AnyKey),
        (0..3_u8).prop_map(|key| Host::Key(Fingerprint::of(&[b'a' + key]))),
        (0..3_u8).prop_map(|key| Host::Name(format!("guestlet://shop/host/{}", char::from(b'a' + key)))),
    ]
}

fn grants() -> impl Strategy<Value = Grant> {
    let callers = prop_oneof![Just("*"), Just("uid:0 *"), Just("uid:1 b"), Just("")];
    let paths =
        || proptest::option::of(proptest::collection::vec(prop_oneof![Just("/a"), Just("/b/c")], 0..2));
    let roles = proptest::collection::vec(proptest::sample::select(&ROLES[..]), 1..4);
    (hosts(), callers, roles, paths(), paths()).prop_map(|(host, caller, roles, exec, files)| {
        let list = |paths: Option<Vec<&str>>| Some(paths?.into_iter().map(Into::into).collect());
        let forward = if roles.contains(&Role::Forward) { vec!["22".parse().unwrap()] } else { Vec::new() };
        Grant { exec: list(exec), files: list(files), forward, ..grant(host, caller, &roles) }
    })
}

/// Calls `ask` with every combination that these tests distinguish.
fn everything(ask: &mut dyn FnMut(Asked<'_>)) {
    let halves = [keyed(b"a"), keyed(b"b"), keyed(b"c")];
    let mut all = vec![Who::Qga, PLAIN, STRANGER];
    all.extend(halves.iter().map(Who::Keyed));
    for who in all {
        for caller in ["", "uid:0 root", "uid:1 b"] {
            for role in ROLES {
                let asked = Asked::new(who, caller, "verb", role);
                ask(asked);
                for (path, flag) in [("/a/x", false), ("/b/c", true), ("/d", false)] {
                    let path = Path::new(path);
                    for directory in [false, true] {
                        let detail = Detail::Program { path, environment: flag, directory, user: "root" };
                        ask(Asked { detail, ..asked });
                    }
                    ask(Asked { detail: Detail::File { path, is_here: true, writes: flag }, ..asked });
                }
                for target in ["22", "127.0.0.1:22", "unix:/a"] {
                    let target: Target = target.parse().unwrap();
                    ask(Asked { detail: Detail::Target(&target), ..asked });
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The first grant for QGA, or for plain host halves, replaces their defaults, so those roles are not compared.
    #[test]
    fn a_further_grant_takes_nothing_away_and_gives_others_nothing(
        before in proptest::collection::vec(grants(), 0..4),
        more in grants(),
    ) {
        let rules = Rules { grants: before, ..Rules::default() };
        let replaces = matches!(more.host, Host::Qga | Host::Plain) && !rules.has_grant_for(&more.host);
        let mut with_more = rules.clone();
        with_more.grants.push(more.clone());
        let mut wrong = Vec::new();
        everything(&mut |asked| {
            let (then, now) = (rules.decide(&asked).passes(), with_more.decide(&asked).passes());
            let is_meant = more.is_for(&asked.who, asked.caller) && more.gives(asked.role, &asked.detail);
            let lost = then && !now && !(replaces && more.host.means(&asked.who));
            if lost || (now && !then && !is_meant) {
                wrong.push(format!("{asked:?}: {then} and {now}"));
            }
        });
        prop_assert!(wrong.is_empty(), "{more:?}: {wrong:?}");
    }
}
