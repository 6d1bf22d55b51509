//! What of a kubeconfig a kubelet's credential is made of: <https://kubernetes.io/docs/reference/config-api/kubeconfig.v1/>.
//! All else in it is passed over.

use serde::Deserialize;

/// A cluster, and who talks to it. It is not for logs.
pub struct Chosen {
    /// The one of the present context.
    pub cluster: Cluster,
    /// The same.
    pub user: User,
}

/// An API server.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct Cluster {
    /// Its address, as `https://host:port`.
    pub server: Option<String>,
    /// The name that its certificate has, if not the address.
    pub tls_server_name: Option<String>,
    /// Whoever answers is believed.
    pub insecure_skip_tls_verify: bool,
    /// A file with the certificates by which the server's is judged.
    pub certificate_authority: Option<String>,
    /// The same, in base64.
    pub certificate_authority_data: Option<String>,
}

/// Who talks to it.
#[allow(clippy::struct_field_names, reason = "as a kubeconfig has them")]
#[derive(Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct User {
    /// A file with the certificate.
    pub client_certificate: Option<String>,
    /// The same, in base64.
    pub client_certificate_data: Option<String>,
    /// A file with its key.
    pub client_key: Option<String>,
    /// The same, in base64.
    pub client_key_data: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
struct Kubeconfig {
    current_context: Option<String>,
    contexts: Vec<NamedContext>,
    clusters: Vec<NamedCluster>,
    users: Vec<NamedUser>,
}

#[derive(Deserialize)]
struct NamedContext {
    name: String,
    #[serde(default)]
    context: Context,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Context {
    cluster: String,
    user: String,
}

#[derive(Deserialize)]
struct NamedCluster {
    name: String,
    #[serde(default)]
    cluster: Cluster,
}

#[derive(Deserialize)]
struct NamedUser {
    name: String,
    #[serde(default)]
    user: User,
}

/// The cluster and the user of the present context.
///
/// # Errors
/// If it is no kubeconfig, or they are not in it: in words, without what it says.
pub fn parse(text: &str) -> Result<Chosen, String> {
    // By way of a plain value: each type that is read from YAML by itself costs the program tens of kilobytes.
    let value: serde_json::Value = serde_saphyr::from_str(text).map_err(|error| one_line(&error))?;
    let config: Option<Kubeconfig> = serde_json::from_value(value).map_err(|error| one_line(&error))?;
    config.and_then(choose).ok_or_else(|| "it names no cluster or no user".to_owned())
}

fn choose(config: Kubeconfig) -> Option<Chosen> {
    let name = config.current_context?;
    let Context { cluster, user } = config.contexts.into_iter().find(|one| one.name == name)?.context;
    let cluster = config.clusters.into_iter().find(|one| one.name == cluster)?.cluster;
    let user = config.users.into_iter().find(|one| one.name == user)?.user;
    Some(Chosen { cluster, user })
}

/// The first line of an error.
fn one_line(error: &dyn std::error::Error) -> String {
    crate::sys::error_chain::words(error).lines().next().unwrap_or_default().chars().take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_present_context_decides() {
        let text = "apiVersion: v1\nkind: Config\npreferences: {}\nclusters:\n- name: a\n  cluster: {server: 'https://a:1'}\n\
                    - name: b\n  cluster:\n    server: https://b:2\n    extensions: [{name: x, extension: {}}]\n\
                    users:\n- {name: u, user: {token: abc}}\n- {name: v, user: {client-key: k.pem, exec: {command: x}}}\n\
                    contexts:\n- {name: one, context: {cluster: a, user: u, namespace: n}}\n\
                    - {name: two, context: {cluster: b, user: v}}\ncurrent-context: two\n";
        let chosen = parse(text).unwrap();
        assert_eq!(chosen.cluster.server.as_deref(), Some("https://b:2"));
        assert_eq!(chosen.user.client_key.as_deref(), Some("k.pem"));
        for (text, expected) in [
            (text.replace("current-context: two", "current-context: three"), "names no cluster"),
            (text.replace("user: v}", "user: w}"), "names no cluster"),
            (text.replace("- name: b", "- {}\n- name: c"), "name"),
            ("{}".to_owned(), "names no cluster"),
            (String::new(), "names no cluster"),
            ("just words".to_owned(), "invalid type"),
            ("a: [1".to_owned(), ""),
            ("clusters: 5".to_owned(), "invalid type"),
            ("\u{0}".to_owned(), ""),
            ("[".repeat(100_000), ""),
        ] {
            let problem = parse(&text).err().unwrap();
            assert!(problem.contains(expected) && problem.lines().count() <= 1, "{problem}");
        }
    }
}
