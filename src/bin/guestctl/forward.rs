//! The verb of `guestctl` for what listens in a guest.

use std::net::IpAddr;

use clap::Args;
use guestlet::ctl::Verb;
use guestlet::ctl::forward;

/// Reach ports and unix sockets of a guest, without any network in between
///
/// Connections that are made here, or standard input and output with --stdio, are carried to a target in the guest. Each
/// direction of a connection ends by itself. LISTEN and TARGET are each PORT, ADDRESS:PORT or the absolute path of a unix
/// socket; IPv6 addresses are in brackets. A port alone is one of the guest itself; without LISTEN, guestctl listens on the
/// same port here. With port 0, it listens on any free port. The guest's settings say who may reach what: docs/forward.md.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  guestctl forward db-1 5432\n  guestctl forward db-1 15432:5432 8080:10.0.0.5:80\n  \
                        guestctl forward db-1 /tmp/db.sock:/run/postgresql/.s.PGSQL.5432\n  \
                        ssh -o ProxyCommand='guestctl forward web-1 22 --stdio' root@web-1"
)]
pub struct Forward {
    /// The name of the VM, as shown by ls
    name: String,
    /// What to reach, and where to listen for connections to it
    #[arg(value_name = "[LISTEN:]TARGET", required = true)]
    specs: Vec<forward::Spec>,
    /// Carry one connection over standard input and output, without listening: for ssh, scp, rsync and Ansible
    #[arg(long)]
    stdio: bool,
    /// The address to listen on, unless LISTEN has one: whoever can reach it can reach the guest's target
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", conflicts_with = "stdio")]
    address: IpAddr,
}

impl From<Forward> for Verb {
    fn from(typed: Forward) -> Self {
        let Forward { name, specs, stdio, address } = typed;
        Self::Forward { name, forward: forward::Forward { specs, stdio, address } }
    }
}
