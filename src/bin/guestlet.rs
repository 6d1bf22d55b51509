//! The agent in the guest; speaks qemu-ga's command line.

use std::path::PathBuf;
use std::process::ExitCode;

use guestlet::config::agent::{self as settings, AgentFragment};
use guestlet::qga::{PROTOCOL_VERSION, document};
use guestlet::sys::{activation, logging};
use guestlet::{VERSION, agent};

const HELP: &str = "\
guestlet: the agent in a virtual machine, for QGA clients and for guestlet-host

Usage: guestlet [OPTIONS]

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
    Run { file: Option<PathBuf>, fragment: AgentFragment },
    Show(String),
}

fn parse(mut parser: lexopt::Parser) -> Result<Invocation, lexopt::Error> {
    use lexopt::prelude::{Long, Short, ValueExt as _};

    let list = |value: String| value.split(',').map(str::to_owned).collect::<Vec<_>>();
    let mut file = None;
    let mut fragment = AgentFragment::default();
    while let Some(argument) = parser.next()? {
        match argument {
            Short('m') | Long("method") => fragment.qga.method = Some(parser.value()?.string()?),
            Short('p') | Long("path") => fragment.qga.path = Some(parser.value()?.into()),
            Short('t') | Long("statedir") => fragment.qga.statedir = Some(parser.value()?.into()),
            Short('b') | Long("block-rpcs") => {
                let value = parser.value()?.string()?;
                if value == "help" {
                    return Ok(Invocation::Show(document::names()));
                }
                fragment.qga.block_rpcs.get_or_insert_default().extend(list(value));
            }
            Short('a') | Long("allow-rpcs") => {
                fragment.qga.allow_rpcs.get_or_insert_default().extend(list(parser.value()?.string()?));
            }
            Long("settings") => file = Some(parser.value()?.into()),
            Short('v') | Long("verbose") => fragment.log.verbose = Some(true),
            Short('V') | Long("version") => {
                let text = format!("guestlet {VERSION} (QEMU Guest Agent {PROTOCOL_VERSION})\n");
                return Ok(Invocation::Show(text));
            }
            Short('h') | Long("help") => return Ok(Invocation::Show(HELP.to_owned())),
            other => return Err(other.unexpected()),
        }
    }
    Ok(Invocation::Run { file, fragment })
}

fn run() -> anyhow::Result<()> {
    let (file, fragment) = match parse(lexopt::Parser::from_env()) {
        Ok(Invocation::Run { file, fragment }) => (file, fragment),
        Ok(Invocation::Show(text)) => {
            use std::io::Write as _;
            // A reader that goes away early has seen enough.
            let _ = std::io::stdout().write_all(text.as_bytes());
            return Ok(());
        }
        Err(error) => anyhow::bail!("{error}; see guestlet --help"),
    };
    let sockets = activation::take()?;
    let settings = settings::load(file.as_deref(), fragment)?;
    logging::init("guestlet", settings.verbose)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(agent::run(settings, sockets))
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
