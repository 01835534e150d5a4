//! How much may wait: each tenant's requests are counted from their arrival to their end, and one too many is sent away.
//!
//! Must never know: HTTP, or what is asked.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use timetable_sandbox::TenantName;
use tokio::sync::{Notify, watch};

use crate::error::ApiError;

/// Counts what runs and waits.
pub struct Admission {
    /// Answers of one tenant at once.
    limit: usize,
    state: Mutex<State>,
    /// Told when nothing runs while it drains.
    idle: Notify,
    /// True once what still runs is to end.
    ended: watch::Sender<bool>,
}

#[derive(Default)]
struct State {
    draining: bool,
    /// Requests.
    requests: usize,
    /// Answers of each tenant.
    answers: HashMap<Option<TenantName>, usize>,
}

impl Admission {
    /// `running` answers of one tenant may run at once, and `waiting` more may wait.
    pub fn new(running: usize, waiting: usize) -> Self {
        Admission {
            limit: running.saturating_add(waiting),
            state: Mutex::default(),
            idle: Notify::new(),
            ended: watch::Sender::new(false),
        }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request with so many answers, until the permit is dropped.
    pub fn admit(
        self: &Arc<Self>,
        tenant: Option<&TenantName>,
        answers: usize,
    ) -> Result<Permit, ApiError> {
        let mut state = self.state();
        if state.draining {
            return Err(draining());
        }
        if answers > self.limit {
            return Err(ApiError::bad(format!(
                "the request asks for {answers} answers, and this server takes {} at once; lower n, or send fewer prompts",
                self.limit
            )));
        }
        let tenant = tenant.cloned();
        let there = state.answers.entry(tenant.clone()).or_default();
        if *there + answers > self.limit {
            return Err(ApiError::busy(format!(
                "{there} of your requests run or wait, and this server keeps {} at most; try again in a moment",
                self.limit
            )));
        }
        *there += answers;
        state.requests += 1;
        Ok(Permit {
            admission: Arc::clone(self),
            tenant,
            answers,
        })
    }

    /// Requests that run or wait.
    pub fn requests(&self) -> usize {
        self.state().requests
    }

    /// Refuses with 503 while the server drains.
    pub fn check(&self) -> Result<(), ApiError> {
        match self.state().draining {
            true => Err(draining()),
            false => Ok(()),
        }
    }

    /// Takes no request any more.
    pub fn drain(&self) {
        self.state().draining = true;
    }

    /// Tells every request that still runs that the server ends.
    pub fn end(&self) {
        self.ended.send_replace(true);
    }

    /// Waits until no request runs.
    pub async fn idle(&self) {
        loop {
            let notified = self.idle.notified();
            if self.requests() == 0 {
                return;
            }
            notified.await;
        }
    }
}

fn draining() -> ApiError {
    ApiError::stopped("this server is shutting down; try again in a moment, or at another one")
}

/// What a request hears that was not answered in time.
pub fn cut_off() -> ApiError {
    ApiError::stopped(
        "this server ended before the answer did; try again in a moment, or at another one",
    )
}

/// A request that was let in.
pub struct Permit {
    admission: Arc<Admission>,
    tenant: Option<TenantName>,
    answers: usize,
}

impl Permit {
    /// Waits until the server ends all the same.
    pub fn ended(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut ended = self.admission.ended.subscribe();
        async move {
            if ended.wait_for(|ended| *ended).await.is_err() {
                // Nobody is left who could tell.
                std::future::pending::<()>().await;
            }
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.admission.state();
        state.requests = state.requests.saturating_sub(1);
        if let Some(there) = state.answers.get_mut(&self.tenant) {
            *there = there.saturating_sub(self.answers);
            if *there == 0 {
                state.answers.remove(&self.tenant);
            }
        }
        if state.requests == 0 {
            // One waits at most; the permit is kept for it if it is not there yet.
            self.admission.idle.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_too_many_of_a_tenant_is_sent_away_and_other_tenants_are_not() {
        let admission = Arc::new(Admission::new(2, 1));
        let acme: TenantName = "acme".parse().unwrap();
        let first = admission.admit(Some(&acme), 2).unwrap();
        let _second = admission.admit(Some(&acme), 1).unwrap();
        let status = |answers, tenant| {
            let refused = admission.admit(tenant, answers).err();
            refused.map(|error| error.status.as_u16())
        };
        assert_eq!(status(1, Some(&acme)), Some(429));
        assert_eq!(status(1, None), None);
        assert_eq!(status(4, None), Some(400), "it never fits");
        drop(first);
        assert_eq!(status(2, Some(&acme)), None);
        admission.drain();
        assert_eq!(status(1, None), Some(503));
        assert_eq!(admission.requests(), 1);
    }
}
