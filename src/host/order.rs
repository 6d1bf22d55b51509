//! Order of a guest's events: each one is numbered, and none may be missing. Pure.
//!
//! ```text
//!  (nowhere, or the place to resume) ──AgentReady──▶ at n ──event n+1──▶ at n+1
//!                                                     │ ▲
//!                                                     └─┴─ Heartbeat n, or AgentReady with the whole state
//! ```

use crate::wire::proto::v1::{self, event::Kind};

/// Position in the event stream of one guest; survives a reconnect.
#[derive(Debug, Clone, Default)]
pub struct Order {
    position: Option<v1::Position>,
    /// True once the stream has begun with `AgentReady`.
    begun: bool,
}

/// Reason why an event is out of order.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Disorder {
    /// An event came before `AgentReady`.
    #[error("the agent's events do not begin with AgentReady")]
    NotReady,
    /// `AgentReady` resumes at a position different from the requested one.
    #[error("the agent resumes its events at a position other than the requested one")]
    OtherPlace,
    /// `AgentReady` neither resumes nor has a state.
    #[error("the agent begins its events without its state")]
    NoState,
    /// The sequence number is not the expected one.
    #[error("the agent sent event {found} in place of {expected}")]
    Hole {
        /// Sequence number of the event.
        found: u64,
        /// Sequence number that was expected.
        expected: u64,
    },
}

impl Order {
    /// Begins a new stream, and returns the position at which it has to resume, if there is one.
    pub fn begin(&mut self) -> Option<v1::Position> {
        self.begun = false;
        self.position.clone()
    }

    /// Forgets the position, so that the next stream has to begin with the whole state.
    pub fn forget(&mut self) {
        self.position = None;
    }

    /// Takes the next event of the stream.
    ///
    /// # Errors
    /// If it is out of order.
    pub fn take(&mut self, event: &v1::Event) -> Result<(), Disorder> {
        match &event.kind {
            Some(Kind::AgentReady(ready)) => self.ready(event.sequence, ready),
            Some(Kind::Heartbeat(_)) => self.at(event.sequence, 0),
            _ => self.at(event.sequence, 1),
        }
    }

    fn ready(&mut self, sequence: u64, ready: &v1::AgentReady) -> Result<(), Disorder> {
        if ready.resumed {
            let same =
                |position: &v1::Position| position.run_id == ready.run_id && position.sequence == sequence;
            if !self.position.as_ref().is_some_and(same) {
                return Err(Disorder::OtherPlace);
            }
        } else if ready.state.is_none() {
            return Err(Disorder::NoState);
        }
        self.begun = true;
        self.position = Some(v1::Position { run_id: ready.run_id.clone(), sequence });
        Ok(())
    }

    fn at(&mut self, found: u64, step: u64) -> Result<(), Disorder> {
        let position = self.position.as_mut().filter(|_| self.begun).ok_or(Disorder::NotReady)?;
        let expected = position.sequence.saturating_add(step);
        if found != expected {
            return Err(Disorder::Hole { found, expected });
        }
        position.sequence = found;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(run_id: &str, sequence: u64, resumed: bool) -> v1::Event {
        let state = (!resumed).then(v1::GuestState::default);
        let ready = v1::AgentReady { run_id: run_id.into(), resumed, missed: 0, state: state.map(Box::new) };
        v1::Event { sequence, time: None, kind: Some(Kind::AgentReady(ready)) }
    }

    fn heartbeat(sequence: u64) -> v1::Event {
        v1::Event { sequence, time: None, kind: Some(Kind::Heartbeat(v1::Heartbeat {})) }
    }

    fn event(sequence: u64) -> v1::Event {
        // An event of an unknown kind counts in the sequence as well.
        v1::Event { sequence, time: None, kind: None }
    }

    fn all(order: &mut Order, events: &[v1::Event]) -> Result<(), Disorder> {
        events.iter().try_for_each(|event| order.take(event))
    }

    #[test]
    fn events_are_consecutive_across_streams() {
        let mut order = Order::default();
        assert_eq!(order.begin(), None);
        all(&mut order, &[ready("r", 7, false), event(8), heartbeat(8), event(9)]).unwrap();
        let position = v1::Position { run_id: "r".into(), sequence: 9 };
        assert_eq!(order.begin(), Some(position));
        all(&mut order, &[ready("r", 9, true), event(10), ready("r", 300, false), event(301)]).unwrap();
        assert_eq!(order.begin().unwrap().sequence, 301);
        all(&mut order, &[ready("other", 1, false), event(2)]).unwrap();
        order.forget();
        assert_eq!(order.begin(), None);
    }

    #[test]
    fn disorder() {
        let hole = |found, expected| Disorder::Hole { found, expected };
        let cases = [
            ("event first", vec![event(6)], Disorder::NotReady),
            ("heartbeat first", vec![heartbeat(5)], Disorder::NotReady),
            ("resumes elsewhere", vec![ready("r", 6, true)], Disorder::OtherPlace),
            ("resumes another run", vec![ready("x", 5, true)], Disorder::OtherPlace),
            ("hole", vec![ready("r", 5, true), event(7)], hole(7, 6)),
            ("again", vec![ready("r", 5, true), event(6), event(6)], hole(6, 7)),
            ("heartbeat is ahead", vec![ready("r", 5, true), heartbeat(6)], hole(6, 5)),
        ];
        for (case, events, expected) in cases {
            let mut order = Order::default();
            all(&mut order, &[ready("r", 5, false)]).unwrap();
            order.begin();
            assert_eq!(all(&mut order, &events), Err(expected), "{case}");
        }
        let mut without = ready("r", 5, false);
        let Some(Kind::AgentReady(ready)) = &mut without.kind else { panic!() };
        ready.state = None;
        assert_eq!(Order::default().take(&without), Err(Disorder::NoState));
    }
}
