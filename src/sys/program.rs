//! Runs the system's own programs: by absolute path, with a clean environment and a deadline.

use std::process::{Output, Stdio};
use std::time::Duration;

/// Why a program did not do its work.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It could not be started.
    #[error("cannot run {program}")]
    Start {
        /// The program's path.
        program: String,
        /// What `execve(2)` says.
        source: std::io::Error,
    },
    /// It said that it failed.
    #[error("{program} failed ({status}): {message}")]
    Failed {
        /// The program's path.
        program: String,
        /// How it ended.
        status: std::process::ExitStatus,
        /// What it wrote to its standard error.
        message: String,
    },
    /// It did not end in time, and was killed.
    #[error("{program} did not end within {seconds} s")]
    TimedOut {
        /// The program's path.
        program: String,
        /// The deadline.
        seconds: u64,
    },
}

/// Runs `program` with `arguments` until it ends.
///
/// # Errors
/// If it cannot be started, fails, or takes longer than `deadline`.
pub async fn run(program: &str, arguments: &[&str], deadline: Duration) -> Result<Output, Error> {
    let child = tokio::process::Command::new(program)
        .args(arguments)
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = match tokio::time::timeout(deadline, child).await {
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
}
