//! `guestctl doctor`: what works on this host, what is missing, and what to do.
//!
//! It examines files of this host and calls the daemon, and changes nothing.

use std::path::{Path, PathBuf};

use super::client::{self, Client, answer};
use super::print::Printer;
use super::{Error, words};
use crate::text::findings::{self, Finding};
use crate::wire::proto::v1::{
    Advice, CallbackState, GetHostStatusRequest, HostStatus, PowerState, SessionState, VirtualMachine,
};

/// Shows all findings, even if the daemon does not answer.
///
/// # Errors
/// [`Error::Wrong`] if something is wrong; also if standard output cannot be written.
pub async fn run(socket: PathBuf, printer: &mut Printer) -> Result<(), Error> {
    let asked = client::with(socket, async |daemon| ask(daemon.admin()).await).await;
    tell(printer, &findings(Some(Path::new("/")), asked))
}

/// Answer of a daemon: its status, and its VMs.
pub type Asked = (HostStatus, Result<Vec<VirtualMachine>, Error>);

/// Requests the status of a daemon.
///
/// # Errors
/// Fails if it does not answer.
pub async fn ask(mut client: Client) -> Result<Asked, Error> {
    let status = answer(client.get_host_status(GetHostStatusRequest {}), "").await?;
    // The daemon lists no VMs before it knows them all. The first answer says what prevents that.
    let list = client::vms(&mut client, false).await;
    Ok((status, list))
}

/// Writes the findings.
///
/// # Errors
/// [`Error::Wrong`] if something is wrong; also if standard output cannot be written.
pub fn tell(printer: &mut Printer, found: &[Finding]) -> Result<(), Error> {
    let colours = printer.colours();
    printer.value(&findings::json(found), || findings::table(found, colours))?;
    if findings::any_wrong(found) { Err(Error::Wrong) } else { Ok(()) }
}

/// Returns the findings from a daemon's answer and, if it runs on this machine, from the files below `root`.
pub fn findings(root: Option<&Path>, asked: Result<Asked, Error>) -> Vec<Finding> {
    match asked {
        Ok((status, Ok(vms))) => examine(root, Ok((&status, &vms))),
        Ok((status, Err(error))) => {
            let mut found = examine(root, Ok((&status, &[])));
            let says = format!("it does not list its VMs: {error}");
            found.push(Finding::wrong("VMs", says, "fix what is wrong above; or it has only just started"));
            found
        }
        Err(error) => examine(root, Err(&error)),
    }
}

fn examine(root: Option<&Path>, answer: Result<(&HostStatus, &[VirtualMachine]), &Error>) -> Vec<Finding> {
    let (status, vms) = match answer {
        Ok(answer) => answer,
        Err(error) => {
            let remedy = match error {
                Error::NoSocket(_) | Error::NobodyAnswers(_) => {
                    "journalctl --unit guestlet-host shows why it stopped, if it did; guestlet-host --check \
                     checks the settings"
                }
                Error::Forbidden(_) => "",
                _ => "systemctl restart guestlet-host",
            };
            return vec![Finding::wrong("guestlet-host", error.to_string(), remedy)];
        }
    };
    let mut found = vec![daemon(status), settings(status)];
    found.extend(status.backend_problems.iter().map(|problem| {
        let remedy = "can it reach the API server, and may the service account read from it? (packaging/kubernetes/host)";
        Finding::wrong("cluster", problem.clone(), remedy)
    }));
    found.extend(status.advice.iter().map(advice));
    found.extend(root.and_then(|root| kernel(root, vms)));
    found.extend(vms.iter().map(vm));
    found
}

fn daemon(status: &HostStatus) -> Finding {
    let mut says = format!(
        "guestlet-host {} is running: {} of {} VMs connected",
        status.version, status.connected, status.virtual_machines
    );
    if status.without_vsock > 0 {
        says = format!("{says}, {} without vsock", status.without_vsock);
    }
    if status.version == crate::VERSION {
        return Finding::good("guestlet-host", says);
    }
    let says = format!("{says}; {} is installed", crate::VERSION);
    let remedy = if status.node.is_empty() {
        "systemctl restart guestlet-host"
    } else {
        "use the same version of guestlet in the cluster and of this guestctl"
    };
    Finding::note("guestlet-host", says, remedy)
}

fn settings(status: &HostStatus) -> Finding {
    let file = &status.settings_file;
    if !status.settings_problem.is_empty() {
        return Finding::wrong(
            "settings",
            status.settings_problem.clone(),
            "fix them; the previous settings stay in force until then",
        );
    }
    if status.virtual_machines == 0 && status.node.is_empty() {
        return Finding::note(
            "settings",
            format!("{file} lists no VM"),
            "add a [[vm]] table for each VM: name, uuid, vsock-cid",
        );
    }
    Finding::good("settings", format!("{file} is in force"))
}

/// Converts a finding that the program has made about its cluster.
fn advice(advice: &Advice) -> Finding {
    let Advice { subject, says, remedy, is_wrong } = advice;
    match (is_wrong, remedy.is_empty()) {
        (true, _) => Finding::wrong(subject, says, remedy),
        (false, true) => Finding::good(subject, says),
        (false, false) => Finding::note(subject, says, remedy),
    }
}

/// Checks the vsock support of the kernel, if any VM is reached by vsock.
fn kernel(root: &Path, vms: &[VirtualMachine]) -> Option<Finding> {
    let by_kernel = vms.iter().any(|vm| vm.dial.starts_with("vsock:"));
    by_kernel.then(|| {
        if root.join("dev/vhost-vsock").exists() {
            Finding::good("vsock", "/dev/vhost-vsock is there")
        } else {
            Finding::wrong(
                "vsock",
                "this host's kernel has no vhost-vsock (/dev/vhost-vsock)",
                "modprobe vhost_vsock",
            )
        }
    })
}

fn vm(vm: &VirtualMachine) -> Finding {
    let subject = format!("VM {}", vm.name);
    let reason = if vm.reason.is_empty() { String::new() } else { format!(": {}", vm.reason) };
    let subject = subject.as_str();
    match vm.session() {
        SessionState::Connected if !vm.power_problem.is_empty() => {
            let says = format!("connected, but its hypervisor does not answer: {}", vm.power_problem);
            Finding::note(
                subject,
                says,
                "QEMU serves one client on each QMP socket: add one that only guestlet-host uses",
            )
        }
        SessionState::Connected if vm.callback() != CallbackState::Open && !vm.callback_reason.is_empty() => {
            let says = format!("connected, but this guest cannot make calls: {}", vm.callback_reason);
            Finding::wrong(subject, says, "in the guest: guestlet doctor")
        }
        SessionState::Connected => {
            let version = vm.guest.as_ref().map(|guest| guest.agent_version.as_str()).unwrap_or_default();
            Finding::good(subject, format!("connected, guestlet {version}"))
        }
        _ if matches!(vm.power(), PowerState::Off | PowerState::Paused) => {
            Finding::good(subject, format!("it is {}", words::power(vm.power())))
        }
        SessionState::Elsewhere => {
            Finding::good(subject, format!("its agent is served by the guestlet-host of its {}", vm.dial))
        }
        SessionState::NoVsock if vm.lacks_vsock => {
            Finding::wrong(subject, vm.reason.clone(), vm.remedy.clone())
        }
        // This may be intended.
        SessionState::NoVsock => Finding::note(subject, vm.reason.clone(), vm.remedy.clone()),
        SessionState::Refused => Finding::wrong(
            subject,
            format!("refused{reason}"),
            "compare uuid and vsock-cid in the settings with the VM's; only one host half may hold a guest",
        ),
        state => Finding::wrong(
            subject,
            format!("{} at {}{reason}", words::session(state), vm.dial),
            "check that the VM runs, has this vsock address, and has guestlet installed; in the guest: guestlet doctor",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::findings::Level;

    fn host(vms: u32) -> HostStatus {
        HostStatus { version: crate::VERSION.to_owned(), virtual_machines: vms, ..HostStatus::default() }
    }

    fn level(found: &[Finding], subject: &str) -> Level {
        found.iter().find(|finding| finding.subject == subject).unwrap().level
    }

    #[test]
    fn each_vm_has_its_line() {
        let one = |name: &str, session: SessionState, dial: &str| VirtualMachine {
            name: name.to_owned(),
            session: session.into(),
            dial: dial.to_owned(),
            ..VirtualMachine::default()
        };
        let mut off = one("off", SessionState::Connecting, "hybrid:/x:970");
        off.set_power(PowerState::Off);
        let mut mute = one("mute", SessionState::Connected, "hybrid:/x:970");
        mute.callback_reason = "nobody listens".to_owned();
        let vms = [
            one("good", SessionState::Connected, "vsock:3:970"),
            one("gone", SessionState::Connecting, "vsock:4:970"),
            one("other", SessionState::Refused, "vsock:5:970"),
            off,
            mute,
            one("elsewhere", SessionState::Elsewhere, "node n1"),
            one("without", SessionState::NoVsock, "no vsock"),
        ];
        let root = tempfile::tempdir().unwrap();
        let found = examine(Some(root.path()), Ok((&host(5), &vms)));
        for (subject, expected) in [
            ("guestlet-host", Level::Good),
            ("settings", Level::Good),
            ("vsock", Level::Wrong),
            ("VM good", Level::Good),
            ("VM gone", Level::Wrong),
            ("VM other", Level::Wrong),
            ("VM off", Level::Good),
            ("VM mute", Level::Wrong),
            ("VM elsewhere", Level::Good),
            ("VM without", Level::Note),
        ] {
            assert_eq!(level(&found, subject), expected, "{subject}: {found:?}");
        }
        std::fs::create_dir(root.path().join("dev")).unwrap();
        std::fs::File::create(root.path().join("dev/vhost-vsock")).unwrap();
        assert_eq!(level(&examine(Some(root.path()), Ok((&host(5), &vms))), "vsock"), Level::Good);
        assert_eq!(level(&examine(Some(root.path()), Ok((&host(0), &[]))), "settings"), Level::Note);
    }
}
