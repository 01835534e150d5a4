//! The watchdog: a thread that advances the engine's epoch, and the knowledge of whether that thread is alive.
//!
//! Must never know: what a deadline is for. Callers set deadlines in ticks before each call.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use wasmtime::Engine;

/// Interrupts calls that outlive their deadline. Its thread's death is noticed by the next call, which starts it again.
pub struct Watchdog {
    engine: Engine,
    tick: Duration,
    alive: Arc<AtomicBool>,
    ticks: Arc<AtomicU64>,
    thread: Mutex<Option<Ticker>>,
    restarts: AtomicU64,
}

struct Ticker {
    stop: Arc<AtomicBool>,
    join: JoinHandle<()>,
}

/// Says that the thread is gone, however it went: by returning or by panicking.
struct Obituary(Arc<AtomicBool>);

impl Drop for Obituary {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Watchdog {
    pub(crate) fn start(engine: Engine, tick: Duration) -> std::io::Result<Watchdog> {
        let watchdog = Watchdog {
            engine,
            tick,
            alive: Arc::new(AtomicBool::new(false)),
            ticks: Arc::new(AtomicU64::new(0)),
            thread: Mutex::new(None),
            restarts: AtomicU64::new(0),
        };
        watchdog.spawn()?;
        Ok(watchdog)
    }

    /// Does the ticker thread run?
    pub fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    /// Ticks since the start.
    pub fn ticks(&self) -> u64 {
        self.ticks.load(Ordering::Relaxed)
    }

    /// How often a dead ticker was started again.
    pub fn restarts(&self) -> u64 {
        self.restarts.load(Ordering::Relaxed)
    }

    /// Stops the thread and waits for it, for example before a fork. The next call into a component starts it again.
    pub fn stop(&self) {
        let ticker = match self.thread.lock() {
            Ok(mut thread) => thread.take(),
            Err(poisoned) => poisoned.into_inner().take(),
        };
        if let Some(ticker) = ticker {
            ticker.stop.store(true, Ordering::Release);
            ticker.join.thread().unpark();
            // A ticker that panicked has said so through `alive`.
            let _ = ticker.join.join();
        }
    }

    /// Before a call: a call without a ticker would have no deadline. Costs one load while all is well.
    pub(crate) fn ensure_alive(&self) -> Result<(), String> {
        if self.is_alive() {
            return Ok(());
        }
        self.stop();
        self.restarts.fetch_add(1, Ordering::Relaxed);
        tracing::warn!("the watchdog's ticker thread was dead; starting it again");
        self.spawn().map_err(|error| {
            format!(
                "the watchdog's ticker thread is dead and cannot be started again ({error}); no component is called \
                 without a deadline. Raise the process's thread limit"
            )
        })
    }

    fn spawn(&self) -> std::io::Result<()> {
        let mut slot = match self.thread.lock() {
            Ok(slot) => slot,
            Err(poisoned) => poisoned.into_inner(),
        };
        if slot.is_some() && self.is_alive() {
            return Ok(());
        }
        let stop = Arc::new(AtomicBool::new(false));
        let (engine, tick) = (self.engine.weak(), self.tick);
        let (stopped, ticks) = (stop.clone(), self.ticks.clone());
        self.alive.store(true, Ordering::Release);
        let obituary = Obituary(self.alive.clone());
        let join = std::thread::Builder::new()
            .name("timetable-watchdog".into())
            .spawn(move || {
                let _obituary = obituary;
                loop {
                    std::thread::park_timeout(tick);
                    if stopped.load(Ordering::Acquire) {
                        return;
                    }
                    let Some(engine) = engine.upgrade() else {
                        return;
                    };
                    engine.increment_epoch();
                    ticks.fetch_add(1, Ordering::Relaxed);
                }
            })?;
        *slot = Some(Ticker { stop, join });
        Ok(())
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop();
    }
}
