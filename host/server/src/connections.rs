//! Sockets: accepts them, bounds them, and lets them go when the server ends.
//!
//! Must never know: what is asked.

use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioTimer;
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::patient::Patient;
use crate::routes::State;
use crate::server::{Ended, Phase};

/// Bytes of a request's head.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// Between two attempts where no connection can be accepted, as when there are no file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// How long the last answers may take to reach their clients once nothing runs.
const LAST_ANSWERS: Duration = Duration::from_secs(5);
/// How long those that are cut off may take to hear it.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How often it is asked whether the engine lives.
const LOOK: Duration = Duration::from_millis(500);

/// Serves until told to stop, or until everything has ended after it was told to drain.
pub async fn serve(
    listener: TcpListener,
    state: Arc<State>,
    mut phase: watch::Receiver<Phase>,
) -> Ended {
    let slots = Arc::new(Semaphore::new(state.options.max_connections));
    let graceful = GracefulShutdown::new();
    let accept = async {
        loop {
            // Never closed.
            let Ok(slot) = Arc::clone(&slots).acquire_owned().await else {
                return;
            };
            match listener.accept().await {
                Ok((stream, _)) => connection(stream, slot, &state, &graceful),
                Err(error) => {
                    tracing::warn!(%error, "a connection was not accepted");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    };
    let cut_off = tokio::select! {
        () = accept => 0,
        cut_off = until_done(&state, &mut phase) => cut_off,
    };
    // Connections that wait for another request are closed; the others once they have their answer, or that there is none.
    state.admission.end();
    let patience = match cut_off {
        0 => LAST_ANSWERS,
        _ => LAST_WORDS,
    };
    let _ = timeout(patience, graceful.shutdown()).await;
    Ended { cut_off }
}

/// How many requests still run when it is time to go.
async fn until_done(state: &State, phase: &mut watch::Receiver<Phase>) -> usize {
    let mut look = tokio::time::interval(LOOK);
    loop {
        tokio::select! {
            _ = phase.wait_for(|phase| *phase != Phase::Serving) => break,
            _ = look.tick() => {
                if state.service.engine.fatal_error().is_some() {
                    break;
                }
            }
        }
    }
    state.admission.drain();
    let deadline = Instant::now() + state.options.drain_timeout;
    tokio::select! {
        () = state.admission.idle() => {}
        () = sleep_until(deadline) => {}
        _ = phase.wait_for(|phase| *phase == Phase::Stopping) => {}
    }
    state.admission.requests()
}

fn connection(
    stream: TcpStream,
    slot: OwnedSemaphorePermit,
    state: &Arc<State>,
    graceful: &GracefulShutdown,
) {
    // A token is a packet of its own.
    let _ = stream.set_nodelay(true);
    let (state, metrics) = (Arc::clone(state), Arc::clone(&state.metrics));
    let header_timeout = state.options.header_timeout;
    let service = service_fn(move |request| Arc::clone(&state).answer(request));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(header_timeout)
        .max_buf_size(HEAD_BYTES_MAX)
        .serve_connection(Patient::new(stream, header_timeout), service);
    let connection = graceful.watch(connection);
    let connected = metrics.connected();
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            // Clients come and go.
            tracing::debug!(%error, "a connection ended");
        }
        drop((slot, connected));
    });
}
