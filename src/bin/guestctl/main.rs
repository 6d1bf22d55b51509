//! `guestctl`: what people on a host ask `guestlet-host`. The verbs with verbs of their own have a file each.

mod completion;
mod cp;
mod disk;
mod exec;
mod forward;
mod load_balancers;
mod machine;
mod volumes;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::error::ErrorKind;
use clap::{Arg, CommandFactory as _, FromArgMatches as _, Parser, Subcommand, ValueEnum, value_parser};
use guestlet::ctl::audit::Query;
use guestlet::ctl::cluster::Access;
use guestlet::ctl::ls::{Column, List, Selector};
use guestlet::ctl::manifests::{self, parse_driver, parse_root};
use guestlet::ctl::print::Printer;
use guestlet::ctl::top;
use guestlet::ctl::trust::{self, bootstrap};
use guestlet::ctl::{
    self, Verb, Where, kinds, load_balancers::Action, print::Format, watch::Filter, words::parse_span,
};

use cp::Cp;
use disk::Disk;
use exec::Exec;
use forward::Forward;
use load_balancers::Lb;
use machine::Machine;
use volumes::Volumes;

/// Shows the VMs of this host, as their guestlet agents and hypervisors see them.
#[derive(Debug, Parser)]
#[command(name = "guestctl", version = guestlet::VERSION)]
#[command(
    after_help = "Exit codes: 0 success, 1 error, 2 wrong usage, 3 guestlet-host is not running, 4 no such VM, \
                  5 doctor found something wrong; cp, exec, attach and console have their own"
)]
struct Arguments {
    /// The socket of guestlet-host
    #[arg(
        long,
        global = true,
        value_name = "PATH",
        env = "GUESTLET_HOST_SOCKET",
        hide_short_help = true,
        default_value = "/run/guestlet-host/api.sock"
    )]
    socket: PathBuf,
    /// Output format: for people, or for programs
    #[arg(short, long, global = true, value_enum, default_value = "table")]
    output: Output,
    #[command(flatten)]
    cluster: Access,
    #[command(subcommand)]
    command: Command,
}

/// The name under which kubectl finds its plugin `guestlet`.
const PLUGIN: &str = "kubectl-guestlet";

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Output {
    Table,
    /// ls and volumes ls: with more columns
    Wide,
    Json,
    Yaml,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List VMs: all, or those of some names or labels
    ///
    /// The exit code is 4 if no VM has one of the names. AGENT is connected, connecting, refused (REASON says why), gone (the
    /// VM does not run), elsewhere (it has moved to another host) or no-vsock.
    #[command(
        after_help = "Examples:\n  guestctl ls 'web-*' db-1 --sort since\n  guestctl ls -o wide --sort node\n  \
                            guestctl ls -l 'tier=db,env in (prod,test)' --show-labels\n  \
                            guestctl ls -o json | jq -r '.[] | select(.session != \"connected\") | .name'"
    )]
    Ls {
        /// Only VMs with these names; * matches any characters
        #[arg(value_name = "NAME")]
        names: Vec<String>,
        /// Only VMs whose labels match, as in kubectl: key=value, key!=value, key in (a,b), key notin (a,b), key, !key,
        /// or several of them with commas between
        #[arg(short = 'l', long, value_name = "SELECTOR")]
        selector: Option<Selector>,
        /// Show the labels in a column
        #[arg(long)]
        show_labels: bool,
        /// Sort by this column, including those of -o wide
        #[arg(long, value_enum, value_name = "COLUMN", ignore_case = true)]
        sort: Option<Column>,
    },
    /// Show where the VMs run, as reported to their guests, and whether the guests know
    Topology,
    /// Show the Kubernetes Nodes of the guests, as their agents see them
    Nodes,
    /// Show everything that is known about a VM
    Info {
        /// The name of the VM, as shown by ls
        name: String,
    },
    /// Show the disks of a VM, as its guest sees them
    Disks {
        /// The name of the VM, as shown by ls
        name: String,
    },
    /// Show events as they happen, until interrupted
    Watch {
        /// Only for this VM
        name: Option<String>,
        /// Only events of these kinds
        #[arg(long = "kind", value_name = "KIND", value_delimiter = ',', value_parser = PossibleValuesParser::new(kinds::names()))]
        kinds: Vec<String>,
        /// Show past events of this time first, such as 90s, 5m, 2h or 1d
        #[arg(long, value_name = "SPAN", value_parser = parse_span)]
        since: Option<Duration>,
        /// Show heartbeats too
        #[arg(long)]
        heartbeats: bool,
    },
    /// Measure how long the agent takes to answer, once a second
    Ping {
        /// The name of the VM, as shown by ls
        name: String,
        /// How often
        #[arg(short, long, default_value_t = 4, value_parser = value_parser!(u32).range(1..=10_000))]
        count: u32,
    },
    /// Show the load of all guests: processors, memory, pressure, disks, networks, the fullest file system
    ///
    /// Keys choose the sort order, and q quits. W-CPU, W-MEM and W-IO are the part of the time in which something in the guest
    /// waited for a processor, memory or a disk. Rates are averages since the guests were last asked.
    #[command(
        after_help = "Examples:\n  guestctl top --sort memory\n  guestctl top --once -o json | jq '.[] | select(.waiting_memory_ratio > 0.1) | .name'"
    )]
    Top {
        /// Sort by this, highest first
        #[arg(long, value_enum, default_value = "cpu")]
        sort: top::Sort,
        /// How often guests are asked, such as 5s
        #[arg(long, value_name = "SPAN", value_parser = parse_span, default_value = "2s")]
        every: Duration,
        /// Print a table once, or with -o json values, and exit
        #[arg(long)]
        once: bool,
    },
    /// Show what works on this host, what is missing, and what to do
    Doctor,
    /// Show who asked guestlet-host for what, and the results
    ///
    /// These are the calls that changed something, reached into a guest or were denied, from the file that audit.file in the
    /// settings of guestlet-host names. Only root can read it.
    Audit {
        /// Only records of the last, such as 90s, 5m, 2h or 1d
        #[arg(long, value_name = "SPAN", value_parser = parse_span)]
        since: Option<Duration>,
        /// Only for this VM
        #[arg(long, value_name = "NAME")]
        vm: Option<String>,
        /// Show with each call the guest's own records of it, from the file that audit.file in the agent's settings names
        #[arg(long, value_name = "PATH")]
        guest_file: Option<PathBuf>,
    },
    #[command(flatten)]
    Machine(Machine),
    #[command(flatten)]
    Exec(Exec),
    /// Copy files from a guest, to a guest, or from guest to guest
    ///
    /// A copy is written to a temporary file, which is renamed once it is on the disk and its SHA-256 matches. If the
    /// connection breaks, guestctl reconnects and resumes; after an interruption, the same command resumes. Symbolic links
    /// below the named paths are not followed. The exit code is 1 if something could not be copied, and 255 if the connection
    /// was lost for good. The guest's settings say who may read and write which files: docs/cp.md.
    #[command(
        after_help = "Examples:\n  guestctl cp nginx.conf web-1:/etc/nginx/\n  guestctl cp -r web-1:/var/log/nginx logs\n  \
                            guestctl cp -rp web-1:/srv/data web-2:/srv/\n  guestctl cp web-1:/etc/hosts - | less"
    )]
    Cp(Cp),
    Forward(Forward),
    /// Connect to the serial console of a VM; Ctrl-] disconnects
    ///
    /// It is the hypervisor's console and needs no agent, so it works while the guest boots or hangs. One client at a time has
    /// the console. Without a terminal, standard input is passed on and its end ends nothing. The exit code is 6 if the VM has
    /// ended, 7 if another client has taken the console over, and 255 if the connection with guestlet-host was lost for long.
    Console {
        /// The name of the VM, as shown by ls
        name: String,
        /// Take over the console: the client that has it is told, and disconnected
        #[arg(short, long)]
        force: bool,
    },
    /// Plug disks into a running VM
    #[command(subcommand)]
    Disk(Disk),
    /// Print the manifests that a guest cluster needs for volumes in addition to guestlet in its nodes, for kubectl apply -f -
    Manifests {
        /// The CSI driver's name, as csi.driver in the agents' settings
        #[arg(long, value_name = "NAME", default_value = manifests::DRIVER, value_parser = parse_driver)]
        driver: String,
        /// Where the guests' kubelets keep their state
        #[arg(long, value_name = "PATH", default_value = manifests::KUBELET_ROOT, value_parser = parse_root)]
        kubelet_root: String,
    },
    /// Manage the volumes of clusters
    ///
    /// Clusters create and use their volumes themselves, through CSI. These commands are for inspection and repair: the cluster
    /// is not told of what is done here.
    #[command(subcommand)]
    Volumes(Volumes),
    /// Manage the load balancers of clusters
    ///
    /// Clusters request them themselves. These commands are for inspection and repair.
    #[command(subcommand)]
    Lb(Lb),
    /// List the pools of addresses for load balancers, and why load balancers cannot be created
    Pools,
    /// Manage the keys by which this host half and the guests identify each other
    #[command(subcommand)]
    Trust(Trust),
    /// Relay a connection to guestlet-host over standard input and output
    #[command(hide = true)]
    Proxy,
}

#[derive(Debug, Subcommand)]
enum Trust {
    /// List the keys of this host half and of all guests
    Ls,
    /// Show what is known about the key of a guest
    Show {
        /// The VM's name
        name: String,
    },
    /// Print what to add to a VM, or to write into its guest, so that the guest accepts this host half by its key
    Bootstrap {
        /// The VM's name
        name: String,
        /// For this platform only
        #[arg(long = "for", value_name = "PLATFORM", value_enum)]
        platform: Option<bootstrap::Format>,
        /// Include a one-time token, with which the guest proves at its first contact that it is the one that was set up
        #[arg(long)]
        token: bool,
        /// Roles and profiles that the key gives this host half in the guest; the guest's own settings may give it more
        #[arg(long = "role", value_name = "ROLE", value_delimiter = ',', default_value = "volumes")]
        roles: Vec<String>,
    },
    /// Accept the key with which a guest was refused, after it was reinstalled or restored
    Accept {
        /// The VM's name
        name: String,
        /// Only if it is this one, such as SHA256:…
        key: Option<String>,
    },
    /// Forget the key of a guest: the next one that it presents is pinned, and it may speak without keys again
    Forget {
        /// The VM's name, or the UUID of one that is gone
        #[arg(required_unless_present = "unlisted", conflicts_with = "unlisted")]
        name: Option<String>,
        /// The keys of all VMs that the host half's settings do not list any more; trust ls marks them
        #[arg(long)]
        unlisted: bool,
    },
    /// Make a guest create a new key for its next session, or give this host half a new one
    Rotate {
        /// The VM's name
        #[arg(required_unless_present = "host", conflicts_with = "host")]
        name: Option<String>,
        /// Make this host half a new key, tell the guests, and say which of them know it
        #[arg(long)]
        host: bool,
        /// Use the new key of this host half; guests drop the previous one
        #[arg(long, requires = "host")]
        finish: bool,
        /// Even if some guests do not know it yet
        #[arg(long, requires = "finish")]
        force: bool,
    },
}

impl From<Trust> for Verb {
    fn from(verb: Trust) -> Self {
        Self::Trust(match verb {
            Trust::Ls => trust::Action::List,
            Trust::Show { name } => trust::Action::Show { name },
            Trust::Bootstrap { name, platform, token, roles } => {
                trust::Action::Bootstrap { name, format: platform, with_token: token, roles }
            }
            Trust::Accept { name, key } => trust::Action::Accept { name, key: key.unwrap_or_default() },
            Trust::Forget { unlisted: true, .. } => trust::Action::ForgetUnlisted,
            Trust::Forget { name, .. } => trust::Action::Forget { name: name.unwrap_or_default() },
            Trust::Rotate { host: true, finish, force, .. } => trust::Action::RotateHost { finish, force },
            Trust::Rotate { name, .. } => trust::Action::Rotate { name: name.unwrap_or_default() },
        })
    }
}

fn main() -> ExitCode {
    let is_plugin = std::env::args_os().next().is_some_and(|program| Path::new(&program).ends_with(PLUGIN));
    let mut said = std::env::args_os().skip(1);
    if said.next().is_some_and(|word| word == completion::WORD) {
        return completion::answer(said.skip(1).collect());
    }
    let arguments = parse(is_plugin);
    let wide = matches!(arguments.output, Output::Wide);
    let format = match arguments.output {
        Output::Table | Output::Wide => Format::Table,
        Output::Json => Format::Json,
        Output::Yaml => Format::Yaml,
    };
    let verb = match arguments.command {
        Command::Ls { names, selector, show_labels, sort } => {
            let selector = selector.unwrap_or_default();
            Verb::Ls(List { names, selector, sort, wide, show_labels })
        }
        Command::Topology => Verb::Topology,
        Command::Nodes => Verb::Nodes,
        Command::Info { name } => Verb::Info { name },
        Command::Disks { name } => Verb::Disks { name },
        Command::Watch { name, kinds, since, heartbeats } => {
            Verb::Watch(Filter { name, kinds, heartbeats, since })
        }
        Command::Ping { name, count } => Verb::Ping { name, count },
        Command::Top { sort, every, once } => {
            Verb::Top(top::Wish { sort, every: every.max(Duration::from_secs(1)), once })
        }
        Command::Doctor => Verb::Doctor,
        Command::Audit { since, vm, guest_file } => Verb::Audit(Query { since, vm, guest_file }),
        Command::Machine(machine) => machine.into(),
        Command::Exec(exec) => exec.into(),
        Command::Cp(cp) => cp.into(),
        Command::Forward(forward) => forward.into(),
        Command::Console { name, force } => Verb::Console { name, force },
        Command::Disk(disk) => disk.into(),
        Command::Manifests { driver, kubelet_root } => {
            return ended(manifests::run(&mut Printer::new(format), &driver, &kubelet_root));
        }
        Command::Volumes(volumes) => volumes.verb(wide),
        Command::Lb(lb) => lb.verb(wide),
        Command::Pools => Verb::LoadBalancers(Action::Pools),
        Command::Trust(trust) => trust.into(),
        Command::Proxy => Verb::Proxy,
    };
    let place = if is_plugin || arguments.cluster.names_a_cluster() {
        Where::Cluster(arguments.cluster)
    } else {
        Where::Here(arguments.socket)
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&anyhow::Error::new(error).context("cannot start the runtime"), 1),
    };
    let runs_program = matches!(
        &verb,
        Verb::Program { action: ctl::exec::Action::Run(_) | ctl::exec::Action::Attach { .. }, .. }
    );
    let result = runtime.block_on(ctl::run(place, format, verb));
    // A thread that still reads what is typed is not waited for.
    runtime.shutdown_background();
    if runs_program { exec::ended(result) } else { ended(result) }
}

/// What was typed. As a plugin it speaks as kubectl's.
fn parse(is_plugin: bool) -> Arguments {
    let mut command = Arguments::command();
    if is_plugin {
        let of_clusters = |arg: Arg| arg.hide_short_help(false);
        command = command.name(PLUGIN).bin_name("kubectl guestlet");
        command = command.mut_arg("namespace", of_clusters).mut_arg("all_namespaces", of_clusters);
    }
    let parsed = Arguments::from_arg_matches(&command.get_matches_mut());
    let arguments = parsed.unwrap_or_else(|error| error.format(&mut command).exit());
    if arguments.cluster.is_for_a_cluster() && !is_plugin && !arguments.cluster.names_a_cluster() {
        let words = "--namespace, --all-namespaces and --node apply to clusters only: select one with \
                     --kubeconfig or --context";
        command.error(ErrorKind::MissingRequiredArgument, words).exit();
    }
    arguments
}

fn ended(result: Result<(), ctl::Error>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is_broken_pipe() => ExitCode::SUCCESS,
        Err(error @ (ctl::Error::Wrong | ctl::Error::Ended(_))) => ExitCode::from(error.exit_code()),
        Err(error) => {
            let code = error.exit_code();
            fail(&error.into(), code)
        }
    }
}

#[allow(clippy::print_stderr, reason = "errors of a command line tool")]
fn fail(error: &anyhow::Error, code: u8) -> ExitCode {
    eprintln!("guestctl: {error:#}");
    ExitCode::from(code)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::format_push_string, missing_docs)]
#[path = "../../../tests/man/mod.rs"]
mod man;

#[cfg(test)]
#[allow(clippy::unwrap_used, missing_docs)]
#[path = "../../../tests/docs/blocks.rs"]
mod pages;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::man::{Entry, Page, clap_sections};

    #[test]
    fn the_manual_page_says_what_the_program_says() {
        let command = Arguments::command();
        let mut sections = clap_sections!(command.clone());
        let codes = [
            ("0", "Done."),
            ("1", "An error; standard error says which."),
            ("2", "Wrong usage."),
            ("3", "guestlet-host is not running."),
            ("4", "No such VM."),
            ("5", "The doctor found something wrong."),
            ("255", "Of cp: the connection was lost, and did not come back."),
            (
                "other",
                "Of exec and attach that of the program, 128 and the number of the signal that killed it; 125 if guestctl, the host \
                 half or the agent failed, 126 if the program cannot be executed, 127 if there is no such \
                 program, 255 if the connection to it was lost. Of console 6 if the VM has ended, 7 if the \
                 console was taken over, 255 if the connection was lost.",
            ),
        ];
        let files = [
            ("/run/guestlet-host/api.sock", "Where guestlet-host(8) answers on this machine."),
            (
                "$KUBECONFIG, ~/.kube/config",
                "How clusters are reached, with --context or as kubectl guestlet.",
            ),
        ];
        sections.push(("FILES".to_owned(), files.map(|(file, words)| Entry::new(file, words)).into()));
        let variables = [
            (
                "NO_COLOR",
                "If it is set to anything, nothing is shown in colours; elsewhere than on a terminal nothing is anyway.",
            ),
            (
                "LC_ALL, LC_CTYPE, LANG",
                "Bars of top and info are ASCII characters where these name no UTF-8.",
            ),
        ];
        sections
            .push(("ENVIRONMENT".to_owned(), variables.map(|(name, words)| Entry::new(name, words)).into()));
        sections.push(("EXIT STATUS".to_owned(), codes.map(|(code, words)| Entry::new(code, words)).into()));
        let page = Page {
            name: "guestctl",
            summary: "asks the host half of guestlet about VMs".to_owned(),
            synopsis: vec!["guestctl [OPTIONS] <COMMAND>".to_owned()],
            description: vec![
                command.get_about().map(ToString::to_string).unwrap_or_default(),
                "Root may ask guestlet-host(8) for everything, and others for what the [[access]] tables of its settings let them do."
                    .to_owned(),
            ],
            sections,
        };
        page.check();
    }

    #[test]
    fn commands_of_the_documentation_are_taken() {
        pages::check_commands("guestctl", 60, |words| {
            let words = ["guestctl"].into_iter().chain(words.iter().map(String::as_str));
            Arguments::try_parse_from(words).map(drop).map_err(|error| error.to_string())
        });
    }

    #[test]
    fn commands_that_the_documentation_mentions_exist() {
        let mut command = Arguments::command();
        command.build();
        pages::check_mentions("guestctl", 100, |words| pages::is_known(&command, words));
    }
}
