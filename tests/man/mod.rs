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

impl Page {
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
        text
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
