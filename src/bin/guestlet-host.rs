//! `guestlet-host`: the controller half, one on each host.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use guestlet::config::host::DEFAULT_FILE;
use guestlet::hostd::{self, Options};

/// `EX_CONFIG` of sysexits.h.
const WRONG_SETTINGS: u8 = 78;

/// Finds this host's VMs and talks to the guestlet agent in each of them.
#[derive(Debug, Parser)]
#[command(name = "guestlet-host", version = guestlet::VERSION)]
struct Arguments {
    /// Settings; the *.toml files in the folder of the same name with .d for .toml are added
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Check the settings and exit
    #[arg(long)]
    check: bool,
    /// Log more
    #[arg(short, long)]
    verbose: bool,
}

#[allow(clippy::print_stderr, reason = "before and after there is a log")]
fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let options = Options {
        required: arguments.config.is_some(),
        file: arguments.config.unwrap_or_else(|| PathBuf::from(DEFAULT_FILE)),
        verbose: arguments.verbose,
    };
    let outcome = if arguments.check {
        hostd::check(&options).map(|settings| {
            eprintln!("guestlet-host: the settings are good: {} VMs", settings.vms.len());
        })
    } else {
        hostd::run(&options)
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("guestlet-host: {error:#}");
            if !hostd::is_of_settings(&error) {
                return ExitCode::FAILURE;
            }
            if !arguments.check {
                hostd::pause_under_systemd();
            }
            ExitCode::from(WRONG_SETTINGS)
        }
    }
}
