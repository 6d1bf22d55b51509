//! Verbs of guestlet-host: one row for each method of its admin API, and one for each use of a method that is
//! allowed separately.
//!
//! To add a method: its constant, its place in [`VERBS`], and the object that it acts on in `host::asked`.

/// Class of verbs that rules can allow together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Look at VMs, disks and volumes, and see whether an agent answers.
    Read,
    /// Attach, detach, resize and remove disks that guestlet-host makes itself.
    Disks,
    /// Attach any file of the host as a disk. A user with this role can read and write whatever the hypervisor can.
    Files,
    /// Change volumes of clusters.
    Volumes,
    /// Change load balancers of clusters.
    LoadBalancers,
    /// Decide which keys of guests are accepted, and hand out the data with which guests authenticate this host half.
    Keys,
    /// Freeze, thaw and trim the file systems of a guest.
    Freeze,
    /// Shut a guest down, restart or suspend it, and set its clock, processors and memory.
    Power,
    /// Read and change who may log in to a guest.
    Accounts,
    /// Send any command of QGA to a guest: its effect depends on the guest alone.
    Qga,
    /// Read the logs of guests.
    Logs,
    /// Read the metrics that guests measure of themselves.
    Metrics,
    /// Copy files from and to guests.
    Copy,
    /// Run programs in guests, as far as the guest lets them. A user with this role is effectively root in the guest.
    Exec,
    /// Connect to ports and sockets in guests, as far as the guests allow it.
    Forward,
    /// Use the serial consoles of VMs. The guest has no say in it, and may show a boot loader or a login prompt.
    Console,
}

impl Role {
    /// Every role, in the order of the declaration.
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

    /// Returns the role's name in the settings.
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

/// Operation that can be requested.
#[derive(Debug, PartialEq, Eq)]
pub struct Verb {
    /// Method of `guestlet.v1.Admin`, or of a service whose calls are relayed to agents.
    pub method: &'static str,
    /// Words of the operation as users type them after `guestctl`, and write them in rules.
    pub words: &'static str,
    /// Class of the verb: a rule that gives this role allows the verb.
    pub role: Role,
    /// True if the verb changes something or reaches into a guest, so that each use of it is written to the audit log.
    pub is_recorded: bool,
}

const fn looks(method: &'static str, words: &'static str) -> Verb {
    Verb { method, words, role: Role::Read, is_recorded: false }
}

const fn changes(method: &'static str, words: &'static str, role: Role) -> Verb {
    Verb { method, words, role, is_recorded: true }
}

/// Defines a verb that changes nothing but reaches into a guest, so that it is recorded.
const fn asks(method: &'static str, words: &'static str) -> Verb {
    Verb { method, words, role: Role::Read, is_recorded: true }
}

/// List the VMs; also used by `topology` and `nodes`.
pub static LS: Verb = looks("ListVirtualMachines", "ls");
/// Show everything that is known of one VM.
pub static INFO: Verb = looks("GetVirtualMachine", "info");
/// Follow the events of VMs.
pub static WATCH: Verb = looks("WatchVirtualMachines", "watch");
/// Measure round trips to an agent.
pub static PING: Verb =
    Verb { method: "PingVirtualMachine", words: "ping", role: Role::Read, is_recorded: true };
/// List the disks as a guest sees them.
pub static DISKS: Verb = looks("ListDisks", "disks");
/// Status of the host half, which `ls` and `doctor` request along with their own data; every `[[access]]` table
/// allows it.
pub static STATUS: Verb = looks("GetHostStatus", "status");
/// Attach a disk with a volume that guestlet-host creates.
pub static DISK_ATTACH: Verb = changes("AttachDisk", "disk attach", Role::Disks);
/// Attach a disk with a file of the caller's choice.
pub static DISK_ATTACH_FILE: Verb = changes("AttachDisk", "disk attach --file", Role::Files);
/// Detach a disk.
pub static DISK_DETACH: Verb = changes("DetachDisk", "disk detach", Role::Disks);
/// Enlarge a disk.
pub static DISK_RESIZE: Verb = changes("ResizeDisk", "disk resize", Role::Disks);
/// List the volumes of disks.
pub static DISK_VOLUMES: Verb = looks("ListDiskVolumes", "disk volumes");
/// Remove a volume of a disk.
pub static DISK_RM: Verb = changes("RemoveDiskVolume", "disk rm", Role::Disks);
/// List the disks as the hypervisor sees them.
pub static DISK_LS: Verb = looks("ListAttachedDisks", "disk ls");
/// List the volumes of clusters.
pub static VOLUMES_LS: Verb = looks("ListVolumes", "volumes ls");
/// Create a volume of a cluster.
pub static VOLUMES_CREATE: Verb = changes("CreateVolume", "volumes create", Role::Volumes);
/// Attach a volume of a cluster to a VM.
pub static VOLUMES_ATTACH: Verb = changes("AttachVolume", "volumes attach", Role::Volumes);
/// Detach a volume of a cluster from its VM.
pub static VOLUMES_DETACH: Verb = changes("DetachVolume", "volumes detach", Role::Volumes);
/// Expand a volume of a cluster.
pub static VOLUMES_EXPAND: Verb = changes("ExpandVolume", "volumes expand", Role::Volumes);
/// Remove a volume of a cluster.
pub static VOLUMES_RM: Verb = changes("RemoveVolume", "volumes rm", Role::Volumes);

/// List the load balancers of clusters.
pub static LB_LS: Verb = looks("ListClusterLoadBalancers", "lb ls");
/// Create or update a load balancer. Only guests do so, for their own clusters.
pub static LB_ENSURE: Verb = changes("EnsureLoadBalancer", "lb ensure", Role::LoadBalancers);
/// Release a load balancer and its addresses.
pub static LB_RM: Verb = changes("RemoveClusterLoadBalancer", "lb rm", Role::LoadBalancers);
/// List the address pools for load balancers.
pub static POOLS: Verb = looks("ListAddressPools", "pools");

/// List the keys of guests.
pub static TRUST_LS: Verb = looks("ListKeys", "trust ls");
/// Accept a different key of a guest.
pub static TRUST_ACCEPT: Verb = changes("AcceptKey", "trust accept", Role::Keys);
/// Forget the key of a guest.
pub static TRUST_FORGET: Verb = changes("ForgetKey", "trust forget", Role::Keys);
/// Replace the key of a guest.
pub static TRUST_ROTATE: Verb = changes("RotateGuestKey", "trust rotate", Role::Keys);
/// Replace the key of this host half.
pub static TRUST_ROTATE_HOST: Verb = changes("RotateHostKey", "trust rotate --host", Role::Keys);
/// Get the data with which a guest authenticates this host half, and a secret if one is requested.
pub static TRUST_BOOTSTRAP: Verb = changes("GetTrustBootstrap", "trust bootstrap", Role::Keys);

/// Freeze file systems of a guest.
pub static FREEZE: Verb = changes("FreezeFileSystems", "freeze", Role::Freeze);
/// Show whether the file systems of a guest are frozen.
pub static FREEZE_STATUS: Verb = asks("GetFreeze", "freeze --status");
/// Thaw the file systems of a guest.
pub static THAW: Verb = changes("ThawFileSystems", "thaw", Role::Freeze);
/// List the receipts of freezes.
pub static RECEIPTS: Verb = asks("ListReceipts", "receipts ls");
/// Show one receipt.
pub static RECEIPT: Verb = asks("GetReceipt", "receipts show");
/// Trim the file systems of a guest, which releases their unused blocks.
pub static TRIM: Verb = changes("TrimFileSystems", "trim", Role::Freeze);
/// Show how full the file systems of a guest are.
pub static FS: Verb = asks("ListFileSystems", "fs");
/// Shut a guest down.
pub static SHUTDOWN: Verb = changes("Shutdown", "shutdown", Role::Power);
/// Reboot a guest: the same method as for a shutdown, but allowed separately.
pub static REBOOT: Verb = changes("Shutdown", "reboot", Role::Power);
/// Suspend a guest to memory.
pub static SUSPEND: Verb = changes("SuspendToMemory", "suspend", Role::Power);
/// Suspend a guest to disk.
pub static SUSPEND_TO_DISK: Verb = changes("SuspendToDisk", "suspend --to disk", Role::Power);
/// Suspend a guest to both memory and disk.
pub static SUSPEND_TO_BOTH: Verb = changes("SuspendToBoth", "suspend --to both", Role::Power);
/// Show the time of a guest.
pub static TIME: Verb = asks("GetTime", "time");
/// Set the time of a guest.
pub static SET_TIME: Verb = changes("SetTime", "time --set", Role::Power);
/// List the processors of a guest.
pub static CPUS: Verb = asks("ListProcessors", "cpus");
/// Bring processors of a guest online or offline.
pub static SET_CPUS: Verb = changes("SetProcessors", "cpus --online", Role::Power);
/// List the memory blocks of a guest.
pub static MEMORY: Verb = asks("ListMemoryBlocks", "memory");
/// Bring memory blocks of a guest online or offline.
pub static SET_MEMORY: Verb = changes("SetMemoryBlocks", "memory --online", Role::Power);
/// List the network interfaces of a guest.
pub static NETWORK: Verb = asks("ListInterfaces", "network");
/// List the routes of a guest.
pub static ROUTES: Verb = asks("ListRoutes", "network --routes");
/// List the users that are logged in to a guest.
pub static USERS: Verb = asks("ListUsers", "users");
/// Set the password of a user in a guest.
pub static PASSWD: Verb = changes("SetPassword", "passwd", Role::Accounts);
/// List the SSH keys of a user in a guest.
pub static KEYS_LS: Verb = changes("ListAuthorizedKeys", "keys ls", Role::Accounts);
/// Add SSH keys to those of a user.
pub static KEYS_ADD: Verb = changes("AddAuthorizedKeys", "keys add", Role::Accounts);
/// Remove SSH keys from those of a user.
pub static KEYS_RM: Verb = changes("RemoveAuthorizedKeys", "keys rm", Role::Accounts);
/// Send any command of QGA to a guest.
pub static QGA: Verb = changes("ExecuteQga", "qga", Role::Qga);

/// Read the journal of a guest.
pub static LOGS: Verb = changes("ReadJournal", "logs", Role::Logs);
/// Read the metrics that a guest measures of itself. Not recorded: monitoring programs call it every few seconds,
/// and their records would crowd out the others.
pub static METRICS: Verb =
    Verb { method: "CollectMetrics", words: "metrics", role: Role::Metrics, is_recorded: false };
/// Run a program in a guest.
pub static EXEC: Verb = changes("RunProgram", "exec", Role::Exec);
/// Attach again to a program that was started earlier.
pub static ATTACH: Verb = changes("RunProgram", "attach", Role::Exec);
/// List the programs that were started.
pub static PS: Verb = changes("ListPrograms", "ps", Role::Exec);
/// Send a signal to a program, or end it.
pub static KILL: Verb = changes("SignalProgram", "kill", Role::Exec);
/// Forward connections to a port or socket in a guest.
pub static FORWARD: Verb = changes("ForwardConnections", "forward", Role::Forward);

/// Open the serial console of a VM.
pub static CONSOLE: Verb = changes("OpenConsole", "console", Role::Console);

/// Copy files from a guest.
pub static CP_FROM: Verb = changes("ReadFiles", "cp from", Role::Copy);
/// Copy files to a guest.
pub static CP_TO: Verb = changes("WriteFiles", "cp to", Role::Copy);

/// Every verb, in the order in which they are declared.
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
