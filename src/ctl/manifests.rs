//! `guestctl manifests`: what a guest cluster needs beside guestlet in its nodes.
//!
//! The text is packaging/kubernetes/csi.yaml, with another driver's name and another kubelet root where they are given.

use std::path::PathBuf;

use super::Error;
use super::print::Printer;

/// For the driver [`DRIVER`] and the kubelet root [`KUBELET_ROOT`].
const TEMPLATE: &str = include_str!("../../packaging/kubernetes/csi.yaml");
/// The driver's name, if it is not said: Harvester's, whose volumes and storage classes keep working.
pub const DRIVER: &str = "driver.harvesterhci.io";
/// Where kubelet keeps its state, if it is not said: kubeadm, RKE2 and k3s agree.
pub const KUBELET_ROOT: &str = "/var/lib/kubelet";
/// Bytes of a driver's name, by the CSI specification (`GetPluginInfo`).
const MAX_NAME: usize = 63;

/// Writes the manifests.
///
/// # Errors
/// If standard output cannot be written.
pub fn run(printer: &mut Printer, driver: &str, kubelet_root: &str) -> Result<(), Error> {
    Ok(printer.text(&render(driver, kubelet_root))?)
}

/// The manifests for a driver's name and a kubelet root, which [`parse_driver`] and [`parse_root`] have passed.
fn render(driver: &str, kubelet_root: &str) -> String {
    // The root first: a driver's name holds no slash, so it makes no new root.
    TEMPLATE.replace(KUBELET_ROOT, kubelet_root).replace(DRIVER, driver)
}

/// A driver's name: a domain name, as the CSI specification has it and as Kubernetes wants an object's name.
///
/// # Errors
/// In words for people, if it is none.
pub fn parse_driver(text: &str) -> Result<String, String> {
    if text.len() > MAX_NAME {
        return Err(format!("it has {} characters; at most {MAX_NAME} are allowed", text.len()));
    }
    let of_label = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let is_label = |label: &str| {
        !label.is_empty() && label.chars().all(of_label) && !label.starts_with('-') && !label.ends_with('-')
    };
    if !text.split('.').all(is_label) {
        return Err("it must be a domain name in lower case, such as driver.example.org".to_owned());
    }
    Ok(text.to_owned())
}

/// Where kubelet keeps its state.
///
/// # Errors
/// In words for people, if it is not a plain absolute path.
pub fn parse_root(text: &str) -> Result<String, String> {
    let path = PathBuf::from(text);
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    let is_normal = path.components().collect::<PathBuf>().as_os_str() == text
        && !path.components().any(|part| part.as_os_str() == "..");
    if !path.is_absolute() || text == "/" || !is_normal || !text.chars().all(plain) {
        return Err("it must be an absolute path of letters, digits, '.', '_' and '-', without '..' and \
                    without a trailing slash"
            .to_owned());
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_and_a_root_take_the_place_of_the_usual_ones() {
        assert_eq!(render(DRIVER, KUBELET_ROOT), TEMPLATE);
        let text = render("disks.example.org", "/srv/kubelet");
        assert!(!text.contains(DRIVER) && !text.contains(KUBELET_ROOT));
        assert!(text.contains("provisioner: disks.example.org\n"));
        assert!(text.contains("path: /srv/kubelet/plugins/disks.example.org/controller\n"));
    }

    #[test]
    fn what_would_break_the_text_is_refused() {
        for good in [DRIVER, "a", "0-1.b"] {
            assert_eq!(parse_driver(good), Ok(good.to_owned()));
        }
        for bad in ["", "a..b", "-a", "a-", "A.b", "a b", "a/b", "a\nb", "ä", &"a".repeat(64)] {
            assert!(parse_driver(bad).is_err(), "{bad:?}");
        }
        for good in [KUBELET_ROOT, "/a", "/a.b/c-d_e"] {
            assert_eq!(parse_root(good), Ok(good.to_owned()));
        }
        for bad in ["", "/", "a", "/a/", "/a//b", "/a/../b", "/a b", "/a\n", "/a#b", "/a:b"] {
            assert!(parse_root(bad).is_err(), "{bad:?}");
        }
    }
}
