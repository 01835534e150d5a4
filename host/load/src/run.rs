//! Sending many requests: when they arrive, or by so many clients. Must never know: what is measured.

use std::{
    cell::{Cell, RefCell},
    time::{Duration, Instant},
};

use futures_util::{StreamExt, future, stream::FuturesUnordered};

use crate::{Client, Outcome, Request};

/// When no more requests are sent. Those that are under way are waited for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// Requests in all.
    pub max_requests: Option<usize>,
    /// Since the beginning.
    pub duration: Option<Duration>,
}

impl Limits {
    fn reached(&self, sent: usize, since: Instant) -> bool {
        self.max_requests.is_some_and(|most| sent >= most)
            || self.duration.is_some_and(|time| since.elapsed() >= time)
    }
}

/// So many clients, each of which sends its next request when it has the answer to the one before. `make` is asked for a
/// client's next request and given the number of requests before it, of all clients; `seen` is told what came of it. Returns the
/// time from the first request until the last answer.
pub async fn closed_loop(
    client: &Client,
    clients: usize,
    limits: Limits,
    make: impl Fn(usize, usize) -> Request,
    seen: impl FnMut(usize, &Request, Outcome),
) -> Duration {
    let start = Instant::now();
    let sent = Cell::new(0);
    let seen = RefCell::new(seen);
    let one = async |place: usize| {
        while !limits.reached(sent.get(), start) {
            let number = sent.replace(sent.get() + 1);
            let request = make(place, number);
            let outcome = client.send(&request).await;
            seen.borrow_mut()(place, &request, outcome);
            // An answer may be there at once, and others have theirs to read.
            tokio::task::yield_now().await;
        }
    };
    future::join_all((0..clients).map(one)).await;
    start.elapsed()
}

/// Each request at its time after the beginning, in this order, whatever became of those before; no more than `max_concurrency` at
/// once, and then the next waits. `seen` is told what came of each. Returns the time from the beginning until the last answer.
pub async fn open_loop(
    client: &Client,
    arrivals: impl Iterator<Item = (Duration, Request)>,
    max_concurrency: usize,
    limits: Limits,
    mut seen: impl FnMut(&Request, Outcome),
) -> Duration {
    let start = Instant::now();
    let mut arrivals = arrivals.peekable();
    let mut running = FuturesUnordered::new();
    let mut sent = 0;
    loop {
        let due = arrivals
            .peek()
            .map(|(at, _)| *at)
            // None that would come after the end.
            .filter(|at| limits.duration.is_none_or(|end| *at < end))
            .filter(|_| !limits.reached(sent, start));
        if due.is_none() && running.is_empty() {
            break;
        }
        let room = running.len() < max_concurrency.max(1);
        let arrival = async {
            match due {
                Some(at) if room => tokio::time::sleep(at.saturating_sub(start.elapsed())).await,
                _ => future::pending().await,
            }
        };
        tokio::select! {
            () = arrival => {
                if let Some((_, request)) = arrivals.next() {
                    sent += 1;
                    running.push(async move {
                        let outcome = client.send(&request).await;
                        (request, outcome)
                    });
                }
            }
            Some((request, outcome)) = running.next() => seen(&request, outcome),
        }
    }
    start.elapsed()
}
