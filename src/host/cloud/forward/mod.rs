//! Forwards from addresses of the host to nodes: puts the plan into the kernel, and keeps it in force.
//!
//! ```text
//!  desk ──plan──▶ forwarder ──addresses──▶ interfaces
//!   ▲                 │ └──rules (nft -f -)──▶ the table "guestlet"
//!   └──in force, or why not─┘       └──checked every few seconds: foreign changes are undone, and logged once
//! ```
//!
//! Rules and addresses stay when this program ends, so that a restart interrupts no traffic; the next run replaces
//! them.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::sys::connections::{self, Destination};
use crate::sys::program::{self, Secret};
use crate::sys::root::Root;
use crate::sys::{blocking, capabilities, error_chain, interface_addresses, ip_forwarding};

pub mod plan;
pub mod rules;

use plan::{Interface, Owners, Plan};

/// Timeout of one run of nft(8).
const DEADLINE: Duration = Duration::from_secs(20);
/// Time within which successive plans are put in force together.
const TOGETHER: Duration = Duration::from_millis(20);
/// Interval at which the rules in the kernel are checked.
const LOOK: Duration = Duration::from_secs(5);
/// Time after which a failure is retried.
const AGAIN: Duration = Duration::from_secs(5);

/// `ENODEV`: the interface does not exist.
const NO_DEVICE: i32 = 19;

/// Advice that precedes the error of nft(8) if the privilege is missing.
const UNPRIVILEGED: &str =
    "guestlet-host lacks the privilege CAP_NET_ADMIN; its example drop-in forwarding.conf grants it";

/// Plan with its sequence number.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Numbered {
    /// Number that grows with each plan. At 0 there is no plan yet, and the kernel is left as it is.
    pub number: u64,
    /// Services and addresses to put in force.
    pub plan: Arc<Plan>,
}

/// Report of the forwarder on the kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct InForce {
    /// Number of the plan that is in force.
    pub number: u64,
    /// Reason why the newest plan is not in force, if so.
    pub problem: Option<String>,
    /// Number of times that another program had changed the rules, and they were restored.
    pub repaired: u64,
}

/// Task that puts plans in force.
#[derive(Debug)]
pub struct Forwarder {
    nft: PathBuf,
    plans: watch::Receiver<Numbered>,
    told: watch::Sender<InForce>,
    /// Plan whose rules were written last, and the words of the table as the kernel listed it right afterwards.
    written: Option<(Arc<Plan>, Vec<String>)>,
    /// Load balancers by address, protocol and port, as of the last time that this run wrote rules.
    owners: Owners,
    /// Destinations whose connection tracking entries have yet to be removed.
    stale: BTreeSet<Destination>,
    is_said: bool,
}

impl Forwarder {
    /// Creates a forwarder that runs the program `nft`, and the channel that reports what is in force.
    pub fn new(nft: PathBuf, plans: watch::Receiver<Numbered>) -> (Self, watch::Receiver<InForce>) {
        let (told, hears) = watch::channel(InForce::default());
        (
            Self {
                nft,
                plans,
                told,
                written: None,
                owners: Owners::new(),
                stale: BTreeSet::new(),
                is_said: false,
            },
            hears,
        )
    }

    /// Puts plans in force until the future is dropped.
    pub async fn run(mut self) {
        loop {
            let wanted = self.plans.borrow_and_update().clone();
            if wanted.number > 0 {
                let done = self.put_in_force(&wanted.plan).await;
                let problem = done.err();
                if let Some(problem) = &problem
                    && self.told.borrow().problem.as_ref() != Some(problem)
                {
                    tracing::error!("cannot forward to nodes of clusters: {problem}");
                }
                self.told.send_if_modified(|told| {
                    let number = if problem.is_none() { wanted.number } else { told.number };
                    let now = InForce { number, problem: problem.clone(), repaired: told.repaired };
                    std::mem::replace(told, now.clone()) != now
                });
                if problem.is_some() {
                    drop(tokio::time::timeout(AGAIN, self.plans.changed()).await);
                    continue;
                }
            }
            self.watch(&wanted).await;
            tokio::time::sleep(TOGETHER).await;
        }
    }

    /// Completes when there is a new plan, or the rules in the kernel are no longer as they were written.
    async fn watch(&mut self, wanted: &Numbered) {
        let mut look = Instant::now() + LOOK;
        loop {
            if let Ok(changed) = tokio::time::timeout_at(look, self.plans.changed()).await {
                if changed.is_err() {
                    std::future::pending::<()>().await;
                }
                return;
            }
            look = Instant::now() + LOOK;
            if wanted.number == 0 || wanted.plan.is_empty() {
                continue;
            }
            match self.table().await {
                Ok(now) if self.written.as_ref().is_some_and(|(_, written)| *written == now) => {}
                // If the table cannot be listed, the reason is reported by the next attempt to write it.
                Ok(_) | Err(program::Error::Failed { .. }) => {
                    self.told.send_modify(|told| told.repaired += 1);
                    if !std::mem::replace(&mut self.is_said, true) {
                        tracing::warn!(
                            "another program has changed or removed the nftables table inet {}; restoring \
                             it, now and whenever that happens again",
                            rules::TABLE
                        );
                    }
                    return;
                }
                Err(error) => tracing::debug!("{}", error_chain::words(&error)),
            }
        }
    }

    async fn put_in_force(&mut self, plan: &Arc<Plan>) -> Result<(), String> {
        let mut before = self.owners.clone();
        if before.is_empty()
            && let Ok(listed) = self.list().await
        {
            before = rules::owners(&listed);
        }
        let now = plan.owners();
        let others = before.iter().filter(|(at, id)| now.get(*at) != Some(*id)).map(|(at, _)| *at);
        self.stale.extend(others);
        // Addresses are removed before rules: traffic to an address without rules would reach programs on the host.
        let arranged = Arc::clone(plan);
        let taken = blocking::run(move || take(&arranged)).await;
        // After a failure elsewhere, this function runs again and again with a table that is already right.
        let is_there = self.is_there(plan).await;
        if !is_there {
            let text = if plan.is_empty() { rules::remove() } else { rules::replace(plan) };
            self.nft(&["-f", "-"], text).await.map_err(|error| {
                let words = error_chain::words(&error);
                match capabilities::has(&Root::default(), capabilities::NET_ADMIN) {
                    Some(false) => format!("{UNPRIVILEGED}; {words}"),
                    Some(true) | None => words,
                }
            })?;
        }
        self.owners = now;
        let forgotten = self.forget().await;
        let arranged = Arc::clone(plan);
        let given =
            blocking::run(move || give(&arranged).and(kernel_forwards(&arranged, &Root::default()))).await;
        if plan.is_empty() {
            self.written = None;
        } else if !is_there {
            let table = self.table().await.map_err(|error| error_chain::words(&error))?;
            self.written = Some((Arc::clone(plan), table));
        }
        taken.and(forgotten).and(given)
    }

    /// Removes connection tracking entries of flows to destinations that are no longer forwarded, or that belong to
    /// another load balancer now. Otherwise these flows would continue to their old nodes, perhaps of another cluster.
    async fn forget(&mut self) -> Result<(), String> {
        if self.stale.is_empty() {
            return Ok(());
        }
        let stale = self.stale.clone();
        let forget = move || {
            let mut count = 0;
            for is_ipv4 in [true, false] {
                if stale.iter().any(|(address, ..)| address.is_ipv4() == is_ipv4) {
                    count += connections::forget(is_ipv4, |to| stale.contains(to))?;
                }
            }
            Ok::<_, io::Error>(count)
        };
        match blocking::run(forget).await {
            Ok(count) => {
                self.stale.clear();
                if count > 0 {
                    tracing::debug!(
                        count,
                        "removed connection tracking entries of what is no longer forwarded"
                    );
                }
                Ok(())
            }
            Err(error) => Err(format!(
                "cannot remove connection tracking entries of what is no longer forwarded: {error}"
            )),
        }
    }

    /// Reports whether the table still has the rules of this plan as they were written.
    async fn is_there(&self, plan: &Arc<Plan>) -> bool {
        match &self.written {
            Some((of, written)) if of == plan => self.table().await.is_ok_and(|now| now == *written),
            _ => false,
        }
    }

    /// Lists the words of the table, with the handle of each rule. They are sorted, since the elements of sets have no
    /// order.
    async fn table(&self) -> Result<Vec<String>, program::Error> {
        let text = self.list().await?;
        let mut words: Vec<_> = text.split([' ', '\n', '\t', ',']).map(str::to_owned).collect();
        words.sort_unstable();
        Ok(words)
    }

    async fn list(&self) -> Result<String, program::Error> {
        let listed =
            self.nft(&["-a", "-n", "-s", "list", "table", "inet", rules::TABLE], String::new()).await;
        Ok(String::from_utf8_lossy(&listed?.stdout).into_owned())
    }

    async fn nft(&self, arguments: &[&str], input: String) -> Result<std::process::Output, program::Error> {
        let program = self.nft.to_string_lossy();
        program::run_with_input(&program, arguments, &Secret::new(input.into_bytes()), DEADLINE).await
    }
}

/// Removes from interfaces the addresses that this program owns and that are not in the plan. Continues after a
/// failure.
fn take(plan: &Plan) -> Result<(), String> {
    let named: BTreeSet<&String> = plan.interfaces.keys().chain(plan.gone.keys()).collect();
    let nothing = Interface::default();
    let mut problems = Vec::new();
    for name in named {
        let Interface { ranges, addresses } = plan.interfaces.get(name).unwrap_or(&nothing);
        let gone = plan.gone.get(name);
        let is_ours = |address: &&IpAddr| {
            ranges.iter().any(|range| range.contains(**address))
                || gone.is_some_and(|gone| gone.contains(*address))
        };
        let found = match interface_addresses::of(name) {
            Ok(found) => found,
            // If the interface no longer exists, neither do its addresses.
            Err(error) if error.raw_os_error() == Some(NO_DEVICE) && addresses.is_empty() => continue,
            Err(error) => {
                problems.push(format!("cannot examine the interface {name}: {error}"));
                continue;
            }
        };
        for address in found.iter().filter(is_ours).filter(|address| !addresses.contains(address)) {
            if let Err(error) = interface_addresses::remove(name, *address) {
                problems
                    .push(format!("cannot remove the address {address} from the interface {name}: {error}"));
            }
        }
    }
    if problems.is_empty() { Ok(()) } else { Err(problems.join("; ")) }
}

/// Adds the planned addresses to interfaces. Continues after a failure.
fn give(plan: &Plan) -> Result<(), String> {
    on_interfaces(plan, |name, Interface { addresses, .. }, found| {
        let missing = addresses.iter().filter(|address| !found.contains(address));
        let give = |address: &IpAddr| match interface_addresses::add(name, *address) {
            Ok(()) => None,
            Err(error) => Some(format!("cannot add the address {address} to the interface {name}: {error}")),
        };
        missing.filter_map(give).collect()
    })
}

/// Refuses a plan if IP forwarding is off and the kernel would drop its packets.
fn kernel_forwards(plan: &Plan, root: &Root) -> Result<(), String> {
    let has_nodes = |is_ipv4: bool| {
        let nodes = plan.services.iter().flat_map(|service| &service.targets);
        nodes.into_iter().any(|(node, _)| node.is_ipv4() == is_ipv4)
    };
    let checked = |family: &str, setting: &str, forwards: io::Result<bool>| match forwards {
        Ok(true) => Ok(()),
        Ok(false) => Err(format!(
            "this host's kernel does not forward {family}, so nodes can only be reached from the host itself; set \
             {setting}=1, in a file of /etc/sysctl.d for the next boots"
        )),
        Err(error) => Err(format!("cannot read whether this host's kernel forwards {family}: {error}")),
    };
    if has_nodes(true) {
        checked("IPv4", "net.ipv4.ip_forward", ip_forwarding::ipv4(root))?;
    }
    if has_nodes(false) {
        checked("IPv6", "net.ipv6.conf.all.forwarding", ip_forwarding::ipv6(root))?;
    }
    Ok(())
}

fn on_interfaces(
    plan: &Plan,
    mut act: impl FnMut(&str, &Interface, &[IpAddr]) -> Vec<String>,
) -> Result<(), String> {
    let mut problems = Vec::new();
    for (name, interface) in &plan.interfaces {
        match interface_addresses::of(name) {
            Ok(found) => problems.extend(act(name, interface, &found)),
            Err(error) => problems.push(format!("cannot examine the interface {name}: {error}")),
        }
    }
    if problems.is_empty() { Ok(()) } else { Err(problems.join("; ")) }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use std::collections::BTreeMap;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// While an interface is missing, or the kernel does not forward, only that is checked every few seconds.
    #[tokio::test]
    async fn the_table_is_not_written_again_for_what_else_is_missing() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let nft = path("nft");
        let script = format!(
            "#!/bin/sh\ncat >/dev/null\ncase $1 in -f) echo written >>{0}/log;; *) cat {0}/table;; esac\n",
            directory.path().display()
        );
        std::fs::write(&nft, script).unwrap();
        std::fs::set_permissions(&nft, std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::write(path("table"), "table inet guestlet { } # handle 1").unwrap();
        let writes = || std::fs::read_to_string(path("log")).unwrap_or_default().lines().count();
        let (_plans, followed) = watch::channel(Numbered::default());
        let (mut forwarder, _told) = Forwarder::new(nft, followed);
        let interfaces = BTreeMap::from([("no-such-interface".to_owned(), Interface::default())]);
        let plan = Arc::new(Plan { interfaces, ..Plan::default() });
        assert!(!plan.is_empty());
        for _ in 0..3 {
            let problem = forwarder.put_in_force(&plan).await.unwrap_err();
            assert!(problem.contains("no-such-interface"), "{problem}");
        }
        assert_eq!(writes(), 1);
        // Another program changes the table.
        std::fs::write(path("table"), "table inet guestlet { } # handle 2").unwrap();
        forwarder.put_in_force(&plan).await.unwrap_err();
        assert_eq!(writes(), 2);
        forwarder.put_in_force(&plan).await.unwrap_err();
        assert_eq!(writes(), 2);
        // The existing rules belong to another plan.
        forwarder.put_in_force(&Arc::default()).await.unwrap();
        assert_eq!(writes(), 3);
        forwarder.put_in_force(&plan).await.unwrap_err();
        assert_eq!(writes(), 4);
    }
}
