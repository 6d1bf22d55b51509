//! The pages of the documentation, their blocks of code, and the commands in them. The tests of the programs use this, too.

#![allow(dead_code, reason = "each of them uses a part")]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// A page.
pub struct Page {
    /// From the top of the sources, such as `docs/exec.md`.
    pub name: String,
    pub text: String,
}

/// A fenced block of code.
pub struct Block {
    /// Page and line, for messages.
    pub place: String,
    /// As the fence says; may be empty.
    pub language: String,
    pub text: String,
}

/// The top of the sources.
pub fn top() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// All pages that people read.
#[allow(clippy::disallowed_methods)]
pub fn pages() -> Vec<Page> {
    let mut names: Vec<_> =
        ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"].map(str::to_owned).into();
    for entry in std::fs::read_dir(top().join("docs")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|ending| ending == "md") {
            names.push(format!("docs/{}", path.file_name().unwrap().to_str().unwrap()));
        }
    }
    names.sort();
    let read = |name: String| Page { text: std::fs::read_to_string(top().join(&name)).unwrap(), name };
    names.into_iter().map(read).collect()
}

impl Page {
    /// Its blocks of code.
    pub fn blocks(&self) -> Vec<Block> {
        let mut blocks = Vec::new();
        let mut open: Option<Block> = None;
        for (number, line) in self.text.lines().enumerate() {
            match (line.trim_start().strip_prefix("```"), open.take()) {
                (Some(_), Some(block)) => blocks.push(block),
                (Some(language), None) => {
                    let place = format!("{}:{}", self.name, number + 1);
                    open = Some(Block { place, language: language.trim().to_owned(), text: String::new() });
                }
                (None, Some(mut block)) => {
                    block.text += line;
                    block.text.push('\n');
                    open = Some(block);
                }
                (None, None) => {}
            }
        }
        assert!(open.is_none(), "{}: a block of code does not end", self.name);
        blocks
    }

    /// What is not in a block of code; its lines keep their numbers.
    pub fn prose(&self) -> String {
        let mut is_code = false;
        let mut prose = String::new();
        for line in self.text.lines() {
            let is_fence = line.trim_start().starts_with("```");
            is_code ^= is_fence;
            if !is_code && !is_fence {
                prose += line;
            }
            prose.push('\n');
        }
        prose
    }

    /// The code in its prose: what is between two backticks.
    pub fn spans(&self) -> Vec<String> {
        let mut spans = Vec::new();
        for paragraph in self.prose().split("\n\n") {
            let parts: Vec<_> = paragraph.split('`').collect();
            assert!(parts.len() % 2 == 1, "{}: a backtick too many in: {paragraph}", self.name);
            let words = |span: &str| span.split_whitespace().collect::<Vec<_>>().join(" ");
            spans.extend(parts.iter().skip(1).step_by(2).map(|span| words(span)));
        }
        spans
    }
}

impl Block {
    /// The lines in which somebody types something.
    fn typed(&self) -> Vec<String> {
        let joined = self.text.replace("\\\n", " ");
        let lines = joined.lines().map(str::trim);
        match self.language.as_str() {
            "sh" => lines.filter(|line| !line.starts_with('#')).map(str::to_owned).collect(),
            "console" | "" => lines
                .filter_map(|line| line.strip_prefix("# ").or(line.strip_prefix("$ ")))
                .map(str::to_owned)
                .collect(),
            _ => Vec::new(),
        }
    }
}

/// The commands of a line as a shell takes it apart: words without quotes, and without what is redirected.
fn commands_of(line: &str) -> Vec<Vec<String>> {
    let (mut commands, mut words, mut word) = (Vec::new(), Vec::new(), None::<String>);
    let (mut quote, mut is_file) = (None, false);
    for character in line.chars().chain(['\n']) {
        match (quote, character) {
            (Some(end), _) if end == character => quote = None,
            (None, '\'' | '"') => {
                quote = Some(character);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => break,
            (None, ' ' | '\n' | '|' | '&' | ';' | '<' | '>') => {
                if let Some(word) = word.take()
                    && !std::mem::take(&mut is_file)
                {
                    words.push(word);
                }
                match character {
                    '<' | '>' => is_file = true,
                    '|' | '&' | ';' => commands.push(std::mem::take(&mut words)),
                    _ => {}
                }
            }
            _ => word.get_or_insert_default().push(character),
        }
    }
    commands.push(words);
    commands.into_iter().filter(|words: &Vec<String>| !words.is_empty()).collect()
}

/// What follows `program` in a command, also in a pod or as a plugin.
fn arguments<'w>(program: &str, words: &'w [String]) -> Option<&'w [String]> {
    if program == "guestctl"
        && let [kubectl, plugin, rest @ ..] = words
        && kubectl == "kubectl"
        && plugin == "guestlet"
    {
        return Some(rest);
    }
    let is_it = |at: &usize| words[*at] == program && (*at == 0 || words[at - 1] == "--");
    let first = words.iter().position(|word| word == "--").map_or(0, |at| at + 1);
    [0, first].iter().find(|at| **at < words.len() && is_it(at)).map(|at| &words[at + 1..])
}

/// The examples of the program's manual page.
#[allow(clippy::disallowed_methods)]
fn examples(program: &str) -> Block {
    let place = format!("packaging/man/{program}.8");
    let page = std::fs::read_to_string(top().join(&place)).unwrap();
    let (_, examples) =
        page.split_once(".SH \"EXAMPLES\"\n").unwrap_or_else(|| panic!("{place} has no examples"));
    let terms = examples.lines().filter_map(|line| line.strip_prefix(".B "));
    let typed = |term: &str| term.replace("\\-", "-").replace("\\(aq", "'");
    let text = terms.map(typed).collect::<Vec<_>>().join("\n");
    Block { place, language: "sh".to_owned(), text }
}

/// Holds every command with this program in the blocks of all pages, and its manual page, against its own parser.
pub fn check_commands(program: &str, at_least: usize, parses: impl Fn(&[String]) -> Result<(), String>) {
    let (mut count, mut wrong) = (0, String::new());
    for block in pages().iter().flat_map(Page::blocks).chain([examples(program)]) {
        for line in block.typed() {
            for words in commands_of(&line) {
                let Some(arguments) = arguments(program, &words) else { continue };
                count += 1;
                if let Err(error) = parses(arguments) {
                    let _ = writeln!(wrong, "{}: {line}: {error}", block.place);
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert!(count >= at_least, "only {count} commands were found");
}

/// Holds every command with this program in the prose of all pages against it: such a one is often cut short.
pub fn check_mentions(program: &str, at_least: usize, is_known: impl Fn(&[&str]) -> Result<(), String>) {
    let (mut count, mut wrong) = (0, String::new());
    for page in pages() {
        for span in page.spans() {
            let words: Vec<_> = span.split(' ').collect();
            let words = match &words[..] {
                ["kubectl", "guestlet", rest @ ..] if program == "guestctl" => rest,
                [first, rest @ ..] if *first == program => rest,
                _ => continue,
            };
            // As the name of the program alone, and with what is left out.
            if words.is_empty() || span.contains('…') {
                continue;
            }
            count += 1;
            // Such as `receipts ls|show`, or cut short of what it is about.
            let at = words.iter().position(|word| word.contains('|')).unwrap_or(0);
            for word in words[at].split('|') {
                let words = [&words[..at], &[word], &words[at + 1..]].concat();
                let longer = [&words[..], &["ID"]].concat();
                if let Err(error) = is_known(&words).or_else(|error| is_known(&longer).map_err(|_| error)) {
                    let _ = writeln!(wrong, "{}: `{span}`: {error}", page.name);
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert!(count >= at_least, "only {count} mentions were found");
}

/// Whether the verb of a command that is mentioned exists, and so do its long options.
#[cfg(any(feature = "ctl", feature = "host"))]
pub fn is_known(command: &clap::Command, words: &[&str]) -> Result<(), String> {
    let (mut command, mut rest) = (command, words);
    while let [first, after @ ..] = rest
        && let Some(below) = command.find_subcommand(first)
    {
        (command, rest) = (below, after);
    }
    let is_verb = |word: &&str| word.starts_with(|one: char| one.is_ascii_lowercase());
    if command.has_subcommands()
        && let Some(word) = rest.first().filter(|word| is_verb(word))
    {
        return Err(format!("there is no {} {word}", command.get_name()));
    }
    for word in rest.iter().take_while(|word| **word != "--") {
        let Some(name) = word.strip_prefix("--").and_then(|long| long.split('=').next()) else { continue };
        let names = |argument: &clap::Arg| {
            argument.get_long_and_visible_aliases().is_some_and(|all| all.contains(&name))
        };
        if !matches!(name, "help" | "version") && !command.get_arguments().any(names) {
            return Err(format!("{} has no option --{name}", command.get_name()));
        }
    }
    Ok(())
}

/// Whether a path of the sources is there.
pub fn is_there(path: &str) -> bool {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path).exists()
}
