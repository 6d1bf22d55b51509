//! `guestlet-host`: the controller half, one on each host.

#[cfg(feature = "kubevirt")]
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use guestlet::config::host::DEFAULT_FILE;
use guestlet::hostd::{self, Options, Role};

/// `EX_CONFIG` of sysexits.h.
const WRONG_SETTINGS: u8 = 78;

/// Finds this host's VMs and talks to the guestlet agent in each of them.
#[derive(Debug, Parser)]
#[command(name = "guestlet-host", version = guestlet::VERSION)]
struct Arguments {
    /// The settings file; *.toml files in the directory of the same name with .d instead of .toml are added
    #[arg(long, value_name = "FILE", global = true)]
    config: Option<PathBuf>,
    /// Check the settings and exit
    #[arg(long, global = true)]
    check: bool,
    /// Log more
    #[arg(short, long, global = true)]
    verbose: bool,
    #[cfg(feature = "kubevirt")]
    #[command(subcommand)]
    role: Option<Command>,
}

/// What is served, if not the VMs of this machine that the settings list.
#[cfg(feature = "kubevirt")]
#[derive(Debug, Clone, clap::Subcommand)]
enum Command {
    /// Serve the VMs that KubeVirt runs on this node of a Kubernetes cluster
    Node {
        /// Kubeconfig for the API server; in a pod, its service account is used by default
        #[arg(long, value_name = "FILE")]
        kubeconfig: Option<PathBuf>,
        /// The name of the Node
        #[arg(long, value_name = "NAME", env = "NODE_NAME")]
        node: String,
        /// The namespace of guestlet's own objects
        #[arg(long, value_name = "NAME", env = "POD_NAMESPACE", default_value = NAMESPACE)]
        namespace: String,
        /// The token of the pod's service account for the controller
        #[arg(long, value_name = "FILE", default_value = TOKEN)]
        token: PathBuf,
    },
    /// Plug volumes into the VMs that KubeVirt runs, for the nodes of a Kubernetes cluster
    Controller {
        /// Kubeconfig for the API server; in a pod, its service account is used by default
        #[arg(long, value_name = "FILE")]
        kubeconfig: Option<PathBuf>,
        /// The namespace of guestlet's own objects
        #[arg(long, value_name = "NAME", env = "POD_NAMESPACE", default_value = NAMESPACE)]
        namespace: String,
        /// The name of this replica
        #[arg(long, value_name = "NAME", env = "POD_NAME")]
        name: String,
        /// The address at which nodes reach this replica; its port is that of kubevirt.controller in the settings
        #[arg(long, value_name = "IP", env = "POD_IP")]
        address: IpAddr,
    },
    /// Write the seccomp profile of the node role into a directory, for kubelet
    SeccompProfile {
        /// A directory below seccomp in kubelet's directory
        directory: PathBuf,
    },
}

/// Where the manifests put guestlet's own objects.
#[cfg(feature = "kubevirt")]
const NAMESPACE: &str = "guestlet-system";
/// Where they put the token of a node.
#[cfg(feature = "kubevirt")]
const TOKEN: &str = "/var/run/secrets/guestlet/token";

impl Arguments {
    fn role(&self) -> Role {
        #[cfg(feature = "kubevirt")]
        match self.role.clone() {
            None | Some(Command::SeccompProfile { .. }) => {}
            Some(Command::Node { kubeconfig, node, namespace, token }) => {
                return Role::Node(hostd::NodeOptions { kubeconfig, name: node, namespace, token });
            }
            Some(Command::Controller { kubeconfig, namespace, name, address }) => {
                return Role::Controller(hostd::ControllerOptions { kubeconfig, namespace, name, address });
            }
        }
        Role::Machine
    }
}

#[allow(clippy::print_stderr, reason = "before and after there is a log")]
fn main() -> ExitCode {
    let arguments = Arguments::parse();
    #[cfg(feature = "kubevirt")]
    if let Some(Command::SeccompProfile { directory }) = &arguments.role {
        return match hostd::install_seccomp_profile(directory) {
            Ok(_) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!(
                    "guestlet-host: cannot write the seccomp profile to {}: {error}",
                    directory.display()
                );
                ExitCode::FAILURE
            }
        };
    }
    let options = Options {
        role: arguments.role(),
        required: arguments.config.is_some(),
        file: arguments.config.unwrap_or_else(|| PathBuf::from(DEFAULT_FILE)),
        verbose: arguments.verbose,
    };
    let outcome = if arguments.check {
        hostd::check(&options).map(|settings| {
            let vms = match &options.role {
                Role::Machine => format!(": {} VMs", settings.vms.len()),
                #[cfg(feature = "kubevirt")]
                Role::Node(_) | Role::Controller(_) => String::new(),
            };
            eprintln!("guestlet-host: the settings are valid{vms}");
        })
    } else {
        hostd::run(&options)
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("guestlet-host: {error:#}");
            if !hostd::is_of_settings(&error) {
                return ExitCode::FAILURE;
            }
            if !arguments.check {
                hostd::pause_under_systemd();
            }
            ExitCode::from(WRONG_SETTINGS)
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::format_push_string, missing_docs)]
#[path = "../../tests/man/mod.rs"]
mod man;

#[cfg(test)]
#[allow(clippy::unwrap_used, missing_docs)]
#[path = "../../tests/docs/blocks.rs"]
mod pages;

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;
    use crate::man::{Entry, Page, clap_sections};

    #[test]
    fn the_manual_page_says_what_the_program_says() {
        let command = Arguments::command();
        let mut sections = clap_sections!(command.clone());
        sections.push((
            "FILES".to_owned(),
            vec![
                Entry::new(
                    "/etc/guestlet/host.toml, /etc/guestlet/host.d/*.toml",
                    "The settings; edits take effect at once.",
                ),
                Entry::new("/run/guestlet-host/api.sock", "Where guestctl(8) asks."),
                Entry::new("/var/lib/guestlet-host/volumes", "Volumes that were made for VMs."),
            ],
        ));
        sections.push((
            "EXIT STATUS".to_owned(),
            vec![
                Entry::new("0", "It was told to end, or the settings are valid (--check)."),
                Entry::new("1", "Something failed; standard error says what."),
                Entry::new("78", "The settings are wrong; standard error says where."),
            ],
        ));
        let page = Page {
            name: "guestlet-host",
            summary: "the host half of guestlet".to_owned(),
            synopsis: vec![
                "guestlet-host [OPTIONS]".to_owned(),
                "guestlet-host node [OPTIONS]".to_owned(),
                "guestlet-host controller [OPTIONS]".to_owned(),
                "guestlet-host seccomp-profile DIRECTORY".to_owned(),
            ],
            description: vec![
                command.get_about().map(ToString::to_string).unwrap_or_default(),
                "It runs as guestlet-host.service. What it knows is shown by guestctl(8); all keys of its settings are in \
                 /usr/share/doc/guestlet-host/docs/settings.md."
                    .to_owned(),
            ],
            sections,
        };
        page.check();
    }

    #[test]
    fn commands_of_the_documentation_are_taken() {
        pages::check_commands("guestlet-host", 1, |words| {
            let words = ["guestlet-host"].into_iter().chain(words.iter().map(String::as_str));
            Arguments::try_parse_from(words).map(drop).map_err(|error| error.to_string())
        });
        let mut command = Arguments::command();
        command.build();
        pages::check_mentions("guestlet-host", 3, |words| pages::is_known(&command, words));
    }
}
