//! FLASH_ATTN's cases.

use std::collections::HashMap;

use serde_json::{Value, json};
use timetable_attention::{BuildFault, MetadataBuilder};
use timetable_types::{
    BuilderConfig, Causal, CommonAttentionMetadata, Metadata, Tensor,
    flash_attn::{Metadata as FlashAttn, SchedulerMetadataCall, TileOrder},
};

use crate::{
    Make,
    resolve::{recorded, resolve},
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
            let config = builder_config(entry);
            let builder = (self.make)(&config);
            (config, builder)
        });
        check_info(builder.info(), entry)?;
        let mut common = case.common.clone();
        if !case.has_host_lengths {
            common.seq_lens_cpu_upper_bound.clear();
        }
        let mut step = case.tensors.clone();
        let built = match case.method.as_str() {
            "build" => builder.build(&common, false),
            "fast_build" => builder.build(&common, true),
            "drafting" => builder.build_for_drafting(&common, 0),
            "update_block_table" => builder.build(&common, false).and_then(|metadata| {
                // As recorded: every block 1,000 later, and the valid slots with them.
                let block = i64::from(config.kv_cache_spec.block_size);
                step.block_table
                    .iter_mut()
                    .flatten()
                    .for_each(|block| *block += 1000);
                step.slot_mapping
                    .iter_mut()
                    .filter(|slot| **slot >= 0)
                    .for_each(|slot| *slot += 1000 * block);
                builder.update_block_table(&metadata, &common)
            }),
            other => panic!("method {other}"),
        };
        let expected = &case.output["metadata"];
        match (built, expected["$error"][1].as_str()) {
            (Err(BuildFault::Declined(error)), Some(text)) if error.message.starts_with(text) => {
                Ok(())
            }
            (Err(error), _) => Err(format!("{error}; recorded {expected}")),
            (Ok(_), Some(text)) => Err(format!("ours builds; recorded error {text:?}")),
            (Ok(Metadata::FlashAttn(metadata)), None) => {
                check_metadata(&metadata, expected, &step, config)?;
                check_schedule(&metadata, &common, config)?;
                let calls = case.output["calls"].as_array().cloned().unwrap_or_default();
                // The recording of an update leaves out the call that its build made.
                if case.method == "update_block_table" {
                    return Ok(());
                }
                let first = file.cases.iter().find(|other| other.config == case.config);
                let missed_window =
                    first.is_some_and(|first| ["fast_build", "drafting"].contains(&&*first.method));
                check_calls(
                    metadata.scheduler_metadata.as_ref(),
                    &calls,
                    &step,
                    config,
                    missed_window,
                )
            }
            (Ok(other), None) => Err(format!("metadata of family {:?}", other.family())),
        }
    }
}

fn check_metadata(
    metadata: &FlashAttn,
    expected: &Value,
    step: &Tensors,
    config: &BuilderConfig,
) -> Result<(), String> {
    let tensor = |tensor: &Tensor| resolve(tensor, step, config, &[]);
    let Causal::All(causal) = metadata.causal else {
        return Err("causal is per request".to_owned());
    };
    let ours = json!({
        "num_actual_tokens": metadata.num_actual_tokens,
        "max_query_len": metadata.max_query_len,
        "query_start_loc": tensor(&metadata.query_start_loc),
        "max_seq_len": metadata.max_seq_len,
        "seq_lens": tensor(&metadata.seq_lens),
        "block_table": tensor(&metadata.block_table),
        "slot_mapping": tensor(&metadata.slot_mapping),
        "max_dcp_context_kv_len": metadata.max_dcp_context_kv_len,
        "num_decode_reqs": metadata.num_decode_reqs,
        "num_prefill_reqs": metadata.num_prefill_reqs,
        "num_decode_tokens": metadata.num_decode_tokens,
        "num_prefill_tokens": metadata.num_prefill_tokens,
        "max_num_splits": metadata.max_num_splits,
        "causal": causal,
    });
    let mut ours = ours.as_object().cloned().expect("an object");
    if let Some(lens) = &metadata.dcp_context_kv_lens {
        ours.insert("dcp_context_kv_lens".to_owned(), tensor(lens));
    }
    if let Some(call) = &metadata.scheduler_metadata {
        // The recording has the schedule's length; its content came from a stub.
        ours.insert(
            "scheduler_metadata".to_owned(),
            json!({ "$stub_shape": [call.scheduler_metadata_len] }),
        );
    }
    if metadata.mm_prefix_query_range.is_some() || metadata.rswa_prefix_lens.is_some() {
        return Err("fields that were None in the recording are present".to_owned());
    }
    compare(&ours, expected, step)
}

/// Field by field, and no field more or less.
pub fn compare(
    ours: &serde_json::Map<String, Value>,
    expected: &Value,
    step: &Tensors,
) -> Result<(), String> {
    let expected = expected.as_object().expect("an object");
    for (name, value) in expected.iter().filter(|(name, _)| *name != "$class") {
        let ours = ours
            .get(name)
            .ok_or_else(|| format!("{name} is absent; recorded {value}"))?;
        equal(name, ours, &recorded(value, step))?;
    }
    match ours.keys().find(|name| !expected.contains_key(*name)) {
        Some(name) => Err(format!("{name} is {}; absent in the recording", ours[name])),
        None => Ok(()),
    }
}

fn check_calls(
    call: Option<&SchedulerMetadataCall>,
    calls: &[Value],
    step: &Tensors,
    config: &BuilderConfig,
    missed_window: bool,
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
        "cache_seqlens": resolve(&call.cache_seqlens, step, config, &[]),
        "qkv_dtype": dtype_name(call.qkv_dtype),
        "cu_seqlens_q": resolve(&call.cu_seqlens_q, step, config, &[]),
        "page_size": call.page_size,
        "causal": call.causal,
        "window_size": [call.window_size.0, call.window_size.1],
        "num_splits": call.num_splits,
    });
    // The field reads its layers' windows at a builder's first build, and only if that one makes a schedule: where the
    // first build was a fast one it schedules without a window for ever after. Ours does not depend on earlier calls.
    let mut recorded_call = recorded_call.clone();
    if call.window_size != (-1, -1)
        && recorded_call["window_size"] == json!([-1, -1])
        && missed_window
    {
        recorded_call["window_size"] = json!([call.window_size.0, call.window_size.1]);
    }
    compare(ours.as_object().expect("an object"), &recorded_call, step)
}

/// Our own typed schedule keeps to its contract on every recorded batch.
fn check_schedule(
    metadata: &FlashAttn,
    common: &CommonAttentionMetadata,
    config: &BuilderConfig,
) -> Result<(), String> {
    let schedule = &metadata.schedule;
    let rows = common.num_reqs as usize;
    if !(1..=config.max_num_splits).contains(&schedule.max_num_splits) {
        return Err(format!(
            "schedule.max_num_splits is {}",
            schedule.max_num_splits
        ));
    }
    if !schedule.num_splits.is_empty() && schedule.num_splits.len() != rows {
        return Err(format!(
            "{} splits for {rows} rows",
            schedule.num_splits.len()
        ));
    }
    let most = schedule.max_num_splits as i32;
    if let Some(splits) = schedule
        .num_splits
        .iter()
        .find(|splits| !(1..=most).contains(splits))
    {
        return Err(format!("a row of {splits} splits, at most {most}"));
    }
    if let TileOrder::Rows(order) = &schedule.tile_order {
        let mut sorted = order.clone();
        sorted.sort_unstable();
        equal("tile order", &sorted, &(0..rows as i32).collect())?;
    }
    Ok(())
}
