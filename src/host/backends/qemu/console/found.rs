//! Parses QEMU's descriptions of its serial ports and character devices. Pure.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::super::super::consoles::ConsoleError;

/// QOM types of serial ports, in order of preference. A virtio console is usable only when its guest has booted
/// far enough.
const KINDS: &[&str] = &[
    "isa-serial",
    "pl011",
    "serial-mm",
    "spapr-vty",
    "sclpconsole",
    "sclplmconsole",
    "pci-serial",
    "pci-serial-2x",
    "pci-serial-4x",
    "virtconsole",
];

/// Property in the result of `qom-list`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Property {
    /// Name of the property.
    pub name: String,
    /// Type of the property, such as `child<isa-serial>`.
    #[serde(rename = "type")]
    pub kind: String,
}

/// Entry in the result of `query-chardev`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Chardev {
    /// Identifier of the character device.
    pub label: String,
    /// Description of its backend, such as `disconnected:unix:/run/a.sock,server=on`.
    pub filename: String,
}

/// Serial port of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Serial {
    /// Index in [`KINDS`].
    pub kind: usize,
    /// Number of the port among those of its kind.
    pub index: Option<u64>,
    /// Identifier of its character device; empty if it has none.
    pub chardev: String,
}

/// Location of a console.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// Unix socket.
    Socket {
        /// Path of the socket.
        path: PathBuf,
        /// True if a client is connected.
        is_taken: bool,
    },
    /// Path of a pseudo-terminal.
    Terminal(PathBuf),
}

impl Place {
    /// Reports whether a client is connected, as far as QEMU knows.
    pub fn is_taken(&self) -> bool {
        matches!(self, Self::Socket { is_taken: true, .. })
    }

    fn path(&self) -> &Path {
        match self {
            Self::Socket { path, .. } | Self::Terminal(path) => path,
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.path().display())
    }
}

/// Returns the index in [`KINDS`] of the device behind a property, if it is a serial port.
pub fn serial_kind(property: &Property) -> Option<usize> {
    let kind = property.kind.strip_prefix("child<")?.strip_suffix('>')?;
    KINDS.iter().position(|known| *known == kind)
}

/// Returns the character device of the first port that has one.
pub fn first(mut serials: Vec<Serial>) -> Option<String> {
    serials.retain(|serial| !serial.chardev.is_empty());
    serials.sort_by_key(|serial| (serial.kind, serial.index.unwrap_or(u64::MAX)));
    serials.into_iter().next().map(|serial| serial.chardev)
}

/// Returns the location of the character device with this label; `vm` is for the error text.
///
/// # Errors
/// If there is no such device, or it is of a kind that cannot be connected to.
pub fn place_of(chardevs: &[Chardev], label: &str, vm: &str) -> Result<Place, ConsoleError> {
    let Some(chardev) = chardevs.iter().find(|chardev| chardev.label == label) else {
        let labels: Vec<_> = chardevs.iter().take(16).map(|chardev| chardev.label.as_str()).collect();
        return Err(ConsoleError::None(format!(
            "QEMU has no character device {label:?} for the console; it has {}; see vm.console in the \
             settings of guestlet-host",
            labels.join(", ")
        )));
    };
    place(&chardev.filename).map_err(|why| {
        let Chardev { filename, .. } = chardev;
        ConsoleError::None(format!(
            "the character device {label:?} of the VM's console is {filename:?}: {why}; {}",
            advice(vm)
        ))
    })
}

/// Returns the location for the socket at this path, with its state if QEMU knows the socket.
pub fn place_at(chardevs: &[Chardev], path: &Path) -> Place {
    let mut known = chardevs.iter().filter_map(|chardev| place(&chardev.filename).ok());
    let unknown = || Place::Socket { path: path.to_owned(), is_taken: false };
    known.find(|place| matches!(place, Place::Socket { .. }) && place.path() == path).unwrap_or_else(unknown)
}

/// Parses the file name of a character device.
fn place(filename: &str) -> Result<Place, &'static str> {
    if let Some(path) = filename.strip_prefix("pty:") {
        return Ok(Place::Terminal(path.into()));
    }
    let (rest, is_taken) = match filename.strip_prefix("disconnected:") {
        Some(rest) => (rest, false),
        None => (filename, true),
    };
    let Some(socket) = rest.strip_prefix("unix:") else {
        return Err(match filename {
            "mux" => "its users could reach QEMU's monitor as well",
            "null" => "what is written there is discarded",
            _ => "only unix sockets and pseudo-terminals can be connected to",
        });
    };
    // QEMU before 6.0 prints the option without a value.
    let path = socket.strip_suffix(",server=on").or_else(|| socket.strip_suffix(",server"));
    let path = path.ok_or("QEMU is the client of that socket; add server=on,wait=off")?;
    if path.contains(",abstract=on") {
        return Err("anybody can bind an abstract socket; use one with a path");
    }
    if !path.starts_with('/') {
        return Err(
            "a relative path means another file here; use an absolute one, or set vm.console to that",
        );
    }
    Ok(Place::Socket { path: path.into(), is_taken })
}

/// Returns the error for a VM that has no console.
pub fn no_console(vm: &str) -> ConsoleError {
    ConsoleError::None(format!("the VM has no serial port; {}", advice(vm)))
}

/// Returns the error for a console that another program is connected to.
pub fn taken() -> ConsoleError {
    let words = "another program of this host is connected to the console (QEMU lets in one at a time); end it, such as socat or \
                 virsh console";
    ConsoleError::Taken(words.to_owned())
}

fn advice(vm: &str) -> String {
    format!(
        "give QEMU -chardev socket,id=console0,path=/run/vm/{vm}/console.sock,server=on,wait=off -serial \
         chardev:console0, or the libvirt domain <console type='pty'/>, and restart the VM"
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn chardevs(filename: &str) -> Vec<Chardev> {
        vec![Chardev { label: "a".into(), filename: filename.into() }]
    }

    #[test]
    fn file_names_are_places_or_say_why_not() {
        let socket = |path: &str, is_taken| Place::Socket { path: path.into(), is_taken };
        for (filename, expected) in [
            ("disconnected:unix:/run/a b,c.sock,server=on", socket("/run/a b,c.sock", false)),
            ("unix:/run/a.sock,server=on", socket("/run/a.sock", true)),
            ("disconnected:unix:/run/a.sock,server", socket("/run/a.sock", false)),
            ("pty:/dev/pts/7", Place::Terminal("/dev/pts/7".into())),
        ] {
            assert_eq!(place_of(&chardevs(filename), "a", "web").unwrap(), expected, "{filename}");
        }
        for (filename, why) in [
            ("mux", "QEMU's monitor"),
            ("null", "is discarded"),
            ("file", "only unix sockets"),
            ("disconnected:tcp:127.0.0.1:5,server=on", "only unix sockets"),
            ("unix:/run/a.sock", "QEMU is the client"),
            ("disconnected:unix:console.sock,server=on", "a relative path"),
            ("disconnected:unix:a,abstract=on,tight=on,server=on", "abstract"),
        ] {
            let error = place_of(&chardevs(filename), "a", "web").unwrap_err().to_string();
            assert!(error.contains(why) && error.contains("path=/run/vm/web/console.sock"), "{error}");
        }
        let error = place_of(&chardevs("mux"), "b", "web").unwrap_err().to_string();
        assert!(error.contains("no character device \"b\"") && error.contains("it has a;"), "{error}");
    }

    #[test]
    fn a_socket_of_the_settings_may_be_known() {
        let known = chardevs("unix:/run/a.sock,server=on");
        assert!(place_at(&known, Path::new("/run/a.sock")).is_taken());
        let other = place_at(&known, Path::new("/run/b.sock"));
        assert_eq!(other, Place::Socket { path: "/run/b.sock".into(), is_taken: false });
    }

    #[test]
    fn the_first_serial_port_is_that_of_the_lowest_number() {
        let property = |kind: &str| Property { name: "device[1]".into(), kind: kind.into() };
        let kind = |name: &str| serial_kind(&property(&format!("child<{name}>"))).unwrap();
        assert_eq!(serial_kind(&property("child<irq>")), None);
        assert_eq!(serial_kind(&property("isa-serial")), None);
        let serial = |name, index, chardev: &str| Serial { kind: kind(name), index, chardev: chardev.into() };
        let all = vec![
            serial("virtconsole", None, "v"),
            serial("isa-serial", Some(1), "one"),
            serial("pci-serial", None, "p"),
            serial("isa-serial", Some(0), "nought"),
        ];
        assert_eq!(first(all.clone()).as_deref(), Some("nought"));
        assert_eq!(first(vec![serial("isa-serial", Some(0), ""), all[0].clone()]).as_deref(), Some("v"));
        assert_eq!(first(Vec::new()), None);
    }

    proptest! {
        #[test]
        fn any_name_is_survived(filename in ".{0,60}") {
            // Whatever the text, a socket has an absolute path; terminals are checked when they are opened.
            if let Ok(Place::Socket { path, .. }) = place(&filename) {
                prop_assert!(path.is_absolute());
            }
        }
    }
}
