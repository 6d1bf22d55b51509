//! A host half, and VMs with consoles.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use guestlet::sys::terminal::Size;

use crate::guest;
use crate::host::{self, DEADLINE};
use crate::screen::Screen;

/// The character device of the console, as most tests have it; `@` is the directory of the test.
pub const SOCKET: &str = "socket,id=console0,path=@console,server=on,wait=off";

/// A QEMU whose guest has not begun. It ends when this is dropped.
pub struct Qemu {
    child: Child,
    folder: PathBuf,
}

impl Qemu {
    /// One whose first serial port is this character device, and which has further arguments.
    pub fn start(folder: &Path, chardev: &str, more: &[&str]) -> Self {
        let rom = folder.join("rom");
        std::fs::write(&rom, guest::firmware()).unwrap();
        let at = |text: &str| text.replace('@', &format!("{}/", folder.display()));
        let mut command = Command::new("qemu-system-x86_64");
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-machine", "pc,accel=tcg"]);
        command.args(["-m", "16", "-S", "-bios"]).arg(&rom);
        for socket in ["@qmp", "@qmp-test"] {
            command.args(["-qmp", &at(&format!("unix:{socket},server=on,wait=off"))]);
        }
        command.args(["-chardev", &at("file,id=debug,path=@debug")]);
        command.args(["-device", "isa-debugcon,iobase=0xe9,chardev=debug"]);
        if !chardev.is_empty() {
            command.args(["-chardev", &at(chardev), "-serial", "chardev:console0"]);
        }
        command.args(more.iter().map(|one| at(one)));
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        let qemu = Self { child, folder: folder.to_owned() };
        until("QEMU is there", || UnixStream::connect(folder.join("qmp-test")).is_ok());
        qemu
    }

    /// Runs a command of QMP.
    pub fn execute(&self, command: &str) {
        let stream = UnixStream::connect(self.folder.join("qmp-test")).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let (mut writer, mut lines) = (stream.try_clone().unwrap(), BufReader::new(stream).lines());
        for command in ["qmp_capabilities", command] {
            writeln!(writer, "{{\"execute\":\"{command}\"}}").unwrap();
            while !lines.next().unwrap().unwrap().contains("\"return\"") {}
        }
    }

    /// The guest begins.
    pub fn go(&self) {
        self.execute("cont");
    }

    /// What the guest has written to the debug port.
    pub fn debug(&self) -> Vec<u8> {
        std::fs::read(self.folder.join("debug")).unwrap_or_default()
    }

    pub fn kill(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The host half with one VM `web`.
pub struct Lab {
    pub host: host::Lab,
    pub qemu: Qemu,
}

impl Lab {
    pub fn new() -> Self {
        Self::with(SOCKET, &[], "")
    }

    /// With this character device, these arguments of QEMU, and these lines in the settings of the VM.
    pub fn with(chardev: &str, more: &[&str], settings: &str) -> Self {
        Self::of(host::Lab::new(), chardev, more, settings)
    }

    /// The same of a host half that has settings already.
    pub fn of(host: host::Lab, chardev: &str, more: &[&str], settings: &str) -> Self {
        let host = host.vm("web", 1, &format!("unix-socket = '@web.sock'\nqmp = '@qmp'\n{settings}"));
        let qemu = Qemu::start(host.settings().parent().unwrap(), chardev, more);
        let host = host.start();
        host.until_vm("web", |vm| vm["power"] == "paused");
        Self { host, qemu }
    }

    /// A guestctl that is at the console.
    pub fn client(&self, options: &[&str]) -> Client {
        Client::start(self.host.ctl_command(&[&["console", "web"], options].concat()))
    }

    /// A guestctl that ends by itself.
    pub fn ctl(&self, options: &[&str]) -> Output {
        self.host.ctl_command(&[&["console", "web"], options].concat()).stdin(Stdio::null()).output().unwrap()
    }

    /// A guestctl at a terminal.
    pub fn screen(&self) -> Screen {
        let screen = Screen::of(self.host.ctl_command(&["console", "web"]), Size { rows: 24, columns: 80 });
        screen.until("Ctrl-] leaves it");
        screen
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("host: {}", self.host.log());
        }
    }
}

/// What a stream has said so far.
type Said = Arc<Mutex<Vec<u8>>>;

/// A guestctl with pipes. It is killed when this is dropped.
pub struct Client {
    child: Child,
    pub output: Said,
    errors: Said,
}

impl Client {
    /// One that is at the console by now.
    pub fn start(command: Command) -> Self {
        let client = Self::spawn(command);
        client.until_complaint("connected to the console");
        client
    }

    pub fn spawn(mut command: Command) -> Self {
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let output = collect(child.stdout.take().unwrap());
        let errors = collect(child.stderr.take().unwrap());
        Self { child, output, errors }
    }

    pub fn write(&mut self, bytes: &[u8]) {
        self.child.stdin.as_mut().unwrap().write_all(bytes).unwrap();
    }

    pub fn end_input(&mut self) {
        self.child.stdin = None;
    }

    pub fn until(&self, words: &str) {
        until(&format!("{words:?}, {}", self.complaint()), || said(&self.output).contains(words));
    }

    pub fn until_complaint(&self, words: &str) {
        until(&format!("{words:?} in {:?}", self.complaint()), || self.complaint().contains(words));
    }

    pub fn complaint(&self) -> String {
        said(&self.errors)
    }

    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.child.id()).unwrap());
        nix::sys::signal::kill(pid, signal).unwrap();
    }

    /// Its exit code, once it has ended.
    pub fn code(&mut self) -> Option<i32> {
        host::wait(&mut self.child).code()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn collect(mut stream: impl std::io::Read + Send + 'static) -> Said {
    let all = Said::default();
    let shared = Arc::clone(&all);
    std::thread::spawn(move || {
        let mut part = vec![0; 1 << 16];
        while let Ok(length @ 1..) = stream.read(&mut part) {
            shared.lock().unwrap().extend(&part[..length]);
        }
    });
    all
}

fn said(stream: &Said) -> String {
    String::from_utf8_lossy(&stream.lock().unwrap()).into_owned()
}

/// An emulated serial port takes each byte by itself, and takes its time on a busy machine.
pub fn until(what: &str, wanted: impl Fn() -> bool) {
    let end = Instant::now() + 3 * DEADLINE;
    while !wanted() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

/// Reads what is there on a socket until it has said this.
pub fn read_until(stream: &mut UnixStream, words: &str) {
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    let (mut all, mut byte) = (Vec::new(), [0]);
    while !String::from_utf8_lossy(&all).contains(words) {
        stream.read_exact(&mut byte).unwrap();
        all.push(byte[0]);
    }
}
