//! FLASHINFER's cases.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value, json};
use timetable_attention::{BuildFault, MetadataBuilder};
use timetable_types::{
    BuilderConfig, Dtype, KvCacheLayout, Metadata, Tensor,
    flashinfer::{
        Decode, Metadata as FlashInfer, Plan, PlanFunction, Prefill, TrtllmDecode, TrtllmKernel,
    },
};

use crate::{
    Make,
    flash_attn::compare,
    resolve::{recorded, resolve},
    vectors::{Case, File, Tensors, builder_config, check_info, dtype_name, equal, integers},
};

/// Builders by configuration: one each, as in the recording.
pub struct Suite<'a> {
    make: Make<'a>,
    builders: HashMap<usize, (BuilderConfig, Box<dyn MetadataBuilder>)>,
    /// Captured decode wrappers that have been planned once, by configuration, size and query length.
    planned: HashSet<(usize, u32, u32)>,
}

impl<'a> Suite<'a> {
    pub fn new(make: Make<'a>) -> Self {
        Self {
            make,
            builders: HashMap::new(),
            planned: HashSet::new(),
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
        assert_eq!(case.method, "build");
        // Where the engine had no host lengths the field waits for the device's. Our contract always brings them.
        let built = builder.build(&case.common, false);
        let expected = &case.output["metadata"];
        match (built, expected["$error"][1].as_str()) {
            (Err(BuildFault::Declined(error)), Some(text)) if error.message.starts_with(text) => {
                Ok(())
            }
            (Err(error), _) => Err(format!("{error}; recorded {expected}")),
            (Ok(_), Some(text)) => Err(format!("ours builds; recorded error {text:?}")),
            (Ok(Metadata::Flashinfer(metadata)), None) => {
                check_metadata(&metadata, expected, &case.tensors, config)?;
                let calls = case.output["calls"].as_array().cloned().unwrap_or_default();
                let mut check = Calls {
                    calls: calls.iter(),
                    case,
                    config,
                    planned: &mut self.planned,
                };
                if let Some(Prefill::Wrapper(plan)) = &metadata.prefill {
                    check.prefill(plan, metadata.num_decodes as usize)?;
                }
                if let Some(Decode::Wrapper(plan)) = &metadata.decode {
                    check.decode(plan, metadata.num_decode_tokens)?;
                }
                match check.calls.next() {
                    Some(call) => Err(format!("recorded one call more: {call}")),
                    None => Ok(()),
                }
            }
            (Ok(other), None) => Err(format!("metadata of family {:?}", other.family())),
        }
    }
}

fn check_metadata(
    metadata: &FlashInfer,
    expected: &Value,
    step: &Tensors,
    config: &BuilderConfig,
) -> Result<(), String> {
    let layout = match metadata.kv_cache_layout {
        KvCacheLayout::Lbnhc => "LBNHC",
        other => panic!("the recordings have no layout {other:?}"),
    };
    let ours = json!({
        "kv_cache_layout": layout,
        "num_actual_tokens": metadata.num_actual_tokens,
        "slot_mapping": resolve(&metadata.slot_mapping, step, config, &[]),
        "q_data_type_prefill": dtype_name(metadata.q_data_type_prefill),
        "q_data_type_decode": dtype_name(metadata.q_data_type_decode),
        "num_decodes": metadata.num_decodes,
        "num_decode_tokens": metadata.num_decode_tokens,
        "num_prefills": metadata.num_prefills,
        "num_prefill_tokens": metadata.num_prefill_tokens,
        "causal": metadata.causal,
    });
    let mut flat = expected.as_object().cloned().expect("an object");
    let (prefill, decode) = (flat.remove("prefill"), flat.remove("decode"));
    compare(
        ours.as_object().expect("an object"),
        &Value::Object(flat),
        step,
    )?;
    match (&metadata.prefill, prefill) {
        (None, None) => {}
        (Some(Prefill::Wrapper(plan)), Some(part)) if part["$class"] == "FIPrefill" => {
            let is_dcp = part["wrapper"]
                .as_str()
                .unwrap_or_default()
                .contains("BatchDCPPrefillWrapper");
            equal(
                "prefill.wrapper",
                &(plan.function == PlanFunction::BatchDcpPrefillPlan),
                &is_dcp,
            )?;
        }
        (Some(Prefill::Trtllm(ours)), Some(part)) if part["$class"] == "TRTLLMPrefill" => {
            let ours = json!({
                "block_tables": resolve(&ours.block_tables, step, config, &[]),
                "seq_lens": resolve(&ours.seq_lens, step, config, &[]),
                "cum_seq_lens_q": resolve(&ours.cum_seq_lens_q, step, config, &[]),
                "cum_seq_lens_kv": resolve(&ours.cum_seq_lens_kv, step, config, &[]),
                "max_q_len": ours.max_q_len,
                "max_seq_len": ours.max_seq_len,
            });
            compare(ours.as_object().expect("an object"), &part, step)?;
        }
        (ours, part) => return Err(format!("prefill: ours {ours:?}, recorded {part:?}")),
    }
    match (&metadata.decode, decode) {
        (None, None) => Ok(()),
        (Some(Decode::Wrapper(_)), Some(part)) if part["$class"] == "FIDecode" => Ok(()),
        (Some(Decode::Trtllm(ours)), Some(part))
            if part["$class"] == "FlashInferTrtllmAPIDecode" =>
        {
            check_trtllm_decode(ours, &part, step, config)
        }
        (ours, part) => Err(format!("decode: ours {ours:?}, recorded {part:?}")),
    }
}

fn check_trtllm_decode(
    ours: &TrtllmDecode,
    part: &Value,
    step: &Tensors,
    config: &BuilderConfig,
) -> Result<(), String> {
    let mut map: Map<String, Value> = Map::new();
    let mut put = |name: &str, value: Value| map.insert(name.to_owned(), value);
    put(
        "kernel",
        json!(match ours.kernel {
            TrtllmKernel::Xqa => "XQA",
            TrtllmKernel::TrtllmGen => "TRTLLM_GEN",
        }),
    );
    put(
        "block_tables",
        resolve(&ours.block_tables, step, config, &[]),
    );
    put("seq_lens", resolve(&ours.seq_lens, step, config, &[]));
    put("max_seq_len", json!(ours.max_seq_len));
    put("q_len_per_req", json!(ours.q_len_per_req));
    if let Some(starts) = &ours.q_cu_seq_lens {
        put("q_cu_seq_lens", resolve(starts, step, config, &[]));
    }
    let mut part = part.as_object().cloned().expect("an object");
    // The recorded mask is [rows, tokens, u16 words] or [tokens, u16 words]; ours is the same words, two to an s32.
    let words = part.remove("mask").map(|mask| flatten(&mask));
    let our_words = ours.mask.as_ref().map(|mask| {
        let words = |value: &i32| {
            [
                i64::from(*value as u32 & 0xffff),
                i64::from(*value as u32 >> 16),
            ]
        };
        mask.values.iter().flat_map(words).collect::<Vec<_>>()
    });
    equal("decode.mask", &our_words, &words)?;
    if ours.dcp_query_start_loc.is_some() {
        return Err("decode.dcp_query_start_loc is present".to_owned());
    }
    compare(&map, &Value::Object(part), step)
}

fn flatten(value: &Value) -> Vec<i64> {
    match value {
        Value::Array(values) => values.iter().flat_map(flatten).collect(),
        value => vec![value.as_i64().expect("a word")],
    }
}

/// The recorded plan calls, in order, against our plans.
struct Calls<'a> {
    calls: std::slice::Iter<'a, Value>,
    case: &'a Case,
    config: &'a BuilderConfig,
    planned: &'a mut HashSet<(usize, u32, u32)>,
}

impl<'a> Calls<'a> {
    fn next(&mut self, name: &str) -> Result<&'a Value, String> {
        let call = self
            .calls
            .next()
            .ok_or_else(|| format!("no call of {name} was recorded"))?;
        equal("call", &name, &call["call"].as_str().unwrap_or_default())?;
        Ok(call)
    }

    fn prefill(&mut self, plan: &Plan, num_decodes: usize) -> Result<(), String> {
        let dcp = plan.function == PlanFunction::BatchDcpPrefillPlan;
        let qo_indptr = resolve(&plan.qo_indptr, &self.case.tensors, self.config, &[]);
        let call = if dcp {
            let call = self.next("BatchDCPPrefillWrapper.plan")?;
            // The rows' own tables, which `paged_kv_indices` gathers from.
            let rows: Vec<Vec<i64>> = call["block_tables"]
                .as_array()
                .expect("rows")
                .iter()
                .map(integers)
                .collect();
            equal(
                "block_tables",
                &self.case.tensors.block_table[num_decodes..].to_vec(),
                &rows,
            )?;
            equal("qo_indptr", &qo_indptr, &call["qo_indptr_cpu"])?;
            equal("seq_lens", &json!(plan.seq_lens), &call["kv_lens_cpu"])?;
            equal(
                "paged_kv_last_page_len",
                &json!(plan.paged_kv_last_page_len),
                &call["paged_kv_last_page_len_cpu"],
            )?;
            equal(
                "dcp_world_size",
                &json!(plan.dcp_world_size),
                &call["dcp_world_size"],
            )?;
            equal(
                "fixed_split_size",
                &json!(plan.fixed_split_size),
                &call["prefill_fixed_split_size"],
            )?;
            self.kv_dtype(plan, &call["kv_cache_dtype"])?;
            equal("head_dim", &json!(plan.head_dim), &call["head_dim"])?;
            self.pages(
                plan,
                &call["paged_kv_indptr_cpu"],
                &call["paged_kv_indices"],
            )?;
            // The wrapper takes no flag: the keys that it plans lie before every query. Ours shows the batch's.
            equal("causal", &plan.causal, &true)?;
            call
        } else {
            let call = self.next("BatchPrefillWithPagedKVCacheWrapper.plan")?;
            equal("qo_indptr", &qo_indptr, &call["qo_indptr"])?;
            equal("seq_lens", &json!(plan.seq_lens), &call["seq_lens"])?;
            equal(
                "paged_kv_last_page_len",
                &json!(plan.paged_kv_last_page_len),
                &call["paged_kv_last_page_len"],
            )?;
            equal(
                "fixed_split_size",
                &json!(plan.fixed_split_size),
                &call["fixed_split_size"],
            )?;
            self.kv_dtype(plan, &call["kv_data_type"])?;
            equal(
                "o_data_type",
                &json!(dtype_name(plan.o_data_type)),
                &call["o_data_type"],
            )?;
            equal("head_dim", &json!(plan.head_dim), &call["head_dim_qk"])?;
            equal("causal", &json!(plan.causal), &call["causal"])?;
            self.pages(plan, &call["paged_kv_indptr"], &call["paged_kv_indices"])?;
            call
        };
        self.shared(plan, call)
    }

    fn decode(&mut self, plan: &Plan, num_decode_tokens: u32) -> Result<(), String> {
        // A single request without query tokens: the field cuts its lists by tokens, to nothing. Ours has the row, inert.
        let mut inert = plan.clone();
        let plan = if num_decode_tokens == 0 && plan.q_len_per_req == 1 {
            equal("work items", &plan.work.request_indices.len(), &0)?;
            inert.seq_lens.clear();
            inert.paged_kv_last_page_len.clear();
            inert.paged_kv_indptr.truncate(1);
            inert.paged_kv_indices = Tensor::Values(Vec::new());
            &inert
        } else {
            plan
        };
        let wrapper = self.next("_get_decode_wrapper")?;
        let graph = plan.cudagraph_batch_size > 0;
        equal("use_cudagraph", &json!(graph), &wrapper["use_cudagraph"])?;
        // A wrapper belongs to a number of query tokens over their number per request.
        let batch_size = num_decode_tokens
            .checked_div(plan.q_len_per_req)
            .unwrap_or(plan.seq_lens.len() as u32);
        equal("batch_size", &json!(batch_size), &wrapper["batch_size"])?;
        equal(
            "q_len_per_req",
            &json!([plan.q_len_per_req]),
            &wrapper["more"],
        )?;
        // The field's first plan of a captured wrapper is a full one, and all later ones are fast. Ours says what the later
        // ones are, because a build must not depend on the calls before it. Not every case of a recording was kept, so the
        // first that is here may be a later one.
        let wrapper = (self.case.config, batch_size, plan.q_len_per_req);
        let recorded_call = self.calls.as_slice().first();
        let is_fast =
            recorded_call.is_some_and(|call| call["call"] == "fast_decode_plan(cudagraph)");
        let fast = graph && (is_fast || self.planned.contains(&wrapper));
        if graph {
            self.planned.insert(wrapper);
        }
        equal(
            "function",
            &(plan.function == PlanFunction::FastDecodePlan),
            &graph,
        )?;
        let call = self.next(if fast {
            "fast_decode_plan(cudagraph)"
        } else {
            "BatchDecodeWithPagedKVCacheWrapper.plan"
        })?;
        equal(
            "paged_kv_last_page_len",
            &json!(plan.paged_kv_last_page_len),
            &call["last_page_len"],
        )?;
        if !fast {
            equal("seq_lens", &json!(plan.seq_lens), &call["seq_lens"])?;
            equal(
                "o_data_type",
                &json!(dtype_name(plan.o_data_type)),
                &call["o_data_type"],
            )?;
        }
        equal(
            "fixed_split_size",
            &json!(plan.fixed_split_size),
            &call["fixed_split_size"],
        )?;
        equal(
            "q_len_per_req",
            &json!(plan.q_len_per_req),
            &call["q_len_per_req"],
        )?;
        self.kv_dtype(plan, &call["kv_data_type"])?;
        equal("head_dim", &json!(plan.head_dim), &call["head_dim"])?;
        self.pages(plan, &call["indptr"], &call["indices"])?;
        self.shared(plan, call)
    }

    fn kv_dtype(&self, plan: &Plan, recorded: &Value) -> Result<(), String> {
        equal(
            "kv_data_type",
            &json!(dtype_name(plan.kv_data_type)),
            recorded,
        )
    }

    /// The field hands both plans one list of all pages and offsets into it. Ours hands each part its own: the same pages,
    /// with offsets from 0.
    fn pages(&self, plan: &Plan, indptr: &Value, indices: &Value) -> Result<(), String> {
        let indptr = integers(indptr);
        let rebased: Vec<i64> = indptr.iter().map(|offset| offset - indptr[0]).collect();
        equal(
            "paged_kv_indptr",
            &json!(plan.paged_kv_indptr),
            &json!(rebased),
        )?;
        let pages = integers(&recorded(indices, &self.case.tensors));
        let of_part = &pages[indptr[0] as usize..*indptr.last().expect("an offset") as usize];
        let ours = resolve(
            &plan.paged_kv_indices,
            &self.case.tensors,
            self.config,
            &plan.paged_kv_indptr,
        );
        equal("paged_kv_indices", &ours, &json!(of_part))
    }

    /// Arguments that every plan function has.
    fn shared(&self, plan: &Plan, call: &Value) -> Result<(), String> {
        equal(
            "num_qo_heads",
            &json!(plan.num_qo_heads),
            &call["num_qo_heads"],
        )?;
        equal(
            "num_kv_heads",
            &json!(plan.num_kv_heads),
            &call["num_kv_heads"],
        )?;
        equal("page_size", &json!(plan.page_size), &call["page_size"])?;
        equal("sm_scale", &json!(plan.sm_scale), &call["sm_scale"])?;
        equal(
            "window_left",
            &json!(plan.window_left),
            &call["window_left"],
        )?;
        equal(
            "logits_soft_cap",
            &json!(plan.logits_soft_cap),
            &call["logits_soft_cap"],
        )?;
        equal(
            "disable_split_kv",
            &json!(plan.disable_split_kv),
            &call["disable_split_kv"],
        )?;
        equal(
            "q_data_type",
            &json!(dtype_name(plan.q_data_type)),
            &call["q_data_type"],
        )?;
        // Arguments that this backend never sets.
        for (name, value) in [
            ("pos_encoding_mode", json!("NONE")),
            ("data_type", Value::Null),
            ("rope_scale", Value::Null),
            ("rope_theta", Value::Null),
            ("non_blocking", json!(true)),
        ] {
            if let Some(recorded) = call.get(name) {
                equal(name, &value, recorded)?;
            }
        }
        equal("the recordings' dtype", &plan.q_data_type, &Dtype::Bfloat16)
    }
}
