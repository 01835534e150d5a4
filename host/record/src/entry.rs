//! What a recording holds: its entries on disk, and steps as whoever reads them has them.
//!
//! A step's long vectors are told by their difference to those of the slot's step before, in the same segment. The entries are
//! postcard of these types: another shape of any of them, or of a record of the contract, is another [`FORMAT`](crate::FORMAT).
//! Must never know: files or compression.

use std::{sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use timetable_sandbox::{
    BuiltBy, ContentHash, Limits, SeenFault, StepRecord, TenantName, WrittenBy,
};
use timetable_types::{
    BuilderConfig, CommonAttentionMetadata, Family, Metadata, flash_attn, flash_mla, flashinfer,
    mamba, triton_attn,
};

use crate::pack::{Ints, Rows, Table};

/// A slot: an attention group's place for a builder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Slot {
    /// Its name: `FLASH_ATTN/0`, `FLASH_ATTN/0@tenant`.
    pub name: String,
    /// Whose it is. None: everybody's.
    pub tenant: Option<TenantName>,
    /// The family whose metadata it takes.
    pub family: Family,
    /// What its builders are constructed with, and its steps are verified with.
    pub config: BuilderConfig,
}

/// A version that was asked for steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RecordedVersion {
    /// The hash of component and configuration.
    pub version: ContentHash,
    /// The hash of the component.
    pub component: ContentHash,
    /// What the builder called itself.
    pub name: String,
    /// Where it came from.
    pub origin: String,
    /// What it was constructed with.
    pub config: BuilderConfig,
    /// The component.
    pub bytes: Vec<u8>,
}

/// One slot's step that was served.
#[derive(Clone, Debug)]
pub struct RecordedStep {
    /// Its number among those that the recorder was told of, those it left out included.
    pub number: u64,
    /// When, since the recording began.
    pub at: Duration,
    /// The slot.
    pub slot: Arc<Slot>,
    /// The version that was asked. None: the plain builder alone.
    pub version: Option<Arc<RecordedVersion>>,
    /// Who built what served.
    pub built_by: BuiltBy,
    /// What the version did wrong in this step.
    pub fault: Option<SeenFault>,
    /// How long the call took whose metadata served.
    pub build_time: Duration,
    /// Fuel of the version's call; 0 if it was not asked.
    pub fuel: u64,
    /// The batch.
    pub common: CommonAttentionMetadata,
    /// Its tensors, and the bounds that metadata is verified with.
    pub tensors: StepRecord,
    /// What served.
    pub metadata: Metadata,
}

/// The first entry of each segment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Header {
    pub(crate) written_by: WrittenBy,
    pub(crate) unix_time: u64,
    /// Names the recorder that wrote it: several may have written into one directory, one after the other.
    pub(crate) run: u64,
    /// How many segments of that recorder come before this one, kept or not.
    pub(crate) segment: u64,
    pub(crate) limits: Limits,
}

/// One entry of a segment.
#[derive(Debug, Serialize, Deserialize)]
#[allow(
    clippy::large_enum_variant,
    reason = "nearly all are steps, and there is one at a time"
)]
pub(crate) enum Entry {
    Header(Header),
    /// Numbered from 0 in each segment.
    Slot(Slot),
    /// Numbered from 0 in each segment.
    Version(RecordedVersion),
    Step(StepEntry),
    /// The recorder was told to end, after so many steps.
    End {
        steps: u64,
    },
}

/// A step on disk.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct StepEntry {
    number: u64,
    at: Duration,
    slot: u32,
    version: Option<u32>,
    built_by: By,
    fault: Option<SeenFault>,
    build_time: Duration,
    fuel: u64,
    /// Without the vectors that follow.
    common: CommonAttentionMetadata,
    tensors: StepRecord,
    query_start_loc: Ints,
    query_start_loc_cpu: Ints,
    seq_lens: Ints,
    seq_lens_cpu_upper_bound: Ints,
    req_idx: Ints,
    is_prefilling: Ints,
    columns: Ints,
    table: Table,
    positions: Ints,
    slot_mapping: Ints,
    /// Postcard of the metadata; of the same length as the slot's step before: each byte less that one's.
    metadata: Vec<u8>,
    metadata_since: bool,
}

/// Who built a step, on disk.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum By {
    Component,
    Plain,
    Candidate,
}

impl From<BuiltBy> for By {
    fn from(built_by: BuiltBy) -> By {
        match built_by {
            BuiltBy::Component => By::Component,
            BuiltBy::Plain => By::Plain,
            BuiltBy::Candidate => By::Candidate,
        }
    }
}

impl From<By> for BuiltBy {
    fn from(by: By) -> BuiltBy {
        match by {
            By::Component => BuiltBy::Component,
            By::Plain => BuiltBy::Plain,
            By::Candidate => BuiltBy::Candidate,
        }
    }
}

/// What a step is told by, and tells the next one.
#[derive(Debug, Default)]
pub(crate) struct Before {
    common: Vectors,
    metadata: Vec<u8>,
}

/// The long vectors of a step.
#[derive(Debug, Default)]
struct Vectors {
    query_start_loc: Vec<i32>,
    query_start_loc_cpu: Vec<i32>,
    seq_lens: Vec<i32>,
    seq_lens_cpu_upper_bound: Vec<i32>,
    req_idx: Vec<u32>,
    is_prefilling: Vec<u8>,
    columns: Vec<u32>,
    blocks: Vec<i32>,
    positions: Vec<i64>,
    slot_mapping: Vec<i64>,
}

impl Vectors {
    /// Exchanges the vectors of a step for these: nothing is copied.
    fn swap(&mut self, common: &mut CommonAttentionMetadata, tensors: &mut StepRecord) {
        use std::mem::swap;
        swap(&mut self.query_start_loc, &mut tensors.query_start_loc);
        swap(
            &mut self.query_start_loc_cpu,
            &mut common.query_start_loc_cpu,
        );
        swap(&mut self.seq_lens, &mut tensors.seq_lens);
        swap(
            &mut self.seq_lens_cpu_upper_bound,
            &mut common.seq_lens_cpu_upper_bound,
        );
        swap(&mut self.req_idx, &mut common.req_idx);
        swap(&mut self.is_prefilling, &mut common.is_prefilling);
        swap(&mut self.columns, &mut tensors.columns);
        swap(&mut self.blocks, &mut tensors.blocks);
        swap(&mut self.positions, &mut tensors.positions);
        swap(&mut self.slot_mapping, &mut tensors.slot_mapping);
    }

    fn rows(&self) -> Rows<'_> {
        Rows {
            req_idx: &self.req_idx,
            columns: &self.columns,
            blocks: &self.blocks,
        }
    }
}

/// A step's numbers that are not vectors.
#[derive(Debug)]
pub(crate) struct Facts {
    pub(crate) number: u64,
    pub(crate) at: Duration,
    pub(crate) slot: u32,
    pub(crate) version: Option<u32>,
    pub(crate) built_by: BuiltBy,
    pub(crate) fault: Option<SeenFault>,
    pub(crate) build_time: Duration,
    pub(crate) fuel: u64,
}

impl StepEntry {
    /// The entry of a step, told by `before`, which then holds this step. `common` and `tensors` get the memory of the one
    /// before for their vectors.
    pub(crate) fn pack(
        facts: Facts,
        common: &mut CommonAttentionMetadata,
        tensors: &mut StepRecord,
        metadata: &Metadata,
        before: &mut Before,
    ) -> Result<StepEntry, postcard::Error> {
        let mut now = Vectors::default();
        now.swap(common, tensors);
        let last = &before.common;
        let lens = &now.seq_lens;
        let bytes = metadata_bytes(metadata)?;
        let metadata_since = bytes.len() == before.metadata.len();
        let entry = StepEntry {
            number: facts.number,
            at: facts.at,
            slot: facts.slot,
            version: facts.version,
            built_by: facts.built_by.into(),
            fault: facts.fault,
            build_time: facts.build_time,
            fuel: facts.fuel,
            common: common.clone(),
            tensors: tensors.clone(),
            query_start_loc: Ints::pack(&now.query_start_loc, &last.query_start_loc),
            query_start_loc_cpu: Ints::pack_or_same(
                &now.query_start_loc_cpu,
                &last.query_start_loc_cpu,
                &now.query_start_loc,
            ),
            seq_lens: Ints::pack(lens, &last.seq_lens),
            seq_lens_cpu_upper_bound: Ints::pack_or_same(
                &now.seq_lens_cpu_upper_bound,
                &last.seq_lens_cpu_upper_bound,
                lens,
            ),
            req_idx: Ints::pack(&now.req_idx, &last.req_idx),
            is_prefilling: Ints::pack(&now.is_prefilling, &last.is_prefilling),
            columns: Ints::pack(&now.columns, &last.columns),
            table: Table::pack(now.rows(), last.rows()),
            positions: Ints::pack(&now.positions, &last.positions),
            slot_mapping: Ints::pack(&now.slot_mapping, &last.slot_mapping),
            metadata: if metadata_since {
                subtract(&bytes, &before.metadata)
            } else {
                bytes.clone()
            },
            metadata_since,
        };
        // The step before gives its memory back.
        let mut last = std::mem::replace(&mut before.common, now);
        last.swap(common, tensors);
        before.metadata = bytes;
        Ok(entry)
    }

    /// Which slot, which version, by number.
    pub(crate) fn ids(&self) -> (u32, Option<u32>) {
        (self.slot, self.version)
    }

    /// The inverse of [`StepEntry::pack`].
    pub(crate) fn unpack(
        self,
        slot: Arc<Slot>,
        version: Option<Arc<RecordedVersion>>,
        before: &mut Before,
    ) -> Result<RecordedStep, String> {
        let last = &before.common;
        let query_start_loc = self.query_start_loc.unpack(&last.query_start_loc, &[])?;
        let seq_lens = self.seq_lens.unpack(&last.seq_lens, &[])?;
        let columns: Vec<u32> = self.columns.unpack(&last.columns, &[])?;
        let now = Vectors {
            query_start_loc_cpu: self
                .query_start_loc_cpu
                .unpack(&last.query_start_loc_cpu, &query_start_loc)?,
            seq_lens_cpu_upper_bound: self
                .seq_lens_cpu_upper_bound
                .unpack(&last.seq_lens_cpu_upper_bound, &seq_lens)?,
            req_idx: self.req_idx.unpack(&last.req_idx, &[])?,
            is_prefilling: self.is_prefilling.unpack(&last.is_prefilling, &[])?,
            blocks: self.table.unpack(&columns, last.rows())?,
            positions: self.positions.unpack(&last.positions, &[])?,
            slot_mapping: self.slot_mapping.unpack(&last.slot_mapping, &[])?,
            query_start_loc,
            seq_lens,
            columns,
        };
        let bytes = match self.metadata_since {
            true if self.metadata.len() != before.metadata.len() => {
                return Err(format!(
                    "metadata of {} bytes is told by {}",
                    self.metadata.len(),
                    before.metadata.len()
                ));
            }
            true => add(&self.metadata, &before.metadata),
            false => self.metadata,
        };
        let metadata = metadata_of(&bytes).map_err(|error| format!("metadata: {error}"))?;
        let (mut common, mut tensors) = (self.common, self.tensors);
        let mut copy = now.copy();
        copy.swap(&mut common, &mut tensors);
        before.common = now;
        before.metadata = bytes;
        Ok(RecordedStep {
            number: self.number,
            at: self.at,
            slot,
            version,
            built_by: self.built_by.into(),
            fault: self.fault,
            build_time: self.build_time,
            fuel: self.fuel,
            common,
            tensors,
            metadata,
        })
    }
}

impl Vectors {
    fn copy(&self) -> Vectors {
        Vectors {
            query_start_loc: self.query_start_loc.clone(),
            query_start_loc_cpu: self.query_start_loc_cpu.clone(),
            seq_lens: self.seq_lens.clone(),
            seq_lens_cpu_upper_bound: self.seq_lens_cpu_upper_bound.clone(),
            req_idx: self.req_idx.clone(),
            is_prefilling: self.is_prefilling.clone(),
            columns: self.columns.clone(),
            blocks: self.blocks.clone(),
            positions: self.positions.clone(),
            slot_mapping: self.slot_mapping.clone(),
        }
    }
}

fn subtract(now: &[u8], before: &[u8]) -> Vec<u8> {
    let pairs = now.iter().zip(before);
    pairs.map(|(a, b)| a.wrapping_sub(*b)).collect()
}

fn add(deltas: &[u8], before: &[u8]) -> Vec<u8> {
    let pairs = deltas.iter().zip(before);
    pairs.map(|(a, b)| a.wrapping_add(*b)).collect()
}

/// `Metadata` without its tag: the JSON form's tag needs a format that describes itself.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Metadata")]
#[allow(clippy::large_enum_variant, reason = "one value at a time")]
enum Untagged {
    FlashAttn(flash_attn::Metadata),
    Flashinfer(flashinfer::Metadata),
    TritonAttn(triton_attn::Metadata),
    FlashMla(flash_mla::Metadata),
    Mamba(mamba::Metadata),
}

#[derive(Serialize)]
struct Writing<'a>(#[serde(with = "Untagged")] &'a Metadata);

#[derive(Deserialize)]
struct Reading(#[serde(with = "Untagged")] Metadata);

/// Metadata as bytes: two are equal where the metadata are, bit for bit.
pub(crate) fn metadata_bytes(metadata: &Metadata) -> Result<Vec<u8>, postcard::Error> {
    postcard::to_stdvec(&Writing(metadata))
}

/// The inverse.
pub(crate) fn metadata_of(bytes: &[u8]) -> Result<Metadata, postcard::Error> {
    match postcard::take_from_bytes::<Reading>(bytes)? {
        (Reading(metadata), []) => Ok(metadata),
        _ => Err(postcard::Error::DeserializeBadEncoding),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use timetable_types::{Causal, Input, Tensor, TensorSlice};

    fn step(len: i32) -> (CommonAttentionMetadata, StepRecord, Metadata) {
        let common = CommonAttentionMetadata {
            num_reqs: 2,
            num_actual_tokens: 2,
            max_query_len: 1,
            max_seq_len: len as u32,
            causal: Causal::All(true),
            block_table_width: 4,
            slot_mapping_len: 2,
            query_start_loc_cpu: vec![0, 1, 2],
            seq_lens_cpu_upper_bound: vec![len, 20],
            is_prefilling: vec![0, 1],
            dcp: None,
            encoder: None,
            fast_prefill: None,
            req_idx: vec![3, 1],
            mm_req_doc_ranges: Vec::new(),
            replayssm_decode_base_cpu: Vec::new(),
            extras: Vec::new(),
        };
        let tensors = StepRecord {
            query_start_loc: vec![0, 1, 2],
            seq_lens: vec![len, 20],
            block_table_width: 4,
            columns: vec![1, 2],
            blocks: vec![7, 8, 9],
            slot_mapping: vec![112 + i64::from(len), 147],
            positions: vec![i64::from(len) - 1, 19],
            num_blocks: 64,
            ..StepRecord::default()
        };
        let metadata = Metadata::FlashAttn(flash_attn::Metadata {
            num_actual_tokens: 2,
            max_query_len: 1,
            query_start_loc: Tensor::Input(Input::QueryStartLoc),
            max_seq_len: len as u32,
            seq_lens: Tensor::Slice(TensorSlice {
                source: Input::SeqLens,
                start: 0,
                end: 2,
            }),
            block_table: Tensor::Input(Input::BlockTable),
            slot_mapping: Tensor::Input(Input::SlotMapping),
            causal: Causal::All(true),
            max_dcp_context_kv_len: 0,
            dcp_context_kv_lens: None,
            num_decode_reqs: 2,
            num_prefill_reqs: 0,
            num_decode_tokens: 2,
            num_prefill_tokens: 0,
            max_num_splits: 0,
            scheduler_metadata: None,
            mm_prefix_query_range: None,
            rswa_prefix_lens: None,
            rswa_window: 0,
            schedule: flash_attn::Schedule {
                max_num_splits: 2,
                num_splits: vec![1, 2],
                tile_order: flash_attn::TileOrder::Rows(vec![1, 0]),
            },
        });
        (common, tensors, metadata)
    }

    #[test]
    fn the_form_on_disk_is_that_of_format_1() {
        let mut before = Before::default();
        let mut bytes = Vec::new();
        for (number, len) in [(0, 5), (1, 6)] {
            let (mut common, mut tensors, metadata) = step(len);
            let facts = Facts {
                number,
                at: Duration::from_micros(number),
                slot: 0,
                version: Some(0),
                built_by: BuiltBy::Component,
                fault: None,
                build_time: Duration::from_nanos(1234),
                fuel: 5678,
            };
            let entry =
                StepEntry::pack(facts, &mut common, &mut tensors, &metadata, &mut before).unwrap();
            bytes.extend(postcard::to_stdvec(&Entry::Step(entry)).unwrap());
        }
        // Another form is another format: raise `FORMAT`, so that old recordings are refused with the remedy.
        let hash = ContentHash::of(&bytes).to_hex();
        assert_eq!(
            (crate::FORMAT, bytes.len(), &hash[..16]),
            (1, 249, "83f44d1f4a0d5eda")
        );
    }
}
