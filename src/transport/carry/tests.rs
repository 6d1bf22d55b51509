use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixStream};

use super::*;

type Item = (u32, Said);

/// Two pumps whose outboxes are each other's links, as over a stream that loses nothing.
async fn between(one: Socket, other: Socket, window: usize) -> (Ended, Ended) {
    let links = [Link::default(), Link::default()];
    let (first, mut from_first) = Outbox::<Item>::new();
    let (second, mut from_second) = Outbox::<Item>::new();
    let manner = Manner { window, patience: Some(Duration::from_secs(20)) };
    let relay = async |from: &mut mpsc::UnboundedReceiver<Item>, link: &Link| {
        while let Some((_, said)) = from.recv().await {
            match said {
                Said::Data(data, _room) => link.receive(&data).unwrap(),
                Said::Credit(credit) => link.grant(credit).unwrap(),
                Said::End => link.end().unwrap(),
                Said::Reset(_) => link.reset(),
            }
        }
    };
    let both = async {
        tokio::join!(carry(1, one, &links[0], &first, manner), carry(1, other, &links[1], &second, manner))
    };
    tokio::select! {
        ended = both => ended,
        _ = async { tokio::join!(relay(&mut from_first, &links[1]), relay(&mut from_second, &links[0])) } => {
            panic!("the outboxes live")
        }
    }
}

async fn tcp() -> (TcpStream, Socket) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (client, server) = tokio::join!(TcpStream::connect(address), listener.accept());
    (client.unwrap(), Socket::tcp(server.unwrap().0))
}

fn unix() -> (UnixStream, Socket) {
    let (one, other) = UnixStream::pair().unwrap();
    (one, Socket::Unix(other))
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length as u64).map(|at| (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
}

#[tokio::test]
async fn each_direction_ends_by_itself() {
    for window in [flow::INITIAL, 256 << 10] {
        let ((mut client, one), (mut target, other)) = (tcp().await, unix());
        let sent = pattern(3 << 20);
        let work = async {
            client.write_all(&sent).await.unwrap();
            client.shutdown().await.unwrap();
            let mut answer = Vec::new();
            client.read_to_end(&mut answer).await.unwrap();
            answer
        };
        let serve = async {
            let mut all = Vec::new();
            target.read_to_end(&mut all).await.unwrap();
            target.write_all(&all).await.unwrap();
            drop(target);
        };
        let (ended, answer, ()) = tokio::join!(between(one, other, window), work, serve);
        assert_eq!(ended, (Ended::Well, Ended::Well));
        assert!(answer == pattern(3 << 20));
    }
}

#[tokio::test]
async fn what_was_sent_before_a_reset_comes_before_it() {
    let ((mut client, one), (mut target, other)) = (tcp().await, tcp().await);
    let work = async {
        client.write_all(b"never read").await.unwrap();
        let (mut all, mut part) = (Vec::new(), [0; 777]);
        loop {
            match client.read(&mut part).await {
                Ok(0) => panic!("an end, and no reset, after {} bytes", all.len()),
                Ok(length) => all.extend_from_slice(&part[..length]),
                Err(error) => return (all, error.kind()),
            }
            tokio::task::yield_now().await;
        }
    };
    let serve = async {
        target.readable().await.unwrap();
        target.write_all(&pattern(1 << 20)).await.unwrap();
        // Until this end has acknowledged all of it, a reset would drop it.
        let target = Socket::tcp(target);
        arrived(&target).await;
        target.abort();
    };
    let (ended, (all, error), ()) = tokio::join!(between(one, other, flow::INITIAL), work, serve);
    assert_eq!((error, all.len()), (io::ErrorKind::ConnectionReset, 1 << 20));
    assert!(all == pattern(1 << 20));
    assert!(matches!(ended, (Ended::Reset, Ended::Broken(_))), "{ended:?}");
}

#[tokio::test]
async fn a_reset_after_an_end_is_told_though_nobody_reads() {
    let ((client, one), (mut target, other)) = (tcp().await, tcp().await);
    let serve = async {
        // More than all buffers on the way have room for, so that the other end waits for credit.
        let sent = target.write_all(&vec![1; 64 << 20]).await;
        sent.unwrap_err().kind()
    };
    let work = async {
        let mut client = client;
        client.shutdown().await.unwrap();
        client.readable().await.unwrap();
        client.set_zero_linger().unwrap();
        drop(client);
    };
    let (ended, error, ()) = tokio::join!(between(one, other, flow::INITIAL), serve, work);
    assert!(matches!(error, io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe), "{error:?}");
    assert!(matches!(ended, (Ended::Broken(_), Ended::Reset)), "{ended:?}");
}

#[tokio::test]
async fn parts_that_wait_are_bounded_whatever_credit_there_is() {
    let (mut peer, socket) = unix();
    let (outbox, mut said) = Outbox::<Item>::new();
    let link = Link::default();
    link.grant(1 << 20).unwrap();
    let manner = Manner { window: flow::INITIAL, patience: None };
    let writer = async {
        peer.write_all(&pattern(1 << 20)).await.unwrap();
        drop(peer);
    };
    let mut carried = pin!(carry(1, socket, &link, &outbox, manner));
    let mut writer = pin!(writer);
    for _ in 0..1000 {
        tokio::select! {
            biased;
            _ = &mut carried => panic!("it has not ended"),
            () = &mut writer => panic!("nobody reads that much"),
            () = tokio::task::yield_now() => {}
        }
    }
    assert!(said.len() <= WAITING, "{}", said.len());
    let drain = async {
        let mut all = Vec::new();
        loop {
            match said.recv().await.unwrap().1 {
                Said::Data(data, _) => all.extend_from_slice(&data),
                Said::End => return all,
                other => panic!("{other:?}"),
            }
        }
    };
    let all = tokio::select! {
        all = drain => all,
        _ = async { tokio::join!(carried, writer) } => panic!("the other direction goes on"),
    };
    assert!(all == pattern(1 << 20));
}
