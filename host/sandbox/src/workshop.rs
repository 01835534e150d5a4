//! The one background thread of a sandbox: compiles, instantiates, and drops what the step thread gave up.
//!
//! It runs at a lower priority than the step thread, and one job after the other, so that a reload takes at most one core's
//! spare time. Must never know: what a job does.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crossbeam_channel::{Sender, unbounded};

type Job = Box<dyn FnOnce() + Send>;

/// Not the lowest: at nice 19 beside a spinning step thread, preparing one version took 2.4 s.
const NICE: i32 = 10;

/// Sends jobs to the thread, which ends when this is dropped and its queue is empty.
pub(crate) struct Workshop {
    jobs: Sender<Job>,
}

impl Workshop {
    pub(crate) fn start() -> std::io::Result<Workshop> {
        let (jobs, queue) = unbounded::<Job>();
        std::thread::Builder::new().name("timetable-reload".into()).spawn(move || {
            lower_priority();
            for job in queue {
                if catch_unwind(AssertUnwindSafe(job)).is_err() {
                    tracing::error!("a job of the reload thread panicked; the builders in service are not affected");
                }
            }
        })?;
        Ok(Workshop { jobs })
    }

    /// Queues `job`. Never blocks.
    pub(crate) fn run(&self, job: impl FnOnce() + Send + 'static) {
        // The thread outlives this sender, so that sending cannot fail.
        let _ = self.jobs.send(Box::new(job));
    }
}

/// Of the calling thread, below that of the step thread. Without it, background work merely disturbs more.
pub(crate) fn lower_priority() {
    // On Linux this is the calling thread's alone.
    if let Err(error) = rustix::process::setpriority_process(None, NICE) {
        tracing::debug!("a background thread keeps its priority: {error}");
    }
}
