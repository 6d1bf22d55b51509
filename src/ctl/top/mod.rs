//! `guestctl top`: the present load of all guests. `figures` calculates numbers from two answers of a guest,
//! and `screen` formats them. This file collects the answers, draws, and handles keys.

mod figures;
mod keys;
mod screen;

use std::collections::BTreeMap;
use std::io::{self, IsTerminal as _};
use std::time::Duration;

use clap::ValueEnum;
use futures_util::StreamExt as _;
use tokio::signal::unix::SignalKind;
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use super::client::{self, Daemon};
use super::print::Printer;
use super::recent::Bars;
use super::signals::Signals;
use super::{Error, standard};
use crate::sys::terminal::{self, Changed, Size};
use crate::wire::proto::v1::{
    CollectMetricsRequest, CollectMetricsResponse, ListVirtualMachinesRequest, SessionState,
};

use figures::Figures;
use keys::Keys;
use screen::View;

/// By what rows are sorted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Sort {
    /// Processor time
    #[default]
    Cpu,
    /// Part of the memory that is used
    Memory,
    /// Waiting for processors, memory or disks, whichever is most
    Pressure,
    /// Bytes read and written
    Disk,
    /// Bytes received and sent
    Network,
    /// The fullest file system
    Full,
    /// Name
    Name,
}

/// Options of `guestctl top`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wish {
    /// Order of the rows.
    pub sort: Sort,
    /// Interval at which guests are called.
    pub every: Duration,
    /// True to show the load once, and then end.
    pub once: bool,
}

/// Timeout for one guest.
const PATIENCE: Duration = Duration::from_secs(4);
/// Guests that are called at the same time.
const AT_A_TIME: usize = 32;
/// Interval between the first two calls, from which rates are calculated.
const APART: Duration = Duration::from_secs(1);

/// Alternate screen of a terminal, without a cursor, until this is dropped.
struct Screen {
    _raw: Changed,
}

impl Screen {
    fn enter() -> io::Result<Self> {
        let raw = Changed::raw(io::stdin())?;
        standard::write(standard::stream(io::stdout())?, b"\x1b[?1049h\x1b[?25l")?;
        Ok(Self { _raw: raw })
    }
}

/// Draws these lines in place of the previous ones.
fn draw(lines: &[String]) -> io::Result<()> {
    // Line breaks are written only between lines: one after the last would scroll a full screen.
    let text = format!("\x1b[H{}\x1b[K\x1b[J", lines.join("\x1b[K\r\n"));
    standard::write(standard::stream(io::stdout())?, text.as_bytes())
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A terminal that was closed need not be restored.
        if let Ok(stream) = standard::stream(io::stdout()) {
            drop(standard::write(stream, b"\x1b[?25h\x1b[?1049l"));
        }
    }
}

/// Shows the load of the guests, once or until the user ends it.
///
/// # Errors
/// Fails if the daemon cannot be reached, or there is no terminal to show it on.
pub async fn run(daemon: Daemon, printer: &mut Printer, wish: Wish) -> Result<(), Error> {
    if wish.once {
        let mut all = ask(&daemon, &BTreeMap::new()).await?;
        tokio::time::sleep(APART).await;
        all = ask(&daemon, &all.answers).await?;
        figures::sort(&mut all.figures, wish.sort);
        return Ok(printer.value(&all.figures, || screen::table(&all.figures))?);
    }
    if printer.is_for_programs() || !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        return Err(Error::Unmet(
            "top needs a terminal; --once prints a table, and with -o json values".to_owned(),
        ));
    }
    follow(&daemon, wish).await
}

async fn follow(daemon: &Daemon, wish: Wish) -> Result<(), Error> {
    let read = |error| Error::Read("the terminal".to_owned(), error);
    let mut keys = Keys::open().map_err(read)?;
    let ends =
        [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(|kind| (true, kind));
    let mut signals =
        Signals::hear(ends.into_iter().chain([(false, SignalKind::window_change())])).map_err(read)?;
    let _screen = Screen::enter().map_err(read)?;
    let (mut sort, mut view, bars) = (wish.sort, View::Now, Bars::of_locale());
    let mut all = ask(daemon, &BTreeMap::new()).await?;
    let mut ticks = interval_at(Instant::now() + APART.min(wish.every), wish.every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        figures::sort(&mut all.figures, sort);
        let size = terminal::size(io::stdout()).unwrap_or(Size { rows: 24, columns: 80 });
        draw(&screen::lines(&all.figures, (sort, view, bars), size))?;
        tokio::select! {
            _ = ticks.tick() => all = tokio::select! {
                asked = ask(daemon, &all.answers) => asked?,
                () = keys.until_quit() => return Ok(()),
            },
            ends = signals.next() => if ends { return Ok(()) },
            key = keys.next() => match key.map_err(read)? {
                None => return Ok(()),
                Some(key) if keys::is_quit(key) => return Ok(()),
                Some(b'h') => view = view.other(),
                Some(key) => sort = keys::sort(key).unwrap_or(sort),
            },
        }
    }
}

/// Answers of the guests by the names of VMs, and the figures calculated from them.
struct Asked {
    answers: BTreeMap<String, CollectMetricsResponse>,
    figures: Vec<Figures>,
}

/// Calls all guests; `before` has their previous answers.
async fn ask(daemon: &Daemon, before: &BTreeMap<String, CollectMetricsResponse>) -> Result<Asked, Error> {
    let wanted = ListVirtualMachinesRequest { with_recent: true, ..Default::default() };
    let vms = client::list(&mut daemon.admin(), wanted).await?;
    let all = vms.into_iter().map(|vm| async move {
        let mut answer = None;
        if vm.session() == SessionState::Connected {
            let request = CollectMetricsRequest { name: vm.name.clone(), ..CollectMetricsRequest::default() };
            let mut metrics = daemon.metrics();
            let asked = tokio::time::timeout(PATIENCE, metrics.collect_metrics(request)).await;
            answer = asked.ok().and_then(Result::ok).map(tonic::Response::into_inner);
        }
        (vm, answer)
    });
    let answered: Vec<_> = futures_util::stream::iter(all).buffered(AT_A_TIME).collect().await;
    let mut asked = Asked { answers: BTreeMap::new(), figures: Vec::new() };
    for (vm, answer) in answered {
        let figures = Figures::of(&vm.name, before.get(&vm.name), answer.as_ref());
        asked.figures.push(Figures { recent: vm.recent, ..figures });
        if let Some(answer) = answer {
            asked.answers.insert(vm.name, answer);
        }
    }
    Ok(asked)
}
