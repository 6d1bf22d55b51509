//! `guestlet-ccm`: the cloud controller manager of a guest's cluster.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use guestlet::ccm::net::Net;
use guestlet::ccm::nodes::Settings;
use guestlet::ccm::nodes::addresses::Choice;
use guestlet::ccm::nodes::plan::ZoneChange;
use guestlet::ccm::services::wanted::{Defaults, announcing_of};
use guestlet::ccm::{self, Options};
use guestlet::kubernetes::lease::Timing;
use guestlet::wire::proto::v1::Announcing;

/// Cloud controller manager for a cluster of VMs: serves its Nodes and Services through the guestlet agent of its node.
#[derive(Debug, Parser)]
#[command(name = "guestlet-ccm", version = guestlet::VERSION)]
struct Arguments {
    /// Kubeconfig for the API server; in a pod, its service account is used by default
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// The socket of this node's agent
    #[arg(long, value_name = "SOCKET", default_value = "/run/guestlet-cloud/cloud.sock")]
    agent_socket: PathBuf,
    /// The name of this replica
    #[arg(long, value_name = "NAME", env = "POD_NAME")]
    name: String,
    /// The namespace of the Lease cloud-controller-manager
    #[arg(long, value_name = "NAME", env = "POD_NAMESPACE", default_value = "kube-system")]
    namespace: String,
    /// How many seconds the Lease lasts without being renewed; at least 3
    #[arg(long, value_name = "SECONDS", default_value_t = 15, value_parser = clap::value_parser!(u64).range(3..=3600))]
    lease: u64,
    /// Address on which kubelet's probes are served: /healthz, /livez and /readyz
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:10268")]
    health: SocketAddr,
    /// How many seconds the host must report that a VM is gone before its Node is deleted
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=86400))]
    delete_after: u64,
    /// How many seconds a Node may wait to be recognised before an event reports it
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(..=86400))]
    tell_after: u64,
    /// The host's network from which Nodes get their addresses; by default that of the first interface with an address
    #[arg(long, value_name = "NETWORK")]
    management_network: Option<String>,
    /// Only use internal addresses of Nodes in this range; may be repeated
    #[arg(long, value_name = "CIDR")]
    node_cidr: Vec<Net>,
    /// Treat further addresses of Nodes in this range as external; may be repeated
    #[arg(long, value_name = "CIDR")]
    external_cidr: Vec<Net>,
    /// What happens to the labels of region and zone when a VM has moved elsewhere: update or keep
    #[arg(long, value_name = "WHAT", default_value = "update", value_parser = zone_change)]
    zone_change: ZoneChange,
    /// Who announces addresses, unless the Service sets it: kube-vip, none or host
    #[arg(long, value_name = "WHO", default_value = "kube-vip", value_parser = announcing)]
    announce: Announcing,
    /// The loadBalancerClass of the Services that are handled
    #[arg(long, value_name = "CLASS", default_value = "guestlet.io/load-balancer")]
    load_balancer_class: String,
    /// Leave Services without a loadBalancerClass alone
    #[arg(long)]
    only_class: bool,
    /// Log more
    #[arg(short, long)]
    verbose: bool,
}

fn zone_change(word: &str) -> Result<ZoneChange, String> {
    match word {
        "update" => Ok(ZoneChange::Update),
        "keep" => Ok(ZoneChange::Keep),
        _ => Err("use update or keep".to_owned()),
    }
}

fn announcing(word: &str) -> Result<Announcing, String> {
    announcing_of(word).ok_or_else(|| "use kube-vip, none or host".to_owned())
}

impl Arguments {
    fn options(self) -> Options {
        let lease = Duration::from_secs(self.lease);
        // In the proportions of the defaults: 15, 10 and 2 seconds.
        let timing = Timing { lease, deadline: lease * 2 / 3, every: lease * 2 / 15 };
        Options {
            kubeconfig: self.kubeconfig,
            name: self.name,
            namespace: self.namespace,
            socket: self.agent_socket,
            timing,
            health: self.health,
            nodes: Settings {
                choice: Choice {
                    network: self.management_network,
                    internal: self.node_cidr,
                    external: self.external_cidr,
                },
                zone_change: self.zone_change,
                confirm: Duration::from_secs(self.delete_after),
                patience: Duration::from_secs(self.tell_after),
            },
            services: Defaults {
                class: self.load_balancer_class,
                without_class: !self.only_class,
                announcing: self.announce,
            },
            verbose: self.verbose,
        }
    }
}

#[allow(clippy::print_stderr, reason = "before and after there is a log")]
fn main() -> ExitCode {
    match ccm::run(Arguments::parse().options()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("guestlet-ccm: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::format_push_string, missing_docs)]
#[path = "../../tests/man/mod.rs"]
mod man;

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
                Entry::new("/run/guestlet-cloud/cloud.sock", "The socket of this node's agent."),
                Entry::new(
                    "/var/run/secrets/kubernetes.io/serviceaccount",
                    "How a pod reaches the API server, without --kubeconfig.",
                ),
            ],
        ));
        sections.push((
            "EXIT STATUS".to_owned(),
            vec![
                Entry::new("0", "It was told to end."),
                Entry::new("1", "Something failed, or it is no longer the leader; standard error says what."),
                Entry::new("2", "An option is wrong."),
            ],
        ));
        let page = Page {
            name: "guestlet-ccm",
            summary: "the cloud controller manager of a cluster of VMs".to_owned(),
            synopsis: vec!["guestlet-ccm [OPTIONS]".to_owned()],
            description: vec![
                command.get_about().map(ToString::to_string).unwrap_or_default(),
                "It runs as a pod on the nodes of a cluster's control plane, where one of all replicas leads. It asks the agent \
                 guestlet(8) of its node, and that its host half. See /usr/share/doc/guestlet/docs/cloud-provider.md."
                    .to_owned(),
            ],
            sections,
        };
        page.check();
    }

    #[test]
    fn the_usual_options_are_those_of_the_manual() {
        let options = Arguments::parse_from(["guestlet-ccm", "--name", "a"]).options();
        assert_eq!(options.timing, Timing::default());
        assert_eq!(options.socket, PathBuf::from("/run/guestlet-cloud/cloud.sock"));
        for wrong in
            [&["--announce", "me"][..], &["--zone-change", "x"], &["--node-cidr", "x"], &["--lease", "1"]]
        {
            let arguments = ["guestlet-ccm", "--name", "a"].iter().chain(wrong);
            assert!(Arguments::try_parse_from(arguments).is_err(), "{wrong:?}");
        }
    }
}
