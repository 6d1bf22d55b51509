//! Thousands of calls of one caller at once.

use std::process::Command;
use std::sync::Arc;

use guestlet::transport::http2::{self, ORIGIN};
use guestlet::wire::proto::v1::ListProgramsRequest;
use guestlet::wire::proto::v1::exec_client::ExecClient;
use tokio::net::UnixStream;
use tokio::sync::Barrier;
use tokio::task::JoinSet;
use tonic::Code;

use crate::host::DEADLINE;
use crate::lab::{ALL, Lab, text};

/// Calls at once.
const CALLS: usize = 10_000;
/// Connections that they are made over.
const CONNECTIONS: usize = 20;
const OTHER: u32 = 4_000_001;

#[test]
fn ten_thousand_calls_at_once_are_all_answered_and_keep_nobody_else_out() {
    let mut lab = Lab::with(ALL);
    lab.host.kill();
    let rule = format!("[[access]]\nusers = ['{OTHER}']\nroles = ['read', 'exec']\n[[vm]]\n");
    lab.host.edit("[[vm]]\n", &rule);
    lab.host.again();
    lab.host.until_session("web", "connected");
    text(&lab.exec(&[], &["true"]));
    let before = [lab.agent_memory() << 10, lab.host.memory("VmRSS") as u64];

    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let socket = lab.host.socket();
    let begun = Arc::new(Barrier::new(2));
    let calling = runtime.spawn({
        let begun = Arc::clone(&begun);
        async move {
            let mut calls = JoinSet::new();
            for _ in 0..CONNECTIONS {
                let stream = UnixStream::connect(&socket).await.unwrap();
                let (client, mut connection) = http2::connect(stream).await.unwrap();
                tokio::spawn(async move { connection.ended().await });
                let client = ExecClient::with_origin(client, http::Uri::from_static(ORIGIN));
                for _ in 0..CALLS / CONNECTIONS {
                    let mut client = client.clone();
                    calls.spawn(async move {
                        let request = ListProgramsRequest { name: "web".to_owned() };
                        let answer = tokio::time::timeout(DEADLINE, client.list_programs(request)).await;
                        answer.expect("it is answered").map(drop)
                    });
                }
            }
            begun.wait().await;
            calls.join_all().await
        }
    });
    // Meanwhile another caller is served.
    runtime.block_on(begun.wait());
    for _ in 0..5 {
        let mut other = lab.host.ctl_as(OTHER, &["exec", "web", "--", "echo", "here"]);
        assert_eq!(text(&other.output().unwrap()), "here\n");
    }
    let answers = runtime.block_on(calling).unwrap();
    assert_eq!(answers.len(), CALLS);
    let mut done = 0;
    for answer in answers {
        match answer {
            Ok(()) => done += 1,
            // The reason is said, and it is one that goes away.
            Err(status) => {
                assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
                assert!(!status.message().is_empty());
            }
        }
    }
    assert!(done > 0);
    let after = [lab.agent_memory() << 10, lab.host.memory("VmRSS") as u64];
    for (now, then) in after.into_iter().zip(before) {
        assert!(now < then + (64 << 20), "{after:?} after {before:?} bytes");
    }
    eprintln!(
        "{done} of {CALLS} were done, the others refused; memory of agent and host half: {before:?}, {after:?}"
    );
    assert_eq!(text(&lab.exec(&[], &["echo", "again"])), "again\n");
}

/// Streams to guests that the host half has dialled.
fn dials(lab: &Lab) -> u64 {
    let socket = lab.host.path("run/metrics.sock");
    let mut curl = Command::new("curl");
    curl.args(["--silent", "--unix-socket"]).arg(socket).arg("http://host/host/metrics");
    let page = String::from_utf8(curl.output().unwrap().stdout).unwrap();
    let count = page.lines().find_map(|line| line.strip_prefix("guestlet_host_dials_total "));
    count.unwrap_or_else(|| panic!("{page}")).parse().unwrap()
}

#[test]
fn a_program_in_a_guest_without_keys_costs_one_connection() {
    let lab = Lab::new();
    let before = dials(&lab);
    for _ in 0..5 {
        assert_eq!(text(&lab.exec(&[], &["echo", "here"])), "here\n");
    }
    assert_eq!(dials(&lab) - before, 5);
}
