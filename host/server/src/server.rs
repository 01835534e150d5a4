//! The server's thread, and how it is told to end.
//!
//! Must never know: what is asked, or what a signal is.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{SystemTime, UNIX_EPOCH};

use timetable_engine::EngineHandle;
use tokio::sync::watch;

use crate::admission::Admission;
use crate::connections;
use crate::metrics::Metrics;
use crate::model::ServedModel;
use crate::options::Options;
use crate::routes::State;

/// Threads beside the runtime, for what takes long.
const THREADS_BESIDE: usize = 2;

/// All metrics as Prometheus text, or why there are none.
pub type MetricsText = Box<dyn Fn() -> Result<String, String> + Send + Sync>;

/// What is served.
pub struct Service {
    /// Answers.
    pub engine: Arc<EngineHandle>,
    /// Says how large a request may be, and what its texts mean.
    pub model: ServedModel,
    /// What `/metrics` answers.
    pub metrics_text: MetricsText,
    /// When the model was loaded, in seconds since 1970.
    pub created: u64,
}

impl Service {
    /// Of a model that was loaded now.
    pub fn new(engine: Arc<EngineHandle>, model: ServedModel, metrics_text: MetricsText) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Service {
            engine,
            model,
            metrics_text,
            created: now.map_or(0, |now| now.as_secs()),
        }
    }
}

/// Where a server is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Serving,
    Draining,
    Stopping,
}

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Requests that had no answer yet.
    pub cut_off: usize,
}

/// Tells a server to end, from any thread.
#[derive(Clone)]
pub struct Control(Arc<watch::Sender<Phase>>);

impl Control {
    /// New requests get 503; those that run get their answers; then it ends.
    pub fn drain(&self) {
        self.0.send_if_modified(|phase| {
            let serves = *phase == Phase::Serving;
            if serves {
                *phase = Phase::Draining;
            }
            serves
        });
    }

    /// Ends at once.
    pub fn stop(&self) {
        self.0.send_replace(Phase::Stopping);
    }
}

/// A server on a thread of its own. Dropping it stops it.
pub struct Server {
    address: SocketAddr,
    control: Control,
    thread: Option<JoinHandle<Ended>>,
}

impl Server {
    /// Serves at `listener`, and counts in `metrics`.
    ///
    /// # Errors
    /// The operating system gives no thread, or the listener is not usable.
    pub fn start(
        listener: TcpListener,
        service: Service,
        options: Options,
        metrics: Arc<Metrics>,
    ) -> std::io::Result<Server> {
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(THREADS_BESIDE)
            .build()?;
        let running = service.model.bounds.max_num_seqs;
        let state = Arc::new(State {
            admission: Arc::new(Admission::new(running, options.max_waiting_requests)),
            service,
            options,
            metrics,
        });
        let (sender, phase) = watch::channel(Phase::Serving);
        let listener = {
            let _inside = runtime.enter();
            tokio::net::TcpListener::from_std(listener)?
        };
        let thread = std::thread::Builder::new()
            .name("timetable-http".to_owned())
            .spawn(move || runtime.block_on(connections::serve(listener, state, phase)))?;
        Ok(Server {
            address,
            control: Control(Arc::new(sender)),
            thread: Some(thread),
        })
    }

    /// Where it listens; with port 0 asked for, the port that it got.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// For whoever ends it.
    pub fn control(&self) -> Control {
        self.control.clone()
    }

    /// Waits for its end. None: its thread panicked.
    pub fn wait(mut self) -> Option<Ended> {
        self.thread.take()?.join().ok()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.control.stop();
            if thread.join().is_err() {
                tracing::error!("the server's thread panicked");
            }
        }
    }
}
