//! One attention group's step: prepared from verified metadata, staged for the upload, launched by layers. It must never know
//! which builder made the metadata.

use std::sync::Arc;

use timetable_attention::{ResolveError, VerifyContext};
use timetable_types::{Family, Metadata};

use super::config::GroupConfig;
use super::launch::Launch;
use super::run::GroupLaunch;
use super::workspace::Workspace;
use super::{flash_attn, flashinfer};
use crate::upload::{LowerError, PackError, Packer, Stage, StepPtrs};

/// Why metadata was not prepared. None of this passes the verifier, except what this device does not run or has no room for.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PrepareError {
    /// The record asks for something that no kernel of this device executes.
    #[error("{what} is not executed by the CUDA device yet: {remedy}")]
    Unsupported {
        /// What it asks for.
        what: &'static str,
        /// What would work.
        remedy: &'static str,
    },
    /// A field contradicts the step's tensors or another field.
    #[error("{field}: {problem}")]
    Inconsistent {
        /// The field.
        field: &'static str,
        /// The value, and the bound that it breaks.
        problem: String,
    },
    /// The step needs more of the device's memory than its buffers have.
    #[error("{what}: {needed}, the group's workspace has room for {room}: {remedy}")]
    Room {
        /// Of what.
        what: &'static str,
        /// What the step needs.
        needed: u64,
        /// What there is.
        room: u64,
        /// What to do.
        remedy: &'static str,
    },
    /// A plan was made for other layers.
    #[error(
        "the plan's {what} is {plan}, this group's layers have {layer}: the layers of an attention group must share it"
    )]
    Hyperparameter {
        /// Which.
        what: &'static str,
        /// The plan's.
        plan: f64,
        /// The layers'.
        layer: f64,
    },
    /// A symbolic tensor has no value for this step.
    #[error("{field}: {error}")]
    Tensor {
        /// The field.
        field: &'static str,
        /// Why.
        error: ResolveError,
    },
    /// The step's lists do not fit the upload.
    #[error("{0}")]
    Pack(#[from] PackError),
}

/// Whether a captured graph may replay the prepared step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replay {
    /// It may; or the step was prepared for none.
    Fits,
    /// It exceeds what the graph was captured with: launch it eagerly. Never so for a step that keeps the promise which the
    /// graph was captured for, but a plain builder's may be one.
    Eager(&'static str),
}

/// What a step of this group needs, counted on the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkCounts {
    /// Work items of both lists.
    pub work_items: u64,
    /// The most partial results that any query tile merges; at least 1.
    pub max_splits: u32,
}

/// What preparing leaves: counts, eager launches, staged lists.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) launch: Launch,
    pub(crate) counts: WorkCounts,
    pub(crate) replay: Replay,
}

/// Memory that preparing reuses from step to step.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    pub(crate) values: Vec<i32>,
    pub(crate) starts: Vec<i32>,
    pub(crate) lens: Vec<i32>,
    /// One bit for each row or item.
    pub(crate) seen: Vec<u64>,
    /// For each row the running sum of its tiles.
    pub(crate) tiles: Vec<u32>,
    pub(crate) first_chunk: Vec<i32>,
}

impl Scratch {
    /// `n` bits, all clear.
    pub(crate) fn clear_bits(&mut self, n: usize) {
        self.seen.clear();
        self.seen.resize(n.div_ceil(64), 0);
    }

    /// Sets bit `i`; whether it was clear.
    pub(crate) fn insert(&mut self, i: usize) -> bool {
        let (word, bit) = (&mut self.seen[i / 64], 1_u64 << (i % 64));
        let clear = *word & bit == 0;
        *word |= bit;
        clear
    }
}

/// One attention group on the device. Owned by the step loop; prepared once a step, packed, and launched by every layer.
#[derive(Debug)]
pub struct GroupState {
    config: GroupConfig,
    ptrs: StepPtrs,
    workspace: Arc<Workspace>,
    stage: Stage,
    scratch: Scratch,
    prepared: Option<Prepared>,
}

impl GroupState {
    /// Unprepared. `ptrs`: the step's tensors.
    pub fn new(config: GroupConfig, ptrs: StepPtrs, workspace: Arc<Workspace>) -> Self {
        let (bytes, ops) = stage_size(&config, &workspace);
        Self {
            config,
            ptrs,
            workspace,
            stage: Stage::new(bytes, ops),
            scratch: Scratch::default(),
            prepared: None,
        }
    }

    /// What its layers share.
    pub fn config(&self) -> &GroupConfig {
        &self.config
    }

    /// Its device memory. Whoever captures a graph with it keeps a clone.
    pub fn workspace(&self) -> &Arc<Workspace> {
        &self.workspace
    }

    /// What is prepared next reads these tensors: a [part](StepPtrs::part) of the step's, or all of them.
    pub fn set_tensors(&mut self, ptrs: StepPtrs) {
        self.ptrs = ptrs;
        self.prepared = None;
    }

    /// Takes another workspace, at a step boundary: what was prepared is forgotten. Graphs that were captured with the old one
    /// keep it, and must not be replayed any more.
    pub fn set_workspace(&mut self, workspace: Arc<Workspace>) {
        let (bytes, ops) = stage_size(&self.config, &workspace);
        self.stage = Stage::new(bytes, ops);
        self.workspace = workspace;
        self.prepared = None;
    }

    /// The most bytes and operations that [`GroupState::pack`] takes of an upload.
    pub fn max_upload(&self) -> (usize, usize) {
        stage_size(&self.config, &self.workspace)
    }

    /// Replaces what is prepared by `metadata`, counted and staged for the step that `context` describes. `captured`: what the
    /// graph was captured with that this step would replay. May be called again for the same step, with a plain builder's
    /// metadata. After an error the group is unprepared.
    ///
    /// The metadata should have passed the verifier: here too, what contradicts the step's tensors is refused, and so is a
    /// schedule that would leave kernels waiting for a partial result that never comes.
    ///
    /// # Errors
    /// See [`PrepareError`].
    pub fn prepare(
        &mut self,
        metadata: &Metadata,
        context: &VerifyContext<'_>,
        captured: Option<&Launch>,
    ) -> Result<Replay, PrepareError> {
        self.prepared = None;
        self.stage.clear();
        let found = metadata.family();
        if found != self.config.family {
            return Err(PrepareError::Unsupported {
                what: found.interface(),
                remedy: match self.config.family {
                    Family::Flashinfer => "this group's layers are FLASHINFER's",
                    _ => "this group's layers are FLASH_ATTN's",
                },
            });
        }
        let mut step = Step {
            config: &self.config,
            ptrs: &self.ptrs,
            workspace: &self.workspace,
            context,
            captured,
            stage: &mut self.stage,
            scratch: &mut self.scratch,
        };
        let prepared = match metadata {
            Metadata::FlashAttn(metadata) => flash_attn::prepare(&mut step, metadata)?,
            Metadata::Flashinfer(metadata) => flashinfer::prepare(&mut step, metadata)?,
            // Of a family that no group has.
            _ => {
                return Err(PrepareError::Unsupported {
                    what: found.interface(),
                    remedy: "choose FLASH_ATTN or FLASHINFER",
                });
            }
        };
        let replay = prepared.replay;
        self.prepared = Some(prepared);
        Ok(replay)
    }

    /// Appends what was prepared to the step's upload: its lists are unpacked in the second round.
    ///
    /// # Errors
    /// If the upload is full.
    pub fn pack(&self, packer: &mut Packer<'_>) -> Result<(), PackError> {
        packer.stage("an attention group's lists", &self.stage)
    }

    /// What the prepared step needs; none while unprepared.
    pub fn counts(&self) -> Option<WorkCounts> {
        self.prepared.as_ref().map(|prepared| prepared.counts)
    }

    /// The prepared step's eager launches; none while unprepared.
    pub fn eager(&self) -> Option<GroupLaunch<'_>> {
        let prepared = self.prepared.as_ref()?;
        Some(self.launches(&prepared.launch))
    }

    /// Launches as `launch` says: those of a graph to capture.
    pub fn launches<'s>(&'s self, launch: &'s Launch) -> GroupLaunch<'s> {
        GroupLaunch::new(&self.config, &self.workspace, &self.ptrs, launch)
    }
}

/// Bytes of lists and operations that a step of the group stages at most.
fn stage_size(config: &GroupConfig, workspace: &Workspace) -> (usize, usize) {
    let size = workspace.size();
    let reqs = config.limits.max_num_reqs;
    // Up to ten vectors of rows for each part; columns of selected pages take what is left of a mebibyte.
    let rows = 20 * (reqs + 2) * 4;
    let (lists, ops) = match config.family {
        Family::Flashinfer if config.is_plain() => (1 << 20, 32 + reqs),
        Family::Flashinfer => {
            let items = size.max_work_items[0] + size.max_work_items[1];
            ((3 * items + 2 * (size.max_tiles + 2)) * 4 + (1 << 20), 32)
        }
        _ => (0, 8),
    };
    (rows + lists + 1024, ops)
}

/// One step on its way to being prepared.
pub(crate) struct Step<'s> {
    pub(crate) config: &'s GroupConfig,
    pub(crate) ptrs: &'s StepPtrs,
    pub(crate) workspace: &'s Workspace,
    pub(crate) context: &'s VerifyContext<'s>,
    pub(crate) captured: Option<&'s Launch>,
    pub(crate) stage: &'s mut Stage,
    pub(crate) scratch: &'s mut Scratch,
}

impl Step<'_> {
    /// Rows and tokens within the step's buffers.
    pub(crate) fn check_sizes(
        &self,
        num_reqs: usize,
        num_tokens: usize,
    ) -> Result<(), PrepareError> {
        let limits = &self.config.limits;
        for (what, needed, room) in [
            ("requests of a step", num_reqs, limits.max_num_reqs),
            ("tokens of a step", num_tokens, limits.max_num_tokens),
        ] {
            if needed > room {
                return Err(PrepareError::Room {
                    what,
                    needed: needed as u64,
                    room: room as u64,
                    remedy: "raise --max-num-seqs or --max-num-batched-tokens",
                });
            }
        }
        Ok(())
    }

    /// Does the workspace hold a list's items and partial results?
    pub(crate) fn check_room(&self, list: usize, need: &ListNeed) -> Result<(), PrepareError> {
        let size = self.workspace.size();
        let pairs = [
            ("work items", need.items, size.max_work_items[list] as u64),
            (
                "packed rows of partial results",
                need.partial_rows(self.config.num_kv_heads),
                size.partial_rows as u64,
            ),
        ];
        for (what, needed, room) in pairs {
            if needed > room {
                return Err(PrepareError::Room {
                    what,
                    needed,
                    room,
                    remedy: "let the builder split less (max_num_splits)",
                });
            }
        }
        Ok(())
    }
}

/// What one list needs, counted from host lengths: the device's are at most those.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ListNeed {
    /// Work items.
    pub(crate) items: u64,
    /// Slots up to the last partial result; 0 where no tile is split.
    pub(crate) slots: u64,
    /// Packed rows of the largest partial result.
    pub(crate) rows: u64,
    /// The most splits of a tile.
    pub(crate) splits: u32,
}

impl ListNeed {
    /// Packed rows of scratch, if a slot has `rows` of them.
    pub(crate) fn partial_rows(&self, num_kv_heads: u32) -> u64 {
        self.slots * u64::from(num_kv_heads) * self.rows
    }
}

pub(crate) fn inconsistent(field: &'static str, problem: String) -> PrepareError {
    PrepareError::Inconsistent { field, problem }
}

/// A lowering's error, with the field that it was for.
pub(crate) fn of_field(field: &'static str) -> impl Fn(LowerError) -> PrepareError {
    move |error| match error {
        LowerError::Resolve(error) => PrepareError::Tensor { field, error },
        LowerError::Pack(error) => PrepareError::Pack(error),
        LowerError::TableWidth { .. } | LowerError::Part { .. } => {
            inconsistent(field, error.to_string())
        }
    }
}
