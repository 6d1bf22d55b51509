//! The verbs of `guestctl` for programs in a guest.

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;
use guestlet::ctl::exec::{Action, Disconnect, Run};
use guestlet::ctl::words::parse_span;
use guestlet::ctl::{Error, Verb};
use nix::sys::signal::Signal;

/// The verbs.
#[derive(Debug, Subcommand)]
#[allow(clippy::enum_variant_names, reason = "the verb has that name")]
pub enum Exec {
    /// Run a program in a guest, with its standard streams connected here, or on a terminal
    ///
    /// No shell is involved: name one if it is needed. If the connection breaks, guestctl reconnects and continues. The exit
    /// code is the program's; 128 plus the number of the signal that killed it; 125 if guestctl, the host half or the agent
    /// failed, 126 if the program cannot be executed, 127 if there is no such program, 255 if the connection to it was lost.
    /// The guest's settings say who may run what, as which user: docs/exec.md.
    #[command(
        after_help = "Examples:\n  guestctl exec web-1 -- systemctl status nginx\n  guestctl exec -it web-1 -- bash\n  \
                            guestctl exec -i web-1 -- tar x -C /srv < files.tar\n  \
                            guestctl exec -it web-1 --user alice --login"
    )]
    Exec {
        /// The name of the VM, as shown by ls
        name: String,
        /// The program, looked for in PATH, and its arguments
        #[arg(last = true, required_unless_present = "login", value_name = "COMMAND")]
        command: Vec<OsString>,
        /// Pass standard input on; otherwise the program has none
        #[arg(short, long)]
        interactive: bool,
        /// Give the program a terminal
        #[arg(short, long)]
        tty: bool,
        /// Run it as this user, by name or number, with all of the user's groups
        #[arg(short, long)]
        user: Option<String>,
        /// Log the user in through PAM, as runuser(1) does, and have the login shell execute the program; without one, run the
        /// login shell
        #[arg(short, long)]
        login: bool,
        /// Set an environment variable of the program
        #[arg(short, long, value_name = "NAME=VALUE")]
        env: Vec<OsString>,
        /// Its working directory; by default the user's home directory
        #[arg(long, value_name = "PATH")]
        cwd: Option<OsString>,
        /// Terminate it after this time, such as 90s or 5m
        #[arg(long, value_name = "SPAN", value_parser = parse_span)]
        timeout: Option<Duration>,
        /// Start it, print its identifier, and detach: attach shows the newest part of its output
        #[arg(short, long, conflicts_with_all = ["interactive", "on_disconnect", "wait"])]
        detach: bool,
        /// Kill the program when guestctl is gone, or keep it for a while; by default kill with a terminal, otherwise keep
        #[arg(long, value_name = "WHAT", value_enum)]
        on_disconnect: Option<Disconnect>,
        /// How long it then waits for guestctl attach, such as 90s or 1h; at most a day
        #[arg(long, value_name = "SPAN", value_parser = parse_span)]
        wait: Option<Duration>,
    },
    /// Attach to a program: its output that nobody has read yet comes first
    Attach {
        /// The name of the VM, as shown by ls
        name: String,
        /// The program's identifier, as ps shows it
        id: String,
        /// Pass standard input on, after what others have passed on; otherwise the program's input is left alone
        #[arg(short, long)]
        interactive: bool,
        /// Fail unless the program has a terminal
        #[arg(short, long)]
        tty: bool,
    },
    /// List the programs in a guest that you have started
    Ps {
        /// The name of the VM, as shown by ls
        name: String,
    },
    /// Terminate a program in a guest: SIGTERM, and after 10 s SIGKILL for all processes that it has started
    Kill {
        /// The name of the VM, as shown by ls
        name: String,
        /// The program's identifier, as ps shows it
        id: String,
        /// Only send this signal, such as HUP; KILL is sent to all processes that it has started
        #[arg(short, long, value_parser = parse_signal)]
        signal: Option<u32>,
    },
}

/// A signal by its name or number.
fn parse_signal(text: &str) -> Result<u32, String> {
    let upper = text.to_uppercase();
    let name = if upper.starts_with("SIG") { upper } else { format!("SIG{upper}") };
    let signal = text.parse::<i32>().map_or_else(|_| name.parse(), Signal::try_from);
    let number = signal.ok().and_then(|signal| u32::try_from(signal as i32).ok());
    number.ok_or_else(|| format!("unknown signal {text:?}"))
}

impl From<Exec> for Verb {
    fn from(exec: Exec) -> Self {
        let (name, action) = match exec {
            Exec::Attach { name, id, interactive, tty } => {
                (name, Action::Attach { id, has_input: interactive, has_terminal: tty })
            }
            Exec::Ps { name } => (name, Action::List),
            Exec::Kill { name, id, signal } => (name, Action::Kill { id, signal: signal.unwrap_or(0) }),
            Exec::Exec {
                name,
                command,
                interactive,
                tty,
                user,
                login,
                env,
                cwd,
                timeout,
                detach,
                on_disconnect,
                wait,
            } => {
                let run = Run {
                    command,
                    user,
                    environment: env,
                    directory: cwd,
                    is_login: login,
                    has_terminal: tty,
                    has_input: interactive,
                    limit: timeout,
                    detach,
                    on_disconnect,
                    wait,
                };
                (name, Action::Run(Box::new(run)))
            }
        };
        Self::Program { name, action }
    }
}

/// The exit code after a program: its own, or that guestctl failed.
pub fn ended(result: Result<(), Error>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Error::Ended(code)) => ExitCode::from(code),
        Err(Error::NotRun(words, code)) => super::fail(&anyhow::Error::msg(words), code),
        Err(error) => super::fail(&error.into(), 125),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_have_names_and_numbers() {
        for (text, number) in [("KILL", 9), ("sigterm", 15), ("1", 1), ("usr1", 10)] {
            assert_eq!(parse_signal(text), Ok(number), "{text}");
        }
        for wrong in ["", "0", "x", "99", "SIGSIG"] {
            assert!(parse_signal(wrong).is_err(), "{wrong}");
        }
    }
}
