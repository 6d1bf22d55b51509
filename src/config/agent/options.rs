//! The command line: qemu-ga's options, and those that only `guestlet` has.
//!
//! Options are parsed as `getopt_long(3)` does: a long one may be abbreviated as long as it is unique.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use lexopt::Arg;
use lexopt::prelude::ValueExt as _;

use crate::config::agent::fragment::AgentFragment;
use crate::config::agent::qemu_ga;

/// Program that was started, by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    /// guestlet, with every option.
    Guestlet,
    /// qemu-ga, with its options and messages.
    QemuGa,
}

impl Program {
    /// Determines the program from `argv[0]`.
    pub fn named(path: &str) -> Self {
        match path.rsplit('/').next() {
            Some("qemu-ga") => Self::QemuGa,
            _ => Self::Guestlet,
        }
    }

    /// Returns the program's name for messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Guestlet => "guestlet",
            Self::QemuGa => "qemu-ga",
        }
    }
}

/// Query that the running agent answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Question {
    /// Show the status of the agent.
    Status,
    /// List the disks of the guest.
    Disks,
    /// Show what works and what does not; also answered when the agent is not running.
    Doctor,
}

impl Question {
    fn named(word: &OsStr) -> Option<Self> {
        match word.to_str()? {
            "status" => Some(Self::Status),
            "disks" => Some(Self::Disks),
            "doctor" => Some(Self::Doctor),
            _ => None,
        }
    }
}

/// Action that the command line requests.
#[derive(Debug)]
pub enum Request {
    /// Run the agent.
    Run(Box<Run>),
    /// Query the running agent.
    Ask {
        /// The query.
        question: Question,
        /// Settings file, if one was named.
        settings: Option<PathBuf>,
        /// True to print the answer as JSON.
        json: bool,
    },
    /// List all QGA commands.
    Commands,
    /// Print the version.
    Version,
    /// Print the options.
    Help,
}

/// Options for running the agent.
#[derive(Debug, Default)]
pub struct Run {
    /// qemu-ga's settings file, if one was named.
    pub config: Option<PathBuf>,
    /// guestlet's settings file, if one was named.
    pub settings: Option<PathBuf>,
    /// True to print the settings instead of running.
    pub dump: bool,
    /// Settings from the options.
    pub fragment: AgentFragment,
}

/// Short and long names of qemu-ga's options.
const OPTIONS: &[(char, &str)] = &[
    ('h', "help"),
    ('V', "version"),
    ('c', "config"),
    ('D', "dump-conf"),
    ('l', "logfile"),
    ('f', "pidfile"),
    ('F', "fsfreeze-hook"),
    ('v', "verbose"),
    ('m', "method"),
    ('p', "path"),
    ('d', "daemonize"),
    ('b', "block-rpcs"),
    ('b', "blacklist"),
    ('a', "allow-rpcs"),
    ('t', "statedir"),
    ('r', "retry-path"),
];
/// Options that only `guestlet` has. The short name `\0` cannot be typed and stands for no short name.
const OWN_OPTIONS: &[(char, &str)] = &[('o', "output"), ('\0', "settings")];

/// Parses the command line.
///
/// # Errors
/// An option that is unknown or lacks its value, or an argument that is not an option.
pub fn parse(words: impl IntoIterator<Item = OsString>, program: Program) -> Result<Request, lexopt::Error> {
    let mut parser = lexopt::Parser::from_args(words);
    parser.set_short_equals(false);
    let mut run = Run::default();
    let (mut question, mut json) = (None, false);
    loop {
        let option = match parser.next()? {
            None => break,
            Some(Arg::Short(short)) => resolve_short(short, program)?,
            Some(Arg::Long(long)) => resolve_long(long, program)?,
            Some(Arg::Value(word)) => {
                if question.is_none() && program == Program::Guestlet {
                    question = Question::named(&word);
                    if question.is_some() {
                        continue;
                    }
                }
                return Err(format!(
                    "unexpected word {:?}; lists are separated by commas, without spaces",
                    word.display().to_string()
                )
                .into());
            }
        };
        let fragment = &mut run.fragment;
        match option {
            "method" => fragment.qga.method = Some(parser.value()?.string()?),
            "path" => fragment.qga.path = Some(qemu_ga::place(parser.value()?.into())),
            "logfile" => fragment.log.file = Some(qemu_ga::absolute(parser.value()?.into())),
            "pidfile" => fragment.pidfile = Some(qemu_ga::absolute(parser.value()?.into())),
            "statedir" => fragment.qga.statedir = Some(parser.value()?.into()),
            "fsfreeze-hook" => {
                let named = parser.optional_value().map(|path| qemu_ga::absolute(path.into()));
                fragment.qga.fsfreeze_hook = Some(named.unwrap_or_else(|| qemu_ga::DEFAULT_HOOK.into()));
            }
            "block-rpcs" | "blacklist" | "allow-rpcs" => {
                let names = parser.value()?.string()?;
                if names == "help" || names == "?" {
                    return Ok(Request::Commands);
                }
                let list = match option {
                    "allow-rpcs" => &mut fragment.qga.allow_rpcs,
                    _ => &mut fragment.qga.block_rpcs,
                };
                qemu_ga::add_names(list, &names);
            }
            "verbose" => fragment.log.verbose = Some(true),
            "daemonize" => fragment.daemon = Some(true),
            "retry-path" => fragment.qga.retry_path = Some(true),
            "config" => run.config = Some(parser.value()?.into()),
            "settings" => run.settings = Some(parser.value()?.into()),
            "dump-conf" => run.dump = true,
            "output" => {
                json = match parser.value()?.string()?.as_str() {
                    "json" => true,
                    "table" => false,
                    other => return Err(format!("unknown output format {other:?}; use table or json").into()),
                }
            }
            "version" => return Ok(Request::Version),
            "help" => return Ok(Request::Help),
            other => return Err(format!("unknown option --{other}").into()),
        }
    }
    if let Some(question) = question {
        return Ok(Request::Ask { question, settings: run.settings, json });
    }
    if json {
        return Err("the option --output is for status, disks and doctor only".into());
    }
    Ok(Request::Run(Box::new(run)))
}

fn options(program: Program) -> impl Iterator<Item = (char, &'static str)> {
    let own = match program {
        Program::Guestlet => OWN_OPTIONS,
        Program::QemuGa => &[],
    };
    OPTIONS.iter().chain(own).copied()
}

fn resolve_short(short: char, program: Program) -> Result<&'static str, String> {
    let found = options(program).find(|(name, _)| *name == short && short != '\0');
    found.map(|(_, long)| long).ok_or_else(|| format!("unknown option -{short}"))
}

fn resolve_long(long: &str, program: Program) -> Result<&'static str, String> {
    if let Some((_, exact)) = options(program).find(|(_, name)| *name == long) {
        return Ok(exact);
    }
    let mut found = options(program).filter(|(_, name)| name.starts_with(long));
    match found.next() {
        None => Err(format!("unknown option --{long}")),
        Some((short, name)) => match found.find(|(other, _)| *other != short) {
            None => Ok(name),
            Some((_, other)) => {
                Err(format!("the option --{long} is ambiguous: it may be --{name} or --{other}"))
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(words: &[&str]) -> Result<Run, String> {
        match parse(words.iter().map(OsString::from), Program::QemuGa) {
            Ok(Request::Run(run)) => Ok(*run),
            Ok(other) => Err(format!("{other:?}")),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn options_are_read_as_getopt_reads_them() {
        let hook = |words: &[&str]| run(words).unwrap().fragment.qga.fsfreeze_hook.unwrap();
        assert_eq!(hook(&["-F"]), PathBuf::from("/etc/qemu/fsfreeze-hook"));
        assert_eq!(hook(&["-F/hook"]), PathBuf::from("/hook"));
        assert_eq!(hook(&["--fsfreeze-hook=/hook"]), PathBuf::from("/hook"));
        assert_eq!(hook(&["--fsfreeze-hook"]), PathBuf::from("/etc/qemu/fsfreeze-hook"));
        assert_eq!(hook(&["-vF/hook"]), PathBuf::from("/hook"));
        assert_eq!(run(&["-mnone"]).unwrap().fragment.qga.method.as_deref(), Some("none"));
        assert_eq!(run(&["--daemon"]).unwrap().fragment.daemon, Some(true));
        let block = run(&["-b", "a,b,", "--blacklist=c", "--bl=d", "--block-rpcs", " e , f"]).unwrap();
        assert_eq!(block.fragment.qga.block_rpcs.unwrap(), ["a", "b", "c", "d", "e", "f"]);
        assert_eq!(run(&["-a", ""]).unwrap().fragment.qga.allow_rpcs, None);
        assert!(run(&["--ver"]).unwrap_err().contains("ambiguous"));
    }

    #[test]
    fn what_is_not_known_is_named() {
        let cases: &[(&[&str], &str)] = &[
            (&["--colour"], "--colour"),
            (&["-x"], "-x"),
            (&["-m"], "missing argument"),
            (&["-b", "guest-exec", "guest-ping"], "separated by commas"),
            (&["--settings", "x"], "--settings"),
            (&["status"], "status"),
            (&["disks"], "disks"),
            (&["doctor"], "doctor"),
            (&["-o", "json"], "-o"),
            (&["-v=x"], "-="),
        ];
        for (words, expected) in cases {
            let error = run(words).unwrap_err();
            assert!(error.contains(expected), "{words:?}: {error}");
        }
        assert!(matches!(parse(["-b".into(), "?".into()], Program::QemuGa), Ok(Request::Commands)));
    }

    #[test]
    fn the_program_is_told_by_its_name() {
        assert_eq!(Program::named("/usr/sbin/qemu-ga"), Program::QemuGa);
        assert_eq!(Program::named("qemu-ga"), Program::QemuGa);
        assert_eq!(Program::named("/usr/bin/guestlet"), Program::Guestlet);
    }
}
