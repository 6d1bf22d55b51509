//! The agent in the guest; speaks qemu-ga's command line, and stands in for it under its name.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use guestlet::agent::{keys, receipts};

use guestlet::config::agent::options::{self, Program, Question, Request, Run};
use guestlet::config::agent::qemu_ga::CONFIG_VARIABLE;
use guestlet::config::agent::{self as settings, AgentSettings};
use guestlet::doctor::{self, Patient};
use guestlet::policy::command::{self, Verb};
use guestlet::policy::{show as show_policy, suggest};
use guestlet::qga::{PROTOCOL_VERSION, document};
use guestlet::sys::daemon::{self, Process};
use guestlet::sys::pid_file::PidFile;
use guestlet::sys::root::Root;
use guestlet::sys::{activation, logging};
use guestlet::text::colours::Colours;
use guestlet::text::findings;
use guestlet::thaw::{self, Thaw};
use guestlet::{VERSION, agent, applications, privileges, status};

/// Time between two tries to start with wrong settings.
const WRONG_SETTINGS_REST: Duration = Duration::from_secs(10);
/// How long the end waits for calls to the system that have not come back, as on a disk that hangs.
const LEFT_BEHIND: Duration = Duration::from_secs(1);
/// How `guestlet doctor` ends where something is wrong.
const SOMETHING_IS_WRONG: u8 = 5;

const GUESTLET_USAGE: &str = "\
guestlet: the guest agent of a virtual machine, for QGA clients and for guestlet-host

Usage: guestlet [OPTIONS]            run the agent
       guestlet status [-o json]     ask the running agent who holds this guest, and what it sees
       guestlet disks [-o json]      ask it which disks this guest has, and what each is used for
       guestlet topology [-o json]   ask it where this guest runs, and the state of its Node's labels
       guestlet topology --wait 30s  the same, as soon as that is known
       guestlet topology --remove    remove the labels from the files of RKE2, k3s and kubeadm
       guestlet doctor [-o json]     show what works, what is missing, and what to do (status 5 if something is wrong)
       guestlet policy show [-o json]          show who may do what, and which line of the settings says so
       guestlet policy suggest [--file FILE]   write grants from audit records (default: those in audit.file)
       guestlet thaw                 thaw all file systems, with or without a running agent
       guestlet receipts ls          list the receipts of freezes, which prove how consistent a snapshot is
       guestlet receipts show ID     show one of them, and why its level is not higher
       guestlet receipts verify ID|FILE        verify that this guest has signed it (status 5 if not)
       guestlet trust ls [-o json]   list the keys that this guest was given, and its own
       guestlet trust reset          forget its own key, and that it was ever given keys
       guestlet unit-options         show unit options that drop what the settings do not need

";
const QEMU_GA_USAGE: &str = "\
qemu-ga: the guest agent of a virtual machine, for QGA clients; this one is guestlet

Usage: qemu-ga [OPTIONS]

";
// (A backslash before the first line would take its indentation off.)
const OPTIONS: &str =
    "  -c, --config FILE        qemu-ga's settings file (default: $QGA_CONF, or /etc/qemu/qemu-ga.conf)
  -m, --method METHOD      where QGA clients come from: virtio-serial (default), isa-serial, unix-listen,
                           vsock-listen, none; a socket passed by systemd wins
  -p, --path PATH          its device or socket, or CID:PORT for vsock-listen (virtio-serial:
                           /dev/virtio-ports/org.qemu.guest_agent.0, isa-serial: /dev/ttyS0)
  -l, --logfile FILE       log to this file (default: the journal under systemd, else standard error)
  -f, --pidfile FILE       with -d: where the process id is written (default: /var/run/qemu-ga.pid)
  -F[FILE], --fsfreeze-hook[=FILE]
                           run this before a freeze and after a thaw (off unless given; default:
                           /etc/qemu/fsfreeze-hook)
  -t, --statedir DIR       where state is kept (default: /var/run)
  -v, --verbose            log each call
  -d, --daemonize          become a daemon
  -b, --block-rpcs LIST    QGA commands that may not be called, separated by commas; \"help\" lists all
  -a, --allow-rpcs LIST    the only QGA commands that may be called
  -D, --dump-conf          show the settings in the format of qemu-ga.conf and exit
  -r, --retry-path         retry where listening on a socket fails; devices are always waited for
";
const OWN_OPTIONS: &str = "      --settings FILE      settings file (default: /etc/guestlet/agent.toml), its drop-ins beside it in agent.d
";
const LAST_OPTIONS: &str = "  -V, --version            show the version and exit
  -h, --help               show this help and exit
";

fn help(program: Program) -> String {
    match program {
        Program::Guestlet => [GUESTLET_USAGE, OPTIONS, OWN_OPTIONS, LAST_OPTIONS].concat(),
        Program::QemuGa => [QEMU_GA_USAGE, OPTIONS, LAST_OPTIONS].concat(),
    }
}

fn version(program: Program) -> String {
    match program {
        Program::Guestlet => format!("guestlet {VERSION} (QEMU Guest Agent {PROTOCOL_VERSION})\n"),
        Program::QemuGa => format!("QEMU Guest Agent {PROTOCOL_VERSION}\n"),
    }
}

fn show(text: &str) {
    // A reader that goes away early has seen enough.
    let _ = std::io::stdout().write_all(text.as_bytes());
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

fn run(program: Program) -> anyhow::Result<ExitCode> {
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    if program == Program::Guestlet && words.first().is_some_and(|verb| verb == "thaw") {
        end_freeze(&words[1..])?;
        return Ok(ExitCode::SUCCESS);
    }
    if program == Program::Guestlet
        && let [verb, kind, target] = &words[..]
        && verb == "application"
    {
        // Only the agent calls it, beside a freeze: no help lists it.
        applications::serve::serve(&kind.to_string_lossy(), &target.to_string_lossy())?;
        return Ok(ExitCode::SUCCESS);
    }
    if program == Program::Guestlet && words.first().is_some_and(|verb| verb == "topology") {
        return tell_topology(&words[1..]);
    }
    if program == Program::Guestlet && words.first().is_some_and(|verb| verb == "trust") {
        return trust(&words[1..]);
    }
    if program == Program::Guestlet && words.first().is_some_and(|verb| verb == "receipts") {
        return tell_receipts(&words[1..]);
    }
    if program == Program::Guestlet && words.first().is_some_and(|verb| verb == "policy") {
        show(&tell_policy(&words[1..])?);
        return Ok(ExitCode::SUCCESS);
    }
    if program == Program::Guestlet && words.first().is_some_and(|verb| verb == "unit-options") {
        show_unit_options(&words[1..])?;
        return Ok(ExitCode::SUCCESS);
    }
    let request = options::parse(words, program)
        .map_err(|error| anyhow::anyhow!("{error}; see {} --help", program.name()))?;
    match request {
        Request::Run(run) => return start(*run, program),
        Request::Ask { question: Question::Doctor, settings, json } => {
            return examine(settings, json, program);
        }
        Request::Ask { question, settings, json } => {
            let run = Run { settings, ..Run::default() };
            let settings = settings::load_for(run, program, std::env::var_os(CONFIG_VARIABLE))?;
            let socket = settings.runtime_folder.join(agent::LOCAL_SOCKET);
            show(&runtime()?.block_on(ask(question, &socket, json))?);
        }
        Request::Commands => show(&document::names()),
        Request::Version => show(&version(program)),
        Request::Help => show(&help(program)),
    }
    Ok(ExitCode::SUCCESS)
}

/// What the running agent answers, for programs or for people.
async fn ask(question: Question, socket: &Path, json: bool) -> anyhow::Result<String> {
    let (value, table) = match question {
        Question::Status | Question::Doctor => {
            let answer = status::ask(socket).await?;
            (status::json(&answer), status::table(&answer))
        }
        Question::Disks => {
            let answer = status::disks::ask(socket).await?;
            (status::disks::json(&answer), status::disks::table(&answer))
        }
    };
    Ok(if json { format!("{value:#}\n") } else { table })
}

fn tell_topology(words: &[OsString]) -> anyhow::Result<ExitCode> {
    let asked =
        status::topology::parse(words).map_err(|error| anyhow::anyhow!("{error}; see guestlet --help"))?;
    if asked.remove {
        let (done, text) = agent::topology::remove();
        show(&text);
        return Ok(if done { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    let run = Run { settings: asked.settings, ..Run::default() };
    let settings = settings::load_for(run, Program::Guestlet, std::env::var_os(CONFIG_VARIABLE))?;
    let socket = settings.runtime_folder.join(agent::LOCAL_SOCKET);
    let answer = runtime()?.block_on(status::topology::ask(&socket, asked.wait))?;
    show(&if asked.json {
        format!("{:#}\n", status::topology::json(&answer))
    } else {
        status::topology::table(&answer)
    });
    Ok(ExitCode::SUCCESS)
}

/// `guestlet trust ls [-o json]` and `guestlet trust reset`, both with `--settings FILE`; the agent need not run.
fn trust(words: &[OsString]) -> anyhow::Result<ExitCode> {
    let asked = keys::parse(words).map_err(|error| anyhow::anyhow!("{error}; see guestlet --help"))?;
    let run = Run { settings: asked.settings, ..Run::default() };
    let settings = settings::load_for(run, Program::Guestlet, std::env::var_os(CONFIG_VARIABLE))?;
    match asked.action {
        keys::Action::List { json } => show(&keys::list(settings.trust, json)),
        keys::Action::Reset => show(&keys::forgotten(reset_keys(settings)?)),
    }
    Ok(ExitCode::SUCCESS)
}

/// `guestlet receipts ls | show ID | verify ID|FILE`, with `-o json` and `--settings FILE`; the agent need not run.
fn tell_receipts(words: &[OsString]) -> anyhow::Result<ExitCode> {
    let asked = receipts::parse(words).map_err(|error| anyhow::anyhow!("{error}; see guestlet --help"))?;
    let run = Run { settings: asked.settings, ..Run::default() };
    let settings = settings::load_for(run, Program::Guestlet, std::env::var_os(CONFIG_VARIABLE))?;
    let answer = receipts::answer(settings, &asked.action, asked.json)?;
    show(&answer.text);
    Ok(if answer.is_good { ExitCode::SUCCESS } else { ExitCode::from(SOMETHING_IS_WRONG) })
}

/// Has the keys forgotten; says whether something still gives this guest keys. An agent that runs does it itself: one that was
/// reading the keys when they went would make the guest's own key anew.
fn reset_keys(settings: AgentSettings) -> anyhow::Result<bool> {
    let socket = settings.runtime_folder.join(agent::LOCAL_SOCKET);
    let runtime = runtime()?;
    let by_agent = || runtime.block_on(status::reset_keys(&socket));
    if let Some(is_keyed) = by_agent()? {
        return Ok(is_keyed);
    }
    let is_keyed = keys::forget(settings.trust)?;
    // One that was started meanwhile may have read what is gone. It listens before it reads.
    Ok(by_agent()?.unwrap_or(is_keyed))
}

/// Who may do what by the settings, or what settings would let what was done.
fn tell_policy(words: &[OsString]) -> anyhow::Result<String> {
    let asked = command::parse(words).map_err(|error| anyhow::anyhow!("{error}; see guestlet --help"))?;
    let load = |settings| {
        let run = Run { settings, ..Run::default() };
        settings::load_for(run, Program::Guestlet, std::env::var_os(CONFIG_VARIABLE))
    };
    match (asked.verb, asked.file) {
        (Verb::Show, _) => {
            let rules = load(asked.settings)?.rules;
            Ok(if asked.json {
                format!("{:#}\n", show_policy::json(&rules))
            } else {
                show_policy::table(&rules)
            })
        }
        (Verb::Suggest, Some(file)) => suggestions(&file),
        (Verb::Suggest, None) => {
            let file = load(asked.settings)?.audit_file;
            suggestions(&file.context("audit.file is not set; name the file of audit records with --file")?)
        }
    }
}

fn suggestions(file: &Path) -> anyhow::Result<String> {
    let mut records = String::new();
    let read = File::open(file).and_then(|mut opened| opened.read_to_string(&mut records));
    read.with_context(|| format!("cannot read {}", file.display()))?;
    suggest::tables(&records).with_context(|| file.display().to_string())
}

/// Says what works. The agent need not run, and the settings need not be valid.
fn examine(settings: Option<PathBuf>, json: bool, program: Program) -> anyhow::Result<ExitCode> {
    let run = Run { settings, ..Run::default() };
    let settings = settings::load_for(run, program, std::env::var_os(CONFIG_VARIABLE));
    let folder = settings.as_ref().map_or(Path::new(settings::RUNTIME_FOLDER), |set| &*set.runtime_folder);
    let answer = runtime()?.block_on(doctor::ask(&folder.join(agent::LOCAL_SOCKET)));
    let root = Root::default();
    let answer = answer.as_ref().map_err(|error| format!("{error:#}"));
    let findings = doctor::examine(&Patient { root: &root, settings: settings.as_ref(), answer });
    let people = || findings::table(&findings, Colours::on(&std::io::stdout()));
    show(&if json { format!("{:#}\n", findings::json(&findings)) } else { people() });
    Ok(if findings::any_wrong(&findings) { ExitCode::from(SOMETHING_IS_WRONG) } else { ExitCode::SUCCESS })
}

/// `guestlet unit-options [--settings FILE]`
fn show_unit_options(words: &[OsString]) -> anyhow::Result<()> {
    let settings = match words {
        [] => None,
        [option, file] if option == "--settings" => Some(PathBuf::from(file)),
        _ => anyhow::bail!("unit-options takes only --settings FILE; see guestlet --help"),
    };
    let run = Run { settings, ..Run::default() };
    let settings = settings::load_for(run, Program::Guestlet, std::env::var_os(CONFIG_VARIABLE))?;
    show(&privileges::drop_in(&settings));
    Ok(())
}

fn end_freeze(words: &[OsString]) -> anyhow::Result<()> {
    let mut parser = lexopt::Parser::from_args(words);
    let (thaw, file) =
        thaw::parse(&mut parser).map_err(|error| anyhow::anyhow!("{error}; see guestlet --help"))?;
    if let Thaw::Guard { process, folder, longest, hook_deadline } = thaw {
        return thaw::guard(process, &folder, longest, hook_deadline);
    }
    let run = Run { settings: file, ..Run::default() };
    let loaded = settings::load_for(run, Program::Guestlet, std::env::var_os(CONFIG_VARIABLE));
    let (folder, socket, hook_deadline) = match loaded {
        Ok(settings) => (settings.state_folder, settings.runtime_folder, settings.limits.hook_deadline),
        // What is frozen must not stay so for a mistake in a file.
        Err(error) => {
            logging::init("guestlet", false, None)?;
            tracing::warn!("{error}; using the default path of the marker");
            let folder = settings::DEFAULT_STATE_FOLDER.into();
            (folder, settings::RUNTIME_FOLDER.into(), thaw::usual_hook_deadline())
        }
    };
    let done = match thaw {
        Thaw::IfCrashed => thaw::if_crashed(&folder, hook_deadline)?,
        _ => {
            Some(runtime()?.block_on(thaw::now(&socket.join(agent::LOCAL_SOCKET), &folder, hook_deadline))?)
        }
    };
    if let Some(done) = done {
        show(&format!("{done}\n"));
    }
    Ok(())
}

fn start(run: Run, program: Program) -> anyhow::Result<ExitCode> {
    let sockets = activation::take()?;
    let dump = run.dump;
    let loaded = settings::load_for(run, program, std::env::var_os(CONFIG_VARIABLE));
    let settings = loaded.inspect_err(|_| rest(dump))?;
    if dump {
        show(&settings.dump());
        return Ok(ExitCode::SUCCESS);
    }
    // Before there is a thread, and so before logging and the runtime.
    if settings.daemon.wanted {
        match daemon::start()? {
            Process::Starter { up: true } => return Ok(ExitCode::SUCCESS),
            // The daemon said why.
            Process::Starter { up: false } => return Ok(ExitCode::FAILURE),
            Process::Daemon(starting) => {
                let _pid_file = PidFile::take(&settings.daemon.pid_file)?;
                serve(settings, sockets, move || starting.ready())?;
            }
        }
    } else {
        serve(settings, sockets, || Ok(()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn serve(
    settings: AgentSettings,
    sockets: Vec<activation::Passed>,
    ready: impl FnOnce() -> std::io::Result<()>,
) -> anyhow::Result<()> {
    logging::init("guestlet", settings.verbose, settings.log_file.as_deref())?;
    let has_file = settings.log_file.is_some();
    let runtime = runtime()?;
    let outcome = runtime.block_on(agent::run(settings, sockets, ready));
    runtime.shutdown_timeout(LEFT_BEHIND);
    if let Err(error) = &outcome
        && has_file
    {
        tracing::error!("{error:#}");
    }
    logging::finish();
    outcome
}

/// Wrong settings stay wrong for a while: under a service manager, which starts the agent again at once, each try
/// takes some time.
fn rest(dump: bool) {
    if std::env::var_os("NOTIFY_SOCKET").is_some() && !dump {
        std::thread::sleep(WRONG_SETTINGS_REST);
    }
}

#[allow(clippy::print_stderr, reason = "the log may not have started")]
fn main() -> ExitCode {
    let program = Program::named(&std::env::args_os().next().unwrap_or_default().to_string_lossy());
    match run(program) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("{}: {error:#}", program.name());
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, missing_docs)]
#[path = "../../tests/man/mod.rs"]
mod man;
#[cfg(test)]
#[allow(clippy::unwrap_used, missing_docs)]
#[path = "../../tests/docs/blocks.rs"]
mod pages;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::man::{Entry, Page};

    /// The options of the help text: each begins two or six columns in, and what it means behind two spaces or on lines
    /// that begin further in.
    fn entries(text: &str) -> Vec<Entry> {
        let mut entries: Vec<Entry> = Vec::new();
        for line in text.lines() {
            let words = line.trim_start();
            if line.len() - words.len() <= 7 {
                let (term, meaning) = words.split_once("  ").unwrap_or((words, ""));
                entries.push(Entry::new(term.trim(), meaning.trim()));
            } else if let Some(last) = entries.last_mut() {
                last.meaning = format!("{} {words}", last.meaning).trim().to_owned();
            }
        }
        entries
    }

    /// Of the lines of usage: how it is called, and what for.
    fn usage() -> Vec<(&'static str, &'static str)> {
        let lines = GUESTLET_USAGE.lines().skip_while(|line| !line.starts_with("Usage: "));
        let lines =
            lines.map(|line| line.trim_start_matches("Usage:").trim()).filter(|line| !line.is_empty());
        lines.map(|line| line.split_once("  ").map(|(call, words)| (call, words.trim())).unwrap()).collect()
    }

    #[test]
    fn the_manual_page_says_what_the_program_says() {
        let options = entries(&[OPTIONS, OWN_OPTIONS, LAST_OPTIONS].concat());
        assert!(options.len() > 15 && options.iter().all(|entry| !entry.meaning.is_empty()));
        let page = Page {
            name: "guestlet",
            summary: "the guest agent of a virtual machine".to_owned(),
            synopsis: usage().iter().map(|(call, _)| (*call).to_owned()).collect(),
            description: vec![
                "guestlet answers QEMU guest agent clients (libvirt, KubeVirt, Proxmox) on virtio-serial, and guestlet-host \
                 on the host through virtio-vsock. It takes the place of qemu-ga, with its options and its files; under \
                 the name qemu-ga it takes qemu-ga's options only."
                    .to_owned(),
                "It runs as guestlet.service. All keys of its settings are in /usr/share/doc/guestlet/docs/settings.md."
                    .to_owned(),
            ],
            sections: vec![
                ("COMMANDS".to_owned(), usage().iter().map(|(call, words)| Entry::new(*call, *words)).collect()),
                ("OPTIONS".to_owned(), options),
                (
                    "FILES".to_owned(),
                    vec![
                        Entry::new("/etc/guestlet/agent.toml, /etc/guestlet/agent.d/*.toml", "The settings."),
                        Entry::new("/etc/guestlet/disks.d/*.toml", "Rules for disks."),
                        Entry::new("/etc/guestlet/hosts.d/*.pub", "The keys of host halves that may command this guest."),
                        Entry::new("/var/lib/guestlet", "This guest's own key."),
                        Entry::new("/etc/qemu/qemu-ga.conf, /etc/sysconfig/qemu-ga", "qemu-ga's settings, which hold as well."),
                        Entry::new("/run/guestlet", "What lasts until the next boot."),
                    ],
                ),
                (
                    "EXIT STATUS".to_owned(),
                    vec![
                        Entry::new("0", "Done, or told to end."),
                        Entry::new("1", "An error; standard error says which."),
                        Entry::new("5", "The doctor found something wrong."),
                    ],
                ),
            ],
        };
        page.check();
    }

    fn is_taken(words: &[&str]) -> Result<(), String> {
        let all: Vec<OsString> = words.iter().map(OsString::from).collect();
        let rest = all.get(1..).unwrap_or_default();
        match words.first().copied() {
            Some("thaw") => {
                thaw::parse(&mut lexopt::Parser::from_args(rest)).map(drop).map_err(|error| error.to_string())
            }
            Some("topology") => status::topology::parse(rest).map(drop).map_err(|error| error.to_string()),
            Some("policy") => command::parse(rest).map(drop).map_err(|error| error.to_string()),
            Some("trust") => keys::parse(rest).map(drop),
            Some("receipts") => receipts::parse(rest).map(drop),
            Some("unit-options" | "application") => Ok(()),
            _ => options::parse(all, Program::Guestlet).map(drop).map_err(|error| error.to_string()),
        }
    }

    #[test]
    fn commands_of_the_documentation_are_taken() {
        pages::check_commands("guestlet", 5, |words| {
            is_taken(&words.iter().map(String::as_str).collect::<Vec<_>>())
        });
        pages::check_mentions("guestlet", 30, is_taken);
    }
}
