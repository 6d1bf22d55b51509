//! Credential of kubelet: finding and loading it.
//!
//! Only a certificate with its key is accepted. Programs and tokens, which a kubeconfig may name as well, are not:
//! a program that is named in a file must not be run, and a kubelet that has joined has a certificate.

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};

use crate::sys::files;
use crate::sys::root::Root;
use crate::topology::kubeconfig::{Chosen, Cluster};
use crate::topology::{certificate, kubeconfig};

/// Usual paths of kubelet's kubeconfig: those of kubeadm, RKE2 and k3s.
pub const PLACES: [&str; 3] = [
    "/etc/kubernetes/kubelet.conf",
    "/var/lib/rancher/rke2/agent/kubelet.kubeconfig",
    "/var/lib/rancher/k3s/agent/kubelet.kubeconfig",
];
/// Prefix of a kubelet's user name, before the name of its Node.
const PREFIX: &str = "system:node:";
/// Maximum length of a Node's name, in bytes.
const MAX_NAME: usize = 253;
/// Maximum size of a file that is read, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// Credential that was loaded completely.
#[derive(Debug, Clone)]
pub struct Credential {
    /// API server that the kubeconfig names.
    pub server: Server,
    /// Node that it belongs to.
    pub node: String,
    /// TLS configuration for connections to the server.
    pub tls: Arc<ClientConfig>,
    /// Reason why the certificate is not valid at this time, although it is well-formed.
    pub untimely: Option<String>,
    /// Contents of all files that it was made from; if they differ, it is a different credential.
    bytes: Arc<[Vec<u8>]>,
}

/// Address and name of an API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// Host name or address, without brackets.
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// Name that its certificate has to have.
    pub name: ServerName<'static>,
}

impl PartialEq for Credential {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes && self.server == other.server && self.untimely == other.untimely
    }
}

/// Result of the search for a credential.
#[derive(Debug)]
pub struct Found {
    /// Credential, or the reason why it cannot be used; absent if no kubeconfig exists.
    pub credential: Option<Result<Credential, String>>,
    /// Files that the result depends on, whether they exist or not.
    pub files: Vec<PathBuf>,
}

/// Searches for the credential: in `configured`, or else at the usual places. Blocks.
pub fn find(root: &Root, configured: Option<&Path>) -> Found {
    let places = match configured {
        Some(file) => vec![file.to_owned()],
        None => PLACES.iter().map(|place| root.path(place)).collect(),
    };
    let mut files = places.clone();
    let credential = places.iter().find_map(|place| match small(place) {
        Ok(None) => None,
        Ok(Some(bytes)) => Some(load(root, place, &bytes, &mut files)),
        Err(error) => Some(Err(format!("{} cannot be read: {error}", place.display()))),
    });
    Found { credential, files }
}

/// Reads a file that may be missing.
fn small(path: &Path) -> io::Result<Option<Vec<u8>>> {
    files::read_at_most(path, MAX_FILE)
}

fn load(root: &Root, place: &Path, text: &[u8], files: &mut Vec<PathBuf>) -> Result<Credential, String> {
    let wrong = |problem: String| format!("{}: {problem}", place.display());
    let text = std::str::from_utf8(text).map_err(|_| wrong("it is not UTF-8".to_owned()))?;
    let Chosen { cluster, user } = kubeconfig::parse(text).map_err(wrong)?;
    if cluster.insecure_skip_tls_verify {
        return Err(wrong(
            "insecure-skip-tls-verify is set: the API server would not be authenticated".to_owned(),
        ));
    }
    let server = server(&cluster).map_err(wrong)?;
    let mut part = |what: &str, data: Option<&str>, file: Option<&String>| match (data, file) {
        (Some(data), _) => base64_simd::STANDARD
            .decode_to_vec(data.trim())
            .map_err(|_| wrong(format!("{what}-data is not Base64"))),
        (None, Some(file)) => {
            let path = Path::new(file);
            let path = if path.is_absolute() {
                root.path(file)
            } else {
                place.parent().unwrap_or(Path::new("/")).join(path)
            };
            let read = small(&path).and_then(|bytes| bytes.ok_or(io::ErrorKind::NotFound.into()));
            let read = read.map_err(|error| format!("{} cannot be read: {error}", path.display()));
            files.push(path);
            read
        }
        (None, None) => Err(wrong(format!("it has no {what}; only certificates are supported"))),
    };
    let (data, file) = (&cluster.certificate_authority_data, &cluster.certificate_authority);
    let authority = part("certificate-authority", data.as_deref(), file.as_ref())?;
    let (data, file) = (&user.client_certificate_data, &user.client_certificate);
    let certificate = part("client-certificate", data.as_deref(), file.as_ref())?;
    let (data, file) = (&user.client_key_data, &user.client_key);
    let key = part("client-key", data.as_deref(), file.as_ref())?;
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(&certificate)
        .collect::<Result<_, _>>()
        .map_err(|error| wrong(format!("the client certificate: {error}")))?;
    let own = certificates.first().and_then(|own| certificate::parse(own));
    let own = own.ok_or_else(|| wrong("the client certificate has no name".to_owned()))?;
    let node = node(&own.common_name).map_err(wrong)?;
    let tls = tls(&authority, certificates, &key).map_err(wrong)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let now = i64::try_from(now).unwrap_or(i64::MAX);
    let untimely = if now > own.not_after {
        Some("kubelet's certificate has expired, or this guest's clock is wrong".to_owned())
    } else if now < own.not_before {
        Some("kubelet's certificate is not valid yet: this guest's clock is wrong".to_owned())
    } else {
        None
    };
    Ok(Credential { server, node, tls, untimely, bytes: [authority, certificate, key].into() })
}

fn server(cluster: &Cluster) -> Result<Server, String> {
    let wrong = || "it has no server like https://host:port".to_owned();
    let uri: http::Uri = cluster.server.as_deref().unwrap_or_default().parse().map_err(|_| wrong())?;
    if uri.scheme_str() != Some("https") || !matches!(uri.path(), "" | "/") {
        return Err(wrong());
    }
    let host = uri.host().ok_or_else(wrong)?.trim_start_matches('[').trim_end_matches(']').to_owned();
    let name = cluster.tls_server_name.clone().unwrap_or_else(|| host.clone());
    let name = ServerName::try_from(name).map_err(|_| wrong())?;
    Ok(Server { port: uri.port_u16().unwrap_or(443), host, name })
}

/// Returns the name of the Node from the common name of its kubelet.
fn node(common_name: &str) -> Result<String, String> {
    let inside = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.');
    match common_name.strip_prefix(PREFIX) {
        Some(node) if !node.is_empty() && node.len() <= MAX_NAME && node.chars().all(inside) => {
            Ok(node.to_owned())
        }
        _ => {
            let mut shown = String::new();
            // Writing to a string cannot fail.
            let _ = write!(shown, "{:?}", common_name.chars().take(80).collect::<String>());
            Err(format!("the certificate is for {shown}, which is not a kubelet"))
        }
    }
}

fn tls(
    authority: &[u8],
    certificates: Vec<CertificateDer<'static>>,
    key: &[u8],
) -> Result<Arc<ClientConfig>, String> {
    let mut roots = RootCertStore::empty();
    for root in CertificateDer::pem_slice_iter(authority) {
        let root = root.map_err(|error| format!("the certificate authority: {error}"))?;
        roots.add(root).map_err(|error| format!("the certificate authority: {error}"))?;
    }
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| format!("the client key: {error}"))?;
    // Explicit, so that it does not depend on a default of the process.
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    let mut config = builder
        .with_root_certificates(roots)
        .with_client_auth_cert(certificates, key)
        .map_err(|error| format!("the client certificate and its key: {error}"))?;
    // Connections are rare, so sessions are not cached.
    config.resumption = rustls::client::Resumption::disabled();
    Ok(Arc::new(config))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_nodes() {
        assert_eq!(node("system:node:web-1.example").unwrap(), "web-1.example");
        for other in ["system:kube-proxy", "system:node:", "system:node:a/b", "system:node:../x", "web-1", ""]
        {
            assert!(node(other).unwrap_err().contains("not a kubelet"), "{other}");
        }
    }

    #[test]
    fn servers() {
        let at = |server: &str| {
            let cluster = Cluster { server: Some(server.to_owned()), ..Cluster::default() };
            super::server(&cluster).map(|server| (server.host, server.port))
        };
        assert_eq!(at("https://127.0.0.1:6443"), Ok(("127.0.0.1".to_owned(), 6443)));
        assert_eq!(at("https://[::1]:6443/"), Ok(("::1".to_owned(), 6443)));
        assert_eq!(at("https://api.example"), Ok(("api.example".to_owned(), 443)));
        for wrong in ["http://127.0.0.1", "127.0.0.1:6443", "https://a/k8s/clusters/x", "", "https://"] {
            assert!(at(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_is_no_kubelets_credential_is_refused_in_words() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        assert!(find(&root, None).credential.is_none());
        let file = folder.path().join("kubeconfig");
        let config = |user: &str| {
            format!(
                "clusters: [{{name: c, cluster: {{server: 'https://127.0.0.1:1', certificate-authority-data: YQ==}}}}]\n\
                 users: [{{name: u, user: {{{user}}}}}]\n\
                 contexts: [{{name: x, context: {{cluster: c, user: u}}}}]\ncurrent-context: x\n"
            )
        };
        for (text, expected) in [
            (String::new(), "it is empty"),
            ("clusters: {".to_owned(), "kubeconfig: "),
            (config("token: abc"), "only certificates are supported"),
            (config("exec: {command: /bin/true, apiVersion: v1}"), "only certificates are supported"),
            (config("client-certificate: gone.pem"), "gone.pem cannot be read"),
            (config("client-certificate-data: '*'"), "not Base64"),
            (config("client-certificate-data: ''"), "only certificates are supported"),
        ] {
            #[allow(clippy::disallowed_methods)]
            std::fs::write(&file, &text).unwrap();
            let found = find(&root, Some(&file));
            let error = found.credential.unwrap().unwrap_err();
            assert!(error.contains(expected), "{text:?}: {error}");
            assert!(found.files.contains(&file));
        }
    }
}
