//! The engine on its own thread, used from others: a channel of requests in, a channel of events per request out.
//!
//! The step thread never waits for anybody: events go into unbounded channels, bounded in fact by each request's tokens, and
//! a reader that has gone away ends its request.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread::JoinHandle,
};

use crossbeam_channel::{Receiver, Sender, unbounded};
use timetable_sandbox::ReloadHandle;

use crate::{
    engine::Engine,
    output::{FinishReason, GenerationRequest, RequestError, RequestId, RequestUpdate},
    tenants::TenantStats,
    timings::EngineStats,
};

/// What a request's reader gets.
#[derive(Debug)]
pub enum RequestEvent {
    /// A token, with the text that became certain.
    Token {
        /// The token.
        token: u32,
        /// Often empty: text comes in whole characters, and what may be a stop string is held back.
        text: String,
    },
    /// The end; nothing follows.
    Finished {
        /// Why.
        reason: FinishReason,
        /// With [`FinishReason::Error`].
        error: Option<RequestError>,
    },
}

enum Command {
    Add {
        id: RequestId,
        request: Box<GenerationRequest>,
        events: Sender<RequestEvent>,
    },
    Abort(RequestId),
    Shutdown,
}

/// One request's events. Dropping it aborts the request.
pub struct RequestStream {
    id: RequestId,
    events: Receiver<RequestEvent>,
    commands: Sender<Command>,
    finished: bool,
}

impl RequestStream {
    /// The request.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Ends the request; the stream ends with [`FinishReason::Abort`] unless it had ended already.
    pub fn abort(&self) {
        // A stopped engine has ended the request already.
        let _ = self.commands.send(Command::Abort(self.id));
    }

    /// For `select!` over several streams. A closed channel without `Finished` means that the engine has stopped.
    pub fn events(&self) -> &Receiver<RequestEvent> {
        &self.events
    }
}

impl Iterator for RequestStream {
    type Item = RequestEvent;

    /// Waits for the next event. The last one is always `Finished`.
    fn next(&mut self) -> Option<RequestEvent> {
        if self.finished {
            return None;
        }
        let event = self.events.recv().unwrap_or(RequestEvent::Finished {
            reason: FinishReason::Error,
            error: Some(RequestError::Stopped),
        });
        self.finished = matches!(event, RequestEvent::Finished { .. });
        Some(event)
    }
}

impl Drop for RequestStream {
    fn drop(&mut self) {
        if !self.finished {
            self.abort();
        }
    }
}

/// An engine that runs on its own thread. Dropping it stops the engine: requests that still run end with
/// [`FinishReason::Abort`].
pub struct EngineHandle {
    commands: Sender<Command>,
    thread: Option<JoinHandle<()>>,
    next_id: AtomicU64,
    reload_handles: Vec<ReloadHandle>,
    stats: Arc<Mutex<EngineStats>>,
    tenants: Arc<Mutex<Vec<TenantStats>>>,
    fatal: Arc<OnceLock<String>>,
}

impl EngineHandle {
    /// Starts the step thread.
    ///
    /// # Errors
    /// If the operating system gives no thread.
    pub fn spawn(mut engine: Engine) -> std::io::Result<Self> {
        let (commands, inbox) = unbounded();
        let reload_handles = engine.reload_handles();
        let stats = Arc::new(Mutex::new(engine.stats()));
        let tenants = Arc::new(Mutex::new(engine.tenant_stats().to_vec()));
        let fatal = Arc::new(OnceLock::new());
        let mut step_loop = StepLoop {
            engine,
            inbox,
            readers: HashMap::new(),
            stats: stats.clone(),
            tenants: tenants.clone(),
            fatal: fatal.clone(),
        };
        let thread = std::thread::Builder::new()
            .name("timetable-step".to_owned())
            .spawn(move || step_loop.run())?;
        Ok(Self {
            commands,
            thread: Some(thread),
            next_id: AtomicU64::new(0),
            reload_handles,
            stats,
            tenants,
            fatal,
        })
    }

    /// Hands a request over. What is wrong with it comes as its only event.
    pub fn submit(&self, request: GenerationRequest) -> RequestStream {
        let id = RequestId(self.next_id.fetch_add(1, Ordering::Relaxed));
        let (events, receiver) = unbounded();
        // If the engine has stopped, the sender is dropped here and the stream says so.
        let _ = self.commands.send(Command::Add {
            id,
            request: Box::new(request),
            events,
        });
        RequestStream {
            id,
            events: receiver,
            commands: self.commands.clone(),
            finished: false,
        }
    }

    /// Replaces, rolls back and reports on the groups' builders, while requests run.
    pub fn reload_handles(&self) -> &[ReloadHandle] {
        &self.reload_handles
    }

    /// Counts and times, as of the last step.
    pub fn stats(&self) -> EngineStats {
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`EngineHandle::stats`], for whoever outlives this handle or is on another thread.
    pub fn stats_reader(&self) -> impl Fn() -> EngineStats + Send + Sync + use<> {
        let stats = self.stats.clone();
        move || *stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts for each tenant, as of the last step; see [`Engine::tenant_stats`].
    pub fn tenant_stats(&self) -> Vec<TenantStats> {
        self.tenant_stats_reader()()
    }

    /// As [`EngineHandle::tenant_stats`], for whoever outlives this handle or is on another thread.
    pub fn tenant_stats_reader(&self) -> impl Fn() -> Vec<TenantStats> + Send + Sync + use<> {
        let tenants = self.tenants.clone();
        move || {
            tenants
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone()
        }
    }

    /// Why the engine takes no further request: its device is gone. None while it lives. Requests that ran have ended with
    /// this error; new ones do at once.
    pub fn fatal_error(&self) -> Option<String> {
        self.fatal.get().cloned()
    }

    /// Stops the engine and waits for its thread.
    pub fn shutdown(mut self) {
        self.stop();
    }

    fn stop(&mut self) {
        let _ = self.commands.send(Command::Shutdown);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the step thread panicked; its requests ended without an answer");
        }
    }
}

impl Drop for EngineHandle {
    fn drop(&mut self) {
        self.stop();
    }
}

/// What the step thread owns.
struct StepLoop {
    engine: Engine,
    inbox: Receiver<Command>,
    readers: HashMap<RequestId, Sender<RequestEvent>>,
    stats: Arc<Mutex<EngineStats>>,
    tenants: Arc<Mutex<Vec<TenantStats>>>,
    fatal: Arc<OnceLock<String>>,
}

impl StepLoop {
    fn run(&mut self) {
        while self.take_commands() {
            self.step();
        }
        for (_, events) in self.readers.drain() {
            let _ = events.send(RequestEvent::Finished {
                reason: FinishReason::Abort,
                error: None,
            });
        }
    }

    /// Everything in the inbox; waits only while there is nothing to compute. False: stop.
    fn take_commands(&mut self) -> bool {
        loop {
            let command = if self.engine.is_idle() {
                match self.inbox.recv() {
                    Ok(command) => command,
                    Err(_) => return false,
                }
            } else {
                match self.inbox.try_recv() {
                    Ok(command) => command,
                    Err(_) => return true,
                }
            };
            match command {
                Command::Add {
                    id,
                    request,
                    events,
                } => self.add(id, *request, events),
                Command::Abort(id) => {
                    if self.engine.abort(id) {
                        self.finish(id, FinishReason::Abort, None);
                    }
                }
                Command::Shutdown => return false,
            }
        }
    }

    fn add(&mut self, id: RequestId, request: GenerationRequest, events: Sender<RequestEvent>) {
        self.readers.insert(id, events);
        if let Err(error) = self.engine.add_request_as(id, request) {
            self.finish(id, FinishReason::Error, Some(error));
        }
    }

    fn finish(&mut self, id: RequestId, reason: FinishReason, error: Option<RequestError>) {
        if let Some(events) = self.readers.remove(&id) {
            // The reader may have gone.
            let _ = events.send(RequestEvent::Finished { reason, error });
        }
    }

    fn step(&mut self) {
        self.engine.step();
        if let Some(message) = self.engine.fatal_error() {
            self.fatal.get_or_init(|| message.to_owned());
        }
        let mut gone = Vec::new();
        for update in self.engine.take_updates() {
            let RequestUpdate {
                id,
                token,
                text,
                finish,
                error,
            } = update;
            let Some(events) = self.readers.get(&id) else {
                continue;
            };
            let mut reader_left = false;
            if let Some(token) = token {
                reader_left = events.send(RequestEvent::Token { token, text }).is_err();
            }
            if let Some(reason) = finish {
                let _ = events.send(RequestEvent::Finished { reason, error });
                self.readers.remove(&id);
            } else if reader_left {
                gone.push(id);
            }
        }
        for id in gone {
            self.engine.abort(id);
            self.readers.remove(&id);
        }
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner) = self.engine.stats();
        let mut published = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        published.clone_from_slice(self.engine.tenant_stats());
    }
}
