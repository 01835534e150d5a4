//! CUDA graph modes: properties, resolution, and dispatch in both runner generations.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};
use timetable_attention::batch::RunnerGeneration;
use timetable_attention::graphs::{
    BatchDescriptor, BatchExecutionDescriptor, BatchQuery, ChangeLevel, CudagraphDispatcher,
    CudagraphManager, GraphModes, MambaBlocks, ManagerConfig, ModeChange, ResolveInput,
    RuntimeMode, resolve_cudagraph_mode_and_sizes,
};
use timetable_attention::types::{CudagraphMode, CudagraphSupport};

use crate::harness::{FieldError, Tally, flag, list, run, run_compared, uint};

fn mode(value: &Value) -> CudagraphMode {
    serde_json::from_value(value.clone()).expect("a mode")
}

fn support(value: &Value) -> CudagraphSupport {
    serde_json::from_value(value.clone()).expect("a support level")
}

pub fn cudagraph_mode_properties() -> Tally {
    run("cudagraph_mode_properties", |input| {
        let mode = mode(&input["mode"]);
        let (decode, mixed) = (mode.decode_mode(), mode.mixed_mode());
        let value = if mode.separate_routine() {
            json!([decode as u8, mixed as u8])
        } else {
            json!(decode as u8)
        };
        Ok(json!({
            "value": value,
            "decode_mode": decode.name(),
            "mixed_mode": mixed.name(),
            "separate_routine": mode.separate_routine(),
            "has_full_cudagraphs": mode.has_full_cudagraphs(),
            "has_piecewise_cudagraphs": mode.has_piecewise_cudagraphs(),
            "requires_piecewise_compilation": mode.requires_piecewise_compilation(),
            "without_piecewise": mode.without_piecewise().name(),
            "is_valid_runtime_mode": mode.is_valid_runtime_mode(),
            "bool": mode != CudagraphMode::None,
            "str": mode.name(),
        }))
    })
}

fn log(changes: &[ModeChange]) -> Value {
    changes
        .iter()
        .map(|change| {
            let level = match change.level {
                ChangeLevel::Warning => "warning",
                ChangeLevel::WarningOnce => "warning_once",
            };
            json!([level, change.reason])
        })
        .collect()
}

pub fn resolve_modes() -> Tally {
    run("resolve_cudagraph_mode_and_sizes", |input| {
        let configured =
            (!input["cudagraph_mode"].is_null()).then(|| mode(&input["cudagraph_mode"]));
        let capture_sizes = list(&input["cudagraph_capture_sizes"], uint);
        let mamba = input
            .get("has_mamba_layers")
            .filter(|has| flag(has))
            .map(|_| MambaBlocks {
                max_num_reqs: uint(&input["max_num_reqs"]),
                num_blocks: uint(&input["num_blocks"]),
            });
        let v2 = flag(&input["use_v2_model_runner"]);
        let made = resolve_cudagraph_mode_and_sizes(&ResolveInput {
            mode: configured,
            min_support: support(&input["min_cg_support"]),
            min_backend: input["min_cg_attn_backend"].as_str(),
            uniform_decode_query_len: uint(&input["uniform_decode_query_len"]),
            attention_is_splitting_op: input["splitting_ops"] == "attention",
            compiled: input["compilation_mode"] == "VLLM_COMPILE",
            use_inductor_graph_partition: flag(&input["use_inductor_graph_partition"]),
            runner: if v2 {
                RunnerGeneration::V2
            } else {
                RunnerGeneration::V1
            },
            piecewise_capture_available: flag(&input["piecewise_capture_available"]),
            capture_sizes: &capture_sizes,
            max_capture_size: uint(&input["max_cudagraph_capture_size"]),
            mamba,
            is_profiling: input.get("is_profiling").is_some_and(flag),
        });
        Ok(match made {
            Ok(resolved) => {
                // The changes lead from the configured mode to the one that survived, without a gap.
                let mut at = configured.unwrap_or(CudagraphMode::None);
                for change in &resolved.changes {
                    assert_eq!(change.from, at);
                    at = change.to;
                }
                assert_eq!(at, resolved.mode);
                json!({
                    "mode": resolved.mode.name(),
                    "log": log(&resolved.changes),
                    "cudagraph_capture_sizes": resolved.capture_sizes,
                    "max_cudagraph_capture_size": resolved.max_capture_size,
                    "config_mode_after": resolved.mode.name(),
                })
            }
            Err(failure) => json!({
                "mode": {"$error": ["ValueError", failure.to_string()]},
                "log": log(&failure.changes),
                "cudagraph_capture_sizes": failure.capture_sizes,
                "max_cudagraph_capture_size": failure.max_capture_size,
                "config_mode_after": configured.unwrap_or(CudagraphMode::None).name(),
            }),
        })
    })
}

fn key(key: &BatchDescriptor) -> Value {
    json!([key.num_tokens, key.num_reqs, key.uniform])
}

/// Keys are sets: their order in the file is that of their text.
fn same_but_for_key_order(got: &Value, want: &Value) -> bool {
    let sorted = |keys: &Value| {
        list(keys, Value::to_string)
            .into_iter()
            .collect::<BTreeSet<_>>()
    };
    let same_keys = ["PIECEWISE", "FULL"]
        .iter()
        .all(|mode| sorted(&got["keys"][mode]) == sorted(&want["keys"][mode]));
    same_keys
        && got["capture_descs"] == want["capture_descs"]
        && got["dispatch"] == want["dispatch"]
}

pub fn cudagraph_dispatcher_v1() -> Tally {
    let function = |input: &Value| {
        let sizes = list(&input["cudagraph_capture_sizes"], uint);
        let dispatcher = CudagraphDispatcher::new(
            mode(&input["cudagraph_mode"]),
            uint(&input["uniform_decode_query_len"]),
            uint(&input["max_num_seqs"]),
            &sizes,
            &[0],
        )
        .map_err(|error| FieldError::new("AssertionError", &error))?;
        let keys = |mode| dispatcher.keys(mode).map(|k| key(&k)).collect::<Value>();
        let dispatch = list(&input["queries"], |query| {
            let invalid = list(&query[2], Value::clone);
            let allowed = |mode: RuntimeMode| !invalid.contains(&json!(mode.name()));
            match dispatcher.dispatch(uint(&query[0]), flag(&query[1]), 0, allowed) {
                Ok((mode, k)) => json!([mode.name(), k.num_tokens, k.num_reqs, k.uniform]),
                Err(_) => json!({"$error": ["AssertionError", ""]}),
            }
        });
        let order = dispatcher.capture_order();
        let order = order
            .iter()
            .map(|(mode, keys)| json!([mode.name(), keys.iter().map(key).collect::<Value>()]));
        Ok(json!({
            "keys": {"PIECEWISE": keys(RuntimeMode::Piecewise), "FULL": keys(RuntimeMode::Full)},
            "capture_descs": order.collect::<Value>(),
            "dispatch": dispatch,
        }))
    };
    run_compared("cudagraph_dispatcher_v1", function, same_but_for_key_order)
}

fn descriptor(d: &BatchExecutionDescriptor) -> Value {
    assert_eq!(d.num_ubatches, 1);
    json!([
        d.cg_mode.name(),
        d.num_tokens,
        d.num_reqs,
        d.uniform_token_count,
        d.max_query_len,
        d.num_active_loras
    ])
}

pub fn cudagraph_manager_v2() -> Tally {
    run("cudagraph_manager_v2", |input| {
        let manager = CudagraphManager::new(&ManagerConfig {
            mode: mode(&input["cudagraph_mode"]),
            decode_query_lens: &[uint(&input["decode_query_len"])],
            varlen_decode: flag(&input["varlen_decode"]),
            max_num_reqs: uint(&input["max_num_reqs"]),
            capture_sizes: &list(&input["cudagraph_capture_sizes"], uint),
            max_capture_size: uint(&input["max_cudagraph_capture_size"]),
            lora_cases: &list(&input["lora_capture_cases"], uint),
            ubatching: None,
        });
        let maybe = |value: &Value| (!value.is_null()).then(|| uint(value));
        let dispatch = list(&input["queries"], |query| {
            descriptor(&manager.dispatch(&BatchQuery {
                num_reqs: uint(&query[0]),
                num_tokens: uint(&query[1]),
                uniform_token_count: maybe(&query[2]),
                num_active_loras: uint(&query[3]),
                max_query_len: maybe(&query[4]),
                num_ubatches: 1,
            }))
        });
        let mut captured = Map::new();
        for mode in [RuntimeMode::Piecewise, RuntimeMode::Full] {
            let graphs = manager.capture_order(mode);
            if !graphs.is_empty() {
                captured.insert(mode.name().into(), graphs.iter().map(descriptor).collect());
            }
        }
        Ok(json!({"capture_descs": captured, "dispatch": dispatch}))
    })
}

#[test]
fn cudagraph_mode_properties_conforms() {
    cudagraph_mode_properties().check();
}

#[test]
fn resolve_cudagraph_mode_and_sizes_conforms() {
    resolve_modes().check();
}

#[test]
fn cudagraph_dispatcher_v1_conforms() {
    cudagraph_dispatcher_v1().check();
}

#[test]
fn cudagraph_manager_v2_conforms() {
    cudagraph_manager_v2().check();
}
