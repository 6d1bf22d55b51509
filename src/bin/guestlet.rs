//! The agent in the guest; speaks qemu-ga's command line.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use guestlet::config::agent::{self as settings, AgentFragment};
use guestlet::qga::{PROTOCOL_VERSION, document};
use guestlet::sys::{activation, logging};
use guestlet::{VERSION, agent, status};

/// Time between two tries to start with wrong settings.
const WRONG_SETTINGS_REST: Duration = Duration::from_secs(10);

const HELP: &str = "\
guestlet: the agent in a virtual machine, for QGA clients and for guestlet-host

Usage: guestlet [OPTIONS]          run the agent
       guestlet status [-o json]   ask the running agent who holds this guest, and what it sees

  -m, --method METHOD      where QGA clients come from: virtio-serial (default), unix-listen, none
  -p, --path PATH          its device or socket (virtio-serial: /dev/virtio-ports/org.qemu.guest_agent.0)
  -t, --statedir FOLDER    where state is kept (default: /var/run)
  -b, --block-rpcs LIST    QGA commands that may not be called, separated by commas; \"help\" lists all
  -a, --allow-rpcs LIST    the only QGA commands that may be called
      --settings FILE      settings file (default: /etc/guestlet/agent.toml), its drop-ins beside it in agent.d
  -v, --verbose            log each call
  -V, --version            show the version and exit
  -h, --help               show this help and exit
";

enum Invocation {
    Run { file: Option<PathBuf>, fragment: Box<AgentFragment> },
    Status { file: Option<PathBuf>, json: bool },
    Show(String),
}

fn parse(mut parser: lexopt::Parser) -> Result<Invocation, lexopt::Error> {
    use lexopt::prelude::{Long, Short, Value, ValueExt as _};

    let list = |value: String| value.split(',').map(str::to_owned).collect::<Vec<_>>();
    let mut file = None;
    let mut fragment = AgentFragment::default();
    let mut status = false;
    let mut json = false;
    while let Some(argument) = parser.next()? {
        match argument {
            Short('m') | Long("method") => fragment.qga.method = Some(parser.value()?.string()?),
            Short('p') | Long("path") => fragment.qga.path = Some(parser.value()?.into()),
            Short('t') | Long("statedir") => fragment.qga.statedir = Some(parser.value()?.into()),
            Short('b') | Long("block-rpcs") => match parser.value()?.string()? {
                help if help == "help" => return Ok(Invocation::Show(document::names())),
                names => fragment.qga.block_rpcs.get_or_insert_default().extend(list(names)),
            },
            Short('a') | Long("allow-rpcs") => match parser.value()?.string()? {
                help if help == "help" => return Ok(Invocation::Show(document::names())),
                names => fragment.qga.allow_rpcs.get_or_insert_default().extend(list(names)),
            },
            Long("settings") => file = Some(parser.value()?.into()),
            Value(verb) if verb == "status" && !status => status = true,
            Short('o') | Long("output") if status => {
                json = match parser.value()?.string()?.as_str() {
                    "json" => true,
                    "table" => false,
                    other => return Err(format!("the output {other:?} is none of table, json").into()),
                }
            }
            Short('v') | Long("verbose") => fragment.log.verbose = Some(true),
            Short('V') | Long("version") => {
                let text = format!("guestlet {VERSION} (QEMU Guest Agent {PROTOCOL_VERSION})\n");
                return Ok(Invocation::Show(text));
            }
            Short('h') | Long("help") => return Ok(Invocation::Show(HELP.to_owned())),
            other => return Err(other.unexpected()),
        }
    }
    if status {
        return Ok(Invocation::Status { file, json });
    }
    Ok(Invocation::Run { file, fragment: Box::new(fragment) })
}

fn show(text: &str) {
    // A reader that goes away early has seen enough.
    let _ = std::io::stdout().write_all(text.as_bytes());
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

fn run() -> anyhow::Result<()> {
    match parse(lexopt::Parser::from_env()) {
        Ok(Invocation::Run { file, fragment }) => {
            let sockets = activation::take()?;
            let settings = settings::load(file.as_deref(), *fragment).inspect_err(|_| rest())?;
            logging::init("guestlet", settings.verbose)?;
            runtime()?.block_on(agent::run(settings, sockets))
        }
        Ok(Invocation::Status { file, json }) => {
            let settings = settings::load(file.as_deref(), AgentFragment::default())?;
            let socket = settings.runtime_folder.join(agent::LOCAL_SOCKET);
            let answer = runtime()?.block_on(status::ask(&socket))?;
            if json {
                show(&format!("{:#}\n", status::json(&answer)));
            } else {
                show(&status::table(&answer));
            }
            Ok(())
        }
        Ok(Invocation::Show(text)) => {
            show(&text);
            Ok(())
        }
        Err(error) => anyhow::bail!("{error}; see guestlet --help"),
    }
}

/// Wrong settings stay wrong for a while: under a service manager, which starts the agent again at once, each try
/// takes some time.
fn rest() {
    if std::env::var_os("NOTIFY_SOCKET").is_some() {
        std::thread::sleep(WRONG_SETTINGS_REST);
    }
}

#[allow(clippy::print_stderr, reason = "the log may not have started")]
fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("guestlet: {error:#}");
            ExitCode::FAILURE
        }
    }
}
