//! The Mamba family's cases: MAMBA1, MAMBA2, SHORT_CONV, LINEAR and GDN.
//!
//! Compared in another form than recorded: a decode's states where there is one for each, which the field has as `[decodes, 1]`
//! and the contract as `[decodes]`; and the convolution's lists for the host, which are the heads of its two buffers.

use std::collections::HashMap;

use serde_json::{Map, Value, json};
use timetable_attention::{BuildFault, MetadataBuilder};
use timetable_types::{
    BuilderConfig, KvCacheSpecKind, MambaCacheMode, MambaSpec, MambaType, Metadata, PaddedTensor,
    Tensor,
    mamba::{BaseMetadata, CausalConv1d, GdnMetadata, LinearMetadata, Metadata as Mamba},
};

use crate::{
    Make,
    flash_attn::compare,
    resolve::{recorded, resolve},
    vectors::{Case, File, Tensors, builder_config, check_info, integers},
};

/// Builders by configuration: one each, as in the recording.
pub struct Suite<'a> {
    make: Make<'a>,
    mamba_type: MambaType,
    builders: HashMap<usize, (BuilderConfig, Box<dyn MetadataBuilder>)>,
}

impl<'a> Suite<'a> {
    /// For the cases of the file called `name`.
    pub fn new(make: Make<'a>, name: &str) -> Self {
        Self {
            make,
            mamba_type: match name.strip_suffix("AttentionMetadataBuilder") {
                Some("Mamba1") => MambaType::Mamba1,
                Some("Mamba2") => MambaType::Mamba2,
                Some("ShortConv") => MambaType::ShortConv,
                Some("Linear") => MambaType::Linear,
                Some("GDN") => MambaType::Gdn,
                _ => panic!("no type of {name}"),
            },
            builders: HashMap::new(),
        }
    }

    pub fn check(&mut self, file: &File, case: &Case) -> Result<(), String> {
        let entry = &file.configs[case.config];
        let (config, builder) = self.builders.entry(case.config).or_insert_with(|| {
            let config = config(entry, self.mamba_type);
            let builder = (self.make)(&config);
            (config, builder)
        });
        // A recorded run of the engine says nothing of its builders.
        if entry.get("builder").is_some() {
            check_info(builder.info(), entry)?;
        }
        let common = &case.common;
        let mut step = case.tensors.clone();
        let built = match case.method.as_str() {
            "build" => builder.build(common, false),
            "capture" => builder.build_for_cudagraph_capture(common),
            "update_block_table" => builder.build(common, false).and_then(|metadata| {
                // As recorded: every block 1,000 later.
                let blocks = step.block_table.iter_mut().flatten();
                blocks.for_each(|block| *block += 1000);
                builder.update_block_table(&metadata, common)
            }),
            other => panic!("method {other}"),
        };
        let expected = &case.output["metadata"];
        match (built, expected["$error"][1].as_str()) {
            // An assertion without a text is recorded as an empty one.
            (Err(BuildFault::Declined(error)), Some(text)) if error.message.starts_with(text) => {
                Ok(())
            }
            (Err(error), _) => Err(format!("{error}; recorded {expected}")),
            (Ok(_), Some(text)) => Err(format!("ours builds; recorded error {text:?}")),
            (Ok(Metadata::Mamba(metadata)), None) => {
                let shown = Shown {
                    step: &step,
                    config,
                };
                compare(&shown.metadata(&metadata), &plain(expected, &step), &step)
            }
            (Ok(other), None) => Err(format!("metadata of family {:?}", other.family())),
        }
    }
}

fn config(entry: &Value, mamba_type: MambaType) -> BuilderConfig {
    let mut config = builder_config(entry);
    let recorded = &entry["config"];
    config.kv_cache_spec.kind = KvCacheSpecKind::Mamba;
    config.kv_cache_spec.mamba = Some(MambaSpec {
        mamba_type,
        cache_mode: match recorded["cmode"].as_str() {
            Some("align") => MambaCacheMode::Align,
            _ => MambaCacheMode::None,
        },
        num_speculative_blocks: config.scheduler.num_speculative_tokens,
        chunk_size: recorded["chunk"].as_u64().unwrap_or(64) as u32,
    });
    config
}

/// The recording without its short forms: references to inputs, `true` for 1, buffers by their head and the rest.
fn plain(value: &Value, step: &Tensors) -> Value {
    match recorded(value, step) {
        Value::Bool(flag) => json!(u8::from(flag)),
        Value::Array(entries) => entries.iter().map(|entry| plain(entry, step)).collect(),
        Value::Object(fields) if fields.contains_key("$head") => {
            let mut buffer = integers(&fields["$head"]);
            let len = fields["$len"].as_u64().expect("a length") as usize;
            buffer.resize(len, fields["$tail"].as_i64().expect("a number"));
            json!(buffer)
        }
        Value::Object(fields) => fields
            .iter()
            .map(|(name, value)| {
                let value = plain(value, step);
                let value = match (name.as_str(), value.as_array()) {
                    // One state for each decode.
                    ("state_indices_tensor_d", Some(rows))
                        if rows
                            .iter()
                            .all(|row| row.as_array().is_some_and(|states| states.len() == 1)) =>
                    {
                        rows.iter().map(|row| row[0].clone()).collect()
                    }
                    _ => value,
                };
                (name.clone(), value)
            })
            .collect::<Map<_, _>>()
            .into(),
        other => other,
    }
}

/// Our metadata as the recording has it.
struct Shown<'a> {
    step: &'a Tensors,
    config: &'a BuilderConfig,
}

impl Shown<'_> {
    fn metadata(&self, metadata: &Mamba) -> Map<String, Value> {
        let mut fields = Map::new();
        match metadata {
            Mamba::Mamba1(base) | Mamba::ShortConv(base) => self.base(&mut fields, base),
            Mamba::Mamba2(metadata) => {
                self.base(&mut fields, &metadata.base);
                put(
                    &mut fields,
                    "prep_initial_states",
                    u8::from(metadata.prep_initial_states),
                );
                put(&mut fields, "chunk_size", metadata.chunk_size);
                if metadata.base.num_prefills > 0 {
                    put(&mut fields, "seq_idx_p", &metadata.seq_idx_p);
                    put(
                        &mut fields,
                        "cu_chunk_seqlen_p",
                        &metadata.cu_chunk_seqlen_p,
                    );
                    put(
                        &mut fields,
                        "last_chunk_indices_p",
                        &metadata.last_chunk_indices_p,
                    );
                }
                if metadata.replayssm.is_some() {
                    put(&mut fields, "replayssm", true);
                }
            }
            Mamba::Gdn(metadata) => self.gdn(&mut fields, metadata),
            Mamba::Linear(metadata) => self.linear(&mut fields, metadata),
        }
        fields
    }

    fn tensor(&self, tensor: &Tensor) -> Value {
        plain(&resolve(tensor, self.step, self.config, &[]), self.step)
    }

    fn padded(&self, padded: &PaddedTensor) -> Value {
        let mut rows = self
            .tensor(&padded.tensor)
            .as_array()
            .expect("rows")
            .clone();
        let fill = match (&padded.tensor, rows.first()) {
            (_, Some(Value::Array(row))) => json!(vec![padded.fill; row.len()]),
            _ => json!(padded.fill),
        };
        assert!(
            rows.len() <= padded.rows as usize,
            "more rows than the buffer"
        );
        rows.resize(padded.rows as usize, fill);
        rows.into()
    }

    fn maybe(&self, fields: &mut Map<String, Value>, name: &str, tensor: &Option<Tensor>) {
        if let Some(tensor) = tensor {
            fields.insert(name.to_owned(), self.tensor(tensor));
        }
    }

    fn maybe_padded(
        &self,
        fields: &mut Map<String, Value>,
        name: &str,
        padded: &Option<PaddedTensor>,
    ) {
        if let Some(padded) = padded {
            fields.insert(name.to_owned(), self.padded(padded));
        }
    }

    fn base(&self, fields: &mut Map<String, Value>, base: &BaseMetadata) {
        put(fields, "num_prefills", base.num_prefills);
        put(fields, "num_prefill_tokens", base.num_prefill_tokens);
        put(fields, "num_decodes", base.num_decodes);
        put(fields, "num_decode_tokens", base.num_decode_tokens);
        put(fields, "num_reqs", base.num_reqs);
        self.maybe(fields, "has_initial_states_p", &base.has_initial_states_p);
        self.maybe(fields, "query_start_loc_p", &base.query_start_loc_p);
        put(
            fields,
            "state_indices_tensor_p",
            self.tensor(&base.state_indices_tensor_p),
        );
        put(
            fields,
            "state_indices_tensor_d",
            self.padded(&base.state_indices_tensor_d),
        );
        self.maybe_padded(fields, "query_start_loc_d", &base.query_start_loc_d);
        self.maybe_padded(fields, "num_accepted_tokens", &base.num_accepted_tokens);
        put(fields, "seq_lens", self.tensor(&base.seq_lens));
        self.conv(fields, &base.conv);
    }

    fn conv(&self, fields: &mut Map<String, Value>, conv: &Option<CausalConv1d>) {
        let Some(conv) = conv else {
            return;
        };
        let batch_ptr = self.tensor(&conv.batch_ptr);
        let offsets = self.tensor(&conv.token_chunk_offset_ptr);
        let head =
            |buffer: &Value| json!(buffer.as_array().expect("a buffer")[..conv.total as usize]);
        let of_block = json!({
            "nums": conv.nums,
            "tot": conv.total,
            "mlist": head(&batch_ptr),
            "mlist_len": conv.total,
            "offsetlist": head(&offsets),
            "batch_ptr": batch_ptr,
            "token_chunk_offset_ptr": offsets,
        });
        let mut by_block = Map::new();
        by_block.insert(conv.block_m.to_string(), of_block);
        put(fields, "nums_dict", by_block);
        put(fields, "batch_ptr", batch_ptr);
        put(fields, "token_chunk_offset_ptr", offsets);
    }

    fn linear(&self, fields: &mut Map<String, Value>, metadata: &LinearMetadata) {
        put(fields, "num_prefills", metadata.num_prefills);
        put(fields, "num_prefill_tokens", metadata.num_prefill_tokens);
        put(fields, "num_decodes", metadata.num_decodes);
        put(fields, "num_decode_tokens", metadata.num_decode_tokens);
        put(
            fields,
            "query_start_loc",
            self.tensor(&metadata.query_start_loc),
        );
        put(fields, "seq_lens", self.tensor(&metadata.seq_lens));
        put(
            fields,
            "state_indices_tensor",
            self.tensor(&metadata.state_indices_tensor),
        );
    }

    fn gdn(&self, fields: &mut Map<String, Value>, metadata: &GdnMetadata) {
        for (name, count) in [
            ("num_prefills", metadata.num_prefills),
            ("num_prefill_tokens", metadata.num_prefill_tokens),
            ("num_decodes", metadata.num_decodes),
            ("num_decode_tokens", metadata.num_decode_tokens),
            ("num_spec_decodes", metadata.num_spec_decodes),
            ("num_spec_decode_tokens", metadata.num_spec_decode_tokens),
            ("num_actual_tokens", metadata.num_actual_tokens),
        ] {
            put(fields, name, count);
        }
        for (name, tensor) in [
            ("has_initial_state", &metadata.has_initial_state),
            ("spec_token_indx", &metadata.spec_token_indx),
            ("non_spec_token_indx", &metadata.non_spec_token_indx),
            ("prefill_query_start_loc", &metadata.prefill_query_start_loc),
            ("prefill_state_indices", &metadata.prefill_state_indices),
            (
                "prefill_has_initial_state",
                &metadata.prefill_has_initial_state,
            ),
        ] {
            self.maybe(fields, name, tensor);
        }
        for (name, padded) in [
            ("spec_query_start_loc", &metadata.spec_query_start_loc),
            (
                "non_spec_query_start_loc",
                &metadata.non_spec_query_start_loc,
            ),
            (
                "spec_state_indices_tensor",
                &metadata.spec_state_indices_tensor,
            ),
            (
                "non_spec_state_indices_tensor",
                &metadata.non_spec_state_indices_tensor,
            ),
            ("spec_sequence_masks", &metadata.spec_sequence_masks),
            // On the host too.
            ("spec_sequence_masks_cpu", &metadata.spec_sequence_masks),
            ("num_accepted_tokens", &metadata.num_accepted_tokens),
        ] {
            self.maybe_padded(fields, name, padded);
        }
        if let Some(len) = metadata.uniform_spec_sequence_length {
            put(fields, "uniform_spec_sequence_length", len);
        }
        if metadata.num_prefills > 0 {
            let pairs: Vec<&[i32]> = metadata.chunk_indices.chunks(2).collect();
            put(fields, "chunk_indices", pairs);
            put(fields, "chunk_offsets", &metadata.chunk_offsets);
        }
        self.conv(fields, &metadata.conv);
    }
}

fn put(fields: &mut Map<String, Value>, name: &str, value: impl serde::Serialize) {
    fields.insert(name.to_owned(), json!(value));
}
