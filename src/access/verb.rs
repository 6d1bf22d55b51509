//! What can be asked of guestlet-host: one row for each method of its admin API, and one for each use of it that has to be
//! allowed by itself.
//!
//! To add a method: its constant, its place in [`VERBS`], and what it is done to in `host::asked`.

/// A class of verbs, as rules name them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Look at VMs, disks and volumes, and see whether an agent answers.
    Read,
    /// Attach, detach, resize and remove disks that guestlet-host makes itself.
    Disks,
    /// Attach any file of the host as a disk: who may do that can read and write whatever the hypervisor can.
    Files,
    /// Change volumes of clusters.
    Volumes,
    /// Change load balancers of clusters.
    LoadBalancers,
    /// Decide which keys of guests are taken, and hand out what guests need to know this host half.
    Keys,
    /// Freeze, thaw and trim the file systems of a guest.
    Freeze,
    /// Shut a guest down, restart or suspend it, and set its clock, processors and memory.
    Power,
    /// Read and change who may log in to a guest.
    Accounts,
    /// Ask a guest for any command of QGA: what comes of it is up to the guest alone.
    Qga,
    /// Read the logs of guests.
    Logs,
    /// Read what guests measure of themselves.
    Metrics,
    /// Copy files from and to guests.
    Copy,
    /// Run programs in guests: as far as the guest lets them, whoever may do that is root there.
    Exec,
    /// Reach what listens in guests, as far as they let it be reached.
    Forward,
    /// Sit at the serial consoles of VMs: the guest is not asked, and a boot loader or a login prompt may be there.
    Console,
}

impl Role {
    /// All of them.
    pub const ALL: &[Self] = &[
        Self::Read,
        Self::Disks,
        Self::Files,
        Self::Volumes,
        Self::LoadBalancers,
        Self::Keys,
        Self::Freeze,
        Self::Power,
        Self::Accounts,
        Self::Qga,
        Self::Logs,
        Self::Metrics,
        Self::Copy,
        Self::Exec,
        Self::Forward,
        Self::Console,
    ];

    /// As the settings write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Disks => "disks",
            Self::Files => "files",
            Self::Volumes => "volumes",
            Self::LoadBalancers => "load-balancers",
            Self::Keys => "keys",
            Self::Freeze => "freeze",
            Self::Power => "power",
            Self::Accounts => "accounts",
            Self::Qga => "qga",
            Self::Logs => "logs",
            Self::Metrics => "metrics",
            Self::Copy => "copy",
            Self::Exec => "exec",
            Self::Forward => "forward",
            Self::Console => "console",
        }
    }
}

/// One thing that can be asked.
#[derive(Debug, PartialEq, Eq)]
pub struct Verb {
    /// The method of `guestlet.v1.Admin`, or of a service that is handed on to agents.
    pub method: &'static str,
    /// As people type it after `guestctl`, and write it in rules.
    pub words: &'static str,
    /// Its class.
    pub role: Role,
    /// It changes something, or reaches into a guest, so that each use of it is recorded.
    pub is_recorded: bool,
}

const fn looks(method: &'static str, words: &'static str) -> Verb {
    Verb { method, words, role: Role::Read, is_recorded: false }
}

const fn changes(method: &'static str, words: &'static str, role: Role) -> Verb {
    Verb { method, words, role, is_recorded: true }
}

/// Changes nothing, and reaches into a guest.
const fn asks(method: &'static str, words: &'static str) -> Verb {
    Verb { method, words, role: Role::Read, is_recorded: true }
}

/// List the VMs; also `topology` and `nodes`.
pub static LS: Verb = looks("ListVirtualMachines", "ls");
/// All of one VM.
pub static INFO: Verb = looks("GetVirtualMachine", "info");
/// Events.
pub static WATCH: Verb = looks("WatchVirtualMachines", "watch");
/// Round trips to an agent.
pub static PING: Verb =
    Verb { method: "PingVirtualMachine", words: "ping", role: Role::Read, is_recorded: true };
/// Disks as a guest sees them.
pub static DISKS: Verb = looks("ListDisks", "disks");
/// How the host half is, which `ls` and `doctor` ask beside the rest; every table of the settings allows it.
pub static STATUS: Verb = looks("GetHostStatus", "status");
/// A disk with a volume that guestlet-host makes.
pub static DISK_ATTACH: Verb = changes("AttachDisk", "disk attach", Role::Disks);
/// A disk with a file of the caller's choice.
pub static DISK_ATTACH_FILE: Verb = changes("AttachDisk", "disk attach --file", Role::Files);
/// Take a disk away.
pub static DISK_DETACH: Verb = changes("DetachDisk", "disk detach", Role::Disks);
/// Make a disk larger.
pub static DISK_RESIZE: Verb = changes("ResizeDisk", "disk resize", Role::Disks);
/// The volumes of disks.
pub static DISK_VOLUMES: Verb = looks("ListDiskVolumes", "disk volumes");
/// Remove one of them.
pub static DISK_RM: Verb = changes("RemoveDiskVolume", "disk rm", Role::Disks);
/// Disks as the hypervisor has them.
pub static DISK_LS: Verb = looks("ListAttachedDisks", "disk ls");
/// Volumes of clusters.
pub static VOLUMES_LS: Verb = looks("ListVolumes", "volumes ls");
/// Make one.
pub static VOLUMES_CREATE: Verb = changes("CreateVolume", "volumes create", Role::Volumes);
/// Plug one into a VM.
pub static VOLUMES_ATTACH: Verb = changes("AttachVolume", "volumes attach", Role::Volumes);
/// Take one away from its VM.
pub static VOLUMES_DETACH: Verb = changes("DetachVolume", "volumes detach", Role::Volumes);
/// Make one larger.
pub static VOLUMES_EXPAND: Verb = changes("ExpandVolume", "volumes expand", Role::Volumes);
/// Remove one.
pub static VOLUMES_RM: Verb = changes("RemoveVolume", "volumes rm", Role::Volumes);

/// Load balancers of clusters.
pub static LB_LS: Verb = looks("ListClusterLoadBalancers", "lb ls");
/// Have one, or have it changed: guests do that for their clusters, and nobody else.
pub static LB_ENSURE: Verb = changes("EnsureLoadBalancer", "lb ensure", Role::LoadBalancers);
/// Give one back.
pub static LB_RM: Verb = changes("RemoveClusterLoadBalancer", "lb rm", Role::LoadBalancers);
/// The pools of their addresses.
pub static POOLS: Verb = looks("ListAddressPools", "pools");

/// The keys of guests.
pub static TRUST_LS: Verb = looks("ListKeys", "trust ls");
/// Take another key of a guest.
pub static TRUST_ACCEPT: Verb = changes("AcceptKey", "trust accept", Role::Keys);
/// Forget that of a guest.
pub static TRUST_FORGET: Verb = changes("ForgetKey", "trust forget", Role::Keys);
/// Give a guest another one.
pub static TRUST_ROTATE: Verb = changes("RotateGuestKey", "trust rotate", Role::Keys);
/// Give this host half another key.
pub static TRUST_ROTATE_HOST: Verb = changes("RotateHostKey", "trust rotate --host", Role::Keys);
/// What a guest needs to know this host half, with a secret if that is asked for.
pub static TRUST_BOOTSTRAP: Verb = changes("GetTrustBootstrap", "trust bootstrap", Role::Keys);

/// Freeze file systems of a guest.
pub static FREEZE: Verb = changes("FreezeFileSystems", "freeze", Role::Freeze);
/// Whether they are frozen.
pub static FREEZE_STATUS: Verb = asks("GetFreeze", "freeze --status");
/// Thaw them.
pub static THAW: Verb = changes("ThawFileSystems", "thaw", Role::Freeze);
/// The receipts of freezes.
pub static RECEIPTS: Verb = asks("ListReceipts", "receipts ls");
/// One of them.
pub static RECEIPT: Verb = asks("GetReceipt", "receipts show");
/// Give their unused blocks back.
pub static TRIM: Verb = changes("TrimFileSystems", "trim", Role::Freeze);
/// How full they are.
pub static FS: Verb = asks("ListFileSystems", "fs");
/// End a guest.
pub static SHUTDOWN: Verb = changes("Shutdown", "shutdown", Role::Power);
/// Restart one.
pub static REBOOT: Verb = changes("Shutdown", "reboot", Role::Power);
/// Suspend one to memory.
pub static SUSPEND: Verb = changes("SuspendToMemory", "suspend", Role::Power);
/// Suspend one to a disk.
pub static SUSPEND_TO_DISK: Verb = changes("SuspendToDisk", "suspend --to disk", Role::Power);
/// Suspend one to both.
pub static SUSPEND_TO_BOTH: Verb = changes("SuspendToBoth", "suspend --to both", Role::Power);
/// The time of a guest.
pub static TIME: Verb = asks("GetTime", "time");
/// Set it.
pub static SET_TIME: Verb = changes("SetTime", "time --set", Role::Power);
/// Its processors.
pub static CPUS: Verb = asks("ListProcessors", "cpus");
/// Switch them.
pub static SET_CPUS: Verb = changes("SetProcessors", "cpus --online", Role::Power);
/// Its memory.
pub static MEMORY: Verb = asks("ListMemoryBlocks", "memory");
/// Switch blocks of it.
pub static SET_MEMORY: Verb = changes("SetMemoryBlocks", "memory --online", Role::Power);
/// Its network interfaces.
pub static NETWORK: Verb = asks("ListInterfaces", "network");
/// Its routes.
pub static ROUTES: Verb = asks("ListRoutes", "network --routes");
/// Who is logged in to it.
pub static USERS: Verb = asks("ListUsers", "users");
/// Set a password.
pub static PASSWD: Verb = changes("SetPassword", "passwd", Role::Accounts);
/// The SSH keys of a user.
pub static KEYS_LS: Verb = changes("ListAuthorizedKeys", "keys ls", Role::Accounts);
/// Add some.
pub static KEYS_ADD: Verb = changes("AddAuthorizedKeys", "keys add", Role::Accounts);
/// Take some away.
pub static KEYS_RM: Verb = changes("RemoveAuthorizedKeys", "keys rm", Role::Accounts);
/// Any command of QGA.
pub static QGA: Verb = changes("ExecuteQga", "qga", Role::Qga);

/// Read the journal of a guest.
pub static LOGS: Verb = changes("ReadJournal", "logs", Role::Logs);
/// What a guest measures of itself. Programs ask every few seconds, and records of that would be in the way of others.
pub static METRICS: Verb =
    Verb { method: "CollectMetrics", words: "metrics", role: Role::Metrics, is_recorded: false };
/// Run a program in a guest.
pub static EXEC: Verb = changes("RunProgram", "exec", Role::Exec);
/// Go on with one.
pub static ATTACH: Verb = changes("RunProgram", "attach", Role::Exec);
/// The programs that were started.
pub static PS: Verb = changes("ListPrograms", "ps", Role::Exec);
/// Signal or end one.
pub static KILL: Verb = changes("SignalProgram", "kill", Role::Exec);
/// Reach what listens in a guest.
pub static FORWARD: Verb = changes("ForwardConnections", "forward", Role::Forward);

/// The serial console of a VM.
pub static CONSOLE: Verb = changes("OpenConsole", "console", Role::Console);

/// Copy files from a guest.
pub static CP_FROM: Verb = changes("ReadFiles", "cp from", Role::Copy);
/// Copy files to one.
pub static CP_TO: Verb = changes("WriteFiles", "cp to", Role::Copy);

/// All of them.
pub static VERBS: &[&Verb] = &[
    &LS,
    &INFO,
    &WATCH,
    &PING,
    &DISKS,
    &STATUS,
    &DISK_ATTACH,
    &DISK_ATTACH_FILE,
    &DISK_DETACH,
    &DISK_RESIZE,
    &DISK_VOLUMES,
    &DISK_RM,
    &DISK_LS,
    &VOLUMES_LS,
    &VOLUMES_CREATE,
    &VOLUMES_ATTACH,
    &VOLUMES_DETACH,
    &VOLUMES_EXPAND,
    &VOLUMES_RM,
    &LB_LS,
    &LB_RM,
    &POOLS,
    &TRUST_LS,
    &TRUST_ACCEPT,
    &TRUST_FORGET,
    &TRUST_ROTATE,
    &TRUST_ROTATE_HOST,
    &TRUST_BOOTSTRAP,
    &FREEZE,
    &FREEZE_STATUS,
    &THAW,
    &RECEIPTS,
    &RECEIPT,
    &TRIM,
    &FS,
    &SHUTDOWN,
    &REBOOT,
    &SUSPEND,
    &SUSPEND_TO_DISK,
    &SUSPEND_TO_BOTH,
    &TIME,
    &SET_TIME,
    &CPUS,
    &SET_CPUS,
    &MEMORY,
    &SET_MEMORY,
    &NETWORK,
    &ROUTES,
    &USERS,
    &PASSWD,
    &KEYS_LS,
    &KEYS_ADD,
    &KEYS_RM,
    &QGA,
    &LOGS,
    &METRICS,
    &EXEC,
    &ATTACH,
    &PS,
    &KILL,
    &FORWARD,
    &CONSOLE,
    &CP_FROM,
    &CP_TO,
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_method_of_the_admin_api_has_a_class() {
        let protos = [
            include_str!("../../proto/guestlet/v1/admin.proto"),
            include_str!("../../proto/guestlet/v1/exec.proto"),
            include_str!("../../proto/guestlet/v1/forward.proto"),
            include_str!("../../proto/guestlet/v1/files.proto"),
            include_str!("../../proto/guestlet/v1/qga.proto"),
            include_str!("../../proto/guestlet/v1/freeze.proto"),
            include_str!("../../proto/guestlet/v1/file_systems.proto"),
            include_str!("../../proto/guestlet/v1/power.proto"),
            include_str!("../../proto/guestlet/v1/machine.proto"),
            include_str!("../../proto/guestlet/v1/network.proto"),
            include_str!("../../proto/guestlet/v1/accounts.proto"),
            include_str!("../../proto/guestlet/v1/journal.proto"),
            include_str!("../../proto/guestlet/v1/metrics.proto"),
            include_str!("../../proto/guestlet/v1/console.proto"),
        ];
        let lines = protos.iter().flat_map(|proto| proto.lines());
        let methods: BTreeSet<_> =
            lines.filter_map(|line| line.trim().strip_prefix("rpc ")?.split('(').next()).collect();
        assert!(methods.len() > 15, "the methods were not found");
        let rows: BTreeSet<_> = VERBS.iter().map(|verb| verb.method).collect();
        assert_eq!(rows, methods);
    }

    #[test]
    fn each_verb_has_words_of_its_own() {
        let words: BTreeSet<_> = VERBS.iter().map(|verb| verb.words).collect();
        assert_eq!(words.len(), VERBS.len());
    }
}
