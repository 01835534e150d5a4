//! The watchdog: a thread that advances the engine's epoch, and the knowledge of whether that thread is alive and ticking.
//!
//! Must never know: what a deadline is for. Callers set deadlines in ticks before each call.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use arc_swap::ArcSwapOption;
use wasmtime::Engine;

/// Periods without a tick after which a ticker counts as stuck.
const STALLED_TICKS: u32 = 10;

/// Interrupts calls that outlive their deadline. It is watched itself: the next call notices that its thread died or stopped
/// ticking, says so, and starts another.
pub struct Watchdog {
    engine: Engine,
    tick: Duration,
    /// Without a tick for that long, the ticker is stuck.
    patience: Duration,
    began: Instant,
    ticks: Arc<AtomicU64>,
    /// The ticker that is in charge. Others were told to stop.
    ticker: ArcSwapOption<Ticker>,
    thread: Mutex<Option<JoinHandle<()>>>,
    restarts: AtomicU64,
    stalls: AtomicU64,
}

/// What one ticker thread and those who watch it share.
struct Ticker {
    stop: AtomicBool,
    alive: AtomicBool,
    /// The heartbeat: nanoseconds from `Watchdog::began` to its last tick.
    beat: AtomicU64,
    /// Lets a test hold the thread.
    #[cfg(test)]
    held: AtomicBool,
}

/// Says that the thread is gone, however it went: by returning or by panicking.
struct Obituary(Arc<Ticker>);

impl Drop for Obituary {
    fn drop(&mut self) {
        self.0.alive.store(false, Ordering::Release);
    }
}

impl Watchdog {
    pub(crate) fn start(
        engine: Engine,
        tick: Duration,
        deadline: Duration,
    ) -> std::io::Result<Watchdog> {
        let watchdog = Watchdog {
            engine,
            tick,
            patience: deadline.max(tick * STALLED_TICKS),
            began: Instant::now(),
            ticks: Arc::new(AtomicU64::new(0)),
            ticker: ArcSwapOption::empty(),
            thread: Mutex::new(None),
            restarts: AtomicU64::new(0),
            stalls: AtomicU64::new(0),
        };
        watchdog.spawn()?;
        Ok(watchdog)
    }

    /// Does the ticker thread run?
    pub fn is_alive(&self) -> bool {
        self.ticker
            .load()
            .as_ref()
            .is_some_and(|ticker| ticker.alive.load(Ordering::Acquire))
    }

    /// Ticks since the start.
    pub fn ticks(&self) -> u64 {
        self.ticks.load(Ordering::Relaxed)
    }

    /// How often a ticker that was dead or stuck was replaced.
    pub fn restarts(&self) -> u64 {
        self.restarts.load(Ordering::Relaxed)
    }

    /// How many of them were stuck.
    pub fn stalls(&self) -> u64 {
        self.stalls.load(Ordering::Relaxed)
    }

    /// Stops the thread and waits for it, for example before a fork. The next call into a component starts it again.
    pub fn stop(&self) {
        if let Some(ticker) = self.ticker.swap(None) {
            ticker.stop.store(true, Ordering::Release);
        }
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread {
            thread.thread().unpark();
            // A ticker that panicked has said so through `alive`.
            let _ = thread.join();
        }
    }

    /// Before a call: a call without a ticker would have no deadline. Costs a clock and two loads while all is well.
    pub(crate) fn ensure_alive(&self) -> Result<(), String> {
        let what = match self.ticker.load().as_ref() {
            Some(ticker) if ticker.alive.load(Ordering::Acquire) => {
                let now = nanoseconds(self.began.elapsed());
                let quiet =
                    Duration::from_nanos(now.saturating_sub(ticker.beat.load(Ordering::Acquire)));
                if quiet < self.patience {
                    return Ok(());
                }
                self.stalls.fetch_add(1, Ordering::Relaxed);
                format!("has not ticked for {quiet:?}")
            }
            _ => "was dead".to_owned(),
        };
        self.restarts.fetch_add(1, Ordering::Relaxed);
        tracing::warn!("the watchdog's ticker thread {what}; starting another");
        self.spawn().map_err(|error| {
            format!(
                "the watchdog's ticker thread {what} and cannot be started again ({error}); no component is called \
                 without a deadline. Raise the process's thread limit"
            )
        })
    }

    /// Puts a new ticker in charge. The old one, if it still runs, finds that it was told to stop; it is not waited for.
    fn spawn(&self) -> std::io::Result<()> {
        let mut slot = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        let ticker = Arc::new(Ticker {
            stop: AtomicBool::new(false),
            alive: AtomicBool::new(true),
            beat: AtomicU64::new(nanoseconds(self.began.elapsed())),
            #[cfg(test)]
            held: AtomicBool::new(false),
        });
        let (engine, tick, began) = (self.engine.weak(), self.tick, self.began);
        let ticks = self.ticks.clone();
        let obituary = Obituary(ticker.clone());
        let join = std::thread::Builder::new()
            .name("timetable-watchdog".into())
            .spawn(move || {
                let ticker = &obituary.0;
                loop {
                    std::thread::park_timeout(tick);
                    #[cfg(test)]
                    while ticker.held.load(Ordering::Acquire) {
                        std::thread::sleep(tick);
                    }
                    if ticker.stop.load(Ordering::Acquire) {
                        return;
                    }
                    let Some(engine) = engine.upgrade() else {
                        return;
                    };
                    engine.increment_epoch();
                    ticks.fetch_add(1, Ordering::Relaxed);
                    ticker
                        .beat
                        .store(nanoseconds(began.elapsed()), Ordering::Release);
                }
            })?;
        if let Some(old) = self.ticker.swap(Some(ticker)) {
            old.stop.store(true, Ordering::Release);
        }
        *slot = Some(join);
        Ok(())
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop();
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_millis(2);

    fn watchdog() -> Watchdog {
        let mut config = wasmtime::Config::new();
        config.epoch_interruption(true);
        let engine = Engine::new(&config).expect("an engine");
        Watchdog::start(engine, TICK, Duration::from_millis(40)).expect("a thread")
    }

    fn hold(watchdog: &Watchdog, held: bool) {
        let ticker = watchdog.ticker.load_full().expect("a ticker");
        ticker.held.store(held, Ordering::Release);
    }

    fn wait_for_a_tick(watchdog: &Watchdog) {
        let (before, start) = (watchdog.ticks(), Instant::now());
        while watchdog.ticks() == before {
            assert!(start.elapsed() < Duration::from_secs(10), "nobody ticks");
            std::thread::sleep(TICK);
        }
    }

    #[test]
    fn a_ticker_that_ticks_is_left_alone() {
        let watchdog = watchdog();
        for _ in 0..20 {
            wait_for_a_tick(&watchdog);
            watchdog.ensure_alive().unwrap();
        }
        assert!(watchdog.is_alive());
    }

    #[test]
    fn a_ticker_that_is_stuck_is_replaced_by_the_next_call() {
        let watchdog = watchdog();
        let stuck = watchdog.ticker.load_full().expect("a ticker");
        hold(&watchdog, true);
        let before = watchdog.stalls();
        std::thread::sleep(Duration::from_millis(100));
        assert!(watchdog.is_alive(), "its thread runs, but does not tick");
        watchdog.ensure_alive().unwrap();
        assert_eq!(watchdog.stalls(), before + 1);
        assert!(watchdog.restarts() > 0);
        wait_for_a_tick(&watchdog);

        // The stuck one wakes up, finds that it is not in charge any more, and its end is not taken for the new one's.
        stuck.held.store(false, Ordering::Release);
        let start = Instant::now();
        while stuck.alive.load(Ordering::Acquire) {
            assert!(start.elapsed() < Duration::from_secs(10), "it never ends");
            std::thread::sleep(TICK);
        }
        assert!(watchdog.is_alive());
        wait_for_a_tick(&watchdog);
    }

    #[test]
    fn a_dead_ticker_is_replaced_by_the_next_call() {
        let watchdog = watchdog();
        watchdog.stop();
        assert!(!watchdog.is_alive());
        watchdog.ensure_alive().unwrap();
        assert!(watchdog.is_alive());
        wait_for_a_tick(&watchdog);
    }
}
