//! Times on the device: medians of CUDA graph replays over rotating inputs. It must never know what is measured.

use std::time::{Duration, Instant};

use timetable_device_cuda::{
    CudaError,
    driver::{CaptureMode, Device, Event, GraphExec, Stream},
};

/// Inputs of a case, over all its sets, take at least this many bytes: beyond any L2.
pub const BEYOND_L2: usize = 512 << 20;

/// A rested clock needs this long to rise.
const WARM_UP: Duration = Duration::from_millis(30);

/// Sets of inputs that a case of `bytes` rotates over.
pub fn sets_for(bytes: usize) -> usize {
    BEYOND_L2.div_ceil(bytes.max(1)).clamp(1, 6)
}

/// Captures `work(set)` for each set as a graph, replays them in turn, and gives the median microseconds of one replay.
///
/// # Errors
/// What the driver says, while capturing or running.
pub fn graph_us(
    stream: &Stream,
    sets: usize,
    iterations: usize,
    mut work: impl FnMut(&Stream, usize) -> Result<(), CudaError>,
) -> Result<f64, CudaError> {
    let mut graphs = Vec::new();
    for set in 0..sets {
        // Once without a graph: whatever is loaded or chosen at the first call.
        work(stream, set)?;
        stream.synchronize()?;
        let graph = stream.capture(CaptureMode::ThreadLocal, |stream| work(stream, set))?;
        graphs.push(graph.instantiate()?);
    }
    replay_us(stream, &graphs, iterations)
}

/// Median microseconds of one replay of `graphs`, in turn.
///
/// # Errors
/// What the driver says.
pub fn replay_us(
    stream: &Stream,
    graphs: &[GraphExec],
    iterations: usize,
) -> Result<f64, CudaError> {
    stream_us(stream, graphs.len().max(4), iterations, |index| {
        // SAFETY: the caller of `graph_us` keeps alive what its closure launched, until this has synchronised.
        unsafe { stream.launch_graph(&graphs[index % graphs.len()]) }
    })
}

/// Median microseconds on `stream` of what one call of `launch` puts on it, after `warm_up` calls at a time have warmed the clock
/// up. The stream is idle afterwards.
///
/// # Errors
/// What the driver says.
pub fn stream_us(
    stream: &Stream,
    warm_up: usize,
    iterations: usize,
    mut launch: impl FnMut(usize) -> Result<(), CudaError>,
) -> Result<f64, CudaError> {
    let start = Instant::now();
    loop {
        for index in 0..warm_up {
            launch(index)?;
        }
        stream.synchronize()?;
        if start.elapsed() >= WARM_UP {
            break;
        }
    }
    let device = stream.device();
    let mut marks = Vec::with_capacity(iterations);
    for index in 0..iterations {
        let pair = (event(device)?, event(device)?);
        stream.record(&pair.0)?;
        launch(index)?;
        stream.record(&pair.1)?;
        marks.push(pair);
    }
    stream.synchronize()?;
    let mut times = Vec::with_capacity(iterations);
    for (begin, end) in &marks {
        times.push(f64::from(begin.elapsed_us(end)?));
    }
    Ok(median(times))
}

/// Median microseconds that `work` takes on the host, over `iterations` calls.
///
/// # Errors
/// The first call's that fails.
pub fn host_us<E>(iterations: usize, mut work: impl FnMut() -> Result<(), E>) -> Result<f64, E> {
    work()?;
    let mut times = Vec::with_capacity(iterations);
    for _ in 0..iterations {
        let start = Instant::now();
        work()?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok(median(times))
}

fn event(device: &Device) -> Result<Event, CudaError> {
    Event::new(device, true)
}

/// The middle one; 0 of none.
pub fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_go_beyond_the_l2() {
        assert_eq!(sets_for(1 << 30), 1);
        assert_eq!(sets_for(200 << 20), 3);
        assert_eq!(sets_for(1), 6);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(Vec::new()), 0.0);
    }
}
