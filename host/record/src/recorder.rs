//! The step thread's half of a recorder: it copies a step into memory that is used again and hands it on. It never waits for the
//! disk: when the writer is behind, the step is left out and counted.
//!
//! Must never know: entries, frames or files.

use std::{
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded};
use serde::Serialize;
use timetable_attention::BuildFault;
use timetable_sandbox::{
    BuiltBy, DirError, Limits, ObservedStep, StepObserver, StepRecord, VersionHandle,
};
use timetable_types::{Causal, CommonAttentionMetadata, Metadata};

use crate::{
    entry::Slot,
    writer::{Segments, Writer},
};

/// What is done with a step when the writer is behind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Behind {
    /// It is left out and counted: for a host that serves.
    #[default]
    LeaveOut,
    /// The step thread waits: for a replay of a trace, where nobody waits for the steps.
    Wait,
}

/// Bounds on a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecorderOptions {
    /// Bytes of all segments in the directory. Default: 1 GiB. Beyond it the oldest segment goes.
    pub max_bytes: u64,
    /// Bytes of a segment after which the next one begins. Default: 32 MiB; at most an eighth of `max_bytes`.
    pub segment_bytes: u64,
    /// Steps that wait to be written, at most. Default: 32. Cost: a copy of a step's tensors each.
    pub queue: usize,
    /// Bytes of a step's tensors that are copied, at most; a larger step is left out. Default: 8 MiB, about 1 ms.
    pub max_step_bytes: usize,
    /// What is done when `queue` steps wait.
    pub behind: Behind,
}

impl Default for RecorderOptions {
    fn default() -> Self {
        RecorderOptions {
            max_bytes: 1 << 30,
            segment_bytes: 32 << 20,
            queue: 32,
            max_step_bytes: 8 << 20,
            behind: Behind::LeaveOut,
        }
    }
}

/// Why nothing is recorded.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The directory is not to be used.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// A bound that makes no sense.
    #[error("a recording of at most {0} bytes holds nothing: allow at least {MIN_BYTES} (256 KiB)")]
    TooSmall(u64),
    /// The system gives no thread.
    #[error("the recorder's thread cannot start: {0}; raise the process's thread limit")]
    Thread(std::io::Error),
    /// The compressor gives no memory, or the first segment cannot be written.
    #[error("the recording in `{dir}` cannot be begun: {error}", dir = dir.display())]
    Begin {
        /// The directory.
        dir: std::path::PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
}

/// The smallest `max_bytes`.
const MIN_BYTES: u64 = 256 << 10;

/// What a recorder has done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RecorderFigures {
    /// Steps that it was told of.
    pub steps: u64,
    /// Of those, written: their frames are whole in a segment.
    pub written: u64,
    /// Of those, left out: the writer was behind, the step too large, or the file system refused.
    pub left_out: u64,
    /// Bytes of all segments now.
    pub bytes: u64,
    /// Segments that went to keep the bound.
    pub segments_removed: u64,
    /// Why nothing is written any more: the directory's file system refused.
    pub stopped: Option<String>,
}

/// What the step thread and the writer share.
#[derive(Default)]
pub(crate) struct Shared {
    pub(crate) steps: AtomicU64,
    pub(crate) written: AtomicU64,
    pub(crate) left_out: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) segments_removed: AtomicU64,
    pub(crate) stopped: Mutex<Option<String>>,
    /// No further step comes.
    end: AtomicBool,
}

/// A step on its way to the writer, in memory that is used again.
pub(crate) struct Buffer {
    pub(crate) number: u64,
    pub(crate) at: Duration,
    pub(crate) slot: Option<Arc<Slot>>,
    pub(crate) version: Option<VersionHandle>,
    pub(crate) built_by: BuiltBy,
    pub(crate) fault: Option<BuildFault>,
    pub(crate) build_time: Duration,
    pub(crate) fuel: u64,
    pub(crate) common: CommonAttentionMetadata,
    pub(crate) tensors: StepRecord,
    pub(crate) metadata: Option<Metadata>,
}

impl Buffer {
    fn new() -> Buffer {
        Buffer {
            number: 0,
            at: Duration::ZERO,
            slot: None,
            version: None,
            built_by: BuiltBy::Plain,
            fault: None,
            build_time: Duration::ZERO,
            fuel: 0,
            common: CommonAttentionMetadata {
                num_reqs: 0,
                num_actual_tokens: 0,
                max_query_len: 0,
                max_seq_len: 0,
                causal: Causal::All(true),
                block_table_width: 0,
                slot_mapping_len: 0,
                query_start_loc_cpu: Vec::new(),
                seq_lens_cpu_upper_bound: Vec::new(),
                is_prefilling: Vec::new(),
                dcp: None,
                encoder: None,
                fast_prefill: None,
                req_idx: Vec::new(),
                mm_req_doc_ranges: Vec::new(),
                replayssm_decode_base_cpu: Vec::new(),
                extras: Vec::new(),
            },
            tensors: StepRecord::default(),
            metadata: None,
        }
    }
}

/// Told of every served step, on the step thread.
pub struct Recorder {
    free: Receiver<Box<Buffer>>,
    full: Sender<Box<Buffer>>,
    /// Slots so far, as they were last.
    slots: Vec<Arc<Slot>>,
    shared: Arc<Shared>,
    max_step_bytes: usize,
    behind: Behind,
    began: Instant,
}

/// Ends a recording, and says what became of it.
pub struct RecorderHandle {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// Begins a recording in `path`, which is made with mode 0700 if it is not there; one that holds a recording already gets
/// further segments. `limits` are those that the recorded builders run with.
///
/// # Errors
/// If the directory belongs to another user, is open to others, is a file or a link, is being recorded into already, or cannot
/// be written.
pub fn record(
    path: &Path,
    limits: &Limits,
    options: RecorderOptions,
) -> Result<(Recorder, RecorderHandle), RecordError> {
    if options.max_bytes < MIN_BYTES {
        return Err(RecordError::TooSmall(options.max_bytes));
    }
    let shared = Arc::new(Shared::default());
    let segments = Segments::open(path, options.max_bytes, options.segment_bytes)?;
    let writer = Writer::begin(segments, limits.clone(), Arc::clone(&shared)).map_err(|error| {
        RecordError::Begin {
            dir: path.to_owned(),
            error,
        }
    })?;
    let queue = options.queue.max(1);
    let (full, to_write) = bounded(queue);
    let (to_free, free) = bounded(queue);
    for _ in 0..queue {
        // The channel has room for each.
        let _ = to_free.try_send(Box::new(Buffer::new()));
    }
    let of_thread = Arc::clone(&shared);
    let thread = std::thread::Builder::new()
        .name("timetable-record".to_owned())
        .spawn(move || run(writer, &to_write, &to_free, &of_thread))
        .map_err(RecordError::Thread)?;
    let recorder = Recorder {
        free,
        full,
        slots: Vec::new(),
        shared: Arc::clone(&shared),
        max_step_bytes: options.max_step_bytes,
        behind: options.behind,
        began: Instant::now(),
    };
    let handle = RecorderHandle {
        shared,
        thread: Some(thread),
    };
    Ok((recorder, handle))
}

/// How often the writer looks for steps. It is not woken, for that would cost the step thread microseconds.
const PERIOD: Duration = Duration::from_millis(2);

fn run(
    mut writer: Writer,
    to_write: &Receiver<Box<Buffer>>,
    to_free: &Sender<Box<Buffer>>,
    shared: &Shared,
) {
    loop {
        // Asked before the channel: what was handed over before the end is written.
        let end = shared.end.load(Relaxed);
        match to_write.try_recv() {
            Ok(mut buffer) => {
                writer.write(&mut buffer);
                // Their last reference may be this one: nothing is dropped on the step thread.
                buffer.version = None;
                buffer.metadata = None;
                buffer.fault = None;
                // A recorder that is gone takes no buffer back.
                let _ = to_free.try_send(buffer);
            }
            Err(TryRecvError::Empty) if !end => {
                writer.flush();
                std::thread::sleep(PERIOD);
            }
            Err(TryRecvError::Empty | TryRecvError::Disconnected) => break,
        }
    }
    writer.end();
}

impl Recorder {
    /// The slot as it is now: its configuration may have become another.
    fn slot(&mut self, step: &ObservedStep<'_>) -> Arc<Slot> {
        let config = step.context.config;
        let place = self
            .slots
            .iter()
            .position(|slot| slot.name == step.slot && slot.tenant.as_ref() == step.tenant);
        if let Some(place) = place
            && self.slots[place].config == *config
        {
            return Arc::clone(&self.slots[place]);
        }
        let slot = Arc::new(Slot {
            name: step.slot.to_owned(),
            tenant: step.tenant.cloned(),
            family: step.built.metadata.family(),
            config: config.clone(),
        });
        match place {
            Some(place) => self.slots[place] = Arc::clone(&slot),
            None => self.slots.push(Arc::clone(&slot)),
        }
        slot
    }
}

impl StepObserver for Recorder {
    fn observe(&mut self, step: ObservedStep<'_>) {
        let number = self.shared.steps.fetch_add(1, Relaxed);
        let buffer = match self.behind {
            Behind::LeaveOut => self.free.try_recv().ok(),
            Behind::Wait => self.free.recv().ok(),
        };
        let Some(mut buffer) = buffer else {
            self.shared.left_out.fetch_add(1, Relaxed);
            return;
        };
        let fits = buffer.tensors.fill(step.context, self.max_step_bytes);
        if fits {
            copy_common(&mut buffer.common, step.context.common);
            buffer.slot = Some(self.slot(&step));
            buffer.number = number;
            buffer.at = self.began.elapsed();
            let built = step.built;
            buffer.version = built.version;
            buffer.built_by = built.built_by;
            buffer.fault = built.fault;
            buffer.build_time = built.build_time;
            buffer.fuel = built.fuel;
            buffer.metadata = Some(built.metadata);
        } else {
            self.shared.left_out.fetch_add(1, Relaxed);
            buffer.slot = None;
        }
        // There are as many places as buffers; a writer that is gone writes nothing.
        let _ = self.full.try_send(buffer);
    }
}

/// As `clone_from`, which for this record would allocate every vector anew.
fn copy_common(into: &mut CommonAttentionMetadata, from: &CommonAttentionMetadata) {
    // Destructured, so that a field that is added here is copied or does not compile.
    let CommonAttentionMetadata {
        num_reqs,
        num_actual_tokens,
        max_query_len,
        max_seq_len,
        causal,
        block_table_width,
        slot_mapping_len,
        query_start_loc_cpu,
        seq_lens_cpu_upper_bound,
        is_prefilling,
        dcp,
        encoder,
        fast_prefill,
        req_idx,
        mm_req_doc_ranges,
        replayssm_decode_base_cpu,
        extras,
    } = from;
    into.num_reqs = *num_reqs;
    into.num_actual_tokens = *num_actual_tokens;
    into.max_query_len = *max_query_len;
    into.max_seq_len = *max_seq_len;
    into.causal = causal.clone();
    into.block_table_width = *block_table_width;
    into.slot_mapping_len = *slot_mapping_len;
    into.query_start_loc_cpu.clone_from(query_start_loc_cpu);
    into.seq_lens_cpu_upper_bound
        .clone_from(seq_lens_cpu_upper_bound);
    into.is_prefilling.clone_from(is_prefilling);
    into.dcp.clone_from(dcp);
    into.encoder.clone_from(encoder);
    into.fast_prefill.clone_from(fast_prefill);
    into.req_idx.clone_from(req_idx);
    into.mm_req_doc_ranges.clone_from(mm_req_doc_ranges);
    into.replayssm_decode_base_cpu
        .clone_from(replayssm_decode_base_cpu);
    into.extras.clone_from(extras);
}

impl RecorderHandle {
    /// What became of the steps so far.
    pub fn figures(&self) -> RecorderFigures {
        let shared = &self.shared;
        RecorderFigures {
            steps: shared.steps.load(Relaxed),
            written: shared.written.load(Relaxed),
            left_out: shared.left_out.load(Relaxed),
            bytes: shared.bytes.load(Relaxed),
            segments_removed: shared.segments_removed.load(Relaxed),
            stopped: shared
                .stopped
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone(),
        }
    }

    /// Writes what waits, and ends the recording. Steps that the recorder is told of later are lost.
    pub fn finish(mut self) -> RecorderFigures {
        self.end();
        self.figures()
    }

    fn end(&mut self) {
        self.shared.end.store(true, Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the recorder's thread panicked; what it had not written is lost");
        }
    }
}

impl Drop for RecorderHandle {
    fn drop(&mut self) {
        self.end();
    }
}
