//! A team of threads for regions that last microseconds.
//!
//! Decoding one token runs over a hundred parallel regions of 10–100 µs each. Waking a sleeping thread costs as much as
//! such a region, so the workers wait actively for a moment after each, yielding to anything else that wants the core,
//! and sleep only when no region comes. The caller works too and never waits for a worker that has not begun: on a busy
//! machine it simply does everything itself.
//!
//! Knows nothing of models.

use std::any::Any;
use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long a worker waits actively before it sleeps.
const ACTIVE_WAIT: Duration = Duration::from_micros(300);
/// Polls between two yields of the core.
const POLLS_PER_YIELD: u32 = 64;

type Work<'a> = dyn Fn(Range<usize>) + Sync + 'a;

/// A region: `work` is called with ranges that together cover `0..len` once.
struct Region {
    /// Lifetime erased; dereferenced only between entering and leaving an open region.
    work: *const Work<'static>,
    len: usize,
    grain: usize,
}

struct Shared {
    /// Odd while a region is open. Changes twice per region.
    epoch: AtomicU64,
    /// Workers that have entered, or are trying to.
    inside: AtomicUsize,
    next: AtomicUsize,
    region: UnsafeCell<Region>,
    stop: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `region` is written only by the caller of `run` (serialised by `Pool::turn`) while the epoch is even and
// `inside` is zero; it is read only by workers that entered and then saw the odd epoch (see `Shared::enter`). The work
// that it points to is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above; the raw pointer is only followed while the caller keeps its referent alive.
unsafe impl Send for Shared {}

impl Shared {
    /// Takes ranges until none is left.
    fn work_off(&self, work: &Work<'_>, len: usize, grain: usize) {
        loop {
            let start = self.next.fetch_add(grain, Ordering::Relaxed);
            if start >= len {
                return;
            }
            work(start..len.min(start + grain));
        }
    }

    /// A worker's part of the region that it saw at `epoch`.
    fn enter(&self, epoch: u64) {
        // Announce first, look second; the caller closes first and looks at `inside` second. In the total order of
        // these four operations either the caller sees this worker or this worker sees the region closed.
        self.inside.fetch_add(1, Ordering::SeqCst);
        if self.epoch.load(Ordering::SeqCst) == epoch {
            // SAFETY: the region is open and its caller waits for `inside` to fall to zero before it returns, so the
            // pointer and the fields are valid and not written until this worker leaves.
            let (work, len, grain) = unsafe {
                let region = &*self.region.get();
                (&*region.work, region.len, region.grain)
            };
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| self.work_off(work, len, grain)))
            {
                lock(&self.panic).get_or_insert(payload);
            }
        }
        self.inside.fetch_sub(1, Ordering::SeqCst);
    }

    fn worker(&self, asleep: &AtomicBool) {
        let mut done = 0;
        loop {
            let mut since = None;
            let mut polls = 0u32;
            let epoch = loop {
                let epoch = self.epoch.load(Ordering::SeqCst);
                if epoch != done && epoch % 2 == 1 {
                    break epoch;
                }
                if self.stop.load(Ordering::Relaxed) {
                    return;
                }
                polls += 1;
                if !polls.is_multiple_of(POLLS_PER_YIELD) {
                    std::hint::spin_loop();
                } else if since.get_or_insert_with(Instant::now).elapsed() < ACTIVE_WAIT {
                    thread::yield_now();
                } else {
                    asleep.store(true, Ordering::SeqCst);
                    // Look again: a caller that opened a region before the flag was set does not wake anybody.
                    if self.epoch.load(Ordering::SeqCst) == epoch
                        && !self.stop.load(Ordering::SeqCst)
                    {
                        thread::park();
                    }
                    asleep.store(false, Ordering::SeqCst);
                    since = None;
                }
            };
            self.enter(epoch);
            done = epoch;
        }
    }
}

struct Worker {
    handle: JoinHandle<()>,
    asleep: Arc<AtomicBool>,
}

/// The team. Dropping it ends its threads.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<Worker>,
    /// One region at a time.
    turn: Mutex<()>,
}

impl Pool {
    /// A team of `threads`, the caller included; `None` means one per available core. If the system refuses a thread
    /// the team is smaller.
    pub(crate) fn new(threads: Option<usize>) -> Self {
        let threads =
            threads.unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from));
        let nothing: &'static Work<'static> = &|_| {};
        let shared = Arc::new(Shared {
            epoch: AtomicU64::new(0),
            inside: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            region: UnsafeCell::new(Region {
                work: nothing,
                len: 0,
                grain: 1,
            }),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
        });
        let spawn = |i: usize| {
            let shared = Arc::clone(&shared);
            let asleep = Arc::new(AtomicBool::new(false));
            let flag = Arc::clone(&asleep);
            let builder = thread::Builder::new().name(format!("model-{i}"));
            let handle = builder.spawn(move || shared.worker(&flag)).ok()?;
            Some(Worker { handle, asleep })
        };
        let workers = (1..threads).map_while(spawn).collect();
        Self {
            shared,
            workers,
            turn: Mutex::new(()),
        }
    }

    /// Threads that take part, the caller included.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `work` with disjoint ranges that cover `0..len`, on all threads, and returns when all are done. A range
    /// has at least `min_grain` elements (but the last). A panic of `work` is passed on.
    pub(crate) fn run(&self, len: usize, min_grain: usize, work: &Work<'_>) {
        // A few ranges per thread, so that a thread that is slowed down leaves its share to the others.
        let grain = len.div_ceil(self.threads() * 4).max(min_grain).max(1);
        if self.workers.is_empty() || len <= grain {
            if len > 0 {
                work(0..len);
            }
            return;
        }
        let _turn = lock(&self.turn);
        let shared = &*self.shared;
        // A leftover of a region in which the caller's own share panicked as well.
        lock(&shared.panic).take();
        // SAFETY: only the lifetime changes. `Open` below does not let this call end, not even by a panic, before every
        // worker that entered has left and the region is closed.
        let erased = unsafe { std::mem::transmute::<*const Work<'_>, *const Work<'static>>(work) };
        // SAFETY: the epoch is even and `inside` was zero when the last region closed; a worker that is trying to enter
        // now compares the epoch first and leaves again without reading this.
        unsafe {
            *shared.region.get() = Region {
                work: erased,
                len,
                grain,
            };
        }
        shared.next.store(0, Ordering::Relaxed);
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        for worker in &self.workers {
            if worker.asleep.load(Ordering::SeqCst) {
                worker.handle.thread().unpark();
            }
        }
        let open = Open(shared);
        shared.work_off(work, len, grain);
        drop(open);
        let payload = lock(&shared.panic).take();
        if let Some(payload) = payload {
            resume_unwind(payload);
        }
    }
}

/// Closes the region and waits for those inside.
struct Open<'a>(&'a Shared);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.epoch.fetch_add(1, Ordering::SeqCst);
        let mut polls = 0u32;
        while self.0.inside.load(Ordering::SeqCst) != 0 {
            polls += 1;
            if polls.is_multiple_of(POLLS_PER_YIELD * 16) {
                thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.handle.thread().unpark();
            // A worker cannot panic outside `catch_unwind`; there is nothing to report.
            let _ = worker.handle.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A buffer that the threads of a region write at disjoint places.
pub(crate) struct SharedOut<'a, T = f32> {
    start: *mut T,
    len: usize,
    _buffer: PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through `slice`, whose contract makes concurrent slices disjoint.
unsafe impl<T: Send> Sync for SharedOut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for SharedOut<'_, T> {}

impl<'a, T> SharedOut<'a, T> {
    pub(crate) fn new(buffer: &'a mut [T]) -> Self {
        Self {
            start: buffer.as_mut_ptr(),
            len: buffer.len(),
            _buffer: PhantomData,
        }
    }

    /// The elements of `range`; panics if it leaves the buffer.
    ///
    /// # Safety
    /// No two live slices of one buffer overlap.
    #[allow(clippy::mut_from_ref)] // The contract is what `&mut` would have said.
    pub(crate) unsafe fn slice(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "{range:?} leaves a buffer of {}",
            self.len
        );
        // SAFETY: within the buffer by the assertion, exclusive by the caller's promise, alive for 'a.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_cover_everything_once() {
        let pool = Pool::new(Some(3));
        for len in [0, 1, 2, 7, 100, 1000] {
            let hits: Vec<AtomicUsize> = (0..len).map(|_| AtomicUsize::new(0)).collect();
            for _ in 0..50 {
                pool.run(len, 1, &|range| {
                    for i in range {
                        hits[i].fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            assert!(
                hits.iter().all(|h| h.load(Ordering::Relaxed) == 50),
                "len {len}"
            );
        }
    }

    #[test]
    fn a_panic_is_passed_on_and_the_team_lives() {
        let pool = Pool::new(Some(2));
        for _ in 0..20 {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                pool.run(64, 1, &|range| assert!(!range.contains(&40), "forty"));
            }));
            assert!(outcome.is_err());
        }
        let sum = AtomicUsize::new(0);
        pool.run(64, 1, &|range| {
            sum.fetch_add(range.sum::<usize>(), Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 64 * 63 / 2);
    }

    #[test]
    fn workers_wake_after_they_slept() {
        let pool = Pool::new(Some(2));
        for _ in 0..3 {
            thread::sleep(Duration::from_millis(5));
            let sum = AtomicUsize::new(0);
            pool.run(1000, 1, &|range| {
                sum.fetch_add(range.len(), Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 1000);
        }
    }
}
