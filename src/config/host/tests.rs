use super::*;
use crate::access::Role as AccessRole;
use crate::config::parse;

const ONE: &str = "6f1c0a52-5c0f-4a8e-9d1b-0d7a2f3b4c5d";
const TWO: &str = "7f1c0a52-5c0f-4a8e-9d1b-0d7a2f3b4c5d";

fn check(texts: &[&str]) -> Result<HostSettings, String> {
    check_as(Role::Machine, texts)
}

fn check_as(role: Role, texts: &[&str]) -> Result<HostSettings, String> {
    let mut merged = HostFragment::default();
    for (number, text) in texts.iter().enumerate() {
        let file = PathBuf::from(format!("{number}.toml"));
        merged.merge(parse(&file, text).map_err(|error| error.to_string())?, &file);
    }
    merged.check(role).map_err(|error| error.to_string())
}

#[test]
fn fragments_add_up() {
    let first = format!(
        "[topology]\nregion = 'eu'\nzone = 'a'\nlabels = {{ 'example.com/row' = '7' }}\n[limits]\nusers = 5\nopen-calls = 9\nunread-seconds = 3\nbusy-seconds = 2\n[[vm]]\nname = 'web-1'\nuuid = '{}'\nvsock-cid = 3\n",
        ONE.to_uppercase()
    );
    let second = format!(
        "topology = {{ zone = 'b', labels = {{ rack = '2' }} }}\nsocket = '/run/x.sock'\nvolumes-dir = '/srv/v'\nmetrics = '127.0.0.1:9970'\nlimits.users = 6\n[[vm]]\nname = 'db.dev'\ncluster = 'dev'\nuuid = '{TWO}'\ndmi-uuid = 'none'\n\
         vsock-socket = '/run/db.vsock'\nport = 1970\nqmp = '/run/db.qmp'\nconsole = 'console0'\nlabels = {{ tier = 'db', 'example.com/spare' = '' }}\n"
    );
    let settings = check(&[&first, &second]).unwrap();
    assert_eq!(settings.socket, Path::new("/run/x.sock"));
    assert_eq!(settings.metrics_socket, Path::new("/run/metrics.sock"));
    assert_eq!(settings.metrics, Some(([127, 0, 0, 1], 9970).into()));
    assert_eq!(settings.volumes, Path::new("/srv/v"));
    let limits = LimitSettings {
        users: Some(6),
        open_calls: Some(9),
        unread_seconds: Some(3),
        busy_seconds: Some(2),
        ..LimitSettings::default()
    };
    assert_eq!(settings.limits, limits);
    let labels = [("example.com/row", "7"), ("rack", "2")];
    let topology = TopologySettings {
        region: "eu".into(),
        zone: "b".into(),
        host: None,
        labels: labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
    };
    assert_eq!(settings.topology, topology);
    assert_eq!(
        settings.vms,
        [
            VmSettings {
                name: "db.dev".into(),
                uuid: TWO.into(),
                dmi_uuid: String::new(),
                cluster: "dev".into(),
                dial: DialSettings::Hybrid { path: "/run/db.vsock".into(), port: 1970 },
                qmp: Some("/run/db.qmp".into()),
                console: Some(ConsoleSettings::Label("console0".into())),
                max_volumes: 240,
                networks: BTreeMap::new(),
                labels: [("example.com/spare", ""), ("tier", "db")]
                    .map(|(key, value)| (key.to_owned(), value.to_owned()))
                    .into(),
            },
            VmSettings {
                name: "web-1".into(),
                uuid: ONE.into(),
                dmi_uuid: ONE.into(),
                cluster: String::new(),
                dial: DialSettings::Vsock { cid: 3, port: 970 },
                qmp: None,
                console: None,
                max_volumes: 240,
                networks: BTreeMap::new(),
                labels: BTreeMap::new(),
            },
        ]
    );
}

#[test]
fn nothing_at_all_is_a_host_without_vms() {
    let settings = check(&[]).unwrap();
    assert_eq!((settings.socket.as_path(), settings.vms), (Path::new(DEFAULT_SOCKET), Vec::new()));
    assert_eq!(settings.metrics_socket, Path::new("/run/guestlet-host/metrics.sock"));
    assert_eq!(settings.volumes, Path::new(VOLUMES));
}

#[test]
fn what_is_wrong_is_named_with_file_and_line() {
    let vm = |rest: &str| format!("\n[[vm]]\nname = 'a'\nuuid = '{ONE}'\n{rest}\n");
    let good = vm("vsock-cid = 3");
    let cases: Vec<(&str, Vec<String>, &str)> = vec![
        ("relative socket", vec!["socket = 'api.sock'".into()], "0.toml:1: socket = \"api.sock\" is a rel"),
        ("no name", vec![format!("\n[[vm]]\nuuid = '{ONE}'\nvsock-cid = 3")], "0.toml:2: [[vm]] has no name"),
        ("no uuid", vec!["\n\n[[vm]]\nname = 'a'\n".into()], "0.toml:3: [[vm]] has no uuid"),
        ("name", vec![good.replace("'a'", "'A_b'")], "0.toml:3: name \"A_b\" is not a DNS name"),
        ("empty name", vec![good.replace("'a'", "''")], "0.toml:3: name \"\" is not a DNS name"),
        ("uuid", vec![good.replace(ONE, "6f1c")], "0.toml:4: uuid \"6f1c\" is not a UUID"),
        (
            "dmi-uuid",
            vec![vm("vsock-cid = 3\ndmi-uuid = ''")],
            "0.toml:6: dmi-uuid \"\" is not a UUID; write it like 6f1c0a52-5c0f-4a8e-9d1b-0d7a2f3b4c5d, as \
             QEMU's -uuid has it; or \"none\"",
        ),
        ("no dial", vec![vm("")], "0.toml:2: [[vm]] has no way to reach"),
        ("two dials", vec![vm("vsock-cid = 3\nvsock-socket = '/a'")], "0.toml:2: [[vm]] has more than one"),
        ("cid", vec![vm("vsock-cid = 2")], "0.toml:5: vsock-cid = 2: the CIDs of guests begin at 3"),
        ("port", vec![vm("vsock-cid = 3\nport = 0")], "0.toml:6: port = 0"),
        ("unix port", vec![vm("unix-socket = '/a'\nport = 5")], "0.toml:6: port has no effect"),
        ("volumes", vec!["volumes-dir = 'v'".into()], "0.toml:1: volumes-dir = \"v\" is a relative path"),
        ("metrics", vec!["metrics = '0.0.0.0:1'".into()], "0.toml:1: metrics = \"0.0.0.0:1\" is not on"),
        (
            "metrics port",
            vec!["metrics = '127.0.0.1'".into()],
            "0.toml:1: metrics = \"127.0.0.1\" is not an address",
        ),
        ("limit", vec!["[limits]\nusers = 0".into()], "0.toml:2: limits.users = 0: use 1 to"),
        ("zone", vec!["[topology]\nzone = 'a b'".into()], "0.toml:2: topology.zone = \"a b\": a label may"),
        (
            "denied label",
            vec!["[topology.labels]\na = 'b'\n'node-role.kubernetes.io/x' = 'y'".into()],
            "0.toml:3: topology.labels: \"node-role.kubernetes.io/x\": the API server (NodeRestriction) does not let",
        ),
        (
            "long label",
            vec![format!("[topology.labels]\na = '{}'", "b".repeat(64))],
            "0.toml:2: topology.labels: \"a\" = \"bbbb",
        ),
        (
            "time",
            vec!["[limits]\nunread-seconds = 0".into()],
            "0.toml:2: limits.unread-seconds = 0: use 1 to 3600",
        ),
        (
            "long time",
            vec!["[limits]\nbusy-seconds = 61".into()],
            "0.toml:2: limits.busy-seconds = 61: use 1 to 60",
        ),
        ("unknown limit", vec!["[limits]\nuser = 1".into()], "0.toml:2: unknown field `user`"),
        ("qmp", vec![vm("vsock-cid = 3\nqmp = 'q'")], "0.toml:6: qmp = \"q\" is a relative path"),
        ("console", vec![vm("vsock-cid = 3\nconsole = 'a'")], "0.toml:6: console has no effect without qmp"),
        (
            "console label",
            vec![vm("vsock-cid = 3\nqmp = '/q'\nconsole = 'a b'")],
            "0.toml:7: console = \"a b\": write the identifier",
        ),
        (
            "console socket",
            vec![vm("vsock-cid = 3\nqmp = '/q'\nconsole = '/q'")],
            "0.toml:7: socket \"/q\" is already used",
        ),
        ("long", vec![vm(&format!("vsock-socket = '/{}'", "a".repeat(107)))], "0.toml:5: vsock-socket is"),
        ("cluster", vec![vm("vsock-cid = 3\ncluster = \"a\\u0007\"")], "0.toml:6: cluster is longer"),
        (
            "same name",
            vec![good.clone(), good.replace(ONE, TWO).replace('3', "4")],
            "1.toml:3: name \"a\" is already used at 0.toml:3",
        ),
        (
            "same uuid",
            vec![good.clone(), good.replace("'a'", "'b'").replace("= 3", "= 4")],
            "1.toml:4: uuid \"6f1c0a52-5c0f-4a8e-9d1b-0d7a2f3b4c5d\" is already used",
        ),
        (
            "same cid",
            vec![good.clone(), good.replace("'a'", "'b'").replace(ONE, TWO)],
            "1.toml:5: vsock-cid \"3\" is already used",
        ),
        (
            "same socket",
            vec![vm("vsock-socket = '/s'\nqmp = '/s'")],
            "0.toml:6: socket \"/s\" is already used at 0.toml:5",
        ),
        ("unknown", vec![vm("vsock-cid = 3\ncidd = 4")], "0.toml:6: unknown field `cidd`"),
    ];
    assert_wrong(cases);
    let many = vec![vm("vsock-cid = 3\nmax-volumes = 5000")];
    assert_wrong(vec![("volumes of a VM", many, "0.toml:6: max-volumes = 5000")]);
}

fn assert_wrong(cases: Vec<(&str, Vec<String>, &str)>) {
    for (case, texts, expected) in cases {
        let texts: Vec<_> = texts.iter().map(String::as_str).collect();
        let error = check(&texts).expect_err(case);
        assert!(error.starts_with(expected), "{case}: {error}");
    }
}

#[test]
fn what_is_wrong_with_labels_is_named_with_file_and_line() {
    let vm = |labels: &str| format!("\n[[vm]]\nname = 'a'\nuuid = '{ONE}'\nvsock-cid = 3\n{labels}\n");
    let many: Vec<_> = (10..43).map(|number| format!("k{number} = ''")).collect();
    assert_wrong(vec![
        (
            "key of a label",
            vec![vm("labels = { good = '', 'a b' = 'c' }")],
            "0.toml:6: labels of the VM \"a\": \"a b\": the name of a label's key may have",
        ),
        (
            "value of a label",
            vec![vm("[vm.labels]\ntier = 'db'\nrack = 'a/b'")],
            "0.toml:8: labels of the VM \"a\": \"rack\" = \"a/b\": a label may have letters",
        ),
        (
            "number as a label",
            vec![vm("labels = { rack = 7 }")],
            "0.toml:6: invalid type: integer `7`, expected a string",
        ),
        (
            "labels",
            vec![vm(&format!("[vm.labels]\n{}", many.join("\n")))],
            "0.toml:39: labels of the VM \"a\": \"k42\" is one too many; remove all but 32",
        ),
    ]);
}

#[test]
fn pools_and_what_clusters_may() {
    let pools = "[[pool]]\nname = 'fast'\npath = '/srv/fast'\nformat = 'qcow2'\nallocation = 'full'\nbus = 'virtio'\n\
                 default = true\nanswer-seconds = 5\n[cluster.dev]\nmax-volumes = 5\nmax-bytes = '1T'\nclasses = ['fast', 'slow']\n\
                 controllers = ['a']\n[cluster.other]\nmax-bytes = 1000\n";
    let more = format!(
        "[[pool]]\nname = 'slow'\npath = '/srv/slow'\n[[vm]]\nname = 'a'\nuuid = '{ONE}'\nvsock-cid = 3\n\
         cluster = 'dev'\nmax-volumes = 9\n[cluster.dev]\nclasses = ['slow']\n"
    );
    let settings = check(&[pools, &more]).unwrap();
    let pool = |name: &str| PoolSettings {
        name: name.into(),
        path: format!("/srv/{name}").into(),
        format: Format::Raw,
        allocation: Allocation::Thin,
        bus: None,
        default: false,
        answer_seconds: None,
    };
    let fast = PoolSettings {
        format: Format::Qcow2,
        allocation: Allocation::Full,
        bus: Some(Bus::Virtio),
        default: true,
        answer_seconds: Some(5),
        ..pool("fast")
    };
    assert_eq!(settings.pools, [fast, pool("slow")]);
    assert_eq!(settings.vms[0].max_volumes, 9);
    let dev = ClusterSettings { classes: Some(vec!["slow".into()]), ..ClusterSettings::default() };
    assert_eq!(settings.clusters["dev"], dev, "the last table of a cluster wins");
    assert_eq!(settings.clusters["other"].max_bytes, Some(1000));
    let dev =
        &check(&[pools, &more.replace("[cluster.dev]\nclasses = ['slow']\n", "")]).unwrap().clusters["dev"];
    assert_eq!((dev.max_volumes, dev.max_bytes), (Some(5), Some(1 << 40)));
    assert_eq!(dev.controllers, Some(vec!["a".into()]));
}

#[test]
fn what_is_wrong_with_pools_and_clusters_is_named_with_file_and_line() {
    let pool = |rest: &str| format!("\n[[pool]]\nname = 'fast'\n{rest}\n");
    let good = pool("path = '/srv/fast'");
    let long = "a".repeat(64);
    assert_wrong(vec![
        ("no name", vec!["\n[[pool]]\npath = '/a'".into()], "0.toml:2: [[pool]] has no name"),
        ("no path", vec![pool("")], "0.toml:2: [[pool]] has no path"),
        ("name", vec![good.replace("'fast'", "'Fast'")], "0.toml:3: name \"Fast\" is not a DNS name"),
        ("long name", vec![good.replace("'fast'", &format!("'{long}'"))], "0.toml:3: name has more than 63"),
        ("relative", vec![pool("path = 'a'")], "0.toml:4: path = \"a\" is a relative path"),
        ("format", vec![pool("path = '/a'\nformat = 'vmdk'")], "0.toml:5: unknown variant `vmdk`"),
        ("allocation", vec![pool("path = '/a'\nallocation = 'x'")], "0.toml:5: unknown variant `x`"),
        (
            "seconds",
            vec![pool("path = '/a'\nanswer-seconds = 0")],
            "0.toml:5: pool.answer-seconds = 0: use 1 to",
        ),
        ("unknown key", vec![pool("path = '/a'\nfat = 1")], "0.toml:5: unknown field `fat`"),
        (
            "same name",
            vec![good.clone(), pool("path = '/b'")],
            "1.toml:3: pool \"fast\" is already used at 0.toml:3",
        ),
        (
            "same path",
            vec![good.clone(), good.replace("'fast'", "'b'")],
            "1.toml:4: path \"/srv/fast\" is already used at 0.toml:4",
        ),
        (
            "two defaults",
            vec![
                pool("path = '/a'\ndefault = true"),
                "[[pool]]\nname = 'b'\npath = '/b'\ndefault = true".into(),
            ],
            "1.toml:4: default \"true\" is already used",
        ),
        (
            "size",
            vec!["[cluster.dev]\nmax-bytes = '5X'".into()],
            "0.toml:2: max-bytes = \"5X\": give a number",
        ),
        ("no cluster", vec!["[cluster.'']\nmax-volumes = 1".into()], "0.toml:1: [cluster] has an empty name"),
        (
            "class",
            vec![good.clone(), "[cluster.dev]\nclasses = ['fast',\n 'fats']".into()],
            "1.toml:3: classes has \"fats\", but no [[pool]]",
        ),
        (
            "controller",
            vec!["[cluster.dev]\ncontrollers = ['a']".into()],
            "0.toml:2: controllers has \"a\", but no [[vm]] of the cluster dev",
        ),
        ("unknown in cluster", vec!["[cluster.dev]\nclass = 'a'".into()], "0.toml:2: unknown field `class`"),
    ]);
}

#[test]
fn rules_of_access_and_where_it_is_written_down() {
    let first = "[audit]\nfile = '/var/log/a.json'\n[[access]]\nusers = ['alice', '1007']\nverbs = ['ls', 'disk attach --file']\n\
                 vms = ['web-*']\n";
    let second = "[[access]]\ngroups = ['ops']\nroles = ['all']\nclusters = ['dev']\n";
    let settings = check(&[first, second]).unwrap();
    assert_eq!(settings.audit.file.as_deref(), Some(Path::new("/var/log/a.json")));
    let rules: Vec<_> = settings.access.iter().collect();
    assert_eq!(rules.len(), 2);
    assert_eq!(rules[0].users, ["alice", "1007"]);
    assert_eq!(rules[0].verbs, ["ls", "disk attach --file", "status"].into());
    assert_eq!(rules[0].vms.as_deref().unwrap()[0].to_string(), "web-*");
    assert_eq!((rules[0].clusters.as_ref(), rules[0].roles.len()), (None, 0));
    assert_eq!(
        (rules[1].roles.len(), rules[1].groups.as_slice()),
        (AccessRole::ALL.len(), &["ops".to_owned()][..])
    );
    assert!(check(&[]).unwrap().access.is_empty());
}

#[test]
fn what_is_wrong_with_rules_of_access_is_named_with_file_and_line() {
    let rule = |rest: &str| format!("\n[[access]]\nusers = ['alice']\n{rest}\n");
    assert_wrong(vec![
        ("nobody", vec!["\n[[access]]\nverbs = ['ls']".into()], "0.toml:2: [[access]] applies to nobody"),
        (
            "nobody else",
            vec!["[[access]]\nusers = []\nverbs = ['ls']".into()],
            "0.toml:1: [[access]] applies to nobody",
        ),
        ("nothing", vec![rule("vms = ['a']")], "0.toml:2: [[access]] allows nothing"),
        (
            "verb",
            vec![rule("verbs = ['ls',\n'frob']")],
            "0.toml:5: verbs has the unknown verb \"frob\"; the verbs",
        ),
        (
            "role",
            vec![rule("roles = ['root']")],
            "0.toml:4: roles has the unknown role \"root\"; the roles are",
        ),
        (
            "name",
            vec![rule("roles = ['all']\ngroups = ['*']")],
            "0.toml:5: groups has \"*\", which cannot be a name",
        ),
        (
            "pattern",
            vec![rule("roles = ['all']\nvms = ['a', 'web-[0-9]']")],
            "0.toml:5: vms: \"web-[0-9]\" has the",
        ),
        (
            "empty pattern",
            vec![rule("roles = ['all']\nclusters = ['']")],
            "0.toml:5: clusters: \"\" is empty; write",
        ),
        (
            "no VM",
            vec![rule("roles = ['all']\nvms = []")],
            "0.toml:5: vms is empty, so the rule covers nothing",
        ),
        ("key", vec![rule("role = ['all']")], "0.toml:4: unknown field `role`"),
        (
            "file",
            vec!["[audit]\nfile = 'a.json'".into()],
            "0.toml:2: audit.file = \"a.json\" is a relative path",
        ),
        ("of audit", vec!["[audit]\npath = '/a'".into()], "0.toml:2: unknown field `path`"),
    ]);
}

#[test]
fn a_node_takes_what_holds_for_all_of_its_vms() {
    let first = "metrics = '0.0.0.0:9970'\nkubevirt = { port = 971, node-labels = ['example.com/rack'] }\n[cluster.'ns/dev']\nclasses = ['fast']\n";
    let second = "[kubevirt]\nsockets = '/run/sockets'\nmax-volumes = 9\nnode-labels = ['example.com/row']\nguests = false\n";
    let settings = check_as(Role::Node, &[first, second]).unwrap();
    let expected = KubevirtSettings {
        sockets: Some("/run/sockets".into()),
        port: 971,
        max_volumes: 9,
        node_labels: vec!["example.com/row".into()],
        guests: false,
        ..KubevirtSettings::default()
    };
    assert_eq!(settings.kubevirt, expected);
    assert_eq!(settings.metrics, Some(([0, 0, 0, 0], 9970).into()));
}

#[test]
fn what_another_role_has_is_refused_where_it_is() {
    let vm = format!("\n[[vm]]\nname = 'a'\nuuid = '{ONE}'\nvsock-cid = 3\n");
    for (role, text, expected) in [
        (Role::Node, vm.as_str(), "0.toml:2: VMs are found through the Kubernetes API; remove [[vm]]"),
        (
            Role::Node,
            "\n\n[[pool]]\nname = 'a'\npath = '/a'",
            "0.toml:3: there are no pools: volumes are claims",
        ),
        (Role::Node, "[topology]\nzone = 'a'", "0.toml:1: the topology is read from the labels of the Node"),
        (Role::Node, "\ntopology.zone = 'a'", "the topology is read from the labels of the Node"),
        (Role::Node, "[topology.labels]\na = 'b'", "the topology is read from the labels of the Node"),
        (
            Role::Machine,
            "\n[kubevirt]\nport = 970",
            "0.toml:2: [kubevirt] is for guestlet-host node and controller",
        ),
        (
            Role::Machine,
            "metrics = '0.0.0.0:9970'",
            "0.toml:1: metrics = \"0.0.0.0:9970\" is not on loopback",
        ),
        (Role::Node, "kubevirt.port = 0", "0.toml:1: kubevirt.port = 0 is not a port"),
        (Role::Node, "kubevirt.sockets = 'a'", "0.toml:1: kubevirt.sockets = \"a\" is a relative path"),
        (Role::Node, "kubevirt.node-labels = ['a', 'b c']", "0.toml:1: kubevirt.node-labels: \"b c\""),
        (Role::Node, "kubevirt.vm = 1", "unknown field `vm`"),
        (
            Role::Controller,
            "kubevirt.controller = ':9971'",
            "0.toml:1: kubevirt.controller = \":9971\" is not an address",
        ),
        (Role::Controller, "kubevirt.access-mode = 'RWX'", "unknown variant `RWX`"),
        (Role::Controller, "[[pool]]\nname = 'a'\npath = '/a'", "0.toml:1: there are no pools"),
    ] {
        let problem = check_as(role, &[text]).unwrap_err();
        assert!(problem.contains(expected), "{text}: {problem}");
    }
}

mod address_pools;
mod scrapes;
