use super::super::super::wanted::Protocol;
use super::*;

fn service(name: &str, uid: &str) -> Service {
    Service { namespace: "default".into(), name: name.into(), uid: uid.into() }
}

/// The checksums were computed by another program. They must never change, since Harvester's cloud provider finds
/// its objects by them.
#[test]
fn names_are_those_of_harvesters_cloud_provider() {
    let uid = "3f1c9a52-5c0f-4a8e-9d1b-0d7a2f3b4c5d";
    for (cluster, of, expected) in [
        ("dev", service("web", uid), "dev-default-web-1fdba081"),
        ("7up", service("web", uid), "a7up-default-web-81b3d60d"),
        ("dev", service("web", "00000000-0000-4000-8000-000000000002"), "dev-default-web-49a3cde7"),
    ] {
        assert_eq!(name(cluster, &of), expected);
    }
    let long = Service { namespace: "kube-system".into(), name: "a".repeat(63), uid: uid.into() };
    assert_eq!(name("c1", &long), format!("c1-kube-system-{}2bcbeda1", "a".repeat(40)));
    for (cluster, is_one) in
        [("dev", true), ("d-1", true), ("1d", false), ("d.e", false), ("d-", false), ("D", false)]
    {
        assert_eq!(is_label(cluster), is_one, "{cluster}");
    }
}

/// Builds an object as Harvester's cloud provider creates it.
fn theirs() -> Value {
    json!({
        "metadata": {
            "namespace": "ns", "name": "dev-default-web-1fdba081", "resourceVersion": "9",
            "labels": { CLUSTER: "dev", NAMESPACE: "default", NAME: "web" },
            "annotations": { OF_CLUSTER: "dev", NETWORK: "ns/lan", ASKED_NETWORK: "", "other": "x" },
        },
        "spec": { "workloadType": "cluster", "ipam": "pool" },
        "status": { "allocatedAddress": { "ip": "192.0.2.7", "ipPool": "lan" }, "address": "192.0.2.7" },
    })
}

fn read(value: &Value) -> Option<Object> {
    Object::of(serde_json::from_value(value.clone()).unwrap())
}

#[test]
fn only_those_of_guest_clusters_are_read() {
    let object = read(&theirs()).unwrap();
    assert_eq!((object.cluster.as_str(), object.key().as_str()), ("ns/dev", "?dev-default-web-1fdba081"));
    assert_eq!(object.service, service("web", ""));
    assert_eq!(
        (object.network(), object.asked_network(""), object.asked_network("ns/lan")),
        ("ns/lan", "", "ns/lan")
    );
    assert_eq!(object.address(), Address::Has("192.0.2.7".parse().unwrap(), "lan".into()));
    for (place, value) in [
        ("/spec/workloadType", json!("vm")),
        ("/spec/workloadType", json!("")),
        ("/metadata/labels", json!({})),
        ("/metadata/labels/cloudprovider.harvesterhci.io~1cluster", json!("")),
    ] {
        let mut other = theirs();
        *other.pointer_mut(place).unwrap() = value;
        assert_eq!(read(&other), None, "{place}");
    }
}

#[test]
fn what_its_status_says_is_its_address() {
    let with = |status: Value| {
        let mut object = theirs();
        object["status"] = status;
        read(&object).unwrap().address()
    };
    assert_eq!(with(Value::Null), Address::None(None));
    assert_eq!(with(json!({ "allocatedAddress": { "ip": "" } })), Address::None(None));
    assert_eq!(with(json!({ "allocatedAddress": { "ip": "0.0.0.0" } })), Address::Dhcp);
    let condition = |status: &str| json!({ "conditions": [{ "type": "Ready", "status": status, "message": "none left" }] });
    assert_eq!(with(condition("False")), Address::None(Some("none left".into())));
    assert_eq!(with(condition("Unknown")), Address::None(None));
}

/// Returns the configuration of a Service with one port.
pub fn wanted() -> Wanted {
    use super::super::super::wanted::{Family, Port};
    Wanted {
        ipam: Ipam::Pool,
        network: String::new(),
        addresses: Vec::new(),
        families: vec![Family::Ipv4],
        all_families: false,
        ports: vec![Port { name: String::new(), protocol: Protocol::Tcp, port: 80, node_port: 30080 }],
        share: None,
        announcing: Announcing::KubeVip,
        check: None,
        local: false,
        local_port: 0,
        backends: Vec::new(),
        sources: Vec::new(),
        affinity_seconds: 0,
    }
}

#[test]
fn what_is_written_is_read_again() {
    let (of, wanted) = (service("web", "u-1"), Wanted { network: "ns/wan".into(), ..wanted() });
    let mut made = new("ns/dev", &of, &wanted, Some("lan"), Some("ns/lan"));
    assert_eq!(made["spec"], json!({ "workloadType": "cluster", "ipam": "pool", "ipPool": "lan" }));
    assert_eq!(made["metadata"]["annotations"][NETWORK], "ns/wan");
    // If no network is requested, one is chosen here, so that Harvester does not choose another cluster's.
    let any = new("ns/dev", &of, &self::wanted(), None, Some("ns/lan"));
    let annotations = &any["metadata"]["annotations"];
    assert_eq!((&annotations[NETWORK], &annotations[ASKED_NETWORK]), (&json!("ns/lan"), &json!(null)));
    made["metadata"]["resourceVersion"] = json!("1");
    let object = read(&made).unwrap();
    assert_eq!((&object.service, object.wanted.as_ref()), (&of, Some(&wanted)));
    assert_eq!((object.want(&of, &wanted), object.asked_network("x")), (None, "ns/wan"));
    // An object that was taken over says so, and has its address where Harvester's cloud provider looks for it.
    let mut theirs = theirs();
    theirs["status"]["address"] = json!("");
    let patch = read(&theirs).unwrap().want(&of, &wanted).unwrap();
    assert_eq!((&patch["metadata"]["annotations"][UID], &patch["status"]), (&json!("u-1"), &json!(null)));
    // Harvester has completed its own writes.
    theirs["metadata"]["finalizers"] = json!(["wrangler.cattle.io/harvester-lb-controller"]);
    let patch = read(&theirs).unwrap().want(&of, &wanted).unwrap();
    assert_eq!(patch["status"], json!({ "address": "192.0.2.7" }));
    made["metadata"]["annotations"][SHARERS] = json!("no list");
    assert_eq!(read(&made).unwrap().sharers, None);
}
