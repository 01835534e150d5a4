//! Which configured mode survives what the backends support. It must never know how graphs are captured.

use core::fmt;

use serde::Serialize;
use thiserror::Error;
use timetable_types::{CudagraphMode, CudagraphSupport};

use super::modes::{GraphModes, support_name};
use super::sizes::{CaptureSizeError, round_capture_sizes};
use super::{RuntimeMode, modes};
use crate::batch::RunnerGeneration;

/// Blocks that the decodes of Mamba layers occupy: one for each sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MambaBlocks {
    /// Sequences that may run at once.
    pub max_num_reqs: u32,
    /// Blocks there are.
    pub num_blocks: u32,
}

/// What the decision is made from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolveInput<'a> {
    /// The configured mode; `None` counts as NONE.
    pub mode: Option<CudagraphMode>,
    /// The weakest support over attention groups.
    pub min_support: CudagraphSupport,
    /// Whose it is; `None` prints as the field prints it.
    pub min_backend: Option<&'a str>,
    /// 1 + speculative tokens.
    pub uniform_decode_query_len: u32,
    /// Is every attention operator among the operators at which the model is cut?
    pub attention_is_splitting_op: bool,
    /// Is the compilation mode VLLM_COMPILE?
    pub compiled: bool,
    /// Does the compiler's own graph partition cut it?
    pub use_inductor_graph_partition: bool,
    /// Whose rules apply.
    pub runner: RunnerGeneration,
    /// Does the loaded model have compiled pieces or breakable graphs?
    pub piecewise_capture_available: bool,
    /// Configured sizes.
    pub capture_sizes: &'a [u32],
    /// The largest size allowed.
    pub max_capture_size: u32,
    /// Given where there are Mamba layers.
    pub mamba: Option<MambaBlocks>,
    /// A profile run does not check blocks.
    pub is_profiling: bool,
}

/// How loud the field is about a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeLevel {
    /// Each time.
    Warning,
    /// Once per process.
    WarningOnce,
}

/// One change of mode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ModeChange {
    /// The mode before.
    pub from: CudagraphMode,
    /// The mode after.
    pub to: CudagraphMode,
    /// The field's text.
    pub reason: String,
    /// How loud.
    pub level: ChangeLevel,
}

/// The mode that survived.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Resolved {
    /// The mode.
    pub mode: CudagraphMode,
    /// Sizes to capture.
    pub capture_sizes: Vec<u32>,
    /// The largest of them.
    pub max_capture_size: u32,
    /// What changed on the way, in order.
    pub changes: Vec<ModeChange>,
}

/// Why no mode survives.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ResolveError {
    /// Graphs of mixed batches were asked for, and the backend's attention is never captured.
    #[error(
        "CUDAGraphMode.{} is not supported with {backend} backend (support: AttentionCGSupport.{}); please try \
         cudagraph_mode=PIECEWISE, and make sure compilation mode is VLLM_COMPILE",
        .mode.name(), modes::support_name(*.support)
    )]
    MixedUnsupported {
        /// The mode.
        mode: CudagraphMode,
        /// The backend.
        backend: String,
        /// Its support.
        support: CudagraphSupport,
    },
    /// Full graphs are left in the mode although the backend's attention is never captured.
    #[error(
        "CUDAGraphMode.{} is not supported with {backend} backend (support:AttentionCGSupport.{}) ; please try \
         cudagraph_mode=PIECEWISE, and make sure compilation mode is VLLM_COMPILE",
        .mode.name(), modes::support_name(*.support)
    )]
    FullUnsupported {
        /// The mode.
        mode: CudagraphMode,
        /// The backend.
        backend: String,
        /// Its support.
        support: CudagraphSupport,
    },
    /// No size to capture.
    #[error(transparent)]
    Sizes(#[from] CaptureSizeError),
    /// More sequences than Mamba blocks.
    #[error(
        "max_num_seqs ({max_num_reqs}) exceeds available Mamba cache blocks ({num_blocks}). Each decode sequence requires \
         one Mamba cache block, so CUDA graph capture cannot proceed. Please lower max_num_seqs to at most {num_blocks} or \
         increase gpu_memory_utilization."
    )]
    MambaBlocks {
        /// Sequences that may run at once.
        max_num_reqs: u32,
        /// Blocks there are.
        num_blocks: u32,
    },
}

/// A refusal, with the changes made before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolveFailure {
    /// Why.
    pub error: ResolveError,
    /// What changed on the way, in order.
    pub changes: Vec<ModeChange>,
    /// Sizes as they stood.
    pub capture_sizes: Vec<u32>,
    /// The largest size as it stood.
    pub max_capture_size: u32,
}

impl fmt::Display for ResolveFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl core::error::Error for ResolveFailure {}

/// The decision in progress.
struct Resolving<'a> {
    input: &'a ResolveInput<'a>,
    mode: CudagraphMode,
    changes: Vec<ModeChange>,
}

impl Resolving<'_> {
    fn change(&mut self, to: CudagraphMode, level: ChangeLevel, reason: String) {
        self.changes.push(ModeChange {
            from: self.mode,
            to,
            reason,
            level,
        });
        self.mode = to;
    }

    fn warn(&mut self, to: CudagraphMode, subject: &str, because: &str) {
        let reason = format!(
            "CUDAGraphMode.{} is not supported with {subject} (support: AttentionCGSupport.{}); setting \
             cudagraph_mode={}{because}",
            self.mode.name(),
            support_name(self.input.min_support),
            to.name(),
        );
        self.change(to, ChangeLevel::Warning, reason);
    }

    fn backend(&self) -> &str {
        self.input.min_backend.unwrap_or("None")
    }
}

/// Resolves the mode, in the field's order (vLLM 0.33 `resolve_cudagraph_mode_and_sizes`):
/// 1. Mixed batches as full graphs need ALWAYS: a backend that is never captured is refused; otherwise only decodes stay
///    full, others piecewise where the model is cut at attention, eager where not.
/// 2. Decodes as full graphs need more than NEVER: else piecewise if the model is cut at attention, else eager.
/// 3. Decodes of more than one token need UNIFORM_BATCH: likewise.
/// 4. Where nothing can be captured piecewise, what is piecewise becomes eager.
/// 5. Full graphs that are left with NEVER are refused.
/// 6. The first-generation runner rounds the capture sizes to whole decodes.
/// 7. Mamba layers need one block for every sequence.
///
/// # Errors
/// As in 1, 5, 6 and 7.
pub fn resolve_cudagraph_mode_and_sizes(
    input: &ResolveInput<'_>,
) -> Result<Resolved, ResolveFailure> {
    let mut at = Resolving {
        input,
        mode: input.mode.unwrap_or(CudagraphMode::None),
        changes: Vec::new(),
    };
    let mut sizes = (input.capture_sizes.to_vec(), input.max_capture_size);
    match resolve(&mut at, &mut sizes) {
        Ok(()) => Ok(Resolved {
            mode: at.mode,
            capture_sizes: sizes.0,
            max_capture_size: sizes.1,
            changes: at.changes,
        }),
        Err(error) => Err(ResolveFailure {
            error,
            changes: at.changes,
            capture_sizes: sizes.0,
            max_capture_size: sizes.1,
        }),
    }
}

fn resolve(at: &mut Resolving<'_>, sizes: &mut (Vec<u32>, u32)) -> Result<(), ResolveError> {
    if at.mode == CudagraphMode::None {
        return Ok(());
    }
    let input = at.input;
    let support = input.min_support;
    let backend = at.backend().to_owned();
    let of_backend = format!("{backend} backend");
    let split = input.attention_is_splitting_op;

    if at.mode.mixed_mode() == RuntimeMode::Full && support != CudagraphSupport::Always {
        if support == CudagraphSupport::Never {
            return Err(ResolveError::MixedUnsupported {
                mode: at.mode,
                backend,
                support,
            });
        }
        let to = if split {
            CudagraphMode::FullAndPiecewise
        } else {
            CudagraphMode::FullDecodeOnly
        };
        at.warn(to, &of_backend, "");
    }
    if at.mode.decode_mode() == RuntimeMode::Full && support == CudagraphSupport::Never {
        if input.compiled && (split || input.use_inductor_graph_partition) {
            at.warn(
                CudagraphMode::Piecewise,
                &of_backend,
                " because attention is compiled piecewise",
            );
        } else {
            at.warn(
                CudagraphMode::None,
                &of_backend,
                " because attention is not compiled piecewise",
            );
        }
    }
    if at.mode.decode_mode() == RuntimeMode::Full
        && input.uniform_decode_query_len > 1
        && support < CudagraphSupport::UniformBatch
    {
        let to = if split {
            CudagraphMode::Piecewise
        } else {
            CudagraphMode::None
        };
        at.warn(
            to,
            &format!("spec-decode for attention backend {backend}"),
            "",
        );
    }
    if !input.piecewise_capture_available && at.mode.requires_piecewise_compilation() {
        let to = at.mode.without_piecewise();
        let reason = format!(
            "Cudagraph mode {} requires piecewise capture, but the loaded model provides neither a compiled submodule nor \
             breakable CUDA graphs. Overriding to {}.",
            at.mode.name(),
            to.name()
        );
        at.change(to, ChangeLevel::WarningOnce, reason);
    }
    if at.mode.has_full_cudagraphs() && support == CudagraphSupport::Never {
        return Err(ResolveError::FullUnsupported {
            mode: at.mode,
            backend,
            support,
        });
    }
    if input.runner == RunnerGeneration::V1
        && at.mode.decode_mode() == RuntimeMode::Full
        && input.uniform_decode_query_len > 1
    {
        *sizes = round_capture_sizes(&sizes.0, input.uniform_decode_query_len, sizes.1)?;
    }
    if let Some(MambaBlocks {
        max_num_reqs,
        num_blocks,
    }) = input.mamba
        && at.mode.has_full_cudagraphs()
        && !input.is_profiling
        && max_num_reqs > num_blocks
    {
        return Err(ResolveError::MambaBlocks {
            max_num_reqs,
            num_blocks,
        });
    }
    Ok(())
}
