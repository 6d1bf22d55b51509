//! Settings from qemu-ga's own files: /etc/qemu/qemu-ga.conf, and the variables that the units of RHEL and its
//! derivatives turn into options.

use std::path::{Path, PathBuf};

use crate::config::agent::fragment::AgentFragment;
use crate::config::agent::options::{self, Program, Request};
use crate::config::{Error, environment_file, key_file};

/// Default path of qemu-ga's settings file.
pub const DEFAULT_CONFIG: &str = "/etc/qemu/qemu-ga.conf";
/// Environment variable that names a different settings file.
pub const CONFIG_VARIABLE: &str = "QGA_CONF";
/// Hook that is run if a hook is requested without a path.
pub const DEFAULT_HOOK: &str = "/etc/qemu/fsfreeze-hook";
/// Files with variables for qemu-ga's unit; a variable in a later file replaces that of an earlier one.
pub const VARIABLE_FILES: [&str; 2] = ["/usr/etc/sysconfig/qemu-ga", "/etc/sysconfig/qemu-ga"];

const GROUP: &str = "general";

/// Resolves a path as qemu-ga does: a relative one starts at the current directory of the program.
pub fn absolute(path: PathBuf) -> PathBuf {
    if path.as_os_str().is_empty() { path } else { std::path::absolute(&path).unwrap_or(path) }
}

/// Resolves the path of a channel, which may also be a vsock address.
pub fn place(path: PathBuf) -> PathBuf {
    if path.to_str().and_then(vsock_address).is_some() { path } else { absolute(path) }
}

/// Parses `CID:PORT`, each of them decimal, or hexadecimal after `0x`.
pub fn vsock_address(text: &str) -> Option<(u32, u32)> {
    let number = |text: &str| match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    };
    let (cid, port) = text.split_once(':')?;
    Some((number(cid)?, number(port)?))
}

/// Adds the names of a comma-separated list. A list without any name is ignored: it neither blocks nor allows
/// anything.
pub fn add_names(list: &mut Option<Vec<String>>, names: &str) {
    let mut names =
        names.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).peekable();
    if names.peek().is_some() {
        list.get_or_insert_default().extend(names);
    }
}

/// Returns the names of a list in qemu-ga.conf, separated by commas. Other lists of key files are separated by
/// semicolons, and so is one in qemu-ga's own unit test; qemu-ga takes such a list for one name, and blocks
/// nothing.
fn list(fragment: &mut AgentFragment, place: &str, names: String) -> String {
    if !names.contains(';') {
        return names;
    }
    fragment.semicolons = true;
    fragment.remarks.push(format!(
        "{place}: names are separated by commas; it is read as {}. qemu-ga reads it as one name, which no command has",
        names.split([';', ',']).map(str::trim).filter(|name| !name.is_empty()).collect::<Vec<_>>().join(",")
    ));
    names.replace(';', ",")
}

/// Parses qemu-ga.conf. Unknown keys result in a remark and not in an error, because qemu-ga does not refuse them
/// either.
///
/// # Errors
/// If the file is not a key file, or a value does not have its key's type.
pub fn config(file: &Path, bytes: &[u8]) -> Result<AgentFragment, Error> {
    let entries =
        key_file::parse(bytes).map_err(|problem| Error::on_line(file, problem.line, problem.text))?;
    let mut fragment = AgentFragment::default();
    let (mut blocked, mut old_blocked, mut allowed) = (None, None, None);
    for entry in entries.iter().filter(|entry| entry.group == GROUP) {
        let (key, line) = (entry.key, entry.line);
        let wrong = |problem: String| Error::on_line(file, line, format!("{key}: {problem}"));
        let text = || key_file::string(entry.value).map_err(wrong);
        let flag = || key_file::boolean(entry.value).map_err(wrong);
        let path = || text().map(|text| absolute(text.into()));
        let here = || format!("{}:{line}: {key}", file.display());
        let name = match key {
            "daemon" => {
                fragment.daemon = Some(flag()?);
                "daemon"
            }
            "method" => {
                fragment.qga.method = Some(text()?);
                "qga.method"
            }
            "path" => {
                fragment.qga.path = Some(place(text()?.into()));
                "qga.path"
            }
            "logfile" => {
                fragment.log.file = Some(path()?);
                "log.file"
            }
            "pidfile" => {
                fragment.pidfile = Some(path()?);
                "pidfile"
            }
            "fsfreeze-hook" => {
                fragment.qga.fsfreeze_hook = Some(path()?);
                "qga.fsfreeze-hook"
            }
            "statedir" => {
                fragment.qga.statedir = Some(text()?.into());
                "qga.statedir"
            }
            "verbose" => {
                fragment.log.verbose = Some(flag()?);
                "log.verbose"
            }
            "retry-path" => {
                fragment.qga.retry_path = Some(flag()?);
                "qga.retry-path"
            }
            "block-rpcs" => {
                blocked = Some(list(&mut fragment, &here(), text()?));
                "qga.block-rpcs"
            }
            "blacklist" => {
                old_blocked = Some(list(&mut fragment, &here(), text()?));
                "qga.block-rpcs"
            }
            "allow-rpcs" => {
                allowed = Some(list(&mut fragment, &here(), text()?));
                "qga.allow-rpcs"
            }
            _ => {
                fragment
                    .remarks
                    .push(format!("{}:{line}: {key} is not a key of qemu-ga, and ignored", file.display()));
                continue;
            }
        };
        fragment.lines.push((name.to_owned(), line));
    }
    // Within one file, the last line of a key wins, as for any other key.
    for names in [blocked, old_blocked].into_iter().flatten() {
        add_names(&mut fragment.qga.block_rpcs, &names);
    }
    if let Some(names) = allowed {
        add_names(&mut fragment.qga.allow_rpcs, &names);
    }
    Ok(fragment)
}

/// Parses the variables of [`VARIABLE_FILES`]; each file comes with its text.
///
/// - `FILTER_RPC_ARGS`: options, as on the command line
/// - `BLOCK_RPCS` and, older, `BLACKLIST_RPC`: commands that may not be called
/// - `FSFREEZE_HOOK_PATHNAME`: the hook; empty for the default one, /dev/null for none
///
/// # Errors
/// If an option is unknown.
pub fn variables(files: &[(PathBuf, String)]) -> Result<Vec<(PathBuf, AgentFragment)>, Error> {
    let mut fragments: Vec<(PathBuf, AgentFragment)> = Vec::new();
    let assignments: Vec<_> = files
        .iter()
        .flat_map(|(file, text)| environment_file::parse(text).into_iter().map(move |found| (file, found)))
        .collect();
    for (at, (file, found)) in assignments.iter().enumerate() {
        if assignments[at + 1..].iter().any(|(_, later)| later.name == found.name) {
            continue;
        }
        let (fragment, keys): (_, &[&str]) = match found.name.as_str() {
            "FILTER_RPC_ARGS" => {
                let words = found.value.split_whitespace().map(Into::into);
                let fragment = match options::parse(words, Program::QemuGa) {
                    Ok(Request::Run(run)) if !run.dump && run.config.is_none() => run.fragment,
                    Ok(_) => {
                        let problem = "FILTER_RPC_ARGS: only options that are also settings can be used here";
                        return Err(Error::on_line(file, found.line, problem));
                    }
                    Err(error) => {
                        return Err(Error::on_line(file, found.line, format!("FILTER_RPC_ARGS: {error}")));
                    }
                };
                (fragment, &["qga.block-rpcs", "qga.allow-rpcs", "qga.method", "qga.path", "qga.statedir"])
            }
            "BLOCK_RPCS" | "BLACKLIST_RPC" => {
                let mut fragment = AgentFragment::default();
                add_names(&mut fragment.qga.block_rpcs, &found.value);
                (fragment, &["qga.block-rpcs"])
            }
            "FSFREEZE_HOOK_PATHNAME" => {
                let hook = if found.value.is_empty() { DEFAULT_HOOK } else { &found.value };
                let mut fragment = AgentFragment::default();
                fragment.qga.fsfreeze_hook = Some(hook.into());
                (fragment, &["qga.fsfreeze-hook"])
            }
            _ => continue,
        };
        let lines = keys.iter().map(|key| ((*key).to_owned(), found.line)).collect();
        fragments.push(((*file).clone(), AgentFragment { lines, ..fragment }));
    }
    Ok(fragments)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_the_config_file() {
        let text = b"[general]\ndaemon=true\nmethod=vsock-listen\npath=3:0x400\nlogfile=/l\npidfile=/p\n\
            fsfreeze-hook=/h\nstatedir=/s\nverbose=1\nretry-path=true\nblock-rpcs=a,b\nblacklist=c\n\
            allow-rpcs=d , e\ndaemonize = 0\n[other]\nverbose=nonsense\n";
        let found = config(Path::new("f"), text).unwrap();
        assert_eq!(
            (found.daemon, found.log.verbose, found.qga.retry_path),
            (Some(true), Some(true), Some(true))
        );
        assert_eq!(found.qga.method.as_deref(), Some("vsock-listen"));
        assert_eq!(found.qga.path, Some("3:0x400".into()));
        assert_eq!((found.log.file, found.pidfile), (Some("/l".into()), Some("/p".into())));
        assert_eq!((found.qga.fsfreeze_hook, found.qga.statedir), (Some("/h".into()), Some("/s".into())));
        assert_eq!(found.qga.block_rpcs.unwrap(), ["a", "b", "c"]);
        assert_eq!(found.qga.allow_rpcs.unwrap(), ["d", "e"]);
        assert_eq!(found.remarks, ["f:14: daemonize is not a key of qemu-ga, and ignored"]);
    }

    #[test]
    fn a_list_with_semicolons_is_what_it_was_meant_to_be() {
        let text = b"[general]\nblock-rpcs=a;b, c;\nallow-rpcs=;\n";
        let found = config(Path::new("f"), text).unwrap();
        assert_eq!(
            (found.qga.block_rpcs.unwrap(), found.qga.allow_rpcs),
            (vec!["a".into(), "b".into(), "c".into()], None)
        );
        assert!(found.semicolons);
        assert!(
            found.remarks[0].starts_with("f:2: block-rpcs: ") && found.remarks[0].contains("a,b,c"),
            "{:?}",
            found.remarks
        );
    }

    #[test]
    fn an_empty_list_is_none() {
        let found = config(Path::new("f"), b"[general]\nblock-rpcs=\nallow-rpcs=\n").unwrap();
        assert_eq!((found.qga.block_rpcs, found.qga.allow_rpcs), (None, None));
    }

    fn files(texts: &[&str]) -> Vec<(PathBuf, String)> {
        texts.iter().map(|text| ("file".into(), (*text).to_owned())).collect()
    }

    #[test]
    fn a_later_variable_replaces_an_earlier_one() {
        let vendor = "FILTER_RPC_ARGS=\"--block-rpcs=guest-exec,guest-exec-status\"\nBLACKLIST_RPC=a\n";
        let found = variables(&files(&[vendor, "FILTER_RPC_ARGS=\"\"\n"])).unwrap();
        let blocked: Vec<_> =
            found.into_iter().filter_map(|(_, fragment)| fragment.qga.block_rpcs).flatten().collect();
        assert_eq!(blocked, ["a"]);
    }

    #[test]
    fn options_in_a_variable_are_checked() {
        for text in
            ["FILTER_RPC_ARGS=--help", "FILTER_RPC_ARGS=-D", "FILTER_RPC_ARGS='-a guest-ping guest-info'"]
        {
            let error = variables(&files(&["# x\n", text])).unwrap_err().to_string();
            assert!(error.starts_with("file:1: FILTER_RPC_ARGS: "), "{text}: {error}");
        }
        let found = variables(&files(&["FSFREEZE_HOOK_PATHNAME=\n"])).unwrap();
        assert_eq!(found[0].1.qga.fsfreeze_hook, Some(DEFAULT_HOOK.into()));
    }

    #[test]
    fn vsock_addresses() {
        let cases = [
            ("3:1234", Some((3, 1234))),
            ("4294967295:0x10", Some((u32::MAX, 16))),
            ("3:", None),
            (":3", None),
            ("3:4:5", None),
            ("4294967296:1", None),
            ("/run/a:b", None),
        ];
        for (text, expected) in cases {
            assert_eq!(vsock_address(text), expected, "{text}");
        }
    }
}
