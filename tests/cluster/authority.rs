//! The cluster's certificates: whose each component is, and which server they all trust.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use serde_json::json;

/// Signs certificates, and keeps them as files.
pub struct Authority {
    folder: PathBuf,
    key: KeyPair,
    parameters: CertificateParams,
}

impl Authority {
    /// A new one, whose files are in `folder`.
    pub fn new(folder: &Path) -> Self {
        let key = KeyPair::generate().unwrap();
        let mut parameters = CertificateParams::default();
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        parameters.distinguished_name.push(DnType::CommonName, "cluster");
        let certificate = parameters.self_signed(&key).unwrap().pem();
        let authority = Self { folder: folder.to_owned(), key, parameters };
        std::fs::write(authority.file("ca.crt"), certificate).unwrap();
        // What service accounts' tokens are signed with.
        let accounts = KeyPair::generate().unwrap();
        std::fs::write(authority.file("accounts.key"), accounts.serialize_pem()).unwrap();
        std::fs::write(authority.file("accounts.pub"), accounts.public_key_pem()).unwrap();
        authority
    }

    /// The path of one of the files.
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// A server's certificate and key, as files `<name>.crt` and `<name>.key`.
    pub fn serve(&self, name: &str, address: IpAddr) {
        let mut parameters = CertificateParams::new([address.to_string()]).unwrap();
        // Some show it as a client, too: etcd's gateway of JSON to etcd itself.
        parameters.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let (certificate, key) = self.sign(parameters, name, None);
        std::fs::write(self.file(&format!("{name}.crt")), certificate).unwrap();
        std::fs::write(self.file(&format!("{name}.key")), key).unwrap();
    }

    /// A certificate and a key by which a server knows this user of this group.
    fn identify(&self, user: &str, group: &str) -> (String, String) {
        let mut parameters = CertificateParams::default();
        parameters.extended_key_usages.push(ExtendedKeyUsagePurpose::ClientAuth);
        self.sign(parameters, user, Some(group))
    }

    fn sign(&self, mut parameters: CertificateParams, name: &str, group: Option<&str>) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        parameters.distinguished_name.push(DnType::CommonName, name);
        if let Some(group) = group {
            parameters.distinguished_name.push(DnType::OrganizationName, group);
        }
        let issuer = Issuer::from_params(&self.parameters, &self.key);
        (parameters.signed_by(&key, &issuer).unwrap().pem(), key.serialize_pem())
    }

    /// A kubeconfig of this user of this group, as the file `<name>.conf`. The certificate is a file beside it, as
    /// kubelet's is.
    pub fn kubeconfig(&self, name: &str, user: &str, group: &str, server: &str) -> PathBuf {
        let (certificate, key) = self.identify(user, group);
        let pair = self.file(&format!("{name}.pem"));
        std::fs::write(&pair, certificate + &key).unwrap();
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "cluster",
            "clusters": [{
                "name": "cluster",
                "cluster": { "server": server, "certificate-authority": self.file("ca.crt") },
            }],
            "users": [{ "name": name, "user": { "client-certificate": pair, "client-key": pair } }],
            "contexts": [{ "name": "cluster", "context": { "cluster": "cluster", "user": name } }],
        });
        let path = self.file(&format!("{name}.conf"));
        std::fs::write(&path, config.to_string()).unwrap();
        path
    }
}
