//! The parts of a kubeconfig that a kubelet's credential is made from:
//! <https://kubernetes.io/docs/reference/config-api/kubeconfig.v1/>. Everything else in it is ignored.

use crate::topology::yaml::Yaml;

/// Cluster and user of the current context. It contains secrets and must not be logged.
pub struct Chosen {
    /// The cluster of the current context.
    pub cluster: Cluster,
    /// The user of the current context.
    pub user: User,
}

/// Address of an API server, and how its certificate is verified.
#[derive(Debug, Default)]
pub struct Cluster {
    /// URL of the API server, `https://host:port`.
    pub server: Option<String>,
    /// Name in the server's certificate, if it is not the address.
    pub tls_server_name: Option<String>,
    /// True if the server's certificate is not verified.
    pub insecure_skip_tls_verify: bool,
    /// File with the CA certificates that verify the server's.
    pub certificate_authority: Option<String>,
    /// CA certificates themselves, in Base64.
    pub certificate_authority_data: Option<String>,
}

/// Client certificate and key.
#[allow(clippy::struct_field_names, reason = "as a kubeconfig has them")]
pub struct User {
    /// File with the client certificate.
    pub client_certificate: Option<String>,
    /// Client certificate itself, in Base64.
    pub client_certificate_data: Option<String>,
    /// File with the private key.
    pub client_key: Option<String>,
    /// Private key itself, in Base64.
    pub client_key_data: Option<String>,
}

/// Returns the cluster and the user of the current context.
///
/// # Errors
/// A message for the user, without the contents, if the text is not a kubeconfig or lacks them.
pub fn parse(text: &str) -> Result<Chosen, String> {
    let config = Yaml::parse(text).map_err(|error| error.to_string())?;
    choose(&config).ok_or_else(|| "it names no cluster or no user".to_owned())
}

fn choose(config: &Yaml) -> Option<Chosen> {
    let word =
        |of: &Yaml, name: &str| of.get(name)?.text().filter(|text| !text.is_empty()).map(str::to_owned);
    let named = |list: &str, name: &str| {
        config.get(list)?.list().iter().find(|entry| entry.get("name").and_then(Yaml::text) == Some(name))
    };
    let context = named("contexts", &word(config, "current-context")?)?.get("context")?;
    let cluster = named("clusters", &word(context, "cluster")?)?.get("cluster")?;
    let user = named("users", &word(context, "user")?)?.get("user")?;
    let skip = cluster.get("insecure-skip-tls-verify").and_then(Yaml::text);
    Some(Chosen {
        cluster: Cluster {
            server: word(cluster, "server"),
            tls_server_name: word(cluster, "tls-server-name"),
            // Only a value that is certainly false counts as false, to be on the safe side.
            insecure_skip_tls_verify: skip.is_some_and(|skip| !skip.eq_ignore_ascii_case("false")),
            certificate_authority: word(cluster, "certificate-authority"),
            certificate_authority_data: word(cluster, "certificate-authority-data"),
        },
        user: User {
            client_certificate: word(user, "client-certificate"),
            client_certificate_data: word(user, "client-certificate-data"),
            client_key: word(user, "client-key"),
            client_key_data: word(user, "client-key-data"),
        },
    })
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
            (text.replace("- name: b", "- {}\n- name: c"), "names no cluster"),
            ("{}".to_owned(), "names no cluster"),
            (String::new(), "it is empty"),
            ("just words".to_owned(), "names no cluster"),
            ("a: [1".to_owned(), "line"),
            ("clusters: 5".to_owned(), "names no cluster"),
        ] {
            let problem = parse(&text).err().unwrap();
            assert!(problem.contains(expected) && problem.lines().count() <= 1, "{problem}");
        }
    }
}
