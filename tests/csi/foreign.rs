//! gRPC clients that were not written for this server: what they say as the authority, and what is no gRPC at all.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::agent::PATIENCE;
use crate::kubelet::register;
use crate::lab::{DRIVER, Lab, NODE, is_outside, wait};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const PROTOCOL_ERROR: u32 = 1;
/// How the path of kubelet's registration socket comes from grpc-go.
const PERCENT: &str = "%2Fvar%2Flib%2Fkubelet%2Fplugins_registry%2Fdriver.harvesterhci.io-reg.sock";

fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let len = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&len[1..], &[kind, flags, 0, 0, 0, stream], payload].concat()
}

/// A string of a header block, not compressed.
fn string(text: &[u8]) -> Vec<u8> {
    assert!(text.len() < 127);
    [&[u8::try_from(text.len()).unwrap()], text].concat()
}

/// The header block of a call, with these bytes for the authority.
fn block(path: &str, authority: &[u8]) -> Vec<u8> {
    let mut block = b"\x83\x86".to_vec();
    block.extend_from_slice(authority);
    block.push(0x04);
    block.extend(string(path.as_bytes()));
    block.extend_from_slice(b"\x0f\x10");
    block.extend(string(b"application/grpc"));
    block.push(0);
    block.extend(string(b"te"));
    block.extend(string(b"trailers"));
    block
}

/// What came of a call: the bytes of its answer, or the error that refused it.
type Outcome = Result<Vec<u8>, u32>;

/// Makes one call of a connection's own; its request is in these frames.
fn call(socket: &Path, request: &[u8]) -> Outcome {
    let mut connection = Connection::dial(socket);
    connection.send(request, 1);
    connection.answer(1)
}

struct Connection(UnixStream);

impl Connection {
    fn dial(socket: &Path) -> Self {
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(&[PREFACE, &frame(SETTINGS, 0, 0, &[])].concat()).unwrap();
        Self(stream)
    }

    /// Sends the frames of a request's head, and its body: an empty message.
    fn send(&mut self, head: &[u8], stream: u8) {
        let request = [head, &frame(DATA, END_STREAM, stream, &[0; 5])].concat();
        // One that is refused early is not read to its end.
        let _ = self.0.write_all(&request);
    }

    fn answer(&mut self, stream: u8) -> Outcome {
        let mut body = Vec::new();
        loop {
            let mut head = [0; 9];
            if self.0.read_exact(&mut head).is_err() {
                return Err(0);
            }
            let [a, b, c, kind, flags, .., of] = head;
            let mut payload = vec![0; usize::try_from(u32::from_be_bytes([0, a, b, c])).unwrap()];
            self.0.read_exact(&mut payload).unwrap();
            match kind {
                DATA if of == stream => body.extend(payload),
                HEADERS if of == stream && flags & END_STREAM != 0 => return Ok(body),
                RST_STREAM if of == stream => {
                    return Err(u32::from_be_bytes(*payload.first_chunk().unwrap()));
                }
                GOAWAY => return Err(u32::from_be_bytes(*payload[4..].first_chunk().unwrap())),
                _ => {}
            }
        }
    }
}

/// The sockets, each with a call that it serves.
fn sockets(lab: &Lab) -> [(PathBuf, &'static str); 3] {
    [
        (lab.registration(), "/pluginregistration.Registration/GetInfo"),
        (lab.socket(), "/csi.v1.Identity/GetPluginInfo"),
        (lab.controller(), "/csi.v1.Identity/GetPluginInfo"),
    ]
}

/// An answer that names the driver.
#[track_caller]
fn is_answer(outcome: &Outcome, what: &str) {
    let answer = outcome.as_ref().unwrap_or_else(|code| panic!("{what}: refused with the error {code}"));
    assert!(answer.windows(DRIVER.len()).any(|part| part == DRIVER.as_bytes()), "{what}: {answer:?}");
}

/// `:authority`, by its name in the static table, with this value; indexed as `representation` says.
fn literal(representation: u8, value: &str) -> Vec<u8> {
    [vec![representation | 1], string(value.as_bytes())].concat()
}

#[test]
fn any_authority_is_served() {
    if is_outside() {
        return;
    }
    wait(async {
        let lab = Lab::new().await;
        let raw = lab.registration().display().to_string();
        for (socket, path) in sockets(&lab) {
            for authority in [
                vec![],
                b"\x81".to_vec(),
                literal(0x00, ""),
                literal(0x40, ""),
                literal(0x00, "localhost"),
                literal(0x40, PERCENT),
                literal(0x10, &raw),
                literal(0x00, "a b\x7f\\<>"),
                [b"\x40".to_vec(), string(b":authority"), string(PERCENT.as_bytes())].concat(),
                // "www.example.com", in the Huffman code (RFC 7541, C.4.1).
                b"\x41\x8c\xf1\xe3\xc2\xe5\xf2\x3a\x6b\xa0\xab\x90\xf4\xff".to_vec(),
            ] {
                let request = frame(HEADERS, END_HEADERS, 1, &block(path, &authority));
                let what = format!("{}, {}", socket.display(), String::from_utf8_lossy(&authority));
                is_answer(&call(&socket, &request), &what);
            }
        }
        assert!(!lab.log().contains("is refused"), "{}", lab.log());
    });
}

/// A client that has not heard yet that nothing is to be remembered refers to what it said before.
#[test]
fn a_block_in_pieces_and_what_a_client_refers_to_later() {
    if is_outside() {
        return;
    }
    wait(async {
        let lab = Lab::new().await;
        let [(socket, path), ..] = sockets(&lab);
        let first = block(path, &literal(0x40, PERCENT));
        // With padding and a priority, in three frames.
        let padded = [&[3], [0, 0, 0, 0, 15].as_slice(), &first[..4], &[0; 3]].concat();
        let head = [
            frame(HEADERS, 0x28, 1, &padded),
            frame(CONTINUATION, 0, 1, &first[4..30]),
            frame(CONTINUATION, END_HEADERS, 1, &first[30..]),
        ]
        .concat();
        let mut connection = Connection::dial(&socket);
        connection.send(&head, 1);
        is_answer(&connection.answer(1), "in pieces");
        // The newest entry of the table, which lasts until this client says that it has read the server's settings.
        connection.send(&frame(HEADERS, END_HEADERS, 3, &block(path, b"\xbe")), 3);
        is_answer(&connection.answer(3), "by its index");
    });
}

/// What is no request is refused and logged once, and nobody else is disturbed.
#[test]
fn what_is_no_request_is_refused_and_told_once() {
    if is_outside() {
        return;
    }
    wait(async {
        let lab = Lab::new().await;
        let [(socket, path), ..] = sockets(&lab);
        let mut quiet = Connection::dial(&socket);
        for _ in 0..2 {
            for broken in
                [b"\x83\x86\x41\x7fcut".as_slice(), b"\x83\x86\xff\xff\xff\xff\xff\x7f", b"\x83\xc0"]
            {
                let refused = call(&socket, &frame(HEADERS, END_HEADERS, 1, broken));
                assert_eq!(refused, Err(PROTOCOL_ERROR), "{broken:x?}");
            }
            for words in
                [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".as_slice(), b"\x16\x03\x01\x02\x00\x01\x00"]
            {
                let mut stream = UnixStream::connect(&socket).unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                stream.write_all(words).unwrap();
                stream.shutdown(Shutdown::Write).unwrap();
                // Until it is closed, at once.
                let _ = stream.read_to_end(&mut Vec::new());
            }
            // An authority of 100 KB, in as many frames as that takes.
            let long = [b"\x01\x7f\xa1\x8c\x06".as_slice(), &vec![b'/'; 100_000]].concat();
            let mut frames = Vec::new();
            for (at, piece) in block(path, &long).chunks(16_000).enumerate() {
                frames.extend(frame(if at == 0 { HEADERS } else { CONTINUATION }, 0, 1, piece));
            }
            assert!(call(&socket, &frames).is_err());
        }
        for why in ["PROTOCOL_ERROR", "it speaks HTTP/1", "it speaks TLS"] {
            let log = lab.log();
            let told = log.lines().filter(|line| line.contains("is refused") && line.contains(why)).count();
            assert_eq!(told, 1, "{why}: {log}");
        }
        quiet.send(&frame(HEADERS, END_HEADERS, 1, &block(path, &literal(0, "localhost"))), 1);
        is_answer(&quiet.answer(1), "a client that was there");
        assert_eq!(register(&socket).await.name, DRIVER);
    });
}

/// Python's client, which is that of C++ and others, too.
#[test]
fn a_client_of_another_kind() {
    if is_outside() {
        return;
    }
    wait(async {
        let lab = Lab::new().await;
        for (socket, path) in sockets(&lab) {
            for authority in [None, Some(PERCENT), Some("localhost")] {
                let script = "import grpc, sys\n\
                    options = [('grpc.default_authority', name) for name in sys.argv[3:]]\n\
                    channel = grpc.insecure_channel('unix:' + sys.argv[1], options)\n\
                    call = channel.unary_unary(sys.argv[2])\n\
                    for _ in range(3): answer = call(b'', timeout=20)\n\
                    sys.stdout.buffer.write(answer)";
                let mut python = Command::new("/usr/bin/python3");
                let output =
                    python.args(["-c", script]).arg(&socket).arg(path).args(authority).output().unwrap();
                let words = String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success(), "{authority:?}: {words}");
                is_answer(&Ok(output.stdout), "python");
            }
        }
    });
}

/// What a call of grpc-go's gives; the refusal in words.
fn grpc_go(socket: &Path, method: &str, name: &str) -> Result<Vec<u8>, String> {
    let client = std::env::var_os("GRPC_GO_CLIENT");
    let client =
        client.expect("GRPC_GO_CLIENT must name the client that make setup builds; make test sets it");
    let output = Command::new(client).arg(socket).args([method, name]).output().unwrap();
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(output.stdout) } else { Err(words) }
}

/// The client that kubelet and the sidecars are.
#[test]
fn a_client_of_kubelets_kind() {
    if is_outside() {
        return;
    }
    wait(async {
        let mut lab = Lab::new().await;
        for (socket, path) in sockets(&lab) {
            for name in ["path", "escaped", "localhost", "unix:/a b"] {
                let answer = grpc_go(&socket, path, name).unwrap_or_else(|words| panic!("{name}: {words}"));
                is_answer(&Ok(answer), name);
            }
        }
        // As kubelet does it, whose word is in the log then.
        grpc_go(&lab.registration(), "/pluginregistration.Registration/NotifyRegistrationStatus", "path")
            .unwrap();
        let info = grpc_go(&lab.socket(), "/csi.v1.Node/NodeGetInfo", "path").unwrap();
        assert!(info.windows(NODE.len()).any(|part| part == NODE.as_bytes()), "{info:?}");
        // What is refused it is told as such.
        let asked = |socket: &Path, method| grpc_go(socket, method, "path").unwrap_err();
        let words = asked(&lab.socket(), "/csi.v1.Node/NodeStageVolume");
        assert!(words.starts_with("InvalidArgument: "), "{words}");
        let words = asked(&lab.socket(), "/csi.v1.Controller/ListVolumes");
        assert!(words.starts_with("Unimplemented: "), "{words}");
        lab.leave();
        let words = asked(&lab.controller(), "/csi.v1.Controller/ListVolumes");
        assert!(words.starts_with("Unavailable: cannot call the host half"), "{words}");
        assert!(!lab.log().contains("is refused"), "{}", lab.log());
    });
}
