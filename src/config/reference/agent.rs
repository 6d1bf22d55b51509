//! Table of the agent's settings.

use super::Row;

pub(super) const AGENT: &[Row] = &[
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
    ("qga.retry-path", "`false`", "retry where listening on a socket fails; devices are always waited for"),
    ("qga.statedir", "`/var/run`", "where the marker of a freeze is kept"),
    ("qga.block-rpcs", "none", "commands that may not be called; lists of all places add up"),
    ("qga.allow-rpcs", "all", "the only commands that may be called; what is blocked stays blocked"),
    (
        "qga.version",
        "`\"10.2.0\"`",
        "the version that guest-info reports, by default the one of the qemu-ga whose protocol this is; some hosts compare it",
    ),
    (
        "qga.fsfreeze-hook",
        "none",
        "program run before a freeze, with the argument `freeze`, and after a thaw, with `thaw`; `\"\"` for none",
    ),
    (
        "qga.exec.paths",
        "all",
        "the only programs that guest-exec may run: files, or directories with everything below them. They \
         get the agent's environment: `env` is refused, because variables such as `LD_PRELOAD` or `BASH_ENV` \
         can run other programs",
    ),
    (
        "qga.exec.output-deadline",
        "`\"10s\"`",
        "how long after a program's end guest-exec-status waits for its outputs to be closed, from 1 s to 1 \
         h: processes that it has started may still write to them. Later output is dropped, and \
         `out-truncated` or `err-truncated` says so",
    ),
    (
        "qga.files.paths",
        "all",
        "the only files that guest-file-open may open: files, or directories with everything below them",
    ),
    ("qga.files.read-only", "`false`", "guest-file-open opens for reading only"),
    ("qga.passwords.allow", "`true`", "whether guest-set-user-password may be called"),
    (
        "qga.freeze.deadline",
        "`\"2min\"`",
        "how long file systems stay frozen if nobody thaws them, from 1 s to 1 h. With 3 min or more, \
         systemd-journald may be killed by its watchdog",
    ),
    (
        "qga.freeze.hook-deadline",
        "`\"1min\"`, or the freeze's deadline if that is sooner",
        "how long one hook may take, from 1 s to 1 h",
    ),
    (
        "qga.freeze.hooks-deadline",
        "`\"50s\"`, or the deadline of one hook if that is longer",
        "how long all hooks may take together, from 1 s to 1 h: KubeVirt waits 60 s for the answer to a freeze",
    ),
    ("control.listen", "`\"vsock\"`", "where the host half connects: `vsock`, `none`, or `unix:/path`"),
    ("control.port", "`970`", "vsock port, from 1 to 1023"),
    (
        "callback.listen",
        "",
        "from earlier versions, ignored: requests of the guest go over the control channel",
    ),
    ("callback.port", "", "from earlier versions, ignored"),
    ("vsock.peer-cid", "`2`", "the only vsock context whose connections are accepted: the host"),
    (
        "vsock.hybrid",
        "`false`",
        "accept the host half from any source port; needed where the hypervisor has hybrid vsock \
         (Firecracker, Cloud Hypervisor, vhost-device-vsock), where the mode of the host's socket file guards instead",
    ),
    (
        "freeze.receipts-dir",
        "`\"/var/lib/guestlet/receipts\"`",
        "where the receipts of freezes are kept, for 90 days, at most 1,000. See [freeze.md](freeze.md#receipts)",
    ),
    (
        "freeze.applications",
        "`\"auto\"`",
        "which applications take part in freezes: `auto` for databases that are found by their sockets and those that have a table, `listed` for those alone. See [freeze.md](freeze.md#applications)",
    ),
    (
        "freeze.applications-deadline",
        "`\"30s\"`",
        "how long applications may take to be held, from 1 s to 1 h, within `qga.freeze.hooks-deadline`. If \
         one is late, the receipt's level is lower",
    ),
    (
        "freeze.require",
        "`\"filesystem\"`",
        "`application`: a freeze fails if no application is found, one is not held, or its data are not all frozen",
    ),
    (
        "freeze.application.kind",
        "",
        "a database: `postgresql`, `mysql` (MariaDB, too) or `etcd`. It needs a target",
    ),
    (
        "freeze.application.target",
        "",
        "where it listens: the path of its socket; for etcd, its URL on this machine, or a JSON document with \
         it. See [freeze.md](freeze.md#applications)",
    ),
    (
        "freeze.application.user",
        "the socket's owner, unless that is root",
        "owner that the socket must have; or the user that the commands run as, which must be set",
    ),
    ("freeze.application.name", "", "the display name of an application that has commands instead of a kind"),
    (
        "freeze.application.freeze",
        "",
        "a program and its arguments, such as `[\"/usr/lib/shop/hold\", \"now\"]`: when it has exited with \
         status 0, the application is held",
    ),
    (
        "freeze.application.thaw",
        "",
        "the same for the end of the freeze; it is run even if the other one failed",
    ),
    ("freeze.application.data", "", "the directories with its data, which must be frozen with it"),
    (
        "csi.enabled",
        "`\"auto\"`",
        "whether volumes are served to kubelet: `true`, `false`, or `\"auto\"`: as soon as and as long as its \
         directory exists. See [csi.md](csi.md)",
    ),
    ("csi.driver", "`\"driver.harvesterhci.io\"`", "the driver's name"),
    ("csi.kubelet-root", "`/var/lib/kubelet`", "kubelet's directory"),
    (
        "csi.node-socket",
        "`plugins/<driver>/csi.sock` in kubelet's directory",
        "where kubelet finds the Identity and Node services",
    ),
    (
        "csi.controller-socket",
        "`plugins/<driver>/controller/csi.sock` in kubelet's directory",
        "where the sidecars find the Identity and Controller services; `\"\"` for nowhere",
    ),
    (
        "csi.topology",
        "none",
        "topology keys that are reported to kubelet; the only one is `guestlet.io/host`, `topology.host` of the host half",
    ),
    (
        "exec.ring-bytes",
        "`262144`",
        "bytes of each output of a program of `guestctl exec` that are kept until they have arrived, from 4096 to 16777216; with more the program waits. See [exec.md](exec.md)",
    ),
    (
        "file-systems.interval",
        "`\"5min\"`",
        "how often the guest looks whether file systems are about to fill or have turned read-only, from 1 s to 1 h; less than 10 s is 10 s, `0` is never. See [events.md](events.md)",
    ),
    (
        "file-systems.full-percent",
        "`90`",
        "percentage of used bytes or inodes from which a file system counts as about to fill, from 10 to 100",
    ),
    (
        "forward.connections",
        "`1024`",
        "maximum number of simultaneous connections of `guestctl forward` through this guest, from 1 to 2048; \
         one caller may have all but 24. See [forward.md](forward.md)",
    ),
    (
        "cloud.socket",
        "`/run/guestlet-cloud/cloud.sock`",
        "the socket through which `guestlet-ccm` on this node calls the host half, as soon as and as long as its directory exists; `\"\"` for nowhere. See [cloud-provider.md](cloud-provider.md)",
    ),
    (
        "trust.state-dir",
        "`/var/lib/guestlet`",
        "where the guest stores its own key, once it has been given keys of host halves. See [keys.md](keys.md)",
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
        "what happens to the Node's zone and region when the guest has moved elsewhere: `update`, `keep` (an \
         annotation says where it runs) or `report` (and an event warns)",
    ),
    ("topology.report-only", "`false`", "report what the labels would be, and change nothing"),
    (
        "topology.provider-id",
        "`false`",
        "give the Node the provider id that the host half has for the VM, if it has none",
    ),
    (
        "policy.mode",
        "`\"enforce\"`",
        "what happens to a call that no grant allows: `enforce` denies it, `audit` allows it and records that \
         it would be denied. See [security.md](security.md)",
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
        "the caller for whom the host half acts, such as `uid:0 root`; `\"\"` is the host half itself, and `*` matches \
         any characters",
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
        "the only programs that this grant allows, without `env`: `{ paths = [\"/usr/bin/journalctl\"] }`, \
         files or directories",
    ),
    (
        "grant.files",
        "all",
        "the only files that it allows to be opened: `{ paths = [\"/var/log\"], read-only = true }`",
    ),
    (
        "grant.forward",
        "none",
        "the targets that it allows to be reached through this guest: `[\"22\", \"127.0.0.1:5432\", \
         \"unix:/run/app.sock\"]`. See [forward.md](forward.md)",
    ),
    ("log.verbose", "`false`", "log each call"),
    ("log.file", "the journal", "log to this file"),
    (
        "runtime-dir",
        "`/run/guestlet`",
        "directory for what lasts until the next boot: the socket of `guestlet status`, `identity.json`, what \
         the host half calls this guest, and `topology.json`, where it runs",
    ),
    (
        "qemu-ga-files",
        "`true`",
        "read qemu-ga's files as well, at their usual places; with `false` only one that `-c` or `QGA_CONF` names is read",
    ),
];
