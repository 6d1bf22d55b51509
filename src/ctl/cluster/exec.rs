//! Stream to the admin socket in a pod: `guestctl proxy` runs there, and its standard input and output are
//! the two directions of the stream (pods/exec, by WebSocket).

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use kube::api::{Api, AttachParams, AttachedProcess};
use tokio::io::{
    AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, BufReader, Join, ReadBuf, ReadHalf, SimplexStream,
    WriteHalf,
};

use super::Error;
use super::access::ApiServer;
use super::api::Asked;
use super::pods::{CONTAINER, Place, ROLE, SYSTEM};

/// Buffer of each direction in bytes: more than HTTP/2 allows in flight, so that neither direction waits for
/// the other.
const BUFFER: usize = 1 << 20;
/// Time for the last output of the program after its stream has ended.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Limit of the bytes of that output that are shown.
const MOST_WORDS: u64 = 4096;

/// Limit of the bytes that a program may print.
const MOST_PRINTED: u64 = 256 << 20;

/// Standard output and input of a program in a pod.
pub type Ends = Join<BufReader<Output>, WriteHalf<SimplexStream>>;

/// Future that completes when the connection with a pod has ended, with the exit status of the program if it
/// was received.
type Ending = Shared<BoxFuture<'static, Option<Status>>>;

/// Program that runs in a pod. It ends when this value is dropped.
pub struct Running {
    process: AttachedProcess,
    ending: Ending,
    place: Place,
}

/// Standard output of a program in a pod, which ends with the connection to the pod. kube's own stream never
/// ends if the connection breaks, so its reader would wait for ever.
pub struct Output {
    bytes: ReadHalf<SimplexStream>,
    ending: Option<Ending>,
}

impl AsyncRead for Output {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Poll::Ready(read) = Pin::new(&mut self.bytes).poll_read(context, buffer) {
            return Poll::Ready(read);
        }
        if let Some(ending) = &mut self.ending {
            ready!(ending.poll_unpin(context));
            self.ending = None;
        }
        // Everything received before the end is available by now.
        match Pin::new(&mut self.bytes).poll_read(context, buffer) {
            Poll::Ready(read) => Poll::Ready(read),
            Poll::Pending => Poll::Ready(Ok(())),
        }
    }
}

/// Waits until the program has printed something or has ended; returns whether it has printed something.
/// Nothing may be sent before: if a program that cannot work ends while data is in flight, kubelet resets the
/// connection before the reason of the end was read.
///
/// # Errors
/// Fails if its output cannot be read.
pub async fn begun(ends: &mut Ends) -> io::Result<bool> {
    ends.reader_mut().fill_buf().await.map(|printed| !printed.is_empty())
}

/// Runs guestctl in a pod with these arguments.
///
/// # Errors
/// Fails if the user lacks the permission, or the program cannot be started.
pub async fn start(server: &ApiServer, place: &Place, arguments: &[&str]) -> Result<(Running, Ends), Error> {
    let pods: Api<Pod> = Api::namespaced(server.client.clone(), SYSTEM);
    let parameters = AttachParams::default()
        .container(CONTAINER)
        .stdin(true)
        .stdout(true)
        .stderr(true)
        .max_stdin_buf_size(BUFFER)
        .max_stdout_buf_size(BUFFER)
        .max_stderr_buf_size(BUFFER);
    let command = [&["guestctl"], arguments].concat();
    let asked = Asked {
        what: "run guestctl in a pod",
        verb: "get (from Kubernetes 1.35 on create as well)",
        resource: "pods/exec",
        namespace: Some(SYSTEM),
        role: ROLE,
    };
    let place = place.clone();
    let mut process = match server.ask(asked, pods.exec(&place.pod, command, &parameters)).await {
        Ok(process) => process,
        Err(Error::Refused { message, .. }) => {
            return Err(Error::not_started(&place, message));
        }
        Err(error) => return Err(error),
    };
    let (Some(bytes), Some(input), Some(status)) = (process.stdout(), process.stdin(), process.take_status())
    else {
        let message = "it has no standard streams".to_owned();
        return Err(Error::not_started(&place, message));
    };
    let ending = status.boxed().shared();
    let output = BufReader::new(Output { bytes, ending: Some(ending.clone()) });
    Ok((Running { process, ending, place }, tokio::io::join(output, input)))
}

/// Runs guestctl in a pod with these arguments, and returns its standard output.
///
/// # Errors
/// Fails if the program cannot be run, fails, or prints too much.
pub async fn output(server: &ApiServer, place: &Place, arguments: &[&str]) -> Result<Vec<u8>, Error> {
    let (running, ends) = start(server, place, arguments).await?;
    let mut printed = Vec::new();
    let read = ends.take(MOST_PRINTED).read_to_end(&mut printed).await;
    if printed.len() as u64 == MOST_PRINTED {
        return Err(Error::not_started(
            place,
            "its output is too long: request less, with --since".to_owned(),
        ));
    }
    match (running.failure().await, read) {
        (Some(error), _) => Err(error),
        (None, Err(error)) => Err(Error::not_started(place, error.to_string())),
        (None, Ok(_)) => Ok(printed),
    }
}

impl Running {
    /// Returns the failure of the program, with its last messages and its exit code; `None` if it did not fail.
    pub async fn failure(mut self) -> Option<Error> {
        let mut words = Vec::new();
        if let Some(errors) = self.process.stderr() {
            let read = async { errors.take(MOST_WORDS).read_to_end(&mut words).await };
            drop(tokio::time::timeout(LAST_WORDS, read).await);
        }
        let status = tokio::time::timeout(LAST_WORDS, self.ending).await.ok().flatten();
        failure(self.place, status.as_ref(), &String::from_utf8_lossy(&words))
    }
}

fn failure(place: Place, status: Option<&Status>, words: &str) -> Option<Error> {
    let Place { pod, node } = place;
    let said = printable(words.trim().trim_start_matches("guestctl: "));
    let code = status.and_then(exit_code);
    match (code, status) {
        (Some(2), _) if said.contains("unrecognized subcommand") => {
            let message = "its guestctl is older than this one, and cannot relay a connection; update \
                           guestlet in the cluster";
            Some(Error::NotStarted { pod, node, message: message.to_owned() })
        }
        (Some(code), _) => Some(Error::Inside { pod, node, message: said, code }),
        (None, Some(Status { status: Some(status), message, .. })) if status != "Success" => {
            let message = message.clone().unwrap_or(said);
            Some(Error::NotStarted { pod, node, message: printable(&message) })
        }
        (None, None) if !said.is_empty() => Some(Error::Inside { pod, node, message: said, code: 1 }),
        _ => None,
    }
}

/// Returns the exit code of a program that was started and failed.
fn exit_code(status: &Status) -> Option<i32> {
    let causes = status.details.as_ref()?.causes.as_ref()?;
    let cause = causes.iter().find(|cause| cause.reason.as_deref() == Some("ExitCode"))?;
    cause.message.as_ref()?.parse().ok()
}

/// Returns a text on one line, without characters that could move the cursor.
pub(super) fn printable(text: &str) -> String {
    let lines: Vec<_> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines.join(" ").chars().map(|one| if one.is_control() { '\u{fffd}' } else { one }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_program_that_failed_is_told_of_with_its_words() {
        let place = || Place { node: "n1".into(), pod: "p".into() };
        let told = |status: serde_json::Value, words: &str| {
            let status: Option<Status> = serde_json::from_value(status).unwrap();
            failure(place(), status.as_ref(), words).map(|error| (error.exit_code(), error.to_string()))
        };
        let ended = |code: &str| {
            let causes = json!([{ "reason": "ExitCode", "message": code }]);
            json!({ "status": "Failure", "reason": "NonZeroExitCode", "details": { "causes": causes } })
        };
        let (code, words) = told(ended("3"), "guestctl: guestlet-host is not running\n").unwrap();
        assert_eq!((code, words.as_str()), (3, "in the pod p on the node n1: guestlet-host is not running"));
        let (code, words) = told(ended("2"), "error: unrecognized subcommand 'proxy'\n\nUsage").unwrap();
        assert!(code == 1 && words.contains("is older than this one"), "{words}");
        let missing = json!({ "status": "Failure", "message": "exec: \"guestctl\": not found", "code": 500 });
        assert!(told(missing, "").unwrap().1.contains("\"guestctl\": not found"));
        assert_eq!(told(json!({ "status": "Success" }), "guestctl: warning: one line is not a record"), None);
        assert_eq!(told(json!(null), ""), None);
        assert!(told(json!(null), "a\u{1b}[2Jb\nc").unwrap().1.ends_with("a\u{fffd}[2Jb c"));
    }
}
