//! `guestctl trust bootstrap`: what to add to a VM so that its guest recognises its host half by its key.
//!
//! Pure: strings in, text out. To add a platform: its [`Format`], and the function that writes it. The names
//! and places in which the guest looks are in `trust::provided`.

use clap::ValueEnum;

/// Names of the systemd credentials.
const HOSTS: &str = "guestlet.hosts";
const ENROLLMENT: &str = "guestlet.enroll";
/// File for the bootstrap key. Keys that are added later are in files of other names.
const KEY_FILE: &str = "/etc/guestlet/hosts.d/bootstrap.pub";
/// File for the token, in the directory where systemd looks for credentials of the guest itself.
const TOKEN_FILE: &str = "/etc/credstore/guestlet.enroll";

/// For what it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Options of qemu-system-*
    Qemu,
    /// Parts of a domain's XML
    Libvirt,
    /// A part of a VM's manifest for KubeVirt, also in Harvester
    Kubevirt,
    /// User data for cloud-init
    CloudInit,
    /// The file itself
    File,
}

impl Format {
    /// Returns the title of this part in an output with several parts.
    fn title(self) -> &'static str {
        match self {
            Self::Qemu => "QEMU",
            Self::Libvirt => "libvirt",
            Self::Kubevirt => "KubeVirt, Harvester",
            Self::CloudInit => "cloud-init",
            Self::File => "a file in the guest",
        }
    }
}

/// Formats what to add to the VM `vm`. `key_line` is the host half's public key in the form that the guest
/// reads; `token` is a secret for the first contact, if one is to be used.
pub fn text(format: Format, vm: &str, key_line: &str, token: Option<&str>) -> String {
    let key = key_line.trim();
    match format {
        Format::Qemu => qemu(vm, key, token),
        Format::Libvirt => libvirt(key, token),
        Format::Kubevirt => kubevirt(vm, key, token),
        Format::CloudInit => cloud_init(vm, key, token),
        Format::File => file(vm, key, token),
    }
}

/// Formats the same for every platform, each under its name.
pub fn all(vm: &str, key_line: &str, token: Option<&str>) -> String {
    let part =
        |format: &Format| format!("=== {} ===\n\n{}", format.title(), text(*format, vm, key_line, token));
    Format::value_variants().iter().map(part).collect::<Vec<_>>().join("\n")
}

fn qemu(vm: &str, key: &str, token: Option<&str>) -> String {
    let given = || [(HOSTS, Some(key)), (ENROLLMENT, token)].into_iter();
    // Commas within an option are doubled, and quotes protect the option from the shell.
    let option = |option: &str, value: String| format!("{option} '{}'\n", value.replace('\'', r"'\''"));
    let smbios = given().filter_map(|(name, value)| {
        let value = value?.replace(',', ",,");
        Some(option("-smbios", format!("type=11,value=io.systemd.credential:{name}={value}")))
    });
    let fw_cfg = given().filter_map(|(name, value)| {
        let value = value?.replace(',', ",,");
        Some(option("-fw_cfg", format!("name=opt/io.systemd.credentials/{name},string={value}")))
    });
    format!(
        "# For the VM {vm:?}, from its next start of QEMU on:\n{}\n\
         # Or, where the machine has no SMBIOS and the guest's kernel has the module qemu_fw_cfg:\n{}",
        smbios.collect::<String>(),
        fw_cfg.collect::<String>(),
    )
}

fn libvirt(key: &str, token: Option<&str>) -> String {
    let entry = |(name, value): (&str, &str)| {
        format!("      <entry>io.systemd.credential:{name}={}</entry>\n", in_xml(value))
    };
    let given = std::iter::once((HOSTS, key)).chain(token.map(|token| (ENROLLMENT, token)));
    format!(
        "<!-- By virsh edit. The domain has <os> already: <smbios> goes into that. It takes effect at the \
         next cold start. -->\n<domain>\n  <os>\n    <smbios mode='sysinfo'/>\n  </os>\n  <sysinfo \
         type='smbios'>\n    <oemStrings>\n{}    </oemStrings>\n  </sysinfo>\n</domain>\n",
        given.map(entry).collect::<String>(),
    )
}

/// Escapes a text for an XML element.
fn in_xml(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn kubevirt(vm: &str, key: &str, token: Option<&str>) -> String {
    format!(
        "# For the VirtualMachine {vm:?}: what is below userData goes into the user data that it has. In Harvester that is\n\
         # \"User Data\" of the VM, of its template, or of the machine pool. cloud-init reads it at the first boot only.\n\
         spec:\n  template:\n    spec:\n      volumes:\n        - name: cloudinitdisk\n          cloudInitNoCloud:\n            \
         userData: |\n{}",
        indented(&user_data(key, token), 14),
    )
}

fn cloud_init(vm: &str, key: &str, token: Option<&str>) -> String {
    let data = user_data(key, token);
    // The first line identifies the format, so it has to stay first.
    let (first, rest) = data.split_once('\n').unwrap_or((&data, ""));
    format!("{first}\n# For the VM {vm:?}; it is read at the first boot only.\n{rest}")
}

/// Formats user data for cloud-init.
fn user_data(key: &str, token: Option<&str>) -> String {
    let mut text = format!("#cloud-config\nwrite_files:\n{}", written(KEY_FILE, "0644", key));
    if let Some(token) = token {
        text.push_str(&written(TOKEN_FILE, "0600", token));
    }
    text
}

/// Formats a file that cloud-init writes.
fn written(path: &str, mode: &str, line: &str) -> String {
    format!("  - path: {path}\n    permissions: \"{mode}\"\n    content: |\n      {line}\n")
}

fn indented(text: &str, columns: usize) -> String {
    let margin = " ".repeat(columns);
    text.lines().flat_map(|line| [&margin, line, "\n"]).collect()
}

fn file(vm: &str, key: &str, token: Option<&str>) -> String {
    let mut text = format!("# {KEY_FILE} in the VM {vm:?}, mode 0644\n{key}\n");
    if let Some(token) = token {
        // The token is not printed as a line of its own, which would end up in the key's file if the whole output
        // were written there.
        text = format!(
            "# As root in the VM {vm:?}:\n\
             install -D -m 0644 /dev/stdin {KEY_FILE} << 'END'\n{key}\nEND\n\
             install -D -m 0600 /dev/stdin {TOKEN_FILE} << 'END'\n{token}\nEND\n"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const KEY: &str = "ed25519:MCowBQYDK2VwAyEAa72vA2BgKOo5TFtkXTTR/kXMl5gcR0rtF7JG5i0kFGk= role=status,exec # ops' <a & b>: \"c\"";
    const TOKEN: &str = "000102030405060708090a0b0c0d0e0f";

    fn yaml(text: &str) -> Value {
        serde_saphyr::from_str(text).unwrap_or_else(|error| panic!("{error}\n{text}"))
    }

    /// Returns the files that cloud-init would write.
    fn files(user_data: &str) -> Vec<(String, String, String)> {
        assert!(user_data.starts_with("#cloud-config\n"), "{user_data}");
        let data = yaml(user_data);
        let of = |file: &Value, key: &str| file[key].as_str().unwrap().to_owned();
        let files = data["write_files"].as_array().unwrap().iter();
        files.map(|file| (of(file, "path"), of(file, "permissions"), of(file, "content"))).collect()
    }

    fn expected(with_token: bool) -> Vec<(String, String, String)> {
        let mut files = vec![(KEY_FILE.to_owned(), "0644".to_owned(), format!("{KEY}\n"))];
        if with_token {
            files.push((TOKEN_FILE.to_owned(), "0600".to_owned(), format!("{TOKEN}\n")));
        }
        files
    }

    #[test]
    fn the_shell_and_qemu_take_the_key_as_it_is() {
        let text = text(Format::Qemu, "a", KEY, Some(TOKEN));
        let options: Vec<_> = text.lines().filter(|line| line.starts_with('-')).collect();
        assert_eq!(options.len(), 4, "{text}");
        for (option, name) in options.iter().zip(["-smbios", "-smbios", "-fw_cfg", "-fw_cfg"]) {
            let value = option.strip_prefix(name).unwrap().trim();
            let value = value.strip_prefix('\'').unwrap().strip_suffix('\'').unwrap().replace(r"'\''", "'");
            // Once doubled commas are removed, the remaining ones separate the parts of an option.
            assert_eq!(value.replace(",,", "").matches(',').count(), 1, "{value}");
            let value = value.replace(",,", ",");
            assert!(
                value.ends_with(&format!("hosts={KEY}"))
                    || value.ends_with(&format!("hosts,string={KEY}"))
                    || value.ends_with(TOKEN),
                "{value}"
            );
        }
        assert!(
            options[0]
                .starts_with("-smbios 'type=11,value=io.systemd.credential:guestlet.hosts=ed25519:MCow")
        );
        assert!(
            options[3].starts_with("-fw_cfg 'name=opt/io.systemd.credentials/guestlet.enroll,string=0001")
        );
    }

    #[test]
    fn libvirts_elements_are_closed_and_the_key_is_escaped() {
        let text = text(Format::Libvirt, "a", KEY, Some(TOKEN));
        let mut open = Vec::new();
        let mut entries = Vec::new();
        let mut rest = text.as_str();
        while let Some((before, after)) = rest.split_once('<') {
            let (tag, behind) = after.split_once('>').unwrap();
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop(), Some(name), "{text}");
                if name == "entry" {
                    entries.push(before.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"));
                }
            } else if let Some(comment) = after.strip_prefix("!--") {
                rest = comment.split_once("-->").unwrap().1;
                continue;
            } else if !tag.ends_with('/') {
                open.push(tag.split(' ').next().unwrap());
            }
            rest = behind;
        }
        assert!(open.is_empty() && text.contains("<smbios mode='sysinfo'/>"), "{text}");
        let given = [format!("guestlet.hosts={KEY}"), format!("guestlet.enroll={TOKEN}")];
        assert_eq!(entries, given.map(|value| format!("io.systemd.credential:{value}")));
    }

    #[test]
    fn cloud_init_writes_the_files_that_the_guest_reads() {
        for token in [None, Some(TOKEN)] {
            let data = text(Format::CloudInit, "a: \"b\"\n", KEY, token);
            assert_eq!(files(&data), expected(token.is_some()));
        }
    }

    /// The example has a key of zeros, which every guest refuses.
    #[test]
    fn the_packaged_example_is_what_is_printed() {
        let example = include_str!("../../../packaging/cloud-init/keys.yaml");
        let zeros = format!("ed25519:MCowBQYDK2VwAyEA{}=", "A".repeat(43));
        assert_eq!(files(example), files(&text(Format::CloudInit, "a", &zeros, None)));
    }

    #[test]
    fn kubevirt_has_the_same_user_data() {
        for token in [None, Some(TOKEN)] {
            let manifest = yaml(&text(Format::Kubevirt, "a", KEY, token));
            let volume = &manifest["spec"]["template"]["spec"]["volumes"][0];
            assert_eq!(volume["name"], json!("cloudinitdisk"));
            assert_eq!(
                files(volume["cloudInitNoCloud"]["userData"].as_str().unwrap()),
                expected(token.is_some())
            );
        }
    }

    #[test]
    fn the_file_is_the_key_and_never_the_token() {
        let written = text(Format::File, "a", KEY, None);
        assert_eq!(written.lines().filter(|line| !line.starts_with('#')).collect::<Vec<_>>(), [KEY]);
        let commands = text(Format::File, "a", KEY, Some(TOKEN));
        assert!(
            commands
                .contains(&format!("install -D -m 0600 /dev/stdin {TOKEN_FILE} << 'END'\n{TOKEN}\nEND\n"))
        );
    }

    #[test]
    fn who_does_not_say_for_what_gets_every_part() {
        let every = all("a", KEY, None);
        for format in Format::value_variants() {
            assert!(every.contains(&text(*format, "a", KEY, None)), "{format:?}");
        }
        assert!(!every.contains("enroll"));
    }
}
