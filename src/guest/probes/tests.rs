use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::judge::tests::check;
use super::*;

const LONG: Duration = Duration::from_secs(10);

/// Probes of 127.0.0.1, made until the runtime of the test ends.
#[allow(clippy::disallowed_methods)]
fn started() -> Probes {
    let (probes, owner) = at(Box::new(|family| match family {
        Family::V4 => Ok([127, 0, 0, 1].into()),
        Family::V6 => Err("this node has no IPv6 address".to_owned()),
    }));
    tokio::spawn(owner.run());
    probes
}

fn quick(id: &str, port: u16) -> Check {
    let (period, timeout) = (Duration::from_millis(20), Duration::from_millis(20));
    Check { period, timeout, ..check(id, port) }
}

fn wanted(owner: u64, generation: u64, checks: &[&Check]) -> Wanted {
    let checks = checks.iter().map(|&check| check.clone()).collect();
    Wanted { owner, generation, report_every: None, checks }
}

async fn until(probes: &Probes, holds: impl FnMut(&Standing) -> bool) -> Standing {
    let mut standing = probes.standing();
    let found = tokio::time::timeout(LONG, standing.wait_for(holds)).await.expect("in time").unwrap();
    found.clone()
}

async fn listening() -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

#[tokio::test]
async fn ports_come_and_go_and_what_stays_the_same_goes_on() {
    let probes = started();
    let (listener, port) = listening().await;
    let (a, b) = (quick("a", port), Check { family: Family::V6, ..quick("b", port) });
    let first = probes.set(wanted(1, 1, &[&a, &b]), std::future::pending()).await.unwrap();
    assert!(first.iter().all(|outcome| !outcome.healthy && outcome.problem.contains("not been checked")));
    assert_eq!(first.iter().map(|one| one.id.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    let seen =
        until(&probes, |now| now.outcomes[0].healthy && now.outcomes[1].problem.contains("IPv6")).await;
    assert!(seen.generation == 1 && !seen.outcomes[1].healthy);

    // In a different order, with one new check, and later one with a changed field.
    let (c, other) = (quick("c", port), Check { failure_threshold: 2, ..a.clone() });
    let answer = probes.set(wanted(1, 2, &[&c, &a]), std::future::pending()).await.unwrap();
    assert_eq!((answer[0].healthy, answer[1].healthy), (false, true));
    until(&probes, |now| now.outcomes[0].healthy).await;
    let answer = probes.set(wanted(1, 3, &[&other, &c]), std::future::pending()).await.unwrap();
    assert_eq!((answer[0].healthy, answer[1].healthy), (false, true));
    until(&probes, |now| now.outcomes[0].healthy).await;

    drop(listener);
    let gone = until(&probes, |now| now.outcomes.iter().all(|outcome| !outcome.healthy)).await;
    assert_eq!(gone.outcomes[0].problem, format!("connection to 127.0.0.1:{port} refused"));
}

#[tokio::test]
async fn checks_end_with_their_owner_and_one_that_has_ended_gets_none() {
    let probes = started();
    let (_listener, port) = listening().await;
    let check = quick("a", port);
    let (first, second) = (CancellationToken::new(), CancellationToken::new());
    probes.set(wanted(1, 7, &[&check]), first.clone().cancelled_owned()).await.unwrap();
    until(&probes, |now| now.outcomes[0].healthy).await;
    // A new owner does not take over the results of the previous one.
    let answer = probes.set(wanted(2, 1, &[&check]), second.clone().cancelled_owned()).await.unwrap();
    assert!(!answer[0].healthy);
    first.cancel();
    let late = probes.set(wanted(1, 8, &[]), first.cancelled_owned()).await;
    assert_eq!(late, Err(Refusal::Ended));
    let seen = until(&probes, |now| now.outcomes[0].healthy).await;
    assert_eq!((seen.owner, seen.generation), (2, 1));
    second.cancel();
    assert_eq!(until(&probes, |now| now.outcomes.is_empty()).await, Standing::default());
}

#[tokio::test]
async fn one_that_hangs_keeps_no_other_waiting() {
    // A listener that never accepts: once its queue is full, connections are not answered.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let full = socket.listen(0).unwrap();
    let hangs = full.local_addr().unwrap();
    let mut held = Vec::new();
    while let Ok(Ok(stream)) =
        tokio::time::timeout(Duration::from_millis(300), tokio::net::TcpStream::connect(hangs)).await
    {
        held.push(stream);
    }
    let probes = started();
    let (_listener, port) = listening().await;
    let slow = |place: usize| {
        let (period, timeout) = (Duration::from_secs(3600), Duration::from_secs(3600));
        Check { period, timeout, ..check(&format!("slow {place}"), hangs.port()) }
    };
    let mut checks: Vec<_> = (0..255).map(slow).collect();
    checks.push(quick("last", port));
    let all = Wanted { checks: checks.clone(), ..wanted(1, 1, &[]) };
    probes.set(all, std::future::pending()).await.unwrap();
    let seen = until(&probes, |now| now.outcomes[255].healthy).await;
    assert!(seen.outcomes[..255].iter().all(|outcome| outcome.problem.contains("not been checked")));
    // Setting new checks does not wait for the old ones to end.
    let short = Check { timeout: Duration::from_millis(50), ..checks[0].clone() };
    probes.set(wanted(1, 2, &[&short]), std::future::pending()).await.unwrap();
    let seen = until(&probes, |now| now.outcomes[0].problem.contains("not answered")).await;
    assert_eq!(seen.outcomes[0].problem, format!("connection to {hangs} is not answered within 0.05 s"));
}

#[test]
fn first_tries_are_spread_and_nothing_is_due_without_checks() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (_probes, mut owner) = at(Box::new(|_| Err("nowhere".to_owned())));
        assert_eq!(owner.due(), None);
        let checks: Vec<_> = (0..256).map(|place| check(&place.to_string(), 1)).collect();
        let (answer, _answered) = oneshot::channel();
        let wanted = Wanted { checks, ..wanted(1, 1, &[]) };
        owner.take(Request { wanted, ended: Box::pin(std::future::pending()), answer });
        let dues: Vec<_> = owner.probes.iter().map(|probe| probe.due).collect();
        assert!(dues.windows(2).all(|pair| pair[1] - pair[0] == APART));
        // Each check keeps its own period, however late the previous try was.
        tokio::time::sleep(Duration::from_millis(30)).await;
        owner.begin();
        assert_eq!(owner.probes[0].due, dues[0] + Duration::from_secs(5));
        assert!(owner.probes[255].trying.is_none());
        let late = Instant::now();
        owner.probes[255].due = late - Duration::from_secs(60);
        owner.begin();
        assert!(owner.probes[255].due >= late + Duration::from_secs(5));
        owner.end();
        assert_eq!(owner.due(), None);
    });
}
