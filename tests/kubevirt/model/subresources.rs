//! virt-api: the subresources addvolume, removevolume and console, behind the real API server, which asks for them as for any
//! aggregated API and has decided before who may; and the webhook of [`admission`].

use std::net::SocketAddr;
use std::sync::Arc;

use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::{JoinHandle, JoinSet};
use tokio_rustls::TlsAcceptor;

use super::controller::is_owned_by;
use super::objects::{Kind, claim_of, is_hotpluggable, items, named, text, uid};
use super::requests::{Plugging, apply, plugging};
use super::{Shared, admission};
use crate::api::{Api, read};
use crate::client::{JSON, MERGE, call, list};
use crate::patience::until;
use crate::plane::ControlPlane;

const GROUP: &str = "/apis/subresources.kubevirt.io/v1";
const SERVICE: &str = "virt-api";
const NAMESPACE: &str = "kubevirt";

/// Serves them until the task is aborted, and waits until the API server passes them on.
pub async fn serve(plane: &ControlPlane, api: &Api, shared: Arc<Shared>) -> JoinHandle<()> {
    let address = plane.address();
    plane.authority.serve(SERVICE, address);
    let (certificate, key) = (plane.authority.file("virt-api.crt"), plane.authority.file("virt-api.key"));
    let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(
            vec![CertificateDer::from_pem_file(certificate).unwrap()],
            PrivateKeyDer::from_pem_file(key).unwrap(),
        )
        .unwrap();
    let listener = TcpListener::bind(SocketAddr::new(address, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (acceptor, calls) = (TlsAcceptor::from(Arc::new(config)), Calls { api: api.clone(), shared });
    let task = tokio::spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, calls) = (acceptor.clone(), calls.clone());
            connections.spawn(async move {
                let Ok(stream) = acceptor.accept(stream).await else { return };
                let answer = service_fn(|request| calls.answer(request));
                let serving = hyper::server::conn::http1::Builder::new();
                let _ = serving.serve_connection(TokioIo::new(stream), answer).with_upgrades().await;
            });
        }
    });
    announce(api, &address.to_string(), port).await;
    let authority = std::fs::read_to_string(plane.authority.file("ca.crt")).unwrap();
    admission::announce(api, &format!("https://{address}:{port}{}", admission::PATH), &authority).await;
    task
}

/// Has the API server pass on the group.
async fn announce(api: &Api, address: &str, port: u16) {
    api.ensure("/api/v1/namespaces", &json!({ "metadata": { "name": NAMESPACE } })).await;
    // The address of an endpoint may not be one of the loopback interface; a name may.
    let service = json!({
        "metadata": { "name": SERVICE },
        "spec": { "type": "ExternalName", "externalName": address, "ports": [{ "port": port }] },
    });
    api.create(&format!("/api/v1/namespaces/{NAMESPACE}/services"), &service).await;
    let path = "/apis/apiregistration.k8s.io/v1/apiservices";
    let name = "v1.subresources.kubevirt.io";
    let group = json!({
        "metadata": { "name": name },
        "spec": {
            "group": "subresources.kubevirt.io",
            "version": "v1",
            "insecureSkipTLSVerify": true,
            "groupPriorityMinimum": 1000,
            "versionPriority": 15,
            "service": { "namespace": NAMESPACE, "name": SERVICE, "port": port },
        },
    });
    api.create(path, &group).await;
    until("the API server passes on KubeVirt's subresources", async || {
        let group = api.get(&format!("{path}/{name}")).await?;
        let available = items(&group["status"]["conditions"]).find(|it| it["type"] == "Available")?.clone();
        let (status, _) = call(api, Method::GET, GROUP, JSON, None).await.ok()?;
        (available["status"] == "True" && status.is_success()).then_some(())
    })
    .await;
}

#[derive(Clone)]
struct Calls {
    api: Api,
    shared: Arc<Shared>,
}

/// What a call is refused with.
struct Refusal(StatusCode, String);

impl Calls {
    async fn answer(&self, request: Request<Incoming>) -> hyper::Result<Response<String>> {
        if let Some(answer) = self.console(&request).await {
            let (status, message) = match answer {
                Ok(console) => match self.shared.consoles.open(&console, request) {
                    Some(response) => return Ok(response),
                    None => (StatusCode::BAD_REQUEST, "No serial consoles are present.".to_owned()),
                },
                Err(Refusal(status, message)) => (status, message),
            };
            let answer = Response::builder().status(status).header("content-type", JSON);
            return Ok(answer.body(refusal(status, &message).to_string()).expect("an answer"));
        }
        let (head, body) = request.into_parts();
        let body = serde_json::from_slice(&read(body).await?).unwrap_or_default();
        let path = head.uri.path().to_owned();
        let rest = path.strip_prefix(GROUP).unwrap_or_default();
        let parts: Vec<_> = rest.trim_start_matches('/').split('/').collect();
        let (status, answer) = match (head.method, parts[..].as_ref()) {
            (Method::GET, [""]) if path == GROUP => (StatusCode::OK, resources().to_string()),
            (Method::POST, _) if path == admission::PATH => {
                (StatusCode::OK, admission::review(&self.api, &body).await.to_string())
            }
            (Method::PUT, ["namespaces", namespace, plural, name, verb]) => {
                let (status, answer) = match self.change(namespace, plural, name, verb, &body).await {
                    Ok(()) => (StatusCode::ACCEPTED, String::new()),
                    Err(Refusal(status, message)) => (status, refusal(status, &message).to_string()),
                };
                self.shared.journal().requests.push((path.clone(), status.as_u16()));
                (status, answer)
            }
            _ => (
                StatusCode::NOT_FOUND,
                refusal(StatusCode::NOT_FOUND, "there is no such subresource").to_string(),
            ),
        };
        Ok(Response::builder().status(status).header("content-type", JSON).body(answer).expect("an answer"))
    }

    /// Whose console is asked for, if one is, and whether it has one.
    async fn console(&self, request: &Request<Incoming>) -> Option<Result<String, Refusal>> {
        let rest = request.uri().path().strip_prefix(GROUP)?;
        let parts: Vec<_> = rest.trim_start_matches('/').split('/').collect();
        let ["namespaces", namespace, "virtualmachineinstances", name, "console"] = parts[..] else {
            return None;
        };
        let key = format!("{namespace}/{name}");
        Some(match self.api.get(&Kind::Vmi.path(&key)).await {
            Some(instance) if instance["status"]["phase"] == "Running" => Ok(key),
            Some(_) => Err(Refusal(StatusCode::BAD_REQUEST, "VMI is not running".to_owned())),
            None => {
                let message = format!("virtualmachineinstance.kubevirt.io \"{name}\" not found");
                Err(Refusal(StatusCode::NOT_FOUND, message))
            }
        })
    }

    async fn change(
        &self,
        namespace: &str,
        plural: &str,
        name: &str,
        verb: &str,
        options: &Value,
    ) -> Result<(), Refusal> {
        let kind = match plural {
            "virtualmachines" => Kind::Vm,
            "virtualmachineinstances" => Kind::Vmi,
            _ => return Err(Refusal(StatusCode::NOT_FOUND, format!("{plural} have no subresources"))),
        };
        let request = match verb {
            "addvolume" => {
                let mut options = options.clone();
                if options["disk"].is_object() {
                    options["disk"]["name"] = options["name"].clone();
                }
                json!({ "addVolumeOptions": options })
            }
            "removevolume" => json!({ "removeVolumeOptions": options }),
            _ => return Err(Refusal(StatusCode::NOT_FOUND, format!("there is no subresource {verb}"))),
        };
        let (kubevirts, _) = list(&self.api, &Kind::KubeVirt.all()).await.map_err(|error| broken(&error))?;
        let plugging = kubevirts.first().map_or(Plugging::No, plugging);
        if plugging == Plugging::No {
            return Err(Refusal(
                StatusCode::BAD_REQUEST,
                "no feature gate for hot-plugging is open".to_owned(),
            ));
        }
        let key = format!("{namespace}/{name}");
        loop {
            let (status, object) = call(&self.api, Method::GET, &kind.path(&key), JSON, None)
                .await
                .map_err(|error| broken(&error))?;
            if status != StatusCode::OK {
                return Err(Refusal(status, format!("there is no {name}")));
            }
            let (change, at) = self.wanted(kind, plugging, &object, &request).await?;
            let path = kind.path(&key) + at;
            match call(&self.api, Method::PATCH, &path, MERGE, Some(&change))
                .await
                .map_err(|error| broken(&error))?
            {
                (status, _) if status.is_success() => return Ok(()),
                // Changed meanwhile.
                (StatusCode::CONFLICT, _) => {}
                (status, answer) => return Err(Refusal(status, answer.to_string())),
            }
        }
    }

    /// The change of the VM or the instance that a request comes to, and which subresource it is made at.
    async fn wanted(
        &self,
        kind: Kind,
        plugging: Plugging,
        object: &Value,
        request: &Value,
    ) -> Result<(Value, &'static str), Refusal> {
        let spec = if kind == Kind::Vm { &object["spec"]["template"]["spec"] } else { &object["spec"] };
        let mut after = spec.clone();
        refuse(&after, request)?;
        let version = &object["metadata"]["resourceVersion"];
        if kind == Kind::Vm && plugging == Plugging::Requests {
            let requests = with_request(&object["status"]["volumeRequests"], request)?;
            let change = json!({ "status": { "volumeRequests": requests } });
            return Ok((with_version(change, version), "/status"));
        }
        if kind == Kind::Vmi && plugging != Plugging::Requests {
            let vm = self.api.get(&Kind::Vm.path(&super::objects::key(object))).await;
            if vm.is_some_and(|vm| is_owned_by(object, uid(&vm))) {
                let message = "the instance belongs to a VM, which is to be changed instead".to_owned();
                return Err(Refusal(StatusCode::BAD_REQUEST, message));
            }
        }
        apply(request, &mut after);
        let lists = json!({
            "volumes": after["volumes"],
            "domain": { "devices": { "disks": after["domain"]["devices"]["disks"] } },
        });
        let change = match kind {
            Kind::Vm => json!({ "spec": { "template": { "spec": lists } } }),
            _ => json!({ "spec": lists }),
        };
        Ok((with_version(change, version), ""))
    }
}

fn with_version(mut change: Value, version: &Value) -> Value {
    change["metadata"]["resourceVersion"] = version.clone();
    change
}

/// Those that wait, and another one. Of a volume that is asked for, or is to go, no second thing can be wanted, but that one
/// that is asked for goes; only names are compared. A spec that does not list it yet has refused that before.
fn with_request(waiting: &Value, request: &Value) -> Result<Vec<Value>, Refusal> {
    let of = |one: &Value, what: &str| text(&one[what]["name"]).to_owned();
    let is_to_come = request["addVolumeOptions"].is_object();
    let name = of(request, if is_to_come { "addVolumeOptions" } else { "removeVolumeOptions" });
    let (mut requests, mut is_refused) = (Vec::new(), false);
    for one in items(waiting) {
        let (comes, goes) = (of(one, "addVolumeOptions") == name, of(one, "removeVolumeOptions") == name);
        is_refused |= goes || comes && is_to_come;
        if !comes || is_to_come {
            requests.push(one.clone());
        }
    }
    if is_refused {
        let message = format!("a request for the volume {name} is still being processed");
        return Err(Refusal(StatusCode::CONFLICT, message));
    }
    requests.push(request.clone());
    Ok(requests)
}

/// Refuses what cannot be done to this spec.
fn refuse(spec: &Value, request: &Value) -> Result<(), Refusal> {
    let conflict = |message: String| Err(Refusal(StatusCode::CONFLICT, message));
    let add = &request["addVolumeOptions"];
    if add.is_object() {
        let name = text(&add["name"]);
        let claim = claim_of(&add["volumeSource"]);
        if name.is_empty() || claim.is_none() || !add["disk"].is_object() {
            let message = "name, disk and volumeSource are required".to_owned();
            return Err(Refusal(StatusCode::BAD_REQUEST, message));
        }
        if named(&spec["volumes"], name).is_some() {
            return conflict(format!("there is a volume {name} already"));
        }
        if items(&spec["volumes"]).any(|volume| claim_of(volume) == claim) {
            return conflict(format!("a volume has the claim {} already", claim.unwrap_or_default()));
        }
        return Ok(());
    }
    let name = text(&request["removeVolumeOptions"]["name"]);
    match named(&spec["volumes"], name) {
        None => conflict(format!("there is no volume {name}")),
        Some(volume) if !is_hotpluggable(volume) => conflict(format!("the volume {name} is not hot-plugged")),
        Some(_) => Ok(()),
    }
}

fn broken(error: &std::io::Error) -> Refusal {
    Refusal(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
}

fn resources() -> Value {
    let resources: Vec<_> = ["virtualmachines", "virtualmachineinstances"]
        .iter()
        .flat_map(|plural| ["addvolume", "removevolume"].map(|verb| format!("{plural}/{verb}")))
        .map(|name| json!({ "name": name, "singularName": "", "namespaced": true, "kind": "", "verbs": ["update"] }))
        .collect();
    json!({
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": "subresources.kubevirt.io/v1",
        "resources": resources,
    })
}

fn refusal(status: StatusCode, message: &str) -> Value {
    let reason = match status {
        StatusCode::CONFLICT => "Conflict",
        StatusCode::NOT_FOUND => "NotFound",
        StatusCode::BAD_REQUEST => "BadRequest",
        _ => "InternalError",
    };
    json!({
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": status.as_u16(),
    })
}
