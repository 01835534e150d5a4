//! FLASHMLA's reference builder: the common record of the MLA backends. A bfloat16 cache leaves the tile schedule to the kernel's
//! first call, as the field does; for an fp8 cache it is made here, from the host's lengths, so that parts end together.
//!
//! It must never know what the common record holds: that is the SDK's.

mod tiles;

use timetable_guest::{
    Builder, export_flash_mla,
    flash_mla::{Backend, Choice, Decodes, Record},
    types::{
        BuildError, BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata,
        LaunchPromise, Matrix, Tensor,
        flash_mla::{DecodeSchedule, Metadata, TileSchedule},
    },
};

const FLASHMLA: Backend = Backend {
    name: "FLASHMLA",
    base_threshold: 128,
    varlen: false,
    dcp_with_varlen: false,
    supports_draft_decode_metadata_update: false,
};

/// Query heads and tokens that one block of the kernel takes together.
const ROWS_OF_A_BLOCK: u32 = 64;

/// Decodes of one length, in parts of like cost.
pub struct EvenParts {
    record: Record,
    is_fp8: bool,
}

impl Builder for EvenParts {
    type Metadata = Metadata;

    fn create(config: BuilderConfig) -> Result<Self, BuildError> {
        Ok(Self {
            is_fp8: config.attention.kv_cache_dtype.starts_with("fp8"),
            record: Record::new(config, FLASHMLA)?,
        })
    }

    fn info(&self) -> BuilderInfo {
        self.record.info("flash-mla, even parts")
    }

    fn launch_promise(&self, shape: &CaptureShape) -> LaunchPromise {
        let tokens = shape.uniform_query_len.unwrap_or(shape.max_query_len);
        self.record.launch_promise(shape, self.parts(tokens))
    }

    fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        _fast_build: bool,
    ) -> Result<Metadata, BuildError> {
        self.record.build(common, |decodes| self.choose(decodes))
    }

    fn build_for_cudagraph_capture(
        &mut self,
        common: &CommonAttentionMetadata,
    ) -> Result<Metadata, BuildError> {
        self.record
            .build_for_cudagraph_capture(common, |decodes| self.choose(decodes))
    }
}

impl EvenParts {
    /// Parts that run at once: multiprocessors, over the blocks that a request's query rows take.
    fn parts(&self, query_len: u32) -> u32 {
        let config = self.record.config();
        if config.batch_invariant {
            return 1;
        }
        let heads = config.attention.num_heads * config.parallel.dcp_world_size;
        let blocks = heads
            .saturating_mul(query_len.max(1))
            .div_ceil(ROWS_OF_A_BLOCK);
        (config.device.num_workers / blocks).clamp(1, 1 << 12)
    }

    fn choose(&self, decodes: &Decodes<'_>) -> Choice {
        // Under context parallelism a rank's lengths are the device's, and without host lengths all are.
        let sharded = self.record.config().parallel.dcp_world_size > 1;
        let scheduled = self.is_fp8 || self.record.config().batch_invariant;
        if !scheduled || sharded || decodes.seq_lens.is_empty() {
            return Choice::lazy();
        }
        let parts = self.parts(decodes.max_query_len);
        let block_size = self.record.config().kv_cache_spec.block_size;
        let tiles = tiles::even(decodes.seq_lens, decodes.query_start_loc, block_size, parts);
        Choice {
            max_num_splits: tiles.max_num_splits,
            schedule: DecodeSchedule::Tiles(TileSchedule {
                tile_scheduler_metadata: Tensor::Matrix(Matrix {
                    rows: parts,
                    columns: 8,
                    values: tiles.parts,
                }),
                num_splits: Tensor::Values(tiles.num_splits),
            }),
            with_query_start_loc: false,
        }
    }
}

export_flash_mla!(EvenParts);
