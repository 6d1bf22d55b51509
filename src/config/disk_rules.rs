//! Rules for disks: which disk is mounted where, and how. They are read from every `*.toml` of a directory.
//!
//! ```toml
//! [[disk]]
//! match = { serial = "data-1" }      # or label, wwn, bus, partition; every given key has to match
//! mount-point = "/srv/data"
//! file-system = "ext4"               # optional, but required by format-if-blank
//! format-if-blank = true             # optional, as is everything below
//! options = ["noatime"]
//! owner = "postgres"
//! group = "postgres"
//! mode = "0750"
//! grow = true
//! ```
//!
//! A rule with `file-system = "swap"` has no mount-point.
//!
//! All rules are read again when one of the files changes, and are accepted or refused together. To add a key: a
//! field in `Table`, its check in `Checker`, its field in [`DiskRule`], and its line in docs/disks.md.

use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use toml::Spanned;

use super::{Error, Fragment, Problem, drop_in_files, parse, read};

/// Name of the directory of the rules, beside the agent's main file.
pub const FOLDER: &str = "disks.d";
/// Maximum number of rules.
const MOST: usize = 1000;
/// Maximum length of a mount point in bytes; the kernel allows 4095 for a path.
const LONGEST_PATH: usize = 1000;
/// Value of `file-system` for swap space, which is not a file system.
const SWAP: &str = "swap";
/// Bytes of a serial number that a virtio-blk disk shows, and that QEMU's other disks show.
const ROOMS: [(&str, usize); 2] = [("virtio-blk", 20), ("SCSI", 36)];
/// Directories of kernel file systems, in which nothing may be mounted.
const KERNELS: &[&str] = &["/dev", "/proc", "/sys"];

/// Disk rule, checked as far as possible without looking at disks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskRule {
    /// File and line of the rule, for messages.
    pub origin: String,
    /// Serial number of the disk.
    pub serial: Option<String>,
    /// Label of the file system.
    pub label: Option<String>,
    /// World-wide name of the disk.
    pub wwn: Option<String>,
    /// Bus of the disk, such as `virtio`.
    pub bus: Option<String>,
    /// Number of the partition in the partition table; none for the whole disk.
    pub partition: Option<u32>,
    /// Mount point: absolute, without `..`. Swap space is mounted nowhere: its rule has a text here that no other rule
    /// has.
    pub mount_point: PathBuf,
    /// Type of file system that is required.
    pub file_system: Option<String>,
    /// True to create that file system on a blank disk.
    pub format_if_blank: bool,
    /// Mount options, as for mount(8).
    pub options: Vec<String>,
    /// Owner of the root directory of the file system, by name or number.
    pub owner: Option<String>,
    /// Group of the root directory of the file system, by name or number.
    pub group: Option<String>,
    /// Permissions of the root directory of the file system.
    pub mode: Option<u32>,
    /// True to grow the partition and the file system when the disk grows.
    pub grow: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Parsed {
    #[serde(default)]
    disk: Vec<Spanned<Table>>,
}

impl Fragment for Parsed {
    fn merge(&mut self, later: Self, _file: &Path) {
        self.disk.extend(later.disk);
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Table {
    r#match: Option<Spanned<Match>>,
    mount_point: Option<Spanned<String>>,
    file_system: Option<Spanned<String>>,
    format_if_blank: Option<Spanned<bool>>,
    options: Option<Spanned<Vec<String>>>,
    owner: Option<Spanned<String>>,
    group: Option<Spanned<String>>,
    mode: Option<Spanned<String>>,
    grow: Option<bool>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Match {
    serial: Option<String>,
    label: Option<String>,
    wwn: Option<String>,
    bus: Option<String>,
    partition: Option<u32>,
}

/// Reads and checks the rules in the directory `folder`, which may be missing. `check` returns further problems of
/// a rule, with the key that each is about.
///
/// # Errors
/// The first problem, with file and line.
pub fn load(folder: &Path, check: impl Fn(&DiskRule) -> Result<(), Problem>) -> Result<Vec<DiskRule>, Error> {
    let mut rules = Vec::new();
    let mut taken = HashMap::new();
    let mut serials = Serials::default();
    for file in drop_in_files(folder)? {
        let text = match read(&file) {
            // The file was removed after the directory was listed.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            text => text.map_err(|error| Error::in_file(&file, format!("cannot be read: {error}")))?,
        };
        let parsed: Parsed = parse(&file, &text)?;
        for table in &parsed.disk {
            let checker = Checker { file: &file, text: &text, table };
            let rule = checker.rule()?;
            check(&rule).map_err(|problem| checker.wrong(problem.key, problem.text))?;
            if let Some(first) = taken.insert(rule.mount_point.clone(), rule.origin.clone()) {
                let place = rule.mount_point.display();
                return Err(if rule.file_system.as_deref() == Some(SWAP) {
                    checker.wrong("match", format!("another rule uses this as swap space, at {first}"))
                } else {
                    let problem = format!("{place} is also the mount point of the rule at {first}");
                    checker.wrong("mount-point", problem)
                });
            }
            if let Some(problem) = serials.add(&rule) {
                return Err(checker.wrong("match", problem));
            }
            rules.push(rule);
            if rules.len() > MOST {
                return Err(checker.wrong("", format!("there are more than {MOST} rules")));
            }
        }
    }
    Ok(rules)
}

/// Rules by the beginning of their serial number, for each length that a kind of disk shows.
#[derive(Default)]
struct Serials(HashMap<(usize, Vec<u8>), Vec<DiskRule>>);

impl Serials {
    /// Adds a rule, and returns the problem if it is ambiguous: a disk that shows only the beginning of a serial
    /// number would match both this rule and an earlier one.
    fn add(&mut self, rule: &DiskRule) -> Option<String> {
        let serial = rule.serial.as_deref()?.trim();
        for (kind, room) in ROOMS {
            let beginning = serial.as_bytes()[..serial.len().min(room)].trim_ascii().to_vec();
            let alike = self.0.entry((room, beginning)).or_default();
            let is_virtio = room == ROOMS[0].1;
            if let Some(first) = alike.iter().find(|other| may_be_one(rule, other, is_virtio)) {
                return Some(format!(
                    "the serial {serial:?} has the same first {room} bytes as that of the rule at {}, and a \
                     {kind} disk shows no more; use serial numbers that differ earlier, or set bus",
                    first.origin
                ));
            }
            alike.push(rule.clone());
        }
        None
    }
}

/// Returns whether two rules whose serial numbers begin alike may match the same disk, on virtio or on another
/// bus.
fn may_be_one(one: &DiskRule, other: &DiskRule, on_virtio: bool) -> bool {
    let serial = |rule: &DiskRule| rule.serial.as_deref().map(str::trim).map(str::to_owned);
    let differ =
        |one: &Option<String>, other: &Option<String>| one.is_some() && other.is_some() && one != other;
    let can_be = |rule: &DiskRule| rule.bus.as_deref().is_none_or(|bus| (bus == "virtio") == on_virtio);
    serial(one) != serial(other)
        && can_be(one)
        && can_be(other)
        && !differ(&one.bus, &other.bus)
        && !differ(&one.wwn, &other.wwn)
        && !differ(&one.label, &other.label)
}

/// Checker of one rule, which knows the file and text for its messages.
struct Checker<'a> {
    file: &'a Path,
    text: &'a str,
    table: &'a Spanned<Table>,
}

impl Checker<'_> {
    /// Returns the error that something is wrong with a key, on the line of the key, or of the rule if the key is
    /// missing.
    fn wrong(&self, key: &str, problem: String) -> Error {
        let table = self.table.get_ref();
        let at = |place: Option<usize>| place.unwrap_or(self.table.span().start);
        let start = at(match key {
            "match" => table.r#match.as_ref().map(|value| value.span().start),
            "mount-point" => table.mount_point.as_ref().map(|value| value.span().start),
            "file-system" => table.file_system.as_ref().map(|value| value.span().start),
            "format-if-blank" => table.format_if_blank.as_ref().map(|value| value.span().start),
            "options" => table.options.as_ref().map(|value| value.span().start),
            "owner" => table.owner.as_ref().map(|value| value.span().start),
            "group" => table.group.as_ref().map(|value| value.span().start),
            "mode" => table.mode.as_ref().map(|value| value.span().start),
            _ => None,
        });
        Error::at(self.file, self.text, start, problem)
    }

    fn rule(&self) -> Result<DiskRule, Error> {
        let table = self.table.get_ref();
        let text = |value: &Option<Spanned<String>>| value.as_ref().map(|text| text.get_ref().clone());
        let Some(matcher) = table.r#match.as_ref().map(|value| value.get_ref().clone()) else {
            return Err(self
                .wrong("", "[[disk]] has no match; select the disk, for instance by its serial".to_owned()));
        };
        let format_if_blank = table.format_if_blank.as_ref().is_some_and(|value| *value.get_ref());
        let file_system = text(&table.file_system);
        if matcher
            == (Match { partition: matcher.partition, serial: None, label: None, wwn: None, bus: None })
        {
            let problem = "match has no serial, label, wwn or bus, and so matches any disk";
            return Err(self.wrong("match", problem.to_owned()));
        }
        if format_if_blank && matcher.label.is_some() {
            let problem = "a blank disk has no label: match its serial instead to have it formatted";
            return Err(self.wrong("format-if-blank", problem.to_owned()));
        }
        if format_if_blank && file_system.is_none() {
            let problem = "format-if-blank needs file-system, which is the one to create";
            return Err(self.wrong("format-if-blank", problem.to_owned()));
        }
        let mount_point = match file_system.as_deref() {
            Some(SWAP) => self.swap(&matcher)?,
            _ => self.mount_point()?,
        };
        let line = super::line_of(self.text, self.table.span().start);
        Ok(DiskRule {
            origin: format!("{}:{line}", self.file.display()),
            serial: matcher.serial,
            label: matcher.label,
            wwn: matcher.wwn,
            bus: matcher.bus,
            partition: matcher.partition,
            mount_point,
            file_system,
            format_if_blank,
            options: table.options.as_ref().map(|list| list.get_ref().clone()).unwrap_or_default(),
            owner: text(&table.owner),
            group: text(&table.group),
            mode: self.mode()?,
            grow: table.grow.unwrap_or_default(),
        })
    }

    /// Returns the text that identifies swap space in the place of a mount point.
    fn swap(&self, matcher: &Match) -> Result<PathBuf, Error> {
        if self.table.get_ref().mount_point.is_some() {
            return Err(self.wrong("mount-point", "swap space has no mount point".to_owned()));
        }
        let Match { serial, label, wwn, bus, partition } = matcher;
        let words = [("serial", serial), ("label", label), ("wwn", wwn), ("bus", bus)];
        let words = words.into_iter().filter_map(|(key, value)| Some(format!("{key} {}", value.as_ref()?)));
        let partition = partition.map(|number| format!("partition {number}"));
        let words = words.chain(partition).collect::<Vec<_>>().join(", ");
        // A path of one component, so that it is not below that of another rule.
        Ok(format!("swap ({})", words.replace('/', "|")).into())
    }

    fn mount_point(&self) -> Result<PathBuf, Error> {
        let Some(text) = self.table.get_ref().mount_point.as_ref().map(Spanned::get_ref) else {
            return Err(self.wrong("", "[[disk]] has no mount-point".to_owned()));
        };
        let refuse = |why: &str| Err(self.wrong("mount-point", format!("mount-point = {text:?} {why}")));
        let path = Path::new(text);
        if !path.is_absolute() {
            return refuse("is a relative path; give one that starts with /");
        }
        if path.components().any(|part| part == Component::ParentDir) {
            return refuse("has .. in it; write the path without it");
        }
        if text.contains(char::is_control) || text.len() > LONGEST_PATH {
            return refuse("is too long, or has a control character in it");
        }
        // Remove redundant parts: `.`, and slashes that are doubled or at the end.
        let path: PathBuf = path.components().collect();
        if path == Path::new("/") {
            return refuse("is that of the root file system");
        }
        if let Some(kernels) = KERNELS.iter().find(|kernels| path.starts_with(kernels)) {
            return refuse(&format!("is in {kernels}, which belongs to the kernel"));
        }
        let is_link = |place: &&Path| std::fs::symlink_metadata(place).is_ok_and(|found| found.is_symlink());
        if let Some(link) = path.ancestors().find(is_link) {
            let why = format!(
                "leads through the symbolic link {}; write the path that it leads to",
                link.display()
            );
            return refuse(&why);
        }
        Ok(path)
    }

    fn mode(&self) -> Result<Option<u32>, Error> {
        let Some(text) = self.table.get_ref().mode.as_ref().map(Spanned::get_ref) else { return Ok(None) };
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        match u32::from_str_radix(text, 8) {
            Ok(mode) if digits && mode <= 0o7777 => Ok(Some(mode)),
            _ => {
                let problem = format!("mode = {text:?} is not a mode; write octal digits, such as \"0750\"");
                Err(self.wrong("mode", problem))
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;

    /// Loads files with these texts; returns the rules, or the problem without the directory's path.
    fn loaded(texts: &[&str]) -> Result<Vec<DiskRule>, String> {
        let folder = tempfile::tempdir().unwrap();
        for (number, text) in texts.iter().enumerate() {
            std::fs::write(folder.path().join(format!("{number}.toml")), text).unwrap();
        }
        let check = |rule: &DiskRule| match rule.options.as_slice() {
            [bad] if bad == "bad" => Err(Problem { key: "options", text: "bad".to_owned() }),
            _ => Ok(()),
        };
        let prefix = format!("{}/", folder.path().display());
        load(folder.path(), check).map_err(|error| error.to_string().replace(&prefix, ""))
    }

    const GOOD: &str = "[[disk]]\nmatch = { serial = 'a' }\nmount-point = '/srv/a'\n";

    #[test]
    fn rules_of_all_files() {
        let whole = "# first\n[[disk]]\nmatch = { serial = 'b', bus = 'virtio', partition = 1 }\n\
            mount-point = '/srv//b/./c/'\nfile-system = 'xfs'\nformat-if-blank = true\noptions = ['noatime']\n\
            owner = 'me'\ngroup = '7'\nmode = '0750'\ngrow = true\n[[disk]]\n[disk.match]\nlabel = 'l'\nwwn = 'w'\n";
        let error = loaded(&[GOOD, whole]).unwrap_err();
        assert_eq!(error, "1.toml:12: [[disk]] has no mount-point");
        let whole = whole.replace("[disk.match]", "mount-point = '/l'\n[disk.match]");
        let rules = loaded(&[GOOD, &whole]).unwrap();
        assert_eq!(rules.len(), 3);
        assert!(rules[1].origin.ends_with("1.toml:2"), "{}", rules[1].origin);
        let expected = DiskRule {
            origin: rules[1].origin.clone(),
            serial: Some("b".into()),
            label: None,
            wwn: None,
            bus: Some("virtio".into()),
            partition: Some(1),
            mount_point: "/srv/b/c".into(),
            file_system: Some("xfs".into()),
            format_if_blank: true,
            options: vec!["noatime".into()],
            owner: Some("me".into()),
            group: Some("7".into()),
            mode: Some(0o750),
            grow: true,
        };
        assert_eq!(rules[1], expected);
        assert_eq!((rules[2].label.as_deref(), rules[2].wwn.as_deref()), (Some("l"), Some("w")));
        assert!(load(Path::new("/no/such/folder"), |_| Ok(())).unwrap().is_empty());
    }

    #[test]
    fn what_is_wrong_is_named_with_file_and_line() {
        let with = |line: &str| format!("{GOOD}{line}\n");
        let at = |place: &str| GOOD.replace("/srv/a", place);
        let link = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/srv", link.path().join("link")).unwrap();
        let through = format!("{}/link/data", link.path().display());
        for (text, expected) in [
            (with("form = true"), "0.toml:4: unknown field `form`"),
            ("[[rule]]\n".to_owned(), "0.toml:1: unknown field `rule`"),
            ("[[disk]]\nmount-point = '/a'\n".to_owned(), "0.toml:1: [[disk]] has no match"),
            (GOOD.replace("serial = 'a'", "partition = 1"), "0.toml:2: match has no serial"),
            (GOOD.replace("serial", "name"), "0.toml:2: unknown field `name`"),
            (at("srv"), "0.toml:3: mount-point = \"srv\" is a relative path"),
            (at("/srv/../etc"), "0.toml:3: mount-point = \"/srv/../etc\" has .. in it"),
            (at("/"), "0.toml:3: mount-point = \"/\" is that of the root file system"),
            (at("/sys/x"), "0.toml:3: mount-point = \"/sys/x\" is in /sys"),
            (at(&through), "0.toml:3: mount-point = "),
            (with("mode = '0999'"), "0.toml:4: mode = \"0999\" is not a mode"),
            (with("mode = '+7'"), "0.toml:4: mode = \"+7\" is not a mode"),
            (with("mode = '17777'"), "0.toml:4: mode = \"17777\" is not a mode"),
            (with("mode = 750"), "0.toml:4: invalid type: integer `750`, expected a string"),
            (with("format-if-blank = true"), "0.toml:4: format-if-blank needs file-system"),
            (
                with("format-if-blank = true\nfile-system = 'ext4'").replace("serial", "label"),
                "0.toml:4: a blank disk has no label",
            ),
            (with("options = ['bad']"), "0.toml:4: bad"),
            ("disk".to_owned(), "0.toml:1: "),
        ] {
            let error = loaded(&[&text]).expect_err(&text);
            assert!(error.starts_with(expected), "{text}: {error}");
        }
        assert!(loaded(&[&at(&through)]).unwrap_err().contains("leads through the symbolic link"));
        let twice = loaded(&[GOOD, &at("/srv/a/")]).unwrap_err();
        assert!(twice.starts_with("1.toml:3: /srv/a is also the mount point of the rule at "), "{twice}");
        assert!(twice.ends_with("0.toml:1"), "{twice}");
    }
    #[test]
    fn serial_numbers_that_a_disk_cannot_tell_apart_are_refused() {
        const ONE: &str = "serial = 'customer-data-2026-one'";
        const TWO: &str = "serial = 'customer-data-2026-two'";
        const LONG: &str = "serial = 'pvc-11111111-2222-3333-4444-55555555555";
        let both = |one: &str, two: &str| {
            let rule = |matcher: &str, at: &str| GOOD.replace("serial = 'a'", matcher).replace("/srv/a", at);
            loaded(&[&rule(one, "/srv/1"), &format!("# second\n{}", rule(two, "/srv/2"))])
        };
        let (long, longer) = (format!("{LONG}5'"), format!("{LONG}6'"));
        for (one, two, room) in [
            // The first 20 bytes are "customer-data-2026-o" and "customer-data-2026-t", which differ.
            (ONE, TWO, None),
            (&*ONE.replace("2026", "20260"), &*TWO.replace("2026", "20260"), Some(20)),
            ("serial = '12345678901234567890'", "serial = '123456789012345678901'", Some(20)),
            ("serial = '1234567890123456789'", "serial = '1234567890123456789 x'", Some(20)),
            (&long, &longer, Some(20)),
            (&long, &long, None),
            // SCSI shows more bytes of a serial number.
            (&format!("{long}, bus = 'scsi'"), &format!("{longer}, bus = 'scsi'"), Some(36)),
            (&format!("{long}, bus = 'scsi'"), &longer, Some(36)),
            (&format!("{long}, bus = 'scsi'"), &format!("{longer}, bus = 'virtio'"), None),
            (&format!("{long}, bus = 'virtio'"), &longer, Some(20)),
            (
                "serial = '123456789012345678901', bus = 'scsi'",
                "serial = '123456789012345678902', bus = 'scsi'",
                None,
            ),
            // Another key tells the disks apart, or does not.
            (&format!("{long}, wwn = '1'"), &format!("{longer}, wwn = '2'"), None),
            (&format!("{long}, label = '1'"), &format!("{longer}, label = '2'"), None),
            (&format!("{long}, partition = 1"), &format!("{longer}, partition = 2"), Some(20)),
        ] {
            match (both(one, two), room) {
                (Ok(_), None) => {}
                (Err(error), Some(room)) => {
                    assert!(error.starts_with("1.toml:3: the serial "), "{error}");
                    assert!(error.contains(&format!("has the same first {room} bytes as ")), "{error}");
                    assert!(error.contains("0.toml:1, and a "), "{error}");
                }
                (other, _) => panic!("{one} {two}: {other:?}"),
            }
        }
    }
}
