//! `guestctl ping NAME`: measures how long the agent takes to answer.

use super::client::{Client, answer};
use super::print::Printer;
use super::{Error, json, words};
use crate::wire::proto::v1::{PingVirtualMachineRequest, Pong, pong::Outcome};

/// Pings `count` times, once per second, or until it is interrupted, and shows a summary to people.
///
/// # Errors
/// Fails if the VM is unknown or has no session, a ping fails, or standard output cannot be written.
pub async fn run(mut client: Client, printer: &mut Printer, name: String, count: u32) -> Result<(), Error> {
    let request = PingVirtualMachineRequest { name: name.clone(), count, interval_milliseconds: 0 };
    let mut pongs = answer(client.ping_virtual_machine(request), &name).await?;
    let mut sum = Sum::default();
    let mut interrupted = std::pin::pin!(interrupted());
    loop {
        let pong = tokio::select! {
            pong = pongs.message() => pong.map_err(|status| Error::of_call(status, &name))?,
            () = &mut interrupted => break,
        };
        let Some(pong) = pong else { break };
        printer.line(&json::Pong::from(&pong), || line(&name, &pong))?;
        match pong.outcome {
            Some(Outcome::Nanoseconds(nanoseconds)) => sum.add(nanoseconds),
            Some(Outcome::Failure(failure)) => return Err(Error::Ping(failure)),
            None => {}
        }
    }
    if let Some(words) = sum.words() {
        printer.remark(&words)?;
    }
    Ok(())
}

/// Completes at SIGINT, which Ctrl-C sends.
async fn interrupted() {
    if tokio::signal::ctrl_c().await.is_err() {
        // Without a handler, the default action of the signal ends the process.
        std::future::pending::<()>().await;
    }
}

fn line(name: &str, pong: &Pong) -> String {
    match &pong.outcome {
        Some(Outcome::Nanoseconds(nanoseconds)) => {
            format!("{name}: {} in {:.3} ms", pong.number, words::milliseconds(*nanoseconds))
        }
        Some(Outcome::Failure(failure)) => format!("{name}: {} failed: {failure}", pong.number),
        None => format!("{name}: {}", pong.number),
    }
}

#[derive(Debug, Default)]
struct Sum {
    count: u32,
    least: u64,
    most: u64,
    all: u64,
}

impl Sum {
    fn add(&mut self, nanoseconds: u64) {
        self.least = if self.count == 0 { nanoseconds } else { self.least.min(nanoseconds) };
        self.most = self.most.max(nanoseconds);
        self.all = self.all.saturating_add(nanoseconds);
        self.count += 1;
    }

    fn words(&self) -> Option<String> {
        let average = self.all.checked_div(self.count.into())?;
        let [least, average, most] = [self.least, average, self.most].map(words::milliseconds);
        Some(format!("{} pings, min/avg/max = {least:.3}/{average:.3}/{most:.3} ms", self.count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_of_all() {
        let mut sum = Sum::default();
        assert_eq!(sum.words(), None);
        for nanoseconds in [2_000_000, 500_000, 1_000_000] {
            sum.add(nanoseconds);
        }
        assert_eq!(sum.words().unwrap(), "3 pings, min/avg/max = 0.500/1.167/2.000 ms");
    }
}
