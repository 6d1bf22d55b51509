//! Measurement of round trips to a guest.

use std::time::Duration;

use tokio::time::Instant;
use tokio_stream::Stream;
use tonic::{Code, Status};

use super::audit::Entry;
use super::calls::Calls;
use super::text;
use crate::wire::proto::v1::{PingRequest, PingVirtualMachineRequest, Pong, pong::Outcome};

/// Limit on the pings of one call.
const MAX_COUNT: u32 = 10_000;
const USUAL_INTERVAL: Duration = Duration::from_secs(1);
const SHORTEST_INTERVAL: Duration = Duration::from_millis(10);
/// Timeout of an agent for one ping.
const DEADLINE: Duration = Duration::from_secs(5);

/// Number of pings, and their interval.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    count: u32,
    interval: Duration,
}

impl Plan {
    /// Returns the plan that `request` asks for, with defaults for what it does not set.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if the count is too large or the interval too short.
    pub fn of(request: &PingVirtualMachineRequest) -> Result<Self, Status> {
        if request.count > MAX_COUNT {
            return Err(Status::invalid_argument(format!("at most {MAX_COUNT} pings at a time")));
        }
        let interval = match request.interval_milliseconds {
            0 => USUAL_INTERVAL,
            milliseconds => Duration::from_millis(milliseconds.into()),
        };
        if interval < SHORTEST_INTERVAL {
            return Err(Status::invalid_argument(format!(
                "pings are at least {} ms apart",
                SHORTEST_INTERVAL.as_millis()
            )));
        }
        Ok(Self { count: request.count.max(1), interval })
    }
}

/// Pings according to the plan, until the first failure. The audit record ends with the last ping.
pub fn pongs(calls: Calls, plan: Plan, entry: Option<Entry>) -> impl Stream<Item = Pong> + Send {
    let mut ticks = tokio::time::interval(plan.interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    futures_util::stream::unfold(
        (Some((calls, entry)), ticks, 0),
        move |(calls, mut ticks, done)| async move {
            let (mut calls, mut entry) = calls.filter(|_| done < plan.count)?;
            ticks.tick().await;
            let number = done + 1;
            let outcome = ping(&mut calls, number).await;
            let is_answered = matches!(outcome, Outcome::Nanoseconds(_));
            if (!is_answered || number == plan.count)
                && let Some(entry) = entry.take()
            {
                entry.end(if is_answered { Code::Ok } else { Code::Unavailable });
            }
            let next = is_answered.then_some((calls, entry));
            Some((Pong { number, outcome: Some(outcome) }, (next, ticks, number)))
        },
    )
}

async fn ping(calls: &mut Calls, number: u32) -> Outcome {
    let payload = number.to_be_bytes().to_vec();
    let began = Instant::now();
    let answer = tokio::time::timeout(DEADLINE, calls.ping(PingRequest { payload: payload.clone() })).await;
    let took = began.elapsed();
    match answer {
        Ok(Ok(answer)) if answer.get_ref().payload == payload => {
            Outcome::Nanoseconds(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX))
        }
        Ok(Ok(_)) => Outcome::Failure("the guest answered something else".to_owned()),
        Ok(Err(status)) if std::error::Error::source(&status).is_some() => {
            Outcome::Failure("the session ended".to_owned())
        }
        Ok(Err(status)) => Outcome::Failure(text::clean(status.message())),
        Err(_) => Outcome::Failure(format!("no answer within {} s", DEADLINE.as_secs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_is_bounded() {
        let plan = |count, interval_milliseconds| {
            Plan::of(&PingVirtualMachineRequest { name: "a".into(), count, interval_milliseconds })
        };
        assert_eq!(plan(0, 0).unwrap(), Plan { count: 1, interval: USUAL_INTERVAL });
        assert_eq!(plan(10_000, 10).unwrap(), Plan { count: 10_000, interval: SHORTEST_INTERVAL });
        assert!(plan(10_001, 0).is_err());
        assert!(plan(1, 9).is_err());
    }
}
