//! docs/settings.md, written from the tables below; tests hold them against what the programs read.
//!
//! To add a setting: its row here, and `UPDATE_DOCS=1 cargo test --lib reference`.

use std::fmt::Write as _;
use std::path::Path;

use super::agent::fragment::AgentFragment;
use super::host::HostFragment;
use super::{Fragment, parse};

/// Key, default, meaning.
type Row = (&'static str, &'static str, &'static str);

const AGENT: &[Row] = &[
    (
        "qga.method",
        "`\"virtio-serial\"`",
        "where QGA clients come from: `virtio-serial`, `isa-serial`, `unix-listen`, `vsock-listen` or `none`",
    ),
    (
        "qga.path",
        "by the method",
        "its device or socket, or `CID:PORT`: `/dev/virtio-ports/org.qemu.guest_agent.0` for `virtio-serial`, `/dev/ttyS0` for `isa-serial`",
    ),
    (
        "qga.retry-path",
        "`false`",
        "try again where a socket cannot be listened on; devices are always waited for",
    ),
    ("qga.statedir", "`/var/run`", "where the marker of a freeze is kept"),
    ("qga.block-rpcs", "none", "commands that may not be called; lists of all places add up"),
    ("qga.allow-rpcs", "all", "the only commands that may be called; what is blocked stays blocked"),
    (
        "qga.version",
        "`\"10.2.0\"`",
        "what guest-info reports, at first the version whose protocol it is; some hosts compare it",
    ),
    (
        "qga.fsfreeze-hook",
        "none",
        "what is run before a freeze, with the word `freeze`, and after a thaw, with `thaw`; `\"\"` for none",
    ),
    (
        "qga.exec.paths",
        "all",
        "the only programs that guest-exec may run: files, or folders with all that is below them. They get the agent's environment: `env` is refused, because by variables such as `LD_PRELOAD` or `BASH_ENV` other programs can be run",
    ),
    (
        "qga.exec.output-deadline",
        "`\"10s\"`",
        "how long after a program's end guest-exec-status waits for its outputs to be closed, from 1 s to 1 h: processes that it has started may write to them yet. What comes later is dropped, and `out-truncated` or `err-truncated` says so",
    ),
    (
        "qga.files.paths",
        "all",
        "the only files that guest-file-open may open: files, or folders with all that is below them",
    ),
    ("qga.files.read-only", "`false`", "guest-file-open opens for reading only"),
    ("qga.passwords.allow", "`true`", "whether guest-set-user-password may be called"),
    (
        "qga.freeze.deadline",
        "`\"2min\"`",
        "how long file systems stay frozen when nobody thaws them, from 1 s to 1 h. From 3 min on systemd-journald may be killed by its watchdog",
    ),
    (
        "qga.freeze.hook-deadline",
        "`\"1min\"`, or the freeze's deadline if that is sooner",
        "how long one hook may take, from 1 s to 1 h",
    ),
    ("control.listen", "`\"vsock\"`", "where the host half comes from: `vsock`, `none`, or `unix:/path`"),
    ("control.port", "`970`", "vsock port, from 1 to 1023"),
    (
        "callback.listen",
        "",
        "of earlier versions, ignored: what the guest asks goes over the control channel",
    ),
    ("callback.port", "", "of earlier versions, ignored"),
    ("vsock.peer-cid", "`2`", "the only vsock context that is let in: the host"),
    (
        "vsock.hybrid",
        "`false`",
        "let the host half in from any source port; needed where the hypervisor has hybrid vsock (Firecracker, Cloud Hypervisor, vhost-device-vsock), where the mode of the host's socket file guards instead",
    ),
    (
        "csi.enabled",
        "`\"auto\"`",
        "whether kubelet is served volumes: `true`, `false`, or `\"auto\"`: as soon as and as long as its folder is there. See [csi.md](csi.md)",
    ),
    ("csi.driver", "`\"driver.harvesterhci.io\"`", "the driver's name"),
    ("csi.kubelet-root", "`/var/lib/kubelet`", "kubelet's folder"),
    (
        "csi.node-socket",
        "`plugins/<driver>/csi.sock` in kubelet's folder",
        "where kubelet finds the Identity and Node services",
    ),
    (
        "csi.controller-socket",
        "`plugins/<driver>/controller/csi.sock` in kubelet's folder",
        "where the sidecars find the Identity and Controller services; `\"\"` for nowhere",
    ),
    (
        "csi.topology",
        "none",
        "keys of what kubelet is told about where this guest is; known is `guestlet.io/host`, `topology.host` of the host half",
    ),
    (
        "cloud.socket",
        "`/run/guestlet-cloud/cloud.sock`",
        "where `guestlet-ccm` on this node asks the host half, as soon as and as long as the socket's directory is there; `\"\"` for nowhere. See [cloud-provider.md](cloud-provider.md)",
    ),
    (
        "trust.state-dir",
        "`/var/lib/guestlet`",
        "where the guest keeps its own key, once it is given one. See [keys.md](keys.md)",
    ),
    (
        "topology.drop-ins",
        "none",
        "whose files get the labels of where this guest runs, for nodes that are to join: `rke2`, `k3s`, `kubeadm`; lists of several files add up. See [topology.md](topology.md)",
    ),
    (
        "topology.node-labels",
        "`true`",
        "keep the labels of the guest's Node, as soon as a kubelet has a credential",
    ),
    ("topology.kubeconfig", "kubeadm's, RKE2's or k3s's, whichever is there", "kubelet's kubeconfig"),
    (
        "topology.zone-change",
        "`\"update\"`",
        "what becomes of the Node's zone and region when the guest runs elsewhere: `update`, `keep` (an annotation says where it runs) or `report` (and an event warns)",
    ),
    ("topology.report-only", "`false`", "say what the labels would be, and change nothing"),
    (
        "topology.provider-id",
        "`false`",
        "give the Node the provider id that the host half has for the VM, if it has none",
    ),
    (
        "policy.mode",
        "`\"enforce\"`",
        "what becomes of a call that no grant gives: `enforce` denies it, `audit` lets it pass and writes down that it would be denied. See [security.md](security.md)",
    ),
    (
        "audit.file",
        "none",
        "audit records also go to this file, as JSON lines; a new one is for root alone. While file systems are frozen 256 records are kept for it",
    ),
    (
        "trust.plain",
        "none",
        "the roles of a host half that proves no key, once this guest has keys of host halves; the last place that says it wins",
    ),
    (
        "grant.host",
        "",
        "whom the grant is for: a key's fingerprint (`SHA256:…`), the URI of a certificate, `*` for every key, `qga`, or `plain`; each grant is a table `[[grant]]`",
    ),
    (
        "grant.caller",
        "`\"*\"`",
        "for whom the host half asks, such as `uid:0 root`, and `\"\"` for itself; `*` in it stands for any characters",
    ),
    (
        "grant.roles",
        "",
        "`status`, `metrics`, `logs`, `topology`, `freeze`, `disks`, `files-read`, `files-write` (and `files-read` with it), `exec`, `forward`, `power`, `accounts`",
    ),
    ("grant.profile", "", "instead of roles: `qemu-ga`, `monitor`, `volumes` or `operator`"),
    (
        "grant.exec",
        "all",
        "the only programs that may be run by this grant, and without `env`: `{ paths = [\"/usr/bin/journalctl\"] }`, files or directories",
    ),
    (
        "grant.files",
        "all",
        "the only files that may be opened by it: `{ paths = [\"/var/log\"], read-only = true }`",
    ),
    ("log.verbose", "`false`", "log each call"),
    ("log.file", "the journal", "log to this file"),
    (
        "runtime-dir",
        "`/run/guestlet`",
        "what lasts until the next boot: the socket of `guestlet status`, `identity.json`, what the host half calls this guest, and `topology.json`, where it runs",
    ),
    (
        "qemu-ga-files",
        "`true`",
        "read qemu-ga's files as well, at their usual places; with `false` only one that `-c` or `QGA_CONF` names is read",
    ),
];

const HOST: &[Row] = &[
    (
        "socket",
        "`/run/guestlet-host/api.sock`",
        "where guestctl asks; for root only, unless there is an `[[access]]` table",
    ),
    ("metrics-socket", "`metrics.sock` beside `socket`", "Prometheus metrics over HTTP, on a unix socket"),
    (
        "metrics",
        "none",
        "the same on TCP, such as `\"127.0.0.1:9970\"`; only on loopback, but for `guestlet-host node` in its pod. `/healthz` and \
         `/readyz` answer there as well",
    ),
    (
        "volumes-dir",
        "`/var/lib/guestlet-host/volumes`",
        "where `guestctl disk attach --size` makes volumes; QEMU's user must be able to reach it",
    ),
    (
        "load-balancers.state-dir",
        "`/var/lib/guestlet-host/load-balancers`",
        "where it is kept which addresses the Services of clusters have. See [load-balancers.md](load-balancers.md)",
    ),
    (
        "load-balancers.nft",
        "`/usr/sbin/nft`",
        "the program by which the kernel is told what to forward (package nftables)",
    ),
    (
        "load-balancers.release-after-seconds",
        "`86400`",
        "`guestlet-host controller`: for how long no VM of a cluster has to have existed until its load balancers are given back; \
         `0`: they stay until somebody gives them back",
    ),
    ("vm.name", "", "unique on this host, a DNS name"),
    ("vm.uuid", "", "lasting: volumes and clusters know the VM by it"),
    (
        "vm.dmi-uuid",
        "`vm.uuid`",
        "what the guest must read from DMI; `\"none\"` for a VM without DMI, such as QEMU's microvm",
    ),
    ("vm.cluster", "none", "the cluster that the guest belongs to"),
    ("vm.vsock-cid", "", "how the agent is reached: the guest's address on kernel vhost-vsock"),
    ("vm.vsock-socket", "", "or hybrid vsock: the hypervisor's unix socket"),
    ("vm.unix-socket", "", "or a unix socket that leads straight to an agent"),
    ("vm.callback-socket", "", "of earlier versions, ignored"),
    (
        "vm.max-volumes",
        "`240`",
        "how many volumes of its cluster a VM may have, if it has places for them, as its kubelet is told; `0` for all places",
    ),
    (
        "vm.networks",
        "none",
        "which networks of this host it is attached to, by its hardware addresses: `{ \"52:54:00:12:34:56\" = \"lan\" }`",
    ),
    ("vm.port", "`970`", "the agent's vsock port"),
    ("vm.callback-port", "", "of earlier versions, ignored"),
    ("vm.qmp", "none", "a QMP socket of guestlet-host's own: tells whether the VM runs, and plugs disks"),
    (
        "pool.name",
        "",
        "a storage class for the volumes of clusters; each is a table `[[pool]]`. See [csi.md](csi.md)",
    ),
    ("pool.path", "", "its directory, which QEMU's user must be able to reach, and only root may write to"),
    ("pool.format", "`\"raw\"`", "how images are kept: `raw` or `qcow2`"),
    ("pool.allocation", "`\"thin\"`", "whether room for all of them is reserved: `thin` or `full`"),
    ("pool.bus", "by the VM", "what guests see its volumes on: `scsi` or `virtio`"),
    ("pool.default", "the first", "`true` for the class of volumes that name none"),
    (
        "pool.answer-seconds",
        "`30`",
        "for how long a call waits for its file system, 1 to 3600; it is refused then, and so are those after it until \
         the file system answers",
    ),
    (
        "address-pool.name",
        "",
        "addresses for the Services of type LoadBalancer of clusters; each is a table `[[address-pool]]`. See \
         [load-balancers.md](load-balancers.md)",
    ),
    (
        "address-pool.ranges",
        "",
        "the addresses: `[\"192.0.2.10-192.0.2.99\", \"2001:db8::/120\"]`; no two of all pools may overlap",
    ),
    (
        "address-pool.network",
        "none",
        "the network that they belong to: only for clusters with VMs that are attached to it (`vm.networks`)",
    ),
    (
        "address-pool.clusters",
        "all",
        "the clusters that get addresses of it; names or patterns such as `\"team-*\"`",
    ),
    (
        "address-pool.priority",
        "`0`",
        "of the pools that match, the one with the greatest number is tried first",
    ),
    (
        "address-pool.forward-to",
        "none",
        "subnets of the nodes that this host may forward to from these addresses; without it the host forwards nothing",
    ),
    (
        "address-pool.interface",
        "none",
        "the interface of this host that has an address while this host forwards from it; without it addresses have to be \
         there, or to be routed to this host",
    ),
    (
        "address-pool.reserved-ports",
        "`[22]`, with `interface` none",
        "ports at these addresses that this host forwards to nobody",
    ),
    ("cluster.<name>.max-load-balancers", "`1024`", "how many load balancers a cluster may have"),
    ("cluster.<name>.max-volumes", "`4096`", "how many volumes a cluster may have"),
    (
        "cluster.<name>.max-bytes",
        "in each pool the size of its file system",
        "how large they may be together, in all pools, such as `\"2T\"`",
    ),
    ("cluster.<name>.classes", "all", "the storage classes that it may use"),
    (
        "cluster.<name>.controllers",
        "all of the cluster",
        "the VMs that may ask for volumes and load balancers",
    ),
    (
        "trust.state-dir",
        "`/var/lib/guestlet-host/trust`",
        "where this host half keeps its own key and the keys of guests. See [keys.md](keys.md)",
    ),
    (
        "trust.key",
        "`host.key` in `trust.state-dir`",
        "its own private key (Ed25519, PKCS #8, PEM); made at the first start",
    ),
    (
        "trust.certificate",
        "none",
        "a CA's certificate for that key, followed by the CA's own (PEM), where VMs move between hosts; read again when it changes",
    ),
    (
        "access.users",
        "none",
        "users of the host, by name or number, who may ask what the table `[[access]]` says; tables add up. See \
         [security.md](security.md)",
    ),
    ("access.groups", "none", "groups of the host, by name or number, whose members may"),
    (
        "access.roles",
        "none",
        "what they may do: `read`, `disks`, `files` (attach any file of the host as a disk), `volumes`, `load-balancers`, `keys`, or `all`",
    ),
    ("access.verbs", "none", "single verbs that they may use, such as `\"ping\"` or `\"disk attach\"`"),
    ("access.vms", "all", "to which VMs: names, or patterns such as `\"web-*\"`"),
    ("access.clusters", "all", "to VMs and volumes of which clusters; names or patterns"),
    (
        "audit.file",
        "none",
        "a file to which each call that changes something, reaches into a guest or is denied is written, beside the journal",
    ),
    (
        "kubevirt.sockets",
        "none",
        "of `guestlet-host node`: agents are reached by hybrid vsock, through the unix socket `<UID of the \
         VirtualMachineInstance>.sock` in this directory, instead of from inside the launchers' pods. See \
         [kubevirt.md](kubevirt.md)",
    ),
    ("kubevirt.port", "`970`", "the agents' vsock port"),
    (
        "kubevirt.max-volumes",
        "`240`",
        "how many volumes of its cluster a VM may have, as its kubelet is told",
    ),
    (
        "kubevirt.node-labels",
        "none",
        "labels of the Node that its guests' Nodes get as well, beside region and zone, if they have a value: \
         `[\"example.com/rack\"]`",
    ),
    (
        "kubevirt.guests",
        "`true`",
        "write an object `guests.guestlet.io` for each guest, and events of its VirtualMachineInstance",
    ),
    (
        "kubevirt.controller",
        "`\"[::]:9971\"`",
        "of `guestlet-host controller`: where it takes the connections of nodes, in the network of its pod; `[::]` is all addresses of IPv6 and IPv4",
    ),
    (
        "kubevirt.access-mode",
        "`\"ReadWriteMany\"`",
        "of `guestlet-host controller`: the access mode of the claims that volumes are; VMs can be migrated with `ReadWriteMany` alone",
    ),
    ("topology.region", "none", "where this host is; each guest is told. See [topology.md](topology.md)"),
    ("topology.zone", "none", "the failure domain within the region"),
    ("topology.host", "its host name", "what guests are told that this host is called"),
    (
        "topology.labels",
        "none",
        "further labels for the guests' Nodes, which a kubelet may set: `{ \"example.com/power-feed\" = \"a\" }`",
    ),
    ("limits.message-bytes", "`262144`", "bytes of one message of a guest"),
    (
        "limits.bytes-per-second",
        "`262144`",
        "bytes of a guest on its connection; eight times as many at once",
    ),
    ("limits.events-per-second", "`64`", "events of a guest in the long run"),
    ("limits.event-burst", "`1024`", "events of a guest at once"),
    ("limits.events-kept", "`128`", "events of each VM that `watch --since` can show"),
    ("limits.history-bytes", "`65536`", "bytes that these may take"),
    (
        "limits.state-bytes",
        "`1048576`",
        "bytes of memory that the known state of a guest may take; what would be more is left out, and `guestctl info` says what",
    ),
    ("limits.interfaces", "`256`", "network interfaces of a guest"),
    ("limits.addresses", "`64`", "addresses of each"),
    ("limits.file-systems", "`1024`", "mounted file systems of a guest"),
    ("limits.users", "`256`", "user sessions of a guest"),
    ("limits.disks", "`1024`", "disks of a guest"),
    (
        "limits.calls-per-second",
        "`50`",
        "calls of a guest in the long run; four times as many at once. Those about volumes are counted by themselves, and wait",
    ),
    (
        "limits.open-calls",
        "`16`",
        "calls of a guest at a time, and as many about volumes and as many about its cluster beside them",
    ),
    (
        "limits.unread-seconds",
        "`8`",
        "how long a guest may read nothing while something waits for it, from 1 to 3600; its session is refused then",
    ),
    (
        "limits.busy-seconds",
        "`60`",
        "for how long a guest that is busy with a disk is asked again to let go of it, from 1 to 60; the disk stays attached then",
    ),
];

/// What stands before the tables.
const HEAD: &str = "# Settings: every key

Written from `src/config/reference.rs`; tests hold it against what the programs read. Where settings come from, which place
wins, and qemu-ga's own options and files: [configuration.md](configuration.md). Rules for disks: [disks.md](disks.md).

An unknown key is refused, with its file and line, and so is a wrong value. Times are seconds, or a number and `s`, `min` or
`h`. Paths are absolute.
";

fn markdown() -> String {
    let mut text = HEAD.to_owned();
    for (title, words, rows) in [
        (
            "The agent: /etc/guestlet/agent.toml, then /etc/guestlet/agent.d/*.toml",
            "They take effect when the agent is restarted: `systemctl daemon-reload && systemctl restart guestlet`, where the \
             first makes the unit fit them ([security.md](security.md)). Under systemd the ports of the guestlet API are those \
             of `guestlet.socket`: to change one, change it there as well.",
            AGENT,
        ),
        (
            "The host half: /etc/guestlet/host.toml, then /etc/guestlet/host.d/*.toml",
            "They take effect when they are written, but for `socket`, `metrics`, `metrics-socket`, `volumes-dir`, `load-balancers` and `audit.file`. Each \
             VM is a table `[[vm]]`. `guestlet-host node` finds its VMs by the Kubernetes API: it refuses `[[vm]]`, `[[pool]]`, \
             `[[address-pool]]` and `[topology]`, and it alone has `[kubevirt]` ([kubevirt.md](kubevirt.md)).",
            HOST,
        ),
    ] {
        let _ = write!(text, "\n## {title}\n\n{words}\n\n| key | default | meaning |\n|---|---|---|\n");
        for (key, default, meaning) in rows {
            let _ = writeln!(text, "| `{key}` | {default} | {meaning} |");
        }
    }
    text
}

/// The keys that a program reads, by its own words: it names those that it knows when it meets one that it does not.
fn known<F: Fragment>(prefix: &str, found: &mut Vec<String>) {
    let refused = |table: &str| match parse::<F>(Path::new("x"), table) {
        Ok(_) => String::new(),
        Err(error) => error.to_string(),
    };
    // A table, one of several, or one with a name of the user's.
    let table = |header: String, next: String| (header + "\"@\" = 1\n", next);
    let tables = match prefix {
        "" => vec![table(String::new(), String::new())],
        prefix => vec![
            table(format!("[{prefix}]\n"), format!("{prefix}.")),
            table(format!("[[{prefix}]]\n"), format!("{prefix}.")),
            table(format!("[{prefix}.x]\n"), format!("{prefix}.<name>.")),
        ],
    };
    let told = tables.into_iter().find_map(|(table, next)| {
        let words = refused(&table);
        words.contains("unknown field `@`").then_some((words, next))
    });
    let Some((words, next)) = told else {
        return found.push(prefix.to_owned());
    };
    let expected = words.split("expected").nth(1).unwrap_or_default();
    for name in expected.split('`').skip(1).step_by(2) {
        let name = format!("{next}{name}");
        known::<F>(&name, found);
    }
}

#[test]
fn every_key_has_its_row() {
    for (name, rows, keys) in [
        ("AGENT", AGENT, {
            let mut keys = Vec::new();
            known::<AgentFragment>("", &mut keys);
            keys
        }),
        ("HOST", HOST, {
            let mut keys = Vec::new();
            known::<HostFragment>("", &mut keys);
            keys
        }),
    ] {
        let mut keys = keys;
        let mut told: Vec<_> = rows.iter().map(|(key, ..)| (*key).to_owned()).collect();
        keys.sort();
        told.sort();
        assert!(keys.len() > 20, "{keys:?}");
        assert_eq!(told, keys, "the rows of {name}, and the keys that are read");
    }
}

/// `UPDATE_DOCS=1 cargo test` writes the file anew.
#[test]
#[allow(clippy::disallowed_methods)]
fn the_page_in_docs_is_the_one_that_the_tables_give() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/settings.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&file, markdown()).unwrap();
    }
    let written = std::fs::read_to_string(&file).unwrap_or_default();
    assert_eq!(written, markdown(), "run UPDATE_DOCS=1 cargo test --lib reference");
}

/// The packages' settings files show keys as comments: each has to be one, and every value has to be good.
#[test]
#[allow(clippy::disallowed_methods)]
fn the_settings_that_are_packaged_can_be_used() {
    let text = |name: &str| {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging").join(name);
        let text = std::fs::read_to_string(file).unwrap();
        // Settings are behind one "# ", words behind two.
        let used = |line: &str| match line.strip_prefix("# ") {
            Some(rest)
                if rest.starts_with('[')
                    || rest.split_once(" = ").is_some_and(|(key, _)| !key.contains(' ')) =>
            {
                Some(rest.to_owned())
            }
            _ => None,
        };
        text.lines().filter_map(used).collect::<Vec<_>>().join("\n")
    };
    let agent = text("agent.toml");
    assert!(agent.lines().count() > 20, "{agent}");
    parse::<AgentFragment>(Path::new("agent.toml"), &agent).unwrap();
    let host = text("host.toml");
    assert!(host.lines().count() > 5, "{host}");
    parse::<HostFragment>(Path::new("host.toml"), &host).unwrap();
}
