//! Manual pages, written from what the programs say of themselves. The programs' own tests use this.
//!
//! `UPDATE_DOCS=1 cargo test --bins manual` writes packaging/man anew.

use std::fmt::Write as _;
use std::path::Path;

/// One page.
pub struct Page {
    /// The program's name.
    pub name: &'static str,
    /// What it is, in one line.
    pub summary: String,
    /// How it is called, one line each.
    pub synopsis: Vec<String>,
    /// Paragraphs.
    pub description: Vec<String>,
    /// Titles, and what is explained below them.
    pub sections: Vec<(String, Vec<Entry>)>,
}

/// A word, and what it means.
pub struct Entry {
    pub term: String,
    pub meaning: String,
}

impl Entry {
    pub fn new(term: impl Into<String>, meaning: impl Into<String>) -> Self {
        Self { term: term.into(), meaning: meaning.into() }
    }
}

/// How a page ends: examples with what they do, and what else to read.
struct Ends {
    program: &'static str,
    examples: &'static [(&'static str, &'static str)],
    /// Pages with their sections.
    see_also: &'static str,
    /// Of the documentation, below the directory `docs` of the package.
    documents: &'static [&'static str],
}

/// The tests of the programs hold the examples against their own parsers, as they do those of the documentation.
const ENDS: [Ends; 4] = [
    Ends {
        program: "guestlet",
        examples: &[
            ("guestlet doctor", "Says what works in this guest, what is missing, and what to do."),
            (
                "guestlet status",
                "Shows the clients of the agent, its session with the host, and what is frozen.",
            ),
            ("guestlet disks -o json", "Shows the disks with their serial numbers and holders, for scripts."),
            ("guestlet topology --wait 30s", "Waits until the host has said where this guest runs."),
            ("guestlet policy show", "Shows who may do what in this guest, and which file says so."),
            ("guestlet thaw", "Ends a freeze at once, when whoever has frozen the file systems is gone."),
        ],
        see_also: "guestlet-host(8), guestctl(8), guestlet-ccm(8), systemd(1), fsfreeze(8), vsock(7)",
        documents: &["configuration.md", "settings.md", "troubleshooting.md"],
    },
    Ends {
        program: "guestlet-host",
        examples: &[
            ("guestlet-host --check", "Checks /etc/guestlet/host.toml without taking it into force."),
            (
                "guestlet-host --config /tmp/host.toml --verbose",
                "Runs in the foreground with other settings, and logs more.",
            ),
        ],
        see_also: "guestctl(8), guestlet(8), systemd(1), vsock(7), qemu-system(1), virsh(1)",
        documents: &["host.md", "settings.md", "security.md"],
    },
    Ends {
        program: "guestctl",
        examples: &[
            ("guestctl ls 'web-*' --sort since", "Lists some VMs, those whose session changed last first."),
            (
                "guestctl ls -l 'tier=db,env in (prod,test)' --show-labels",
                "Lists the VMs with these labels, with all of their labels.",
            ),
            ("guestctl info web-1 -o yaml", "Shows everything known of one VM."),
            (
                "guestctl watch --kind session-closed --since 1h",
                "Shows lost sessions of the last hour, and further ones.",
            ),
            ("guestctl exec -it web-1 -- bash", "Runs a shell in a guest, on this terminal."),
            ("guestctl cp -r web-1:/var/log/nginx logs", "Copies a directory out of a guest."),
            (
                "guestctl freeze web-1 -- lvcreate --snapshot --name backup vg/web-1",
                "Takes a snapshot while the file systems of the guest are frozen.",
            ),
            (
                "guestctl disk attach web-1 --size 10G --serial data-1",
                "Makes a disk and plugs it into a running VM.",
            ),
            ("guestctl --context shop ls -A", "Lists the VMs of all namespaces of a cluster."),
            ("guestctl doctor", "Says what is wrong on this host and with its guests."),
        ],
        see_also: "guestlet-host(8), guestlet(8), kubectl(1), virsh(1), ssh(1), jq(1)",
        documents: &["guestctl.md", "host.md", "events.md", "troubleshooting.md"],
    },
    Ends {
        program: "guestlet-ccm",
        examples: &[(
            "guestlet-ccm --name $NODE_NAME --kubeconfig /etc/kubernetes/cloud.conf --management-network default/lan",
            "Runs outside a pod, and takes the addresses of Nodes from one network of the host.",
        )],
        see_also: "guestlet(8), guestlet-host(8), kubectl(1)",
        documents: &["cloud-provider.md", "load-balancers.md", "topology.md"],
    },
];

impl Page {
    /// Examples, and what else to read.
    fn ends(&self) -> String {
        let ends = ENDS.iter().find(|ends| ends.program == self.name).expect("each program has examples");
        let mut text = ".SH \"EXAMPLES\"\n".to_owned();
        for (command, meaning) in ends.examples {
            let _ = writeln!(text, ".TP\n.B {}\n{}", typed(command), escaped(meaning));
        }
        // Which package has the documentation.
        let on_hosts = ["guestlet-host", "guestctl"].contains(&self.name);
        let package = if on_hosts { "guestlet-host" } else { "guestlet" };
        let documents: Vec<_> = ends.documents.iter().map(|name| escaped(name)).collect();
        let _ = writeln!(
            text,
            ".SH \"SEE ALSO\"\n{}\n.PP\nIn /usr/share/doc/{}/docs: {}",
            escaped(ends.see_also),
            escaped(package),
            documents.join(", ")
        );
        text
    }

    /// The page in man(7)'s language.
    pub fn text(&self) -> String {
        let mut text = format!(
            ".TH {} 8 \"\" \"guestlet {}\" \"guestlet\"\n.SH NAME\n{} \\- {}\n.SH SYNOPSIS\n",
            self.name.to_uppercase().replace('-', "\\-"),
            env!("CARGO_PKG_VERSION"),
            escaped(self.name),
            escaped(&self.summary),
        );
        for line in &self.synopsis {
            let (program, rest) = line.split_once(' ').unwrap_or((line, ""));
            let _ = writeln!(text, ".B {}\n{}\n.br", escaped(program), escaped(rest));
        }
        text += ".SH DESCRIPTION\n";
        for paragraph in &self.description {
            let _ = writeln!(text, "{}\n.PP", escaped(paragraph));
        }
        for (title, entries) in &self.sections {
            let _ = writeln!(text, ".SH \"{}\"", escaped(title));
            for Entry { term, meaning } in entries {
                let _ = writeln!(text, ".TP\n.B {}\n{}", escaped(term), escaped(meaning));
            }
        }
        text + &self.ends()
    }

    /// Holds the page in packaging/man against this one.
    #[allow(clippy::disallowed_methods)]
    pub fn check(&self) {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("packaging/man/{}.8", self.name));
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(&file, self.text()).unwrap();
        }
        let written = std::fs::read_to_string(&file).unwrap_or_default();
        assert_eq!(written, self.text(), "run UPDATE_DOCS=1 cargo test --bins manual");
    }
}

/// What is to be typed as it stands: an apostrophe is none of typography.
fn typed(command: &str) -> String {
    escaped(command).replace('\'', "\\(aq")
}

fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-").replace('\n', " ");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

/// The options and, below a title each, the commands that clap knows. (Not every program has clap.)
#[allow(unused_macros)]
macro_rules! clap_sections {
    ($command:expr) => {{
        #[allow(clippy::format_push_string)]
        fn entry(argument: &clap::Arg) -> crate::man::Entry {
            let values: Vec<_> = argument
                .get_value_names()
                .unwrap_or_default()
                .iter()
                .map(|name| format!("<{name}>"))
                .collect();
            let takes_value = argument.get_action().takes_values();
            let mut names = Vec::new();
            names.extend(argument.get_short().map(|short| format!("-{short}")));
            names.extend(argument.get_long().map(|long| format!("--{long}")));
            let mut term = names.join(", ");
            if takes_value {
                term = format!("{term} {}", values.join(" ")).trim().to_owned();
            }
            let help = argument.get_long_help().or(argument.get_help());
            let mut meaning = help.map(ToString::to_string).unwrap_or_default();
            let possible: Vec<_> =
                argument.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect();
            if takes_value && !possible.is_empty() {
                meaning += &format!(": {}", possible.join(", "));
            }
            let defaults: Vec<_> =
                argument.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
            if takes_value && !defaults.is_empty() {
                meaning += &format!(" (default: {})", defaults.join(","));
            }
            if let Some(variable) = argument.get_env() {
                meaning += &format!(" (environment: {})", variable.to_string_lossy());
            }
            crate::man::Entry::new(term, meaning)
        }
        fn add(
            path: &str,
            command: &clap::Command,
            top: bool,
            sections: &mut Vec<(String, Vec<crate::man::Entry>)>,
        ) {
            let shown = |argument: &&clap::Arg| !argument.is_hide_set() && (top || !argument.is_global_set());
            let mut entries: Vec<_> = command.get_arguments().filter(shown).map(entry).collect();
            let title = if top { "OPTIONS".to_owned() } else { path.to_owned() };
            if !top {
                let about = command.get_long_about().or(command.get_about());
                let about = about.map(ToString::to_string).unwrap_or_default();
                entries.insert(0, crate::man::Entry::new(path, about));
            }
            if top || !command.has_subcommands() {
                sections.push((title, entries));
            }
            let listed = |below: &&clap::Command| below.get_name() != "help" && !below.is_hide_set();
            for below in command.get_subcommands().filter(listed) {
                add(&format!("{path} {}", below.get_name()), below, false, sections);
            }
        }
        let mut command = $command;
        command.build();
        let mut sections = Vec::new();
        let name = command.get_name().to_owned();
        add(&name, &command, true, &mut sections);
        sections
    }};
}
#[allow(unused_imports)]
pub(crate) use clap_sections;
