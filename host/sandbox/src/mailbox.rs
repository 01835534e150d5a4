//! A place where one of step thread and reload thread leaves something for the other. The step thread never waits at it.
//!
//! Must never know: what is left there.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, Ordering},
};

/// Holds at most one thing.
pub(crate) struct Mailbox<T> {
    full: AtomicBool,
    slot: Mutex<Option<T>>,
}

impl<T> Mailbox<T> {
    pub(crate) fn new() -> Self {
        Mailbox {
            full: AtomicBool::new(false),
            slot: Mutex::new(None),
        }
    }

    /// Leaves `value`, and returns what lay there untaken.
    pub(crate) fn put(&self, value: T) -> Option<T> {
        let old = lock(&self.slot).replace(value);
        self.full.store(true, Ordering::Release);
        old
    }

    /// For the step thread: as `put`, but gives `value` back rather than wait for somebody who is just looking.
    pub(crate) fn offer(&self, value: T) -> Result<Option<T>, T> {
        let Ok(mut slot) = self.slot.try_lock() else {
            return Err(value);
        };
        let old = slot.replace(value);
        self.full.store(true, Ordering::Release);
        Ok(old)
    }

    /// For the reload thread: takes it back.
    pub(crate) fn withdraw(&self) -> Option<T> {
        self.full.store(false, Ordering::Release);
        lock(&self.slot).take()
    }

    /// For the step thread: one load if there is nothing; if somebody is just looking at it, the next step takes it.
    pub(crate) fn take(&self) -> Option<T> {
        self.take_after(|_| {})
    }

    /// As `take`; `first` has happened for whoever does not find it here any more.
    pub(crate) fn take_after(&self, first: impl FnOnce(&T)) -> Option<T> {
        if !self.full.load(Ordering::Acquire) {
            return None;
        }
        let mut slot = self.slot.try_lock().ok()?;
        if let Some(value) = &*slot {
            first(value);
        }
        self.full.store(false, Ordering::Release);
        slot.take()
    }

    pub(crate) fn peek<R>(&self, look: impl FnOnce(&T) -> R) -> Option<R> {
        lock(&self.slot).as_ref().map(look)
    }
}

/// No invariant of ours spans a panic while a lock is held.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
