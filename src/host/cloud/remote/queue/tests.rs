use tokio::sync::oneshot;

use super::super::super::wanted::{Port, Protocol};
use super::super::object::tests::wanted;
use super::*;

fn service(name: &str, uid: &str) -> Service {
    Service { namespace: "shop".into(), name: name.into(), uid: uid.into() }
}

fn own(name: &str) -> Job {
    Job::ensure(service(name, &format!("u-{name}")), Box::new(wanted()), None)
}

fn sharing(name: &str, primary: &str) -> Job {
    let share = Some(service(primary, &format!("u-{primary}")));
    Job::ensure(service(name, &format!("u-{name}")), Box::new(Wanted { share, ..wanted() }), None)
}

fn begin(queue: &mut Queue) -> Option<Job> {
    let none = Balancers::default();
    queue.begin(|job| job.claims(&none, "ns/dev"))
}

/// Begins all jobs that can begin, and returns them.
fn begun(queue: &mut Queue) -> Vec<Job> {
    std::iter::from_fn(|| begin(queue)).collect()
}

fn names(jobs: &[Job]) -> Vec<&str> {
    jobs.iter().map(|job| job.service.name.as_str()).collect()
}

#[test]
fn of_what_has_something_in_common_the_first_is_done_first() {
    let mut queue = Queue::default();
    for job in [own("web"), sharing("db", "web"), own("db"), own("api"), own("web")] {
        queue.push(job);
    }
    let mut jobs = begun(&mut queue);
    assert_eq!(names(&jobs), ["web", "api"], "db waits for web, and what comes later of db for that");
    queue.end(&mut jobs[1]);
    assert!(begin(&mut queue).is_none());
    queue.end(&mut jobs[0]);
    let mut jobs = begun(&mut queue);
    assert_eq!(names(&jobs), ["db"]);
    queue.end(&mut jobs[0]);
    let jobs = begun(&mut queue);
    assert_eq!(names(&jobs), ["db", "web"]);
    assert_eq!(jobs[0].claims.len(), 2, "it shares nothing any more");
}

/// A Service that is created anew has the name of the earlier one, and may request its address.
#[test]
fn a_name_and_an_address_are_given_back_before_they_are_taken_again() {
    let (mut queue, (reply, _answer)) = (Queue::default(), oneshot::channel());
    queue.push(Job::release(service("web", "u-1"), reply));
    queue.push(Job::ensure(service("web", "u-2"), Box::new(wanted()), None));
    let asking = |name: &str, last: u8| {
        let addresses = vec![IpAddr::from([192, 0, 2, last])];
        Job::ensure(service(name, name), Box::new(Wanted { addresses, ..wanted() }), None)
    };
    for job in [asking("a", 7), asking("b", 7), asking("c", 8)] {
        queue.push(job);
    }
    let mut jobs = begun(&mut queue);
    assert_eq!(names(&jobs), ["web", "a", "c"]);
    for job in &mut jobs {
        queue.end(job);
    }
    let jobs = begun(&mut queue);
    assert_eq!(names(&jobs), ["web", "b"]);
    assert_eq!(jobs[0].service.uid, "u-2");
}

#[test]
fn no_more_are_under_way_than_may_be() {
    let mut queue = Queue::default();
    for number in 0..3 * AT_ONCE {
        queue.push(own(&format!("s{number}")));
    }
    let mut jobs = begun(&mut queue);
    assert_eq!((jobs.len(), queue.beside()), (AT_ONCE, AT_ONCE - 1));
    queue.end(&mut jobs[3]);
    assert_eq!(names(&begun(&mut queue)), [format!("s{AT_ONCE}")]);
}

#[test]
fn what_is_put_back_begins_alone_and_before_the_rest() {
    let mut queue = Queue::default();
    for name in ["a", "b", "c"] {
        queue.push(own(name));
    }
    let [mut a, mut b, mut c] = <[Job; 3]>::try_from(begun(&mut queue)).ok().unwrap();
    queue.push(own("d"));
    queue.end(&mut a);
    queue.put_back(b);
    assert!(begin(&mut queue).is_none(), "c is under way");
    queue.end(&mut c);
    b = begin(&mut queue).unwrap();
    assert_eq!((b.service.name.as_str(), queue.beside()), ("b", 0));
    // The job that was put back is under way, so the next one may begin.
    assert_eq!(names(&begun(&mut queue)), ["d"]);
}

/// Removal by a person names only the key, from which the Service and its claims are found.
#[test]
fn what_a_person_gives_back_is_in_order_with_what_its_service_asks_for() {
    let mut balancers = Balancers::default();
    let port = Port { name: String::new(), protocol: Protocol::Tcp, port: 81, node_port: 30081 };
    let made = super::super::object::new(
        "ns/dev",
        &service("web", "u-web"),
        &Wanted { ports: vec![port], ..wanted() },
        None,
        None,
    );
    drop(balancers.put(serde_json::from_value(made).unwrap()));
    let (reply, _answer) = oneshot::channel();
    let claims = Job::remove("u-web".into(), reply).claims(&balancers, "ns/dev");
    assert!(claims.contains(&Claim::Name("shop".into(), "web".into())), "{claims:?}");
    assert!(!claims.is_disjoint(&own("web").claims(&balancers, "ns/dev")));
}
