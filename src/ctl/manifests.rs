//! `guestctl manifests`: what a guest cluster needs in addition to guestlet in its nodes.
//!
//! The text is packaging/kubernetes/csi.yaml, with another name of the driver and another root of kubelet's
//! state if they are given.

use std::path::PathBuf;

use super::Error;
use super::print::Printer;

/// Manifests for the driver [`DRIVER`] and the root directory [`KUBELET_ROOT`].
const TEMPLATE: &str = include_str!("../../packaging/kubernetes/csi.yaml");
/// Default name of the driver: Harvester's, so that its volumes and storage classes keep working.
pub const DRIVER: &str = "driver.harvesterhci.io";
/// Default root directory of kubelet's state: kubeadm, RKE2 and k3s all use it.
pub const KUBELET_ROOT: &str = "/var/lib/kubelet";
/// Longest name of a driver in bytes, by the CSI specification (`GetPluginInfo`).
const MAX_NAME: usize = 63;

/// Writes the manifests.
///
/// # Errors
/// Fails if standard output cannot be written.
pub fn run(printer: &mut Printer, driver: &str, kubelet_root: &str) -> Result<(), Error> {
    Ok(printer.text(&render(driver, kubelet_root))?)
}

/// Returns the manifests for a driver's name and a root directory that [`parse_driver`] and [`parse_root`]
/// have accepted.
fn render(driver: &str, kubelet_root: &str) -> String {
    // The root is replaced first: a driver's name contains no slash, so it cannot add another match.
    TEMPLATE.replace(KUBELET_ROOT, kubelet_root).replace(DRIVER, driver)
}

/// Parses the name of a driver: a domain name, by the CSI specification and by Kubernetes' rules for names of
/// objects.
///
/// # Errors
/// Fails with a message for people if it is not valid.
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

/// Parses the root directory of kubelet's state.
///
/// # Errors
/// Fails with a message for people if it is not a plain absolute path.
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
