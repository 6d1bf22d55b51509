//! Table of the host half's settings.

use super::Row;

pub(super) const HOST: &[Row] = &[
    (
        "socket",
        "`/run/guestlet-host/api.sock`",
        "the socket that guestctl connects to; for root only, unless there is an `[[access]]` table",
    ),
    (
        "metrics-socket",
        "`metrics.sock` beside `socket`",
        "Prometheus metrics of the host half and of all guests over HTTP, on a unix socket. See [metrics.md](metrics.md)",
    ),
    (
        "metrics",
        "none",
        "the same on TCP, such as `\"127.0.0.1:9970\"`; only on loopback, but for `guestlet-host node` in its pod. `/healthz` and \
         `/readyz` answer there as well",
    ),
    (
        "volumes-dir",
        "`/var/lib/guestlet-host/volumes`",
        "where `guestctl disk attach --size` creates volumes; QEMU's user must be able to reach it",
    ),
    (
        "load-balancers.state-dir",
        "`/var/lib/guestlet-host/load-balancers`",
        "where the addresses of the Services of clusters are recorded. See [load-balancers.md](load-balancers.md)",
    ),
    (
        "load-balancers.nft",
        "`/usr/sbin/nft`",
        "the program that sets the kernel's forwarding rules (package nftables)",
    ),
    (
        "load-balancers.release-after-seconds",
        "`86400` for `guestlet-host controller`, else `0`",
        "how long a cluster must have had no VM before its load balancers are released; `0`: they stay until \
         somebody releases them. On a machine only for clusters that have no VM on other machines: see \
         [load-balancers.md](load-balancers.md)",
    ),
    ("vm.name", "", "unique on this host, a DNS name"),
    ("vm.uuid", "", "must never change: volumes and clusters identify the VM by it"),
    (
        "vm.dmi-uuid",
        "`vm.uuid`",
        "what the guest must report as its DMI UUID; `\"none\"` for a VM without DMI, such as QEMU's microvm",
    ),
    ("vm.cluster", "none", "the cluster that the guest belongs to"),
    ("vm.vsock-cid", "", "how the agent is reached: the guest's address on kernel vhost-vsock"),
    ("vm.vsock-socket", "", "or hybrid vsock: the hypervisor's unix socket"),
    ("vm.unix-socket", "", "or a unix socket that leads straight to an agent"),
    ("vm.callback-socket", "", "from earlier versions, ignored"),
    (
        "vm.max-volumes",
        "`240`",
        "how many volumes of its cluster a VM may have, if it has slots for them, as reported to its kubelet; \
         `0` for all slots",
    ),
    (
        "vm.networks",
        "none",
        "which networks of this host it is attached to, by its hardware addresses: `{ \"52:54:00:12:34:56\" = \"lan\" }`; \
         nothing is forwarded to a VM without any",
    ),
    (
        "vm.labels",
        "none",
        "labels by which `guestctl ls -l` selects it, at most 32, with keys and values as in Kubernetes: `{ tier = \"db\" }`. See \
         [guestctl.md](guestctl.md#labels)",
    ),
    ("vm.port", "`970`", "the agent's vsock port"),
    ("vm.callback-port", "", "from earlier versions, ignored"),
    (
        "vm.console",
        "the first serial port",
        "which console `guestctl console` shows: the identifier of one of QEMU's character devices, or the path of its unix socket. See \
         [console.md](console.md)",
    ),
    ("vm.qmp", "none", "a QMP socket for guestlet-host alone: shows whether the VM runs, and plugs disks"),
    (
        "pool.name",
        "",
        "a storage class for the volumes of clusters; each is a table `[[pool]]`. See [csi.md](csi.md)",
    ),
    ("pool.path", "", "its directory, which QEMU's user must be able to reach, and only root may write to"),
    ("pool.format", "`\"raw\"`", "how images are kept: `raw` or `qcow2`"),
    ("pool.allocation", "`\"thin\"`", "whether their full size is reserved: `thin` or `full`"),
    ("pool.bus", "by the VM", "the bus on which guests see its volumes: `scsi` or `virtio`"),
    ("pool.default", "the first", "`true` for the class of volumes that request none"),
    (
        "pool.answer-seconds",
        "`30`",
        "how long a call waits for its file system, 1 to 3600; after that it and later calls are refused \
         until the file system answers",
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
    ("address-pool.priority", "`0`", "of the matching pools, the one with the highest number is tried first"),
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
        "`[22]`; none with `interface`",
        "ports of these addresses that this host never forwards",
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
        "the VMs that may request volumes and load balancers",
    ),
    (
        "trust.state-dir",
        "`/var/lib/guestlet-host/trust`",
        "where this host half keeps its own key and the keys of guests, and which pools it has. See [keys.md](keys.md)",
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
        "scrape.job",
        "",
        "exporters in guests whose metrics this host passes on; each is a table `[[scrape]]`, and this is \
         what Prometheus calls it. See \
         [metrics.md](metrics.md#exporters-in-guests)",
    ),
    (
        "scrape.target",
        "",
        "where such an exporter listens in the guest, as `grant.forward` names it there: `\"9100\"`, `\"10.0.0.5:9100\"` or \
         `\"unix:/run/exporter.sock\"`",
    ),
    ("scrape.path", "`/metrics`", "where it has its metrics"),
    ("scrape.vms", "all", "in which VMs: names, or patterns such as `\"web-*\"`"),
    (
        "scrape.interval-seconds",
        "Prometheus' own",
        "how often Prometheus should scrape, from 1 to 3600, as `/sd` reports it",
    ),
    ("scrape.timeout-seconds", "`5`", "how long an exporter may take, from 1 to 60"),
    (
        "scrape.max-bytes",
        "`4194304`",
        "bytes of its answer, from 1024 to 16777216; nothing of a larger one is passed on",
    ),
    (
        "scrape.max-series",
        "`5000`",
        "series of its answer, from 1 to 50000; nothing of one with more is passed on",
    ),
    (
        "access.users",
        "none",
        "users of the host, by name or number, who may do what the table `[[access]]` allows; tables add up. \
         See [security.md](security.md)",
    ),
    ("access.groups", "none", "groups of the host, by name or number, whose members may"),
    (
        "access.roles",
        "none",
        "what they may do: `read`, `disks`, `files` (attach any file of the host as a disk), `volumes`, `load-balancers`, `keys`, `freeze`, `power`, `accounts`, `qga`, `logs`, `metrics`, `copy`, `exec`, `forward`, `console`, or `all`",
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
        "how many volumes of its cluster a VM may have, as reported to its kubelet",
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
    ("topology.host", "its host name", "the name of this host that guests are told"),
    (
        "topology.labels",
        "none",
        "further labels for the guests' Nodes, which a kubelet may set: `{ \"example.com/power-feed\" = \"a\" }`",
    ),
    ("limits.message-bytes", "`262144`", "bytes of one message of a guest"),
    (
        "limits.bytes-per-second",
        "`262144`",
        "bytes per second of a guest on its connection; bursts of eight times as many",
    ),
    ("limits.events-per-second", "`64`", "events per second of a guest on average"),
    ("limits.event-burst", "`1024`", "events of a guest at once"),
    ("limits.events-kept", "`128`", "events of each VM that `watch --since` can show"),
    ("limits.history-bytes", "`65536`", "bytes that these may occupy"),
    (
        "limits.state-bytes",
        "`1048576`",
        "bytes of memory that the known state of a guest may take; anything beyond that is left out, as \
         `guestctl info` shows",
    ),
    ("limits.interfaces", "`256`", "network interfaces of a guest"),
    ("limits.addresses", "`64`", "addresses of each"),
    ("limits.file-systems", "`1024`", "mounted file systems of a guest"),
    ("limits.users", "`256`", "user sessions of a guest"),
    ("limits.disks", "`1024`", "disks of a guest"),
    (
        "limits.calls-per-second",
        "`50`",
        "calls per second of a guest on average; bursts of four times as many. Calls about volumes are \
         counted separately, and wait",
    ),
    (
        "limits.open-calls",
        "`16`",
        "calls of a guest at a time, and as many about volumes and as many about its cluster beside them",
    ),
    (
        "limits.unread-seconds",
        "`8`",
        "how long a guest may read nothing while data is waiting for it, from 1 to 3600; after that its session is refused",
    ),
    (
        "limits.busy-seconds",
        "`60`",
        "how long a guest that is busy with a disk is asked again to release it, from 1 to 60; after that the \
         disk stays attached",
    ),
];
