//! Runs the system's own programs: by absolute path, with a clean environment and a deadline.

use std::fmt;
use std::fs::File;
use std::hint::black_box;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitStatus, Output, Stdio};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, ChildStderr, ChildStdout, Command};

use crate::sys::blocking;

/// Bytes of a program's output that are kept, of each kind.
const MOST_OUTPUT: u64 = 64 * 1024;

/// Reason why a program did not complete.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Program that could not be started.
    #[error("cannot run {program}")]
    Start {
        /// Path of the program.
        program: String,
        /// Error of `execve(2)`.
        source: std::io::Error,
    },
    /// Program that exited with a failure.
    #[error("{program} failed ({status}): {message}")]
    Failed {
        /// Path of the program.
        program: String,
        /// Exit status.
        status: ExitStatus,
        /// Output on its standard error.
        message: String,
    },
    /// Program that exceeded its deadline. It was killed, unless it was started to run on.
    #[error("{program} did not end within {seconds} s")]
    TimedOut {
        /// Path of the program.
        program: String,
        /// Deadline in seconds.
        seconds: u64,
    },
}

impl Error {
    /// A signal ended the program: that it failed is not said.
    pub fn is_killed(&self) -> bool {
        matches!(self, Self::Failed { status, .. } if status.signal().is_some())
    }

    /// Returns the same error without the output of the program, for programs whose output may contain a secret.
    #[must_use]
    pub fn without(self, secret: &[u8]) -> Self {
        let told = |message: &str| !secret.is_empty() && contains(message.as_bytes(), secret);
        match self {
            Self::Failed { program, status, message } if told(&message) => {
                Self::Failed { program, status, message: "its output is not shown here".to_owned() }
            }
            other => other,
        }
    }
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

/// Bytes that are not shown to anybody, and are cleared when they are no longer needed.
pub struct Secret(Vec<u8>);

impl Secret {
    /// Takes charge of them.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    /// Returns the bytes of the secret.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Secret")
    }
}

impl Drop for Secret {
    fn drop(&mut self) {
        self.0.fill(0);
        // Read afterwards, as far as the compiler knows.
        black_box(&self.0);
    }
}

/// Runs `program` with `arguments` until it ends.
///
/// # Errors
/// If it cannot be started, fails, or takes longer than `deadline`.
pub async fn run(program: &str, arguments: &[&str], deadline: Duration) -> Result<Output, Error> {
    let child = async { spawned(outputs_read(program, arguments)).await?.wait_with_output().await };
    ended(program, tokio::time::timeout(deadline, child).await, deadline)
}

/// Runs a program, as [`run`] does, with a secret on its standard input.
///
/// # Errors
/// The errors of [`run`].
pub async fn run_with_input(
    program: &str,
    arguments: &[&str],
    input: &Secret,
    deadline: Duration,
) -> Result<Output, Error> {
    let child = async {
        let mut command = command(program, arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = spawned(command).await?;
        if let Some(mut stdin) = child.stdin.take() {
            // One that ends without reading it says why by itself.
            let _ = stdin.write_all(input.bytes()).await;
        }
        child.wait_with_output().await
    };
    ended(program, tokio::time::timeout(deadline, child).await, deadline)
}

/// Exit status and output of a program that has ended.
#[derive(Debug)]
pub struct Ended {
    /// Exit status.
    pub status: ExitStatus,
    /// The beginning of what it wrote to its standard output, 64 KiB at most.
    pub output: String,
    /// The beginning of what it wrote to its standard error, 64 KiB at most.
    pub errors: String,
}

/// Runs `program` with `arguments` until it ends, however that is.
///
/// # Errors
/// If it cannot be started, or takes longer than `deadline`.
pub async fn run_to_end(program: &str, arguments: &[&str], deadline: Duration) -> Result<Ended, Error> {
    let run = async {
        let mut child = spawned(outputs_read(program, arguments)).await?;
        let (output, errors) = (child.stdout.take(), child.stderr.take());
        let (status, output, errors) = tokio::join!(child.wait(), beginning(output), beginning(errors));
        Ok(Ended { status: status?, output: output?, errors: errors? })
    };
    match tokio::time::timeout(deadline, run).await {
        Ok(ended) => ended.map_err(|source| Error::Start { program: program.to_owned(), source }),
        Err(_) => Err(Error::TimedOut { program: program.to_owned(), seconds: deadline.as_secs() }),
    }
}

/// Runs `program` with `arguments` until it ends, with `input` as its standard input and `output` as its
/// standard output and error. The files stay open for the program when this process ends. At the deadline, or
/// when the future is dropped, the program is killed only if `kill` is set.
///
/// # Errors
/// If it cannot be started, or takes longer than `deadline`.
pub async fn run_on(
    program: &str,
    arguments: &[&str],
    input: File,
    output: File,
    kill: bool,
    deadline: Duration,
) -> Result<ExitStatus, Error> {
    let failed = |source| Error::Start { program: program.to_owned(), source };
    let errors = output.try_clone().map_err(failed)?;
    let mut command = command(program, arguments);
    command.stdin(input).stdout(output).stderr(errors).kill_on_drop(kill);
    // From here on this process holds no copy of the files, because the command is dropped with them. A caller
    // that checks whether the program still has them open sees only its own.
    let mut child = spawned(command).await.map_err(failed)?;
    match tokio::time::timeout(deadline, child.wait()).await {
        Ok(ended) => ended.map_err(failed),
        Err(_) => Err(Error::TimedOut { program: program.to_owned(), seconds: deadline.as_secs() }),
    }
}

/// A program whose output is read while it runs. Dropped, it is killed. It may not write more than a pipe holds to its standard
/// error, which is read when its output has ended.
#[derive(Debug)]
pub struct Reading {
    /// Standard output of the program.
    pub output: ChildStdout,
    child: Child,
    errors: Option<ChildStderr>,
}

impl Reading {
    /// Waits for its end, which follows that of its output.
    ///
    /// # Errors
    /// If it says that it has failed.
    pub async fn end(self, program: &str) -> Result<(), Error> {
        let Self { output, mut child, errors } = self;
        // Closes the output, so that the program does not block on a reader that no longer reads.
        drop(output);
        let failed = |source| Error::Start { program: program.to_owned(), source };
        let (status, errors) = tokio::join!(child.wait(), beginning(errors));
        let status = status.map_err(failed)?;
        if status.success() {
            return Ok(());
        }
        let message = errors.unwrap_or_default().trim().to_owned();
        Err(Error::Failed { program: program.to_owned(), status, message })
    }
}

/// Starts `program` with `arguments`, for a caller that reads its output and decides when to stop.
///
/// # Errors
/// If it cannot be started.
pub async fn start_reading(program: &str, arguments: &[&str]) -> Result<Reading, Error> {
    let failed = |source| Error::Start { program: program.to_owned(), source };
    let mut child = spawned(outputs_read(program, arguments)).await.map_err(failed)?;
    let (output, errors) = (child.stdout.take(), child.stderr.take());
    let output = output.ok_or_else(|| failed(std::io::Error::other("it has no output")))?;
    Ok(Reading { output, child, errors })
}

/// Starts the program outside the event loop. Starting waits for the program's file, whose disk may hang, and
/// until the program is executed it cannot be ended.
async fn spawned(mut command: Command) -> std::io::Result<Child> {
    blocking::run(move || command.spawn()).await
}

/// Reads all of it, and keeps the beginning.
async fn beginning(stream: Option<impl AsyncRead + Unpin>) -> std::io::Result<String> {
    let mut kept = Vec::new();
    if let Some(mut stream) = stream {
        (&mut stream).take(MOST_OUTPUT).read_to_end(&mut kept).await?;
        tokio::io::copy(&mut stream, &mut tokio::io::sink()).await?;
    }
    Ok(String::from_utf8_lossy(&kept).into_owned())
}

fn command(program: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("LC_ALL", "C")
        .kill_on_drop(true);
    command
}

/// One that has no input, and whose outputs are read.
fn outputs_read(program: &str, arguments: &[&str]) -> Command {
    let mut command = command(program, arguments);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn ended(
    program: &str,
    output: Result<std::io::Result<Output>, tokio::time::error::Elapsed>,
    deadline: Duration,
) -> Result<Output, Error> {
    let output = match output {
        Ok(ended) => ended.map_err(|source| Error::Start { program: program.to_owned(), source })?,
        Err(_) => return Err(Error::TimedOut { program: program.to_owned(), seconds: deadline.as_secs() }),
    };
    if output.status.success() {
        return Ok(output);
    }
    let message = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(Error::Failed { program: program.to_owned(), status: output.status, message })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn endings() {
        let second = Duration::from_secs(10);
        assert_eq!(run("/bin/echo", &["hi"], second).await.unwrap().stdout, b"hi\n");
        let missing = run("/no/such/program", &[], second).await.unwrap_err();
        assert_eq!(missing.to_string(), "cannot run /no/such/program");
        let failed = run("/bin/ls", &["/no/such/file"], second).await.unwrap_err().to_string();
        assert!(
            failed.starts_with("/bin/ls failed (exit status: 2): ") && failed.contains("No such file"),
            "{failed}"
        );
        let late = run("/bin/sleep", &["100"], Duration::from_millis(10)).await.unwrap_err();
        assert!(matches!(late, Error::TimedOut { .. }));
    }

    #[tokio::test]
    async fn however_it_ends() {
        let second = Duration::from_secs(10);
        let script = "echo out; echo err >&2; head -c 200000 /dev/zero; exit 2";
        let ended = run_to_end("/bin/sh", &["-c", script], second).await.unwrap();
        assert_eq!(ended.status.code(), Some(2));
        assert!(ended.output.starts_with("out\n"));
        assert_eq!((ended.output.len() as u64, ended.errors.as_str()), (MOST_OUTPUT, "err\n"));
        let late = run_to_end("/bin/sleep", &["100"], Duration::from_millis(10)).await.unwrap_err();
        assert!(matches!(late, Error::TimedOut { .. }));
    }

    #[tokio::test]
    async fn what_is_not_killed_goes_on() {
        let second = Duration::from_secs(10);
        let script = "cat; echo err >&2; sleep 0.3; echo late; exit 3";
        for kill in [false, true] {
            let (mut input, output) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
            std::io::Write::write_all(&mut input, b"in\n").unwrap();
            std::io::Seek::rewind(&mut input).unwrap();
            let (copy, said) = (output.try_clone().unwrap(), || {
                let mut bytes = vec![0; 100];
                let length = std::os::unix::fs::FileExt::read_at(&output, &mut bytes, 0).unwrap();
                String::from_utf8(bytes[..length].to_vec()).unwrap()
            });
            let short = Duration::from_millis(100);
            let late = run_on("/bin/sh", &["-c", script], input, copy, kill, short).await.unwrap_err();
            assert!(matches!(late, Error::TimedOut { .. }));
            let end = std::time::Instant::now() + if kill { Duration::from_secs(1) } else { second };
            while std::time::Instant::now() < end && !said().ends_with("late\n") {
                tokio::time::sleep(short).await;
            }
            assert_eq!(said().ends_with("late\n"), !kill, "{}", said());
        }
        let (input, output) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let status = run_on("/bin/sh", &["-c", "exit 3"], input, output, false, second).await.unwrap();
        assert_eq!(status.code(), Some(3));
    }

    #[tokio::test]
    async fn input_comes_through_and_stays_secret() {
        let second = Duration::from_secs(10);
        let secret = Secret::new(b"user:pass".to_vec());
        assert_eq!(format!("{secret:?}"), "Secret");
        assert_eq!(run_with_input("/bin/cat", &[], &secret, second).await.unwrap().stdout, b"user:pass");
        // The program ends without reading its input.
        run_with_input("/bin/true", &[], &Secret::new(vec![b'x'; 1 << 20]), second).await.unwrap();
        let failed =
            run_with_input("/bin/sh", &["-c", "cat >&2; exit 3"], &secret, second).await.unwrap_err();
        assert!(failed.to_string().ends_with("(exit status: 3): user:pass"), "{failed}");
        let failed = failed.without(b"pass").to_string();
        assert!(!failed.contains("pass") && failed.contains("exit status: 3"), "{failed}");
        let late =
            run_with_input("/bin/sleep", &["100"], &secret, Duration::from_millis(10)).await.unwrap_err();
        assert!(matches!(late, Error::TimedOut { .. }));
    }
}
