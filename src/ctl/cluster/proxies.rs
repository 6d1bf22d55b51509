//! Proxy between this machine and an API server, selected from a kubeconfig and the environment as kubectl
//! does.

use std::net::IpAddr;

use http::Uri;
use kube::config::Kubeconfig;

/// Returns the proxy for the cluster of a context whose API server is at `server`: the one in the kubeconfig,
/// or that of the environment unless `NO_PROXY` contains the server.
///
/// # Errors
/// Fails with the value if it is not a URL.
pub fn proxy(kubeconfig: &Kubeconfig, context: &str, server: &Uri) -> Result<Option<Uri>, String> {
    if let Some(named) = named(kubeconfig, context) {
        return url(named).map(Some);
    }
    let from_environment = [variable("HTTPS_PROXY"), variable("https_proxy")].into_iter().flatten().next();
    let exceptions = variable("NO_PROXY").or_else(|| variable("no_proxy")).unwrap_or_default();
    match from_environment {
        Some(proxy) if !is_excepted(&exceptions, server.host().unwrap_or_default()) => url(&proxy).map(Some),
        _ => Ok(None),
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn url(text: &str) -> Result<Uri, String> {
    text.parse().map_err(|_| format!("the proxy {text:?} is not a URL"))
}

fn named<'a>(kubeconfig: &'a Kubeconfig, context: &str) -> Option<&'a str> {
    let context = kubeconfig.contexts.iter().find(|named| named.name == context)?.context.as_ref()?;
    let cluster = kubeconfig.clusters.iter().find(|named| named.name == context.cluster)?.cluster.as_ref()?;
    cluster.proxy_url.as_deref().filter(|proxy| !proxy.is_empty())
}

/// Returns whether a list such as `10.0.0.0/8,.example.com,localhost` contains this host.
fn is_excepted(list: &str, host: &str) -> bool {
    let host = host.trim_matches(['[', ']']).to_ascii_lowercase();
    let address = host.parse::<IpAddr>().ok();
    list.split(',').map(|entry| entry.trim().to_ascii_lowercase()).filter(|entry| !entry.is_empty()).any(
        |entry| {
            if let Some((network, length)) = entry.split_once('/') {
                let network = network.parse::<IpAddr>().ok().zip(length.parse().ok());
                return network
                    .zip(address)
                    .is_some_and(|((network, length), address)| is_in(address, network, length));
            }
            let name = entry.trim_start_matches("*.").trim_start_matches('.');
            entry == "*" || name == host || (address.is_none() && host.ends_with(&format!(".{name}")))
        },
    )
}

fn is_in(address: IpAddr, network: IpAddr, length: u32) -> bool {
    let same = |one: u128, other: u128, bits: u32| {
        length <= bits && (length == 0 || (one ^ other) >> (bits - length) == 0)
    };
    match (address, network) {
        (IpAddr::V4(one), IpAddr::V4(other)) => same(one.to_bits().into(), other.to_bits().into(), 32),
        (IpAddr::V6(one), IpAddr::V6(other)) => same(one.to_bits(), other.to_bits(), 128),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_that_are_reached_without_a_proxy() {
        for (list, host, expected) in [
            ("", "api.example.com", false),
            ("*", "api.example.com", true),
            ("localhost, API.example.com", "api.example.com", true),
            ("example.com", "api.example.com", true),
            (".example.com", "api.example.com", true),
            ("*.example.com", "api.example.com", true),
            ("ample.com", "api.example.com", false),
            ("10.0.0.0/8", "10.1.2.3", true),
            ("10.0.0.0/8", "11.1.2.3", false),
            ("10.0.0.0/33,x/8,1.1.1.1/x", "10.0.0.0", false),
            ("0.0.0.0/0", "192.0.2.1", true),
            ("192.0.2.1", "192.0.2.1", true),
            ("fd00::/8", "[fd12::1]", true),
            ("fd00::/8", "10.0.0.1", false),
        ] {
            assert_eq!(is_excepted(list, host), expected, "{list:?} {host}");
        }
    }

    #[test]
    fn a_kubeconfig_names_the_proxy_of_its_cluster() {
        let kubeconfig: Kubeconfig = serde_json::from_value(serde_json::json!({
            "clusters": [{ "name": "c", "cluster": { "server": "https://s", "proxy-url": "http://p:1" } },
                         { "name": "d", "cluster": { "server": "https://t", "proxy-url": "no url at all" } }],
            "contexts": [{ "name": "x", "context": { "cluster": "c" } }, { "name": "y", "context": { "cluster": "d" } }],
        }))
        .unwrap();
        let server = Uri::from_static("https://s");
        assert_eq!(proxy(&kubeconfig, "x", &server).unwrap().unwrap(), "http://p:1");
        assert!(proxy(&kubeconfig, "y", &server).unwrap_err().contains("is not a URL"));
        assert_eq!(named(&kubeconfig, "z"), None);
    }
}
