//! The MLA backends' cases: FLASHMLA, FLASH_ATTN_MLA and TRITON_MLA.

use std::collections::HashMap;

use serde_json::{Map, Value, json};
use timetable_attention::{BuildFault, MetadataBuilder};
use timetable_types::{
    BuilderConfig, KvCacheSpecKind, Metadata, RowRange, Tensor,
    flash_mla::{
        ContextChunk, DecodeSchedule, Metadata as FlashMla, MlaDecode, MlaPrefill,
        MlaSchedulerMetadataCall,
    },
};

use crate::{
    Make,
    flash_attn::compare,
    resolve::resolve,
    vectors::{Case, File, Tensors, builder_config, check_info, dtype_name, equal},
};

/// Builders by configuration: one each, as in the recording.
pub struct Suite<'a> {
    make: Make<'a>,
    builders: HashMap<usize, (BuilderConfig, Box<dyn MetadataBuilder>)>,
}

impl<'a> Suite<'a> {
    pub fn new(make: Make<'a>) -> Self {
        Self {
            make,
            builders: HashMap::new(),
        }
    }

    pub fn check(&mut self, file: &File, case: &Case) -> Result<(), String> {
        let entry = &file.configs[case.config];
        let (config, builder) = self.builders.entry(case.config).or_insert_with(|| {
            let config = mla_config(entry);
            let builder = (self.make)(&config);
            (config, builder)
        });
        // A run of the whole engine recorded no builder's attributes.
        if entry.get("builder").is_some() {
            check_info(builder.info(), entry)?;
        }
        let built = match case.method.as_str() {
            "build" => builder.build(&case.common, false),
            "capture" => builder.build_for_cudagraph_capture(&case.common),
            other => panic!("method {other}"),
        };
        let expected = &case.output["metadata"];
        match (built, expected["$error"][1].as_str()) {
            // One of the field's two assertions has no text.
            (Err(BuildFault::Declined(error)), Some(text)) if error.message.starts_with(text) => {
                Ok(())
            }
            (Err(error), _) => Err(format!("{error}; recorded {expected}")),
            (Ok(_), Some(text)) => Err(format!("ours builds; recorded error {text:?}")),
            (Ok(Metadata::FlashMla(metadata)), None) => {
                check_metadata(&metadata, expected, &case.tensors, config)?;
                let call = metadata
                    .decode
                    .as_ref()
                    .and_then(|decode| match &decode.schedule {
                        DecodeSchedule::FlashAttn(call) => Some(call),
                        _ => None,
                    });
                let calls = case.output["calls"].as_array().cloned().unwrap_or_default();
                check_calls(call, &calls, &case.tensors, config)
            }
            (Ok(other), None) => Err(format!("metadata of family {:?}", other.family())),
        }
    }
}

/// As the other files' configurations, with one layer of DeepSeek's sizes: 16 heads over a latent of 512 and a rotary part of 64.
fn mla_config(entry: &Value) -> BuilderConfig {
    let mut config = builder_config(entry);
    config.kv_cache_spec.kind = KvCacheSpecKind::MlaAttention;
    config.kv_cache_spec.num_kv_heads = 1;
    config.kv_cache_spec.head_size = 576;
    config.kv_cache_spec.head_size_v = 0;
    let heads = entry["builder"]["num_heads"].as_u64();
    let heads = heads.or(entry["config"]["num_heads"].as_u64());
    config.attention.num_heads = heads.expect("heads") as u32;
    config.attention.kv_lora_rank = 512;
    config.attention.qk_rope_head_dim = 64;
    // The field sizes the workspace by the cache's block of 16 tokens, whatever the group's: in the recording of FLASHMLA, whose
    // group has 64, they differ, which they do in no engine. The contract has the group's block only.
    if config.kv_cache_spec.block_size != 16 {
        let rows = &entry["builder"]["chunked_prefill_workspace_size"];
        config.options = vec![(
            "chunked_prefill_workspace_size".to_owned(),
            rows.to_string(),
        )];
    }
    config
}

fn check_metadata(
    metadata: &FlashMla,
    expected: &Value,
    step: &Tensors,
    config: &BuilderConfig,
) -> Result<(), String> {
    let tensor = |tensor: &Tensor| resolve(tensor, step, config, &[]);
    let ours = json!({
        "num_reqs": metadata.num_reqs,
        "max_query_len": metadata.max_query_len,
        "max_seq_len": metadata.max_seq_len,
        "num_actual_tokens": metadata.num_actual_tokens,
        "query_start_loc": tensor(&metadata.query_start_loc),
        "slot_mapping": tensor(&metadata.slot_mapping),
        "num_decodes": metadata.num_decodes,
        "num_decode_tokens": metadata.num_decode_tokens,
        "num_prefills": metadata.num_prefills,
        "causal": metadata.causal,
        "head_dim": metadata.head_dim,
    });
    let mut outer = expected.as_object().cloned().expect("an object");
    let (prefill, decode) = (outer.remove("prefill"), outer.remove("decode"));
    compare(object(&ours), &Value::Object(outer), step)?;
    both(
        "prefill",
        metadata.prefill.as_ref(),
        prefill,
        |ours, recorded| check_prefill(ours, recorded, step, config),
    )?;
    both(
        "decode",
        metadata.decode.as_ref(),
        decode,
        |ours, recorded| check_decode(ours, recorded, step, config),
    )
}

fn object(value: &Value) -> &Map<String, Value> {
    value.as_object().expect("an object")
}

/// Both are there, and alike, or neither is.
fn both<T>(
    name: &str,
    ours: Option<&T>,
    recorded: Option<Value>,
    check: impl FnOnce(&T, &mut Map<String, Value>) -> Result<(), String>,
) -> Result<(), String> {
    match (ours, recorded) {
        (None, None) => Ok(()),
        (Some(ours), Some(Value::Object(mut recorded))) => {
            check(ours, &mut recorded).map_err(|what| format!("{name}: {what}"))
        }
        (ours, recorded) => Err(format!(
            "{name}: ours {}, recorded {recorded:?}",
            if ours.is_some() { "present" } else { "absent" }
        )),
    }
}

fn check_decode(
    decode: &MlaDecode,
    recorded: &mut Map<String, Value>,
    step: &Tensors,
    config: &BuilderConfig,
) -> Result<(), String> {
    let tensor = |tensor: &Tensor| resolve(tensor, step, config, &[]);
    let mut ours = Map::new();
    ours.insert("block_table".to_owned(), tensor(&decode.block_table));
    ours.insert("seq_lens".to_owned(), tensor(&decode.seq_lens));
    if let Some(lens) = &decode.dcp_tot_seq_lens {
        ours.insert("dcp_tot_seq_lens".to_owned(), tensor(lens));
    }
    match &decode.schedule {
        // FLASHMLA's schedule is an object that its kernel fills; TRITON_MLA has none.
        DecodeSchedule::Lazy => {
            if let Some(lazy) = recorded.remove("scheduler_metadata") {
                equal("initialised", &lazy["have_initialized"], &json!(false))?;
            }
        }
        DecodeSchedule::FlashAttn(call) => {
            let starts = decode.query_start_loc.as_ref().ok_or("no query starts")?;
            ours.insert("query_start_loc".to_owned(), tensor(starts));
            ours.insert("max_query_len".to_owned(), json!(decode.max_query_len));
            ours.insert("max_seq_len".to_owned(), json!(decode.max_seq_len));
            ours.insert("max_num_splits".to_owned(), json!(decode.max_num_splits));
            // The recording has the schedule's length; its content came from a stub.
            ours.insert(
                "scheduler_metadata".to_owned(),
                json!({ "$stub_shape": [call.scheduler_metadata_len] }),
            );
        }
        DecodeSchedule::Tiles(_) => return Err("tiles for a bfloat16 cache".to_owned()),
    }
    compare(&ours, &Value::Object(recorded.clone()), step)
}

fn slice(range: &RowRange) -> Value {
    json!({ "$slice": [range.start, range.end] })
}

fn check_prefill(
    prefill: &MlaPrefill,
    recorded: &mut Map<String, Value>,
    step: &Tensors,
    config: &BuilderConfig,
) -> Result<(), String> {
    let tensor = |tensor: &Tensor| resolve(tensor, step, config, &[]);
    // An object of the engine's.
    recorded.remove("prefill_backend");
    let context = recorded.remove("chunked_context");
    let ours = json!({
        "block_table": tensor(&prefill.block_table),
        "query_start_loc": tensor(&prefill.query_start_loc),
        "max_query_len": prefill.max_query_len,
        "q_data_type": dtype_name(prefill.q_data_type),
        "output_dtype": dtype_name(prefill.output_dtype),
        "query_lens_cpu": prefill.query_lens_cpu,
        "use_dense_mha": prefill.use_dense_mha,
    });
    compare(object(&ours), &Value::Object(recorded.clone()), step)?;
    both(
        "chunked_context",
        prefill.chunked_context.as_ref(),
        context,
        |ours, recorded| {
            // Another object of the engine's, where there are ranks.
            let manager = recorded.remove("dcp_manager");
            equal(
                "dcp_manager",
                &manager.is_some(),
                &(config.parallel.dcp_world_size > 1),
            )?;
            let chunks = recorded.remove("chunks").expect("chunks");
            let fields = json!({
                // On the device and on the host: one list here.
                "context_lens": ours.context_lens,
                "context_lens_list": ours.context_lens,
                "workspace": {
                    "$shape": ours.workspace.shape,
                    "$dtype": dtype_name(ours.workspace.dtype),
                },
                "empty_token_slices": ours.empty_token_slices.iter().map(slice).collect::<Vec<_>>(),
            });
            compare(object(&fields), &Value::Object(recorded.clone()), step)?;
            let chunks = chunks.as_array().expect("a list");
            equal("chunks", &ours.chunks.len(), &chunks.len())?;
            for (ours, recorded) in ours.chunks.iter().zip(chunks) {
                check_chunk(ours, recorded, step, config)
                    .map_err(|what| format!("chunk {}: {what}", ours.index))?;
            }
            Ok(())
        },
    )
}

fn check_chunk(
    chunk: &ContextChunk,
    recorded: &Value,
    step: &Tensors,
    config: &BuilderConfig,
) -> Result<(), String> {
    let mut ours = json!({
        "index": chunk.index,
        "request_slice": slice(&chunk.request_slice),
        "token_slice": slice(&chunk.token_slice),
        "continuation_token_end": chunk.continuation_token_end,
        "is_continuation": chunk.is_continuation,
        "num_context_tokens": chunk.num_context_tokens,
        "query_start_loc": chunk.query_start_loc,
        "max_query_len": chunk.max_query_len,
        "cu_seq_lens": chunk.cu_seq_lens,
        "starts": chunk.starts,
        "max_seq_len": chunk.max_seq_len,
        "seq_lens": chunk.seq_lens,
        "token_to_seq": segments(&chunk.token_to_seq, &chunk.cu_seq_lens),
        "all_rows_active": chunk.all_rows_active,
        "num_local_context_tokens": chunk.num_local_context_tokens,
    });
    if let Some(dcp) = &chunk.dcp {
        let ranks = config.parallel.dcp_world_size as usize;
        let rows = dcp.local_context_lens_allranks.chunks(ranks);
        ours["padded_local_seq_lens"] = json!(dcp.padded_local_seq_lens);
        ours["local_context_lens_allranks"] = json!(rows.collect::<Vec<_>>());
        ours["padded_local_cu_seq_lens"] = json!(dcp.padded_local_cu_seq_lens);
        ours["padded_local_token_to_seq"] = segments(
            &dcp.padded_local_token_to_seq,
            &dcp.padded_local_cu_seq_lens,
        );
        ours["local_starts"] = json!(dcp.local_starts);
    }
    compare(object(&ours), recorded, step)
}

/// Segment i as often as it is long.
fn segments(tensor: &Tensor, sums: &[i32]) -> Value {
    assert_eq!(*tensor, Tensor::SegmentIds);
    let of = sums.windows(2).enumerate();
    let ids = of.flat_map(|(segment, pair)| (pair[0]..pair[1]).map(move |_| segment));
    json!(ids.collect::<Vec<_>>())
}

fn check_calls(
    call: Option<&MlaSchedulerMetadataCall>,
    calls: &[Value],
    step: &Tensors,
    config: &BuilderConfig,
) -> Result<(), String> {
    equal("calls", &usize::from(call.is_some()), &calls.len())?;
    let (Some(call), [recorded_call]) = (call, calls) else {
        return Ok(());
    };
    let ours = json!({
        "batch_size": call.batch_size,
        "max_seqlen_q": call.max_seqlen_q,
        "max_seqlen_k": call.max_seqlen_k,
        "num_heads_q": call.num_heads_q,
        "num_heads_kv": call.num_heads_kv,
        "headdim": call.headdim,
        "headdim_v": call.headdim_v,
        "cache_seqlens": resolve(&call.cache_seqlens, step, config, &[]),
        "qkv_dtype": dtype_name(call.qkv_dtype),
        "cu_seqlens_q": resolve(&call.cu_seqlens_q, step, config, &[]),
        "page_size": call.page_size,
        "causal": call.causal,
        "num_splits": call.num_splits,
    });
    compare(object(&ours), recorded_call, step)
}
