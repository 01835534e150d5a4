//! A request in the engine: its events as they come, and its end however it ends.
//!
//! Dropping it, as happens when a client hangs up, ends what still runs, so its blocks are free at the next step. Must never
//! know: HTTP, or how an answer is written.

use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use timetable_engine::sampling::TokenLogprobs;
use timetable_engine::{
    EngineHandle, FinishReason, GenerationRequest, RequestEvent, RequestHandle,
};
use timetable_sandbox::TenantName;
use tokio::sync::mpsc;
use tokio::time::Sleep;

use crate::admission::{Permit, cut_off};
use crate::error::ApiError;
use crate::generation::Generation;
use crate::metrics::{Clock, Metrics};

/// What the engine said of one answer.
pub struct Event {
    /// Which.
    pub choice: usize,
    pub what: What,
}

/// What became of an answer.
pub enum What {
    /// A token, and the text that became certain.
    Token {
        token: u32,
        text: String,
        /// If the request asks for them.
        logprobs: Option<Box<TokenLogprobs>>,
    },
    /// It ended well.
    Finished(FinishReason),
    /// It failed.
    Failed(ApiError),
}

/// The answers of one request.
pub struct Running {
    events: mpsc::UnboundedReceiver<(usize, RequestEvent)>,
    requests: Vec<Option<RequestHandle>>,
    open: usize,
    first: Option<Event>,
    timeout: Duration,
    deadline: Pin<Box<Sleep>>,
    /// The server ends.
    ended: Pin<Box<dyn Future<Output = ()> + Send>>,
    clock: Clock,
    _permit: Permit,
}

impl Running {
    /// Hands every answer of `generation` to the engine.
    pub fn submit(
        engine: &EngineHandle,
        generation: &mut Generation,
        tenant: Option<&TenantName>,
        permit: Permit,
        arrived: Instant,
        timeout: Duration,
        metrics: &Arc<Metrics>,
    ) -> Self {
        let (sender, events) = mpsc::unbounded_channel();
        let n = generation.n;
        let mut requests = Vec::with_capacity(generation.choices());
        for (at, prompt) in generation.prompts.iter_mut().enumerate() {
            let tokens = std::mem::take(&mut prompt.tokens);
            for i in 0..n {
                let choice = at * n + i;
                let mut params = generation.params.clone();
                params.max_tokens = prompt.max_tokens;
                // Several answers of one seed differ, and are the same again next time.
                params.seed = params.seed.map(|seed| seed.wrapping_add(i as u64));
                let request = GenerationRequest {
                    prompt: tokens.clone(),
                    params,
                    tenant: tenant.cloned(),
                    ..GenerationRequest::default()
                };
                let sender = sender.clone();
                let sink = move |event| sender.send((choice, event)).is_ok();
                requests.push(Some(engine.submit_to(request, sink)));
            }
        }
        Running {
            events,
            open: requests.len(),
            requests,
            first: None,
            timeout,
            deadline: Box::pin(tokio::time::sleep_until((arrived + timeout).into())),
            ended: Box::pin(permit.ended()),
            clock: Clock::start(metrics, arrived, generation.choices()),
            _permit: permit,
        }
    }

    /// Waits for the first event, which is given again by [`Running::next`]: a request that fails before its first token gets
    /// the status of its failure.
    pub async fn begin(&mut self) -> Result<(), ApiError> {
        match self.next().await {
            Some(Event {
                what: What::Failed(error),
                ..
            }) => Err(error),
            event => {
                self.first = event;
                Ok(())
            }
        }
    }

    /// The next event; none: every answer has ended.
    pub async fn next(&mut self) -> Option<Event> {
        std::future::poll_fn(|context| self.poll(context)).await
    }

    /// An event that is there already.
    pub fn ready(&mut self) -> Option<Event> {
        if let Some(event) = self.first.take() {
            return Some(event);
        }
        let (choice, event) = self.events.try_recv().ok()?;
        Some(self.event(choice, event))
    }

    fn poll(&mut self, context: &mut std::task::Context<'_>) -> Poll<Option<Event>> {
        if let Some(event) = self.first.take() {
            return Poll::Ready(Some(event));
        }
        if self.open == 0 {
            return Poll::Ready(None);
        }
        if let Poll::Ready(received) = self.events.poll_recv(context) {
            return Poll::Ready(received.map(|(choice, event)| self.event(choice, event)));
        }
        if self.deadline.as_mut().poll(context).is_ready() {
            let message = format!(
                "the answer was not ready within {} s; ask for fewer tokens, or raise the server's request_timeout",
                self.timeout.as_secs_f64()
            );
            return Poll::Ready(Some(self.give_up(ApiError::timeout(message))));
        }
        if self.ended.as_mut().poll(context).is_ready() {
            return Poll::Ready(Some(self.give_up(cut_off())));
        }
        Poll::Pending
    }

    fn give_up(&mut self, error: ApiError) -> Event {
        let choice = self.requests.iter().position(Option::is_some).unwrap_or(0);
        self.abort();
        let what = What::Failed(error);
        Event { choice, what }
    }

    fn event(&mut self, choice: usize, event: RequestEvent) -> Event {
        let what = match event {
            RequestEvent::Token {
                token,
                text,
                logprobs,
            } => {
                self.clock.token(choice);
                What::Token {
                    token,
                    text,
                    logprobs,
                }
            }
            RequestEvent::Finished { reason, error } => {
                self.open = self.open.saturating_sub(1);
                self.requests[choice] = None;
                self.clock.finished();
                match (reason, error) {
                    (_, Some(error)) => What::Failed(ApiError::of_engine(&error)),
                    // Nobody aborts what is still read but an engine that stops.
                    (FinishReason::Abort | FinishReason::Error, None) => {
                        What::Failed(ApiError::stopped("the engine has stopped"))
                    }
                    (reason, None) => What::Finished(reason),
                }
            }
        };
        Event { choice, what }
    }

    /// Ends what still runs; no event follows.
    pub fn abort(&mut self) {
        self.open = 0;
        for request in self.requests.iter_mut().filter_map(Option::take) {
            request.abort();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.abort();
    }
}
