//! A spinner on standard error for what takes longer than a second. Silent where standard error is no terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Shows what is being done until it is dropped or finished.
pub struct Progress(ProgressBar);

impl Progress {
    /// Starts with `what`, if `show`.
    pub fn start(what: &str, show: bool) -> Self {
        let bar = if show {
            ProgressBar::new_spinner()
        } else {
            ProgressBar::hidden()
        };
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ({elapsed})") {
            bar.set_style(style);
        }
        bar.set_message(what.to_owned());
        bar.enable_steady_tick(Duration::from_millis(100));
        Progress(bar)
    }

    /// Goes on to something else.
    pub fn next(&self, what: &str) {
        self.0.set_message(what.to_owned());
        self.0.reset_elapsed();
    }

    /// Says how far it is.
    pub fn note(&self, what: String) {
        self.0.set_message(what);
    }

    /// Takes the spinner away.
    pub fn finish(self) {
        self.0.finish_and_clear();
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
