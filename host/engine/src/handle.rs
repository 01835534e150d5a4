//! The engine on its own thread, used from others: a channel of requests in, a sink of events per request out.
//!
//! The step thread never waits for anybody: a sink does not block, and one that says that its reader has gone away ends its
//! request. A [`RequestStream`] is a sink with an unbounded channel, bounded in fact by its request's tokens.
//! This module must never know who reads: a command line, a server, a test.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
};

use crossbeam_channel::{Receiver, Sender, unbounded};
use timetable_sandbox::ReloadHandle;

use crate::{
    engine::Engine,
    output::{FinishReason, GenerationRequest, RequestError, RequestId, RequestUpdate},
    sampling::TokenLogprobs,
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
        /// If the request asks for them.
        logprobs: Option<Box<TokenLogprobs>>,
    },
    /// The end; nothing follows.
    Finished {
        /// Why.
        reason: FinishReason,
        /// With [`FinishReason::Error`].
        error: Option<RequestError>,
    },
}

/// A request's sink, until its last event. However it goes (the engine stops, its thread panics, the command is never read),
/// that event is given.
struct Reader {
    sink: Option<Box<dyn FnMut(RequestEvent) -> bool + Send>>,
    unfinished: Arc<AtomicUsize>,
}

impl Reader {
    /// Gives a token. False: nobody reads any more, and the sink is not called again.
    fn token(&mut self, event: RequestEvent) -> bool {
        let reads = self.sink.as_mut().is_some_and(|sink| sink(event));
        if !reads {
            self.sink = None;
        }
        reads
    }

    fn finish(mut self, reason: FinishReason, error: Option<RequestError>) {
        self.end(reason, error);
    }

    fn end(&mut self, reason: FinishReason, error: Option<RequestError>) {
        if let Some(mut sink) = self.sink.take() {
            // There is nothing left to end if nobody reads it.
            let _ = sink(RequestEvent::Finished { reason, error });
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.end(FinishReason::Error, Some(RequestError::Stopped));
        self.unfinished.fetch_sub(1, Ordering::Release);
    }
}

enum Command {
    Add {
        id: RequestId,
        request: Box<GenerationRequest>,
        reader: Reader,
    },
    Abort(RequestId),
    Shutdown,
}

/// Ends a request from any thread. Dropping it ends nothing.
#[derive(Clone)]
pub struct RequestHandle {
    id: RequestId,
    commands: Sender<Command>,
}

impl RequestHandle {
    /// The request.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Ends the request; its last event is [`FinishReason::Abort`] unless it had ended already.
    pub fn abort(&self) {
        // A stopped engine has ended the request already.
        let _ = self.commands.send(Command::Abort(self.id));
    }
}

/// One request's events. Dropping it aborts the request.
pub struct RequestStream {
    request: RequestHandle,
    events: Receiver<RequestEvent>,
    finished: bool,
}

impl RequestStream {
    /// The request.
    pub fn id(&self) -> RequestId {
        self.request.id()
    }

    /// As [`RequestHandle::abort`].
    pub fn abort(&self) {
        self.request.abort();
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

/// An engine that runs on its own thread; any number of threads may share the handle and submit. Dropping it stops the
/// engine: requests that still run end with [`FinishReason::Abort`].
pub struct EngineHandle {
    commands: Sender<Command>,
    thread: Option<JoinHandle<()>>,
    next_id: AtomicU64,
    unfinished: Arc<AtomicUsize>,
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
            unfinished: Arc::default(),
            reload_handles,
            stats,
            tenants,
            fatal,
        })
    }

    /// Hands a request over. Its events go to `sink`, in order, the last one being [`RequestEvent::Finished`]; what is wrong
    /// with the request comes as its only event.
    ///
    /// `sink` is called on the step thread (on the caller's if the engine has stopped): it must not block, panic, format or do
    /// anything else that takes time. False says that nobody reads any more: the request is aborted and `sink` is dropped
    /// without another event.
    pub fn submit_to(
        &self,
        request: GenerationRequest,
        sink: impl FnMut(RequestEvent) -> bool + Send + 'static,
    ) -> RequestHandle {
        let id = RequestId(self.next_id.fetch_add(1, Ordering::Relaxed));
        self.unfinished.fetch_add(1, Ordering::Relaxed);
        // If the engine has stopped, the reader is dropped here and says so.
        let _ = self.commands.send(Command::Add {
            id,
            request: Box::new(request),
            reader: Reader {
                sink: Some(Box::new(sink)),
                unfinished: self.unfinished.clone(),
            },
        });
        RequestHandle {
            id,
            commands: self.commands.clone(),
        }
    }

    /// As [`EngineHandle::submit_to`], with a stream to read at leisure.
    pub fn submit(&self, request: GenerationRequest) -> RequestStream {
        let (events, receiver) = unbounded();
        RequestStream {
            request: self.submit_to(request, move |event| events.send(event).is_ok()),
            events: receiver,
            finished: false,
        }
    }

    /// Requests that were handed over and whose last event has not been given: 0 once all work is done.
    pub fn num_unfinished(&self) -> usize {
        self.unfinished.load(Ordering::Acquire)
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

    /// Why the engine takes no further request: its device is gone, or its thread. None while it lives. Requests that ran have
    /// ended with an error; new ones do at once.
    pub fn fatal_error(&self) -> Option<String> {
        let ended = || self.thread.as_ref().is_some_and(JoinHandle::is_finished);
        let fatal = self.fatal.get().cloned();
        fatal.or_else(|| ended().then(|| RequestError::Stopped.to_string()))
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
    readers: HashMap<RequestId, Reader>,
    stats: Arc<Mutex<EngineStats>>,
    tenants: Arc<Mutex<Vec<TenantStats>>>,
    fatal: Arc<OnceLock<String>>,
}

impl StepLoop {
    fn run(&mut self) {
        while self.take_commands() {
            self.step();
        }
        for (_, reader) in self.readers.drain() {
            reader.finish(FinishReason::Abort, None);
        }
    }

    /// Everything in the inbox; waits only while there is nothing to compute. False: stop.
    fn take_commands(&mut self) -> bool {
        loop {
            let command = if self.engine.is_idle() {
                // What ended without a step is not counted as running until the next one.
                self.publish();
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
                    reader,
                } => self.add(id, *request, reader),
                Command::Abort(id) => {
                    if self.engine.abort(id) {
                        self.finish(id, FinishReason::Abort, None);
                    }
                }
                Command::Shutdown => return false,
            }
        }
    }

    fn add(&mut self, id: RequestId, request: GenerationRequest, reader: Reader) {
        self.readers.insert(id, reader);
        if let Err(error) = self.engine.add_request_as(id, request) {
            self.finish(id, FinishReason::Error, Some(error));
        }
    }

    fn finish(&mut self, id: RequestId, reason: FinishReason, error: Option<RequestError>) {
        if let Some(reader) = self.readers.remove(&id) {
            reader.finish(reason, error);
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
                logprobs,
                finish,
                error,
            } = update;
            let Some(reader) = self.readers.get_mut(&id) else {
                continue;
            };
            let reads = token.is_none_or(|token| {
                reader.token(RequestEvent::Token {
                    token,
                    text,
                    logprobs,
                })
            });
            if let Some(reason) = finish {
                if let Some(reader) = self.readers.remove(&id) {
                    reader.finish(reason, error);
                }
            } else if !reads {
                gone.push(id);
            }
        }
        for id in gone {
            self.engine.abort(id);
            self.readers.remove(&id);
        }
        self.publish();
    }

    fn publish(&mut self) {
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner) = self.engine.stats();
        let mut published = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        published.clone_from_slice(self.engine.tenant_stats());
    }
}
