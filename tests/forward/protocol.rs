//! What an agent says to a host half that does not keep to the protocol.

use std::path::PathBuf;
use std::sync::mpsc::channel;

use guestlet::transport::http2;
use guestlet::wire::proto::v1::forward_client::ForwardClient;
use guestlet::wire::proto::v1::from_target::Message as Told;
use guestlet::wire::proto::v1::to_target::Message;
use guestlet::wire::proto::v1::{
    ConnectTarget, ForwardCredit, ForwardData, ForwardReset, FromTarget, OpenForward, RefusedBecause,
    ToTarget,
};
use tokio::net::UnixStream;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Code, Status, Streaming};

use crate::forwarding::lab_of;
use crate::host::DEADLINE;
use crate::servers::{echo, tcp};

/// How a call is ended, and a way of breaking the rules for it.
type Break = (&'static str, fn(&Call, &str));

/// A call of an agent.
struct Call {
    say: UnboundedSender<ToTarget>,
    answers: Streaming<FromTarget>,
}

impl Call {
    /// Opens one, with this first message.
    async fn begin(socket: PathBuf, first: Message) -> Result<Self, Status> {
        let stream = UnixStream::connect(socket).await.unwrap();
        let (client, mut connection) = http2::connect(stream).await.unwrap();
        tokio::spawn(async move { drop(connection.ended().await) });
        let (say, said) = unbounded_channel();
        say.send(ToTarget { message: Some(first) }).unwrap();
        let mut client = ForwardClient::with_origin(client, http::Uri::from_static(http2::ORIGIN));
        let answers = client.forward_connections(UnboundedReceiverStream::new(said)).await?.into_inner();
        Ok(Self { say, answers })
    }

    async fn open(socket: PathBuf) -> Self {
        let mut call = Self::begin(socket, Message::Open(OpenForward::default())).await.unwrap();
        assert!(matches!(call.next().await, Ok(Told::Opened(_))));
        call
    }

    fn say(&self, message: Message) {
        self.say.send(ToTarget { message: Some(message) }).unwrap();
    }

    fn connect(&self, number: u32, target: &str) {
        self.say(Message::Connect(ConnectTarget { number, target: target.to_owned() }));
    }

    fn data(&self, number: u32, length: usize) {
        self.say(Message::Data(ForwardData { number, data: vec![7; length].into() }));
    }

    /// The next answer; an error ends the call.
    async fn next(&mut self) -> Result<Told, Status> {
        let answer = tokio::time::timeout(DEADLINE, self.answers.message()).await.expect("it answers");
        Ok(answer?.expect("it has not ended").message.unwrap())
    }

    /// Answers until one that is wanted, or the error that ends the call.
    async fn until(&mut self, wanted: impl Fn(&Told) -> bool) -> Result<Told, Status> {
        loop {
            let told = self.next().await?;
            if wanted(&told) {
                return Ok(told);
            }
        }
    }

    /// The error by which the call ends.
    async fn error(&mut self) -> (Code, String) {
        let status = self.until(|_| false).await.unwrap_err();
        (status.code(), status.message().to_owned())
    }
}

#[tokio::test]
async fn whoever_breaks_the_rules_loses_the_call_and_is_told_which() {
    let port = tcp(echo);
    let lab = lab_of(&[port]);
    let socket = lab.file("web/control.sock");
    let target = port.to_string();

    let first = Call::begin(socket.clone(), Message::End(1)).await.err().unwrap();
    assert_eq!((first.code(), first.message()), (Code::InvalidArgument, "the first message must be open"));

    let breaks: [Break; 9] = [
        ("connection 1: more data than the credit allows", |call, _| {
            // Nobody takes what comes back, so that the echo takes no more than the kernel has room for.
            (0..2500).for_each(|_| call.data(1, 16 << 10));
        }),
        ("connection 1: more than 16 KiB of data at once", |call, _| call.data(1, 40 << 10)),
        ("connection 1: data after the end", |call, _| {
            call.say(Message::End(1));
            call.data(1, 1);
        }),
        ("connection 1: data after the end", |call, _| {
            call.say(Message::End(1));
            call.say(Message::End(1));
        }),
        ("connection 1: more credit than 1 GiB", |call, _| {
            call.say(Message::Credit(ForwardCredit { number: 1, bytes: 1 << 30 }));
        }),
        ("connection 2: it was not begun", |call, _| call.data(2, 1)),
        ("connection 0: it was not begun", |call, _| call.say(Message::End(0))),
        ("connection 1: its number is not greater than those before", |call, target| call.connect(1, target)),
        ("a call is opened once", |call, _| call.say(Message::Open(OpenForward::default()))),
    ];
    for (words, break_it) in breaks {
        let mut call = Call::open(socket.clone()).await;
        call.connect(1, &target);
        assert!(matches!(call.next().await, Ok(Told::Connected(1))));
        break_it(&call, &target);
        assert_eq!(call.error().await, (Code::InvalidArgument, words.to_owned()));
    }
}

#[tokio::test]
async fn what_is_said_of_a_connection_that_has_ended_is_ignored() {
    let port = tcp(echo);
    let lab = lab_of(&[port]);
    let mut call = Call::open(lab.file("web/control.sock")).await;
    call.connect(3, &port.to_string());
    call.data(3, 5);
    call.say(Message::End(3));
    // Before it is connected, too, data may come.
    call.until(|told| matches!(told, Told::End(3))).await.unwrap();
    call.connect(7, "1");
    let refused = call.until(|told| matches!(told, Told::Refused(_))).await.unwrap();
    let Told::Refused(refused) = refused else { unreachable!() };
    assert_eq!((refused.number, refused.because()), (7, RefusedBecause::Denied));
    for number in [3, 5, 7] {
        call.data(number, 1);
        call.say(Message::End(number));
        call.say(Message::Credit(ForwardCredit { number, bytes: 1 }));
        call.say(Message::Reset(ForwardReset { number, reason: String::new() }));
    }
    for (number, target) in [(8, "no target"), (9, "db:80"), (10, &"9".repeat(60_000))] {
        call.connect(number, target);
        let refused = call.until(|told| matches!(told, Told::Refused(_))).await.unwrap();
        let Told::Refused(refused) = refused else { unreachable!() };
        assert_eq!((refused.number, refused.because()), (number, RefusedBecause::NoTarget), "{refused:?}");
        assert!(refused.reason.len() < 1000);
    }
}

#[tokio::test]
async fn a_client_that_takes_nothing_is_sent_its_credit_and_no_more() {
    let flood = tcp(|mut client: std::net::TcpStream| {
        let _ = std::io::Write::write_all(&mut client, &vec![1; 8 << 20]);
    });
    let port = tcp(echo);
    let lab = lab_of(&[flood, port]);
    let mut call = Call::open(lab.file("web/control.sock")).await;
    call.connect(1, &flood.to_string());
    call.connect(2, &port.to_string());
    let mut came = 0;
    while came < 32 << 10 {
        if let Told::Data(data) = call.until(|told| matches!(told, Told::Data(_))).await.unwrap() {
            assert_eq!(data.number, 1);
            came += data.data.len();
        }
    }
    assert_eq!(came, 32 << 10);
    // The other one goes on, and nothing more of the first comes before what it is asked for.
    for _ in 0..20 {
        call.data(2, 100);
        let mut back = 0;
        while back < 100 {
            if let Told::Data(data) = call.until(|told| matches!(told, Told::Data(_))).await.unwrap() {
                assert_eq!(data.number, 2);
                back += data.data.len();
            }
        }
    }
    call.say(Message::Credit(ForwardCredit { number: 1, bytes: 10 }));
    let Told::Data(data) = call.until(|told| matches!(told, Told::Data(_))).await.unwrap() else {
        unreachable!()
    };
    assert_eq!((data.number, data.data.len()), (1, 10));
}

#[tokio::test]
async fn a_connection_that_is_broken_is_broken_at_its_target_after_what_was_sent() {
    let (sender, ended) = channel();
    let port = tcp(move |mut client: std::net::TcpStream| {
        let mut all = Vec::new();
        let how = std::io::Read::read_to_end(&mut client, &mut all);
        sender.send((all.len(), how.map_err(|error| error.kind()))).unwrap();
    });
    let lab = lab_of(&[port]);
    let mut call = Call::open(lab.file("web/control.sock")).await;
    call.connect(1, &port.to_string());
    call.data(1, 10_000);
    call.say(Message::Reset(ForwardReset { number: 1, reason: "x".to_owned() }));
    let how = tokio::task::spawn_blocking(move || ended.recv_timeout(DEADLINE).unwrap());
    let how = tokio::select! {
        how = how => how.unwrap(),
        // What is said goes out while it is listened to.
        never = async { loop { call.until(|_| false).await.unwrap(); } } => never,
    };
    assert_eq!(how, (10_000, Err(std::io::ErrorKind::ConnectionReset)));
    crate::lab::until("it is written down", || {
        lab.agent_log().contains("broken by the client: 10000 bytes to the target")
    });
}
