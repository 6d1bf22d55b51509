//! A host, its guests and somebody outside, each in a network namespace of its own, with real traffic between them.
//!
//! ```text
//!  outside ext0 198.51.100.2 ── host ext0 198.51.100.1
//!                                host br0 10.77.0.254 ── node eth0 10.77.0.<number>
//! ```
//!
//! The host's is the test's own; the others are those of threads, and end with them.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::time::Duration;

use nix::sched::{CloneFlags, unshare};

/// How long a packet may be on its way, on a machine that is busy.
const PATIENCE: Duration = Duration::from_secs(5);

type Work = Box<dyn FnOnce() + Send>;

/// A network namespace.
pub struct Namespace {
    thread: i32,
    work: Sender<Work>,
}

impl Namespace {
    pub fn new() -> Self {
        let (work, todo) = mpsc::channel::<Work>();
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            tell.send(nix::unistd::gettid().as_raw()).unwrap();
            for work in todo {
                work();
            }
        });
        let namespace = Self { thread: told.recv().unwrap(), work };
        namespace.sh("ip link set lo up");
        namespace
    }

    /// A thread of this process that is in it, by which ip(8) knows it.
    pub fn thread(&self) -> i32 {
        self.thread
    }

    /// Does something in it.
    pub fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let (tell, told) = mpsc::channel();
        self.work.send(Box::new(move || drop(tell.send(work())))).unwrap();
        told.recv().expect("what is done in a namespace succeeds")
    }

    pub fn sh(&self, command: &str) {
        let command = command.to_owned();
        self.run(move || sh(&command));
    }

    /// Connects, says something, and returns what is answered.
    pub fn ask(&self, at: SocketAddr) -> std::io::Result<String> {
        self.run(move || ask(at))
    }

    pub fn ask_udp(&self, at: SocketAddr) -> std::io::Result<String> {
        self.run(move || {
            let any: SocketAddr = if at.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }.parse().unwrap();
            let socket = UdpSocket::bind(any)?;
            socket.set_read_timeout(Some(PATIENCE))?;
            socket.connect(at)?;
            socket.send(b"who")?;
            let mut answer = [0; 256];
            let length = socket.recv(&mut answer)?;
            Ok(String::from_utf8_lossy(&answer[..length]).into_owned())
        })
    }
}

pub fn ask(at: SocketAddr) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&at, PATIENCE)?;
    say(&mut stream)
}

/// Asks on a connection that there is.
pub fn say(stream: &mut TcpStream) -> std::io::Result<String> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(b"?")?;
    let mut answer = [0; 256];
    let length = stream.read(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer[..length]).into_owned())
}

pub fn sh(command: &str) {
    let output = Command::new("sh").args(["-ec", command]).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}

pub fn output(command: &str) -> String {
    let output = Command::new("sh").args(["-ec", command]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// All of it; made in the test's own namespace.
pub struct Wires {
    pub outside: Namespace,
    pub nodes: Vec<Node>,
}

/// A node, which answers at ports 30080 (TCP) and 30053 (UDP) with its name and who asks, and says at 32000 whether it has
/// endpoints.
pub struct Node {
    pub namespace: Namespace,
    pub has_endpoints: Arc<AtomicBool>,
}

impl Wires {
    pub fn new(names: &[(&str, u8)]) -> Self {
        sh("ip link set lo up; ip link add br0 type bridge; ip link set br0 up
            ip addr add 10.77.0.254/24 dev br0; ip addr add fd00:77::fe/64 dev br0 nodad
            for call in /proc/sys/net/bridge/bridge-nf-call-ip*tables; do [ ! -e $call ] || echo 0 > $call; done
             echo 1 > /proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/net/ipv6/conf/all/forwarding");
        let outside = Namespace::new();
        sh(&format!(
            "ip link add ext0 type veth peer name ext0 netns {}; ip link set ext0 up
             ip addr add 198.51.100.1/24 dev ext0; ip addr add 2001:db8:1::1/64 dev ext0 nodad",
            outside.thread()
        ));
        outside.sh("ip link set ext0 up; ip addr add 198.51.100.2/24 dev ext0
                    ip addr add 2001:db8:1::2/64 dev ext0 nodad
                    ip route add default via 198.51.100.1; ip route add default via 2001:db8:1::1");
        let nodes = names.iter().map(|(name, number)| Node::new(name, *number)).collect();
        Self { outside, nodes }
    }
}

impl Node {
    fn new(name: &str, number: u8) -> Self {
        let namespace = Namespace::new();
        sh(&format!(
            "ip link add n{number} type veth peer name eth0 netns {}; ip link set n{number} master br0 up",
            namespace.thread()
        ));
        namespace.sh(&format!(
            "ip link set eth0 address 52:54:00:00:00:{number:02x} up; ip addr add 10.77.0.{number}/24 dev eth0; ip addr add fd00:77::{number}/64 dev eth0 nodad
             ip route add default via 10.77.0.254; ip route add default via fd00:77::fe"
        ));
        let has_endpoints = Arc::new(AtomicBool::new(true));
        let (told, answers) = (name.to_owned(), Arc::clone(&has_endpoints));
        namespace.run(move || {
            let name = told.clone();
            let tcp = TcpListener::bind("[::]:30080").unwrap();
            std::thread::spawn(move || {
                for stream in tcp.incoming() {
                    let (mut stream, name) = (stream.unwrap(), name.clone());
                    std::thread::spawn(move || {
                        let peer = plain(stream.peer_addr().unwrap());
                        let mut asked = [0; 16];
                        while stream.read(&mut asked).is_ok_and(|length| length > 0) {
                            stream.write_all(format!("{name} {peer}").as_bytes()).unwrap();
                        }
                    });
                }
            });
            let udp = UdpSocket::bind("[::]:30053").unwrap();
            std::thread::spawn(move || {
                let mut asked = [0; 16];
                while let Ok((_, peer)) = udp.recv_from(&mut asked) {
                    udp.send_to(format!("{told} {}", plain(peer)).as_bytes(), peer).unwrap();
                }
            });
            let health = TcpListener::bind("[::]:32000").unwrap();
            std::thread::spawn(move || {
                for stream in health.incoming() {
                    let (mut stream, mut asked) = (stream.unwrap(), [0; 1024]);
                    let _ = stream.read(&mut asked);
                    let status =
                        if answers.load(Ordering::SeqCst) { "200 OK" } else { "503 Service Unavailable" };
                    let _ = write!(stream, "HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n");
                }
            });
        });
        Self { namespace, has_endpoints }
    }
}

/// Who asks, as an address of its own family.
fn plain(peer: SocketAddr) -> IpAddr {
    peer.ip().to_canonical()
}
