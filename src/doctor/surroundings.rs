//! Checks of the rest of the guest: freezes, rules for disks, other agents, kubelet, mandatory access
//! control.

use super::Patient;
use crate::text::findings::Finding;

/// State directories of kubelets.
const KUBELETS: [(&str, &str); 3] = [
    ("RKE2", "/var/lib/rancher/rke2/agent"),
    ("k3s", "/var/lib/rancher/k3s/agent"),
    ("a kubelet", "/var/lib/kubelet"),
];
/// Programs that serve the same channel.
const OTHERS: [&str; 2] = ["/usr/sbin/qemu-ga", "/usr/bin/qemu-ga"];

/// Checks whether file systems are frozen.
pub fn freeze(patient: &Patient<'_>) -> Option<Finding> {
    let freeze = patient.answer.as_ref().ok()?.status.freeze.as_ref()?;
    let says = if freeze.stage != "thawed" {
        format!("file systems are frozen for {}: {}", freeze.holder, freeze.file_systems.join(" "))
    } else if freeze.spoiled.is_empty() {
        return None;
    } else {
        format!("a snapshot of the last freeze is not consistent: {}", freeze.spoiled)
    };
    Some(Finding::note("freeze", says, "guestlet status shows more; guestlet thaw ends a freeze"))
}

/// Reports rules that did not find their disk, or failed.
pub fn disk_rules(patient: &Patient<'_>) -> Vec<Finding> {
    let Ok(answer) = &patient.answer else { return Vec::new() };
    let disks = &answer.disks;
    let mut findings = Vec::new();
    if !disks.rules_problem.is_empty() {
        findings.push(Finding::wrong(
            "disk rules",
            disks.rules_problem.clone(),
            "fix them; the previous rules stay in force",
        ));
    }
    for rule in &disks.rules {
        let says = format!("{} for {}: {} {}", rule.origin, rule.mount_point, rule.state, rule.reason);
        let says = says.trim_end().to_owned();
        match rule.state.as_str() {
            "failed" | "ambiguous" => {
                findings.push(Finding::wrong("disk rules", says, "guestlet disks shows more"));
            }
            "no-disk" | "unmounted" => {
                findings.push(Finding::note("disk rules", says, "guestlet disks shows more"));
            }
            _ => {}
        }
    }
    if findings.is_empty() && !disks.rules.is_empty() {
        findings.push(Finding::good("disk rules", format!("{} in force", disks.rules.len())));
    }
    findings
}

/// Looks for another program that would serve the same channel.
pub fn other_agent(patient: &Patient<'_>) -> Option<Finding> {
    let real = |path: &&str| {
        let path = patient.root.path(path);
        let link = std::fs::read_link(&path).ok();
        path.exists() && !link.is_some_and(|to| to.ends_with("guestlet"))
    };
    let found = OTHERS.into_iter().find(real)?;
    Some(Finding::note(
        "qemu-ga",
        format!("{found} is installed as well as guestlet: only one of them can have the channel"),
        "remove the package qemu-guest-agent",
    ))
}

/// Checks whether this guest is a node of a cluster.
pub fn kubelet(patient: &Patient<'_>) -> Finding {
    match KUBELETS.into_iter().find(|(_, path)| patient.root.path(path).exists()) {
        Some((what, path)) => Finding::good("kubelet", format!("{what} keeps its state in {path}")),
        None => Finding::good("kubelet", "none here, and none is needed"),
    }
}

/// Checks mandatory access control.
pub fn confinement(patient: &Patient<'_>) -> Finding {
    let process = patient.answer.as_ref().ok().and_then(|answer| answer.process);
    let context = process.map(|process| patient.root.line(&format!("/proc/{process}/attr/current")));
    let context = context.unwrap_or_default().trim_end_matches('\0').to_owned();
    let enforcing = patient.root.line("/sys/fs/selinux/enforce") == "1";
    if enforcing && context.contains("virt_qemu_ga_t") {
        return Finding::note(
            "SELinux",
            format!(
                "it is enforcing, and confines the agent as {context}: most files, SSH keys and programs are out of its reach"
            ),
            "setsebool -P virt_qemu_ga_read_nonsecurity_files on, virt_qemu_ga_manage_ssh on, virt_qemu_ga_run_unconfined on: \
             the booleans of the functions that you want (docs/security.md)",
        );
    }
    if enforcing {
        let context = if context.is_empty() { "unknown".to_owned() } else { context };
        return Finding::good("SELinux", format!("it is enforcing; the agent's context is {context}"));
    }
    if context.contains("(enforce)") {
        return Finding::note(
            "AppArmor",
            format!("the agent is confined by the profile {context}"),
            "denied calls are in the kernel's log: journalctl --dmesg --grep apparmor",
        );
    }
    Finding::good("SELinux, AppArmor", "the agent is not confined")
}
