//! Connection between the streams of a call and the thread that carries out its requests.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming};

use super::Answers;
use super::Place;

/// Time without an answer after which the client is informed that the work is still in progress.
const WORKING: Duration = Duration::from_secs(5);

/// State of one call.
pub(super) struct Conversation<T, A> {
    /// First answer, until it is sent.
    pub first: Option<A>,
    pub requests: Option<Streaming<T>>,
    /// Channel for requests, closed when the client sends no more.
    pub say: Option<mpsc::Sender<T>>,
    /// Request that waits until there is room for it.
    pub waiting: Option<T>,
    pub answers: mpsc::Receiver<A>,
    pub stopping: CancellationToken,
    #[allow(dead_code, reason = "held, not looked at")]
    pub place: Place,
}

impl<T: Send + 'static, A: Answers> Conversation<T, A> {
    pub fn into_stream(self) -> impl Stream<Item = Result<A, Status>> {
        futures_util::stream::unfold(Some(self), |this| async {
            let mut this = this?;
            let answer = this.next().await?;
            let goes_on = answer.is_ok();
            Some((answer, goes_on.then_some(this)))
        })
    }

    async fn next(&mut self) -> Option<Result<A, Status>> {
        if let Some(first) = self.first.take() {
            return Some(Ok(first));
        }
        let silence = tokio::time::sleep(WORKING);
        tokio::pin!(silence);
        loop {
            let Self { requests, say, waiting, answers, stopping, .. } = self;
            let asking = say.clone();
            let room = async {
                match asking {
                    Some(say) => say.reserve_owned().await.ok(),
                    None => std::future::pending().await,
                }
            };
            let request = async {
                match requests {
                    Some(requests) => requests.message().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                answer = answers.recv() => return Some(Ok(answer?)),
                permit = room, if waiting.is_some() => {
                    if let (Some(permit), Some(request)) = (permit, waiting.take()) {
                        drop(permit.send(request));
                    }
                }
                request = request, if waiting.is_none() => match request {
                    Ok(Some(request)) => *waiting = Some(request),
                    Ok(None) => (*requests, *say) = (None, None),
                    Err(status) => return Some(Err(status)),
                },
                () = stopping.cancelled() => {
                    return Some(Err(Status::unavailable("the agent is stopping")));
                }
                () = &mut silence => return Some(Ok(A::working())),
            }
        }
    }
}
