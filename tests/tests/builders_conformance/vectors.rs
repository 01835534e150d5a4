//! The recorded cases as the contract's inputs. It must never know an expected output.

use std::path::Path;

use serde_json::{Value, json};
use timetable_types::{
    AttentionConfig, BuilderConfig, BuilderInfo, Causal, CommonAttentionMetadata, CudagraphConfig,
    CudagraphMode, CudagraphSupport, DcpInputs, DeviceConfig, Dtype, Extra, ExtraValue,
    KvCacheLayout, KvCacheSpec, KvCacheSpecKind, ParallelConfig, SchedulerConfig,
    batch::{NUM_ACCEPTED_TOKENS, NUM_DECODE_DRAFT_TOKENS_CPU},
};

/// One file of cases.
pub struct File {
    pub configs: Vec<Value>,
    pub cases: Vec<Case>,
}

/// One case, with its tensors as the host holds them.
pub struct Case {
    pub id: u64,
    pub kind: String,
    pub config: usize,
    pub method: String,
    pub output: Value,
    pub tensors: Tensors,
    pub common: CommonAttentionMetadata,
    /// Did the engine have host lengths? Under asynchronous speculation it does not.
    pub has_host_lengths: bool,
}

/// A step's device tensors.
#[derive(Clone, Debug)]
pub struct Tensors {
    pub query_start_loc: Vec<i64>,
    pub seq_lens: Vec<i64>,
    pub block_table: Vec<Vec<i64>>,
    pub slot_mapping: Vec<i64>,
    /// A model state's own.
    pub num_accepted_tokens: Option<Vec<i64>>,
}

fn read(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("vectors")
        .join(name)
        .with_added_extension("json");
    let text = std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).expect("vectors are JSON")
}

impl File {
    /// What `builder` did in each step of a recorded run of the whole engine, on its CPU device without graphs. The builder's
    /// own attributes are not recorded.
    pub fn steps(name: &str, builder: &str) -> Self {
        let run = read(&format!("engine/{name}"));
        let steps = run["steps"].as_array().expect("steps").iter();
        let of_builder = steps.filter(|step| step["builder"] == builder);
        let cases = of_builder.clone().enumerate().map(|(id, step)| {
            let mut case = Case::parse(&json!({
                "id": id,
                "kind": "engine step",
                "input": { "config": 0, "method": "build", "cam": step["cam"] },
                "output": { "metadata": step["metadata"] },
            }));
            // The recording leaves out the table's last columns, where no row has a block.
            let width = step["block_table_width"].as_u64().expect("a width");
            case.common.block_table_width = width as u32;
            for row in &mut case.tensors.block_table {
                row.resize(width as usize, 0);
            }
            case
        });
        let block_size = match &run["mamba_block_size"] {
            Value::Null => &run["block_size"],
            size => size,
        };
        let config = json!({
            "block_size": block_size,
            "num_heads": run["model"]["num_attention_heads"],
            "compute_capability": "0.0",
            "cudagraph_mode": "NONE",
        });
        Self {
            configs: vec![json!({ "config": config })],
            cases: cases.collect(),
        }
    }

    pub fn load(name: &str) -> Self {
        let value = read(name);
        Self {
            configs: value["configs"].as_array().expect("configs").clone(),
            cases: value["cases"]
                .as_array()
                .expect("cases")
                .iter()
                .map(Case::parse)
                .collect(),
        }
    }
}

/// A list of whole numbers or booleans.
pub fn integers(value: &Value) -> Vec<i64> {
    value
        .as_array()
        .unwrap_or_else(|| panic!("not a list: {value}"))
        .iter()
        .map(|entry| {
            entry
                .as_i64()
                .or(entry.as_bool().map(i64::from))
                .expect("a whole number")
        })
        .collect()
}

fn s32(values: &[i64]) -> Vec<i32> {
    values
        .iter()
        .map(|&value| i32::try_from(value).expect("s32"))
        .collect()
}

impl Case {
    fn parse(value: &Value) -> Self {
        let (input, cam) = (&value["input"], &value["input"]["cam"]);
        let own = &input["build_kwargs"];
        let own = |name: &str| own.get(name).map(integers);
        let tensors = Tensors {
            query_start_loc: integers(&cam["query_start_loc"]),
            seq_lens: integers(&cam["seq_lens"]),
            block_table: cam["block_table_tensor"]
                .as_array()
                .expect("rows")
                .iter()
                .map(integers)
                .collect(),
            slot_mapping: integers(&cam["slot_mapping"]),
            num_accepted_tokens: own(NUM_ACCEPTED_TOKENS),
        };
        let number = |name: &str| cam[name].as_u64().expect("a count") as u32;
        let accepted = tensors.num_accepted_tokens.as_ref();
        let accepted = accepted.map(|rows| ExtraValue::Device(rows.len() as u32));
        let drafts = own(NUM_DECODE_DRAFT_TOKENS_CPU).map(|drafts| ExtraValue::Host(s32(&drafts)));
        let extras = [
            (NUM_ACCEPTED_TOKENS, accepted),
            (NUM_DECODE_DRAFT_TOKENS_CPU, drafts),
        ];
        let extras = extras.into_iter().filter_map(|(name, value)| {
            let name = name.to_owned();
            value.map(|value| Extra { name, value })
        });
        let has_host_lengths = cam.get("seq_lens_cpu_upper_bound").is_some();
        let common = CommonAttentionMetadata {
            num_reqs: number("num_reqs"),
            num_actual_tokens: number("num_actual_tokens"),
            max_query_len: number("max_query_len"),
            max_seq_len: number("max_seq_len"),
            causal: Causal::All(cam["causal"].as_bool().unwrap_or(true)),
            block_table_width: tensors
                .block_table
                .first()
                .map_or(0, |row| row.len() as u32),
            slot_mapping_len: tensors.slot_mapping.len() as u32,
            query_start_loc_cpu: s32(&tensors.query_start_loc),
            seq_lens_cpu_upper_bound: s32(&tensors.seq_lens),
            is_prefilling: integers(&cam["is_prefilling"])
                .iter()
                .map(|&flag| flag as u8)
                .collect(),
            dcp: cam.get("dcp_local_seq_lens").map(|lens| DcpInputs {
                dcp_local_seq_lens_cpu_upper_bound: s32(&integers(lens)),
            }),
            encoder: None,
            fast_prefill: None,
            req_idx: Vec::new(),
            mm_req_doc_ranges: Vec::new(),
            replayssm_decode_base_cpu: Vec::new(),
            extras: extras.collect(),
        };
        Self {
            id: value["id"].as_u64().expect("id"),
            kind: value["kind"].as_str().unwrap_or_default().to_owned(),
            config: input["config"].as_u64().expect("config") as usize,
            method: input["method"].as_str().expect("method").to_owned(),
            output: value["output"].clone(),
            tensors,
            common,
            has_host_lengths,
        }
    }
}

/// The configuration that the recording's builders were made with: 8 query heads over 2 KV heads of 64, bfloat16.
pub fn builder_config(entry: &Value) -> BuilderConfig {
    let config = &entry["config"];
    let number =
        |name: &str, default: u32| config[name].as_u64().map_or(default, |value| value as u32);
    let capability = config["compute_capability"].as_str().expect("capability");
    let (major, minor) = capability.split_once('.').expect("major.minor");
    let compute_capability = (major.parse().expect("major"), minor.parse().expect("minor"));
    // `trtllm` absent leaves the choice to the field, which uses the kernels wherever the device has them.
    let trtllm_attention = compute_capability.0 >= 9 && config["trtllm"].as_bool() != Some(false);
    let is_fp8 = config["cache_dtype"].as_str() == Some("fp8");
    let window = config["sw"]
        .get(0)
        .or(config.get("window_left"))
        .and_then(Value::as_u64)
        .map(|left| left as u32 + 1);
    let sizes = &config["cudagraph_capture_sizes"];
    let capture_sizes = capture_sizes(sizes);
    BuilderConfig {
        kv_cache_spec: KvCacheSpec {
            kind: if window.is_some() {
                KvCacheSpecKind::SlidingWindow
            } else {
                KvCacheSpecKind::FullAttention
            },
            block_size: number("block_size", 16),
            num_kv_heads: 2,
            head_size: 64,
            head_size_v: 64,
            dtype: if is_fp8 {
                Dtype::Float8E4m3
            } else {
                Dtype::Bfloat16
            },
            sliding_window: window,
            attention_chunk_size: None,
            dcp_sharded: number("dcp", 1) > 1,
            mamba: None,
        },
        layer_names: vec!["model.layers.0.self_attn.attn".to_owned()],
        attention: AttentionConfig {
            num_heads: 8,
            scale: 0.125,
            logits_soft_cap: config["soft_cap"].as_f64(),
            sliding_windows: vec![window.map_or(-1, |window| window as i32)],
            model_dtype: Dtype::Bfloat16,
            kv_cache_dtype: config["cache_dtype"].as_str().unwrap_or("auto").to_owned(),
            kv_cache_layout: KvCacheLayout::Lbnhc,
            has_sinks: false,
            use_rswa: false,
            rswa_window: 0,
            kv_lora_rank: 0,
            qk_rope_head_dim: 0,
        },
        scheduler: SchedulerConfig {
            max_num_seqs: number("max_num_seqs", 256),
            max_num_batched_tokens: 8192,
            max_model_len: number("max_model_len", 4096),
            max_num_blocks_per_req: 4096 / number("block_size", 16),
            num_speculative_tokens: number("spec", 0),
            parallel_drafting: false,
        },
        cudagraph: CudagraphConfig {
            mode: match config["cudagraph_mode"].as_str().expect("mode") {
                "NONE" => CudagraphMode::None,
                "PIECEWISE" => CudagraphMode::Piecewise,
                "FULL" => CudagraphMode::Full,
                "FULL_DECODE_ONLY" => CudagraphMode::FullDecodeOnly,
                "FULL_AND_PIECEWISE" => CudagraphMode::FullAndPiecewise,
                other => panic!("CUDA graph mode {other}"),
            },
            max_capture_size: sizes["max"].as_u64().map_or_else(
                || capture_sizes.iter().copied().max().unwrap_or(0),
                |max| max as u32,
            ),
            capture_sizes,
        },
        parallel: ParallelConfig {
            dcp_world_size: number("dcp", 1),
            dcp_rank: number("rank", 0),
            cp_kv_cache_interleave_size: number("il", 1),
            prefill_context_parallel: false,
        },
        device: DeviceConfig {
            compute_capability,
            num_workers: 132,
            ctas_per_worker: 1,
            flash_attn_version: match compute_capability.0 {
                8 => 2,
                9 => 3,
                _ => 4,
            },
            trtllm_attention,
            xqa: trtllm_attention && compute_capability.0 == 9,
        },
        batch_invariant: false,
        max_num_splits: 32,
        model_runner_v2: true,
        options: Vec::new(),
    }
}

/// The sizes as listed; where only their number and the largest are recorded they are the field's defaults: 1, 2, 4, then every
/// eighth to 256 and every sixteenth from there.
fn capture_sizes(sizes: &Value) -> Vec<u32> {
    if sizes.is_array() {
        return integers(sizes).iter().map(|&size| size as u32).collect();
    }
    let Some(max) = sizes["max"].as_u64() else {
        return Vec::new();
    };
    let rest = (1..).map(|step| {
        if step < 32 {
            8 * step
        } else {
            256 + 16 * (step - 32)
        }
    });
    let rest = rest.take_while(|&size| u64::from(size) <= max);
    let defaults: Vec<u32> = [1, 2, 4].into_iter().chain(rest).collect();
    assert_eq!(Some(defaults.len() as u64), sizes["n"].as_u64());
    defaults
}

/// Compares what a builder says of itself with the recorded builder's attributes.
pub fn check_info(info: &BuilderInfo, entry: &Value) -> Result<(), String> {
    let builder = &entry["builder"];
    let support = match builder["cudagraph_support"].as_str().expect("support") {
        "NEVER" => CudagraphSupport::Never,
        "UNIFORM_SINGLE_TOKEN_DECODE" => CudagraphSupport::UniformSingleTokenDecode,
        "UNIFORM_BATCH" => CudagraphSupport::UniformBatch,
        "ALWAYS" => CudagraphSupport::Always,
        other => panic!("CUDA graph support {other}"),
    };
    let threshold = |name: &str| builder[name].as_u64().map(|value| value as u32);
    equal("cudagraph_support", &info.cudagraph_support, &support)?;
    equal(
        "reorder_batch_threshold",
        &info.reorder_batch_threshold,
        &threshold("reorder_batch_threshold"),
    )?;
    equal(
        "varlen_cudagraph_max_query_len",
        &info.varlen_cudagraph_max_query_len,
        &threshold("varlen_cudagraph_max_query_len"),
    )?;
    equal(
        "supports_update_block_table",
        &Some(info.supports_update_block_table),
        &builder["supports_update_block_table"].as_bool(),
    )?;
    equal(
        "supports_draft_decode_metadata_update",
        &Some(info.supports_draft_decode_metadata_update),
        &builder["supports_draft_decode_metadata_update"].as_bool(),
    )
}

/// An error that names the field unless both are equal.
pub fn equal<T: PartialEq + std::fmt::Debug>(
    name: &str,
    ours: &T,
    recorded: &T,
) -> Result<(), String> {
    if ours == recorded {
        Ok(())
    } else {
        Err(format!("{name}: ours {ours:?}, recorded {recorded:?}"))
    }
}

/// The torch name of a dtype.
pub fn dtype_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Float32 => "torch.float32",
        Dtype::Float16 => "torch.float16",
        Dtype::Bfloat16 => "torch.bfloat16",
        Dtype::Float8E4m3 => "torch.float8_e4m3fn",
        Dtype::Float8E5m2 => "torch.float8_e5m2",
        Dtype::Uint8 => "torch.uint8",
        Dtype::Int32 => "torch.int32",
    }
}
