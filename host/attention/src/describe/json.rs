//! Metadata as JSON: each symbolic tensor replaced by its values.

use serde_json::Value;
use timetable_types::{
    Metadata, PaddedTensor, Tensor, flash_attn, flash_mla, flashinfer, mamba, triton_attn,
};

use super::DescriptionError;
use crate::resolve::{ResolveError, Resolver, Siblings};

/// Why metadata has no JSON form.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JsonError {
    /// A symbolic tensor has no value for the step.
    #[error("{field}: {source}")]
    Resolve {
        /// The field.
        field: &'static str,
        /// Why.
        source: ResolveError,
    },
    /// A value that JSON cannot hold.
    #[error("{0}")]
    Json(String),
}

impl From<serde_json::Error> for JsonError {
    fn from(error: serde_json::Error) -> Self {
        JsonError::Json(error.to_string())
    }
}

impl From<JsonError> for DescriptionError {
    fn from(error: JsonError) -> Self {
        DescriptionError::Json(error.to_string())
    }
}

/// `metadata` as a JSON object, with its `family`. Vectors are lists, tables lists of rows, booleans 0 and 1; scratch memory
/// stays `{"scratch": {"shape": …, "dtype": …}}`.
pub fn metadata_to_json(metadata: &Metadata, resolver: &Resolver<'_>) -> Result<Value, JsonError> {
    let mut value = serde_json::to_value(metadata)?;
    let writer = Writer { resolver };
    match metadata {
        Metadata::FlashAttn(record) => writer.flash_attn(record, &mut value)?,
        Metadata::Flashinfer(record) => writer.flashinfer(record, &mut value)?,
        Metadata::TritonAttn(record) => writer.triton_attn(record, &mut value)?,
        Metadata::FlashMla(record) => writer.flash_mla(record, &mut value)?,
        Metadata::Mamba(record) => writer.mamba(record, &mut value)?,
    }
    Ok(value)
}

struct Writer<'r> {
    resolver: &'r Resolver<'r>,
}

impl Writer<'_> {
    fn tensor(
        &self,
        field: &'static str,
        tensor: &Tensor,
        siblings: Siblings<'_>,
    ) -> Result<Value, JsonError> {
        let fault = |source| JsonError::Resolve { field, source };
        if let Tensor::Scratch(_) = tensor {
            return Ok(serde_json::to_value(tensor)?);
        }
        if Resolver::is_i64(tensor) {
            return Ok(Value::from(
                &*self.resolver.resolve_i64(tensor).map_err(fault)?,
            ));
        }
        let values = self.resolver.resolve_i32(tensor, siblings).map_err(fault)?;
        Ok(rows_of(
            &values,
            Resolver::is_matrix(tensor),
            self.resolver.row_width(tensor),
        ))
    }

    fn padded(&self, field: &'static str, padded: &PaddedTensor) -> Result<Value, JsonError> {
        let mut values = Vec::new();
        self.resolver
            .resolve_padded_into(padded, Siblings::NONE, &mut values)
            .map_err(|source| JsonError::Resolve { field, source })?;
        let width = self.resolver.row_width(&padded.tensor);
        Ok(rows_of(&values, Resolver::is_matrix(&padded.tensor), width))
    }

    /// Replaces the named fields of `record` that are present.
    fn put<'t>(
        &self,
        record: &mut Value,
        siblings: Siblings<'_>,
        tensors: impl IntoIterator<Item = (&'static str, Option<&'t Tensor>)>,
    ) -> Result<(), JsonError> {
        for (field, tensor) in tensors {
            if let Some(tensor) = tensor {
                record[field] = self.tensor(field, tensor, siblings)?;
            }
        }
        Ok(())
    }

    fn put_padded<'t>(
        &self,
        record: &mut Value,
        tensors: impl IntoIterator<Item = (&'static str, Option<&'t PaddedTensor>)>,
    ) -> Result<(), JsonError> {
        for (field, padded) in tensors {
            if let Some(padded) = padded {
                record[field] = self.padded(field, padded)?;
            }
        }
        Ok(())
    }

    fn flash_attn(
        &self,
        record: &flash_attn::Metadata,
        value: &mut Value,
    ) -> Result<(), JsonError> {
        self.put(
            value,
            Siblings::NONE,
            [
                ("query_start_loc", Some(&record.query_start_loc)),
                ("seq_lens", Some(&record.seq_lens)),
                ("block_table", Some(&record.block_table)),
                ("slot_mapping", Some(&record.slot_mapping)),
                ("dcp_context_kv_lens", record.dcp_context_kv_lens.as_ref()),
                (
                    "mm_prefix_query_range",
                    record.mm_prefix_query_range.as_ref(),
                ),
                ("rswa_prefix_lens", record.rswa_prefix_lens.as_ref()),
            ],
        )?;
        if let Some(call) = &record.scheduler_metadata {
            self.put(
                &mut value["scheduler_metadata"],
                Siblings::NONE,
                [
                    ("cache_seqlens", Some(&call.cache_seqlens)),
                    ("cu_seqlens_q", Some(&call.cu_seqlens_q)),
                ],
            )?;
        }
        Ok(())
    }

    fn flashinfer(
        &self,
        record: &flashinfer::Metadata,
        value: &mut Value,
    ) -> Result<(), JsonError> {
        self.put(
            value,
            Siblings::NONE,
            [("slot_mapping", Some(&record.slot_mapping))],
        )?;
        match &record.decode {
            Some(flashinfer::Decode::Wrapper(plan)) => {
                self.plan(plan, &mut value["decode"]["wrapper"])?;
            }
            Some(flashinfer::Decode::Trtllm(decode)) => {
                self.put(
                    &mut value["decode"]["trtllm"],
                    Siblings::NONE,
                    [
                        ("block_tables", Some(&decode.block_tables)),
                        ("seq_lens", Some(&decode.seq_lens)),
                        ("q_cu_seq_lens", decode.q_cu_seq_lens.as_ref()),
                        ("dcp_query_start_loc", decode.dcp_query_start_loc.as_ref()),
                    ],
                )?;
            }
            None => {}
        }
        match &record.prefill {
            Some(flashinfer::Prefill::Wrapper(plan)) => {
                self.plan(plan, &mut value["prefill"]["wrapper"])
            }
            Some(flashinfer::Prefill::Trtllm(prefill)) => self.put(
                &mut value["prefill"]["trtllm"],
                Siblings::NONE,
                [
                    ("block_tables", Some(&prefill.block_tables)),
                    ("seq_lens", Some(&prefill.seq_lens)),
                    ("cum_seq_lens_q", Some(&prefill.cum_seq_lens_q)),
                    ("cum_seq_lens_kv", Some(&prefill.cum_seq_lens_kv)),
                ],
            ),
            None => Ok(()),
        }
    }

    fn plan(&self, plan: &flashinfer::Plan, value: &mut Value) -> Result<(), JsonError> {
        let siblings = Siblings::pages(&plan.paged_kv_indptr);
        self.put(
            value,
            siblings,
            [
                ("qo_indptr", Some(&plan.qo_indptr)),
                ("paged_kv_indices", Some(&plan.paged_kv_indices)),
            ],
        )
    }

    fn triton_attn(
        &self,
        record: &triton_attn::Metadata,
        value: &mut Value,
    ) -> Result<(), JsonError> {
        self.put(
            value,
            Siblings::NONE,
            [
                ("query_start_loc", Some(&record.query_start_loc)),
                ("seq_lens", Some(&record.seq_lens)),
                ("block_table", Some(&record.block_table)),
                ("slot_mapping", Some(&record.slot_mapping)),
                ("mm_prefix_range", record.mm_prefix_range.as_ref()),
                ("rswa_prefix_lens", record.rswa_prefix_lens.as_ref()),
            ],
        )
    }

    fn flash_mla(&self, record: &flash_mla::Metadata, value: &mut Value) -> Result<(), JsonError> {
        self.put(
            value,
            Siblings::NONE,
            [
                ("query_start_loc", Some(&record.query_start_loc)),
                ("slot_mapping", Some(&record.slot_mapping)),
            ],
        )?;
        if let Some(prefill) = &record.prefill {
            let value = &mut value["prefill"];
            self.put(
                value,
                Siblings::NONE,
                [
                    ("block_table", Some(&prefill.block_table)),
                    ("query_start_loc", Some(&prefill.query_start_loc)),
                ],
            )?;
            let chunks = prefill
                .chunked_context
                .iter()
                .flat_map(|context| &context.chunks);
            for (index, chunk) in chunks.enumerate() {
                let value = &mut value["chunked_context"]["chunks"][index];
                let siblings = Siblings::segments(&chunk.cu_seq_lens);
                self.put(
                    value,
                    siblings,
                    [("token_to_seq", Some(&chunk.token_to_seq))],
                )?;
                if let Some(dcp) = &chunk.dcp {
                    let siblings = Siblings::segments(&dcp.padded_local_cu_seq_lens);
                    let tensor = Some(&dcp.padded_local_token_to_seq);
                    self.put(
                        &mut value["dcp"],
                        siblings,
                        [("padded_local_token_to_seq", tensor)],
                    )?;
                }
            }
        }
        if let Some(decode) = &record.decode {
            let value = &mut value["decode"];
            self.put(
                value,
                Siblings::NONE,
                [
                    ("block_table", Some(&decode.block_table)),
                    ("seq_lens", Some(&decode.seq_lens)),
                    ("dcp_tot_seq_lens", decode.dcp_tot_seq_lens.as_ref()),
                    ("query_start_loc", decode.query_start_loc.as_ref()),
                ],
            )?;
            match &decode.schedule {
                flash_mla::DecodeSchedule::Lazy => {}
                flash_mla::DecodeSchedule::Tiles(tiles) => {
                    self.put(
                        &mut value["schedule"]["tiles"],
                        Siblings::NONE,
                        [
                            (
                                "tile_scheduler_metadata",
                                Some(&tiles.tile_scheduler_metadata),
                            ),
                            ("num_splits", Some(&tiles.num_splits)),
                        ],
                    )?;
                }
                flash_mla::DecodeSchedule::FlashAttn(call) => {
                    self.put(
                        &mut value["schedule"]["flash_attn"],
                        Siblings::NONE,
                        [
                            ("cache_seqlens", Some(&call.cache_seqlens)),
                            ("cu_seqlens_q", Some(&call.cu_seqlens_q)),
                        ],
                    )?;
                }
            }
        }
        Ok(())
    }

    fn mamba(&self, record: &mamba::Metadata, value: &mut Value) -> Result<(), JsonError> {
        match record {
            mamba::Metadata::Mamba1(base) => self.mamba_base(base, &mut value["mamba1"]),
            mamba::Metadata::ShortConv(base) => self.mamba_base(base, &mut value["short_conv"]),
            mamba::Metadata::Mamba2(mamba2) => {
                let value = &mut value["mamba2"];
                self.mamba_base(&mamba2.base, &mut value["base"])?;
                if let Some(replay) = &mamba2.replayssm {
                    self.put(
                        &mut value["replayssm"],
                        Siblings::NONE,
                        [
                            ("write_pos_d", Some(&replay.write_pos_d)),
                            ("is_flush_d", Some(&replay.is_flush_d)),
                            (
                                "replayssm_state_indices_d",
                                Some(&replay.replayssm_state_indices_d),
                            ),
                        ],
                    )?;
                }
                Ok(())
            }
            mamba::Metadata::Gdn(gdn) => self.gdn(gdn, &mut value["gdn"]),
            mamba::Metadata::Linear(linear) => self.put(
                &mut value["linear"],
                Siblings::NONE,
                [
                    ("query_start_loc", Some(&linear.query_start_loc)),
                    ("seq_lens", Some(&linear.seq_lens)),
                    ("state_indices_tensor", Some(&linear.state_indices_tensor)),
                ],
            ),
        }
    }

    fn mamba_base(&self, base: &mamba::BaseMetadata, value: &mut Value) -> Result<(), JsonError> {
        self.put(
            value,
            Siblings::NONE,
            [
                ("has_initial_states_p", base.has_initial_states_p.as_ref()),
                ("query_start_loc_p", base.query_start_loc_p.as_ref()),
                ("state_indices_tensor_p", Some(&base.state_indices_tensor_p)),
                ("seq_lens", Some(&base.seq_lens)),
            ],
        )?;
        self.put_padded(
            value,
            [
                ("state_indices_tensor_d", Some(&base.state_indices_tensor_d)),
                ("query_start_loc_d", base.query_start_loc_d.as_ref()),
                ("num_accepted_tokens", base.num_accepted_tokens.as_ref()),
            ],
        )?;
        self.conv(base.conv.as_ref(), value)
    }

    fn gdn(&self, gdn: &mamba::GdnMetadata, value: &mut Value) -> Result<(), JsonError> {
        self.put(
            value,
            Siblings::NONE,
            [
                ("has_initial_state", gdn.has_initial_state.as_ref()),
                ("spec_token_indx", gdn.spec_token_indx.as_ref()),
                ("non_spec_token_indx", gdn.non_spec_token_indx.as_ref()),
                (
                    "prefill_query_start_loc",
                    gdn.prefill_query_start_loc.as_ref(),
                ),
                ("prefill_state_indices", gdn.prefill_state_indices.as_ref()),
                (
                    "prefill_has_initial_state",
                    gdn.prefill_has_initial_state.as_ref(),
                ),
            ],
        )?;
        self.put_padded(
            value,
            [
                ("spec_query_start_loc", gdn.spec_query_start_loc.as_ref()),
                (
                    "non_spec_query_start_loc",
                    gdn.non_spec_query_start_loc.as_ref(),
                ),
                (
                    "spec_state_indices_tensor",
                    gdn.spec_state_indices_tensor.as_ref(),
                ),
                (
                    "non_spec_state_indices_tensor",
                    gdn.non_spec_state_indices_tensor.as_ref(),
                ),
                ("spec_sequence_masks", gdn.spec_sequence_masks.as_ref()),
                ("num_accepted_tokens", gdn.num_accepted_tokens.as_ref()),
            ],
        )?;
        self.conv(gdn.conv.as_ref(), value)
    }

    fn conv(&self, conv: Option<&mamba::CausalConv1d>, value: &mut Value) -> Result<(), JsonError> {
        match conv {
            Some(conv) => self.put(
                &mut value["conv"],
                Siblings::NONE,
                [
                    ("batch_ptr", Some(&conv.batch_ptr)),
                    ("token_chunk_offset_ptr", Some(&conv.token_chunk_offset_ptr)),
                ],
            ),
            None => Ok(()),
        }
    }
}

/// A list, or a list of rows.
fn rows_of(values: &[i32], is_matrix: bool, width: usize) -> Value {
    if !is_matrix {
        return Value::from(values);
    }
    Value::Array(values.chunks_exact(width.max(1)).map(Value::from).collect())
}
