//! SIGTERM and SIGINT, as calls on a thread of their own.
//!
//! Must never know: what ends.

use std::io;

use tokio::signal::unix::{SignalKind, signal};

/// From now on each of the two signals calls `on_signal` with how many came before it, instead of ending the process.
///
/// # Errors
/// The operating system gives no thread or no handler.
pub fn on_each(mut on_signal: impl FnMut(usize) + Send + 'static) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()?;
    let (mut terminate, mut interrupt) = {
        let _inside = runtime.enter();
        (
            signal(SignalKind::terminate())?,
            signal(SignalKind::interrupt())?,
        )
    };
    // Not joined: it ends with the process.
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            runtime.block_on(async {
                for before in 0.. {
                    tokio::select! {
                        _ = terminate.recv() => {}
                        _ = interrupt.recv() => {}
                    }
                    on_signal(before);
                }
            });
        })?;
    Ok(())
}
