//! Every field of every recorded builder (all five families) has a place in the contract, or a written reason why not.
//!
//! `vectors/builder_fields.json` lists the names that occur; this file says where each went; `wit/` is asked whether that
//! place exists.

use serde_json::Value;
use timetable_componentize::contract;
use wit_parser::{Resolve, TypeDefKind};

/// Where a recorded name went.
enum Place {
    /// `interface.record.field`, or `interface.enum.case`.
    Wit(String),
    /// Nowhere, and why.
    Left(&'static str),
}

use Place::{Left, Wit};

const RECORDING: &str = "about the recording, not the engine";
const CONFIGURATION: &str = "follows from builder-config, which the host gives";
const NEVER_SET: &str = "never set by this backend; the plan function's default";

/// Records that hold a family's metadata, by the prefix of the field's path; the first that has the field wins.
fn records(file: &str) -> &'static [(&'static str, &'static str)] {
    match file.split('@').next().unwrap_or(file) {
        "FlashAttentionMetadataBuilder" => &[("", "flash-attn.metadata")],
        "FlashInferMetadataBuilder" => &[
            ("", "flashinfer.metadata"),
            ("decode.", "flashinfer.trtllm-decode"),
            ("prefill.", "flashinfer.trtllm-prefill"),
            ("decode.", "flashinfer.decode"),
            ("prefill.", "flashinfer.prefill"),
        ],
        "TritonAttentionMetadataBuilder" => &[("", "triton-attn.metadata")],
        "FlashAttnMLAMetadataBuilder"
        | "FlashMLAMetadataBuilder"
        | "MLACommonMetadataBuilder_TritonMLA" => &[
            ("", "flash-mla.metadata"),
            ("decode.", "flash-mla.mla-decode"),
            ("prefill.", "flash-mla.mla-prefill"),
            ("prefill.chunked_context.", "flash-mla.chunked-context"),
            (
                "prefill.chunked_context.chunks[].",
                "flash-mla.context-chunk",
            ),
            (
                "prefill.chunked_context.chunks[].",
                "flash-mla.dcp-context-chunk",
            ),
        ],
        "Mamba1AttentionMetadataBuilder" | "ShortConvAttentionMetadataBuilder" => &[
            ("", "mamba.base-metadata"),
            ("", "mamba.causal-conv1d"),
            ("nums_dict.8.", "mamba.causal-conv1d"),
        ],
        "Mamba2AttentionMetadataBuilder" => &[
            ("", "mamba.mamba2-metadata"),
            ("", "mamba.base-metadata"),
            ("", "mamba.causal-conv1d"),
            ("nums_dict.8.", "mamba.causal-conv1d"),
        ],
        "GDNAttentionMetadataBuilder" => &[
            ("", "mamba.gdn-metadata"),
            ("", "mamba.causal-conv1d"),
            ("nums_dict.8.", "mamba.causal-conv1d"),
        ],
        "LinearAttentionMetadataBuilder" => &[("", "mamba.linear-metadata")],
        other => panic!("no records are named for {other}"),
    }
}

/// Metadata fields that do not simply keep their name.
fn metadata_exception(path: &str) -> Option<Place> {
    Some(match path {
        "decode.scheduler_metadata" => Wit("flash-mla.mla-decode.schedule".to_owned()),
        "decode.scheduler_metadata.have_initialized" => Left(
            "the kernel's own lazy state; `decode-schedule.lazy` says that the kernel decides at its first call",
        ),
        "prefill.chunked_context.context_lens_list" => {
            Wit("flash-mla.chunked-context.context-lens".to_owned())
        }
        "prefill.chunked_context.dcp_manager" => {
            Left("an object of the engine that runs collectives; a builder cannot hold one")
        }
        "prefill.prefill_backend" => {
            Left("an object with the kernels to call; the host chooses kernels")
        }
        "nums_dict.8.tot" => Wit("mamba.causal-conv1d.total".to_owned()),
        "nums_dict.8.mlist" | "nums_dict.8.mlist_len" | "nums_dict.8.offsetlist" => Left(
            "a step on the way to batch-ptr and token-chunk-offset-ptr, which are there; nothing reads it",
        ),
        "spec_sequence_masks_cpu" => Wit("mamba.gdn-metadata.spec-sequence-masks".to_owned()),
        _ => return None,
    })
}

fn call_argument(file: &str, call: &str, argument: &str) -> Place {
    if call == "get_scheduler_metadata" {
        let record = if file.starts_with("FlashAttentionMetadataBuilder") {
            "flash-attn.scheduler-metadata-call"
        } else {
            "flash-mla.mla-scheduler-metadata-call"
        };
        return Wit(format!("{record}.{}", kebab(argument)));
    }
    let field = match argument {
        "data_type" | "pos_encoding_mode" | "rope_scale" | "rope_theta" => return Left(NEVER_SET),
        "non_blocking" => return Left("how the field copies to its device; the host copies here"),
        "block_tables" => return Left("the rows' own tables, which paged-kv-indices refers to"),
        "batch_size" | "use_cudagraph" => "cudagraph-batch-size",
        "more" => "q-len-per-req",
        "indptr" | "paged_kv_indptr_cpu" => "paged-kv-indptr",
        "indices" => "paged-kv-indices",
        "last_page_len" | "paged_kv_last_page_len_cpu" => "paged-kv-last-page-len",
        "qo_indptr_cpu" => "qo-indptr",
        "kv_lens_cpu" => "seq-lens",
        "head_dim_qk" => "head-dim",
        "kv_cache_dtype" => "kv-data-type",
        "prefill_fixed_split_size" => "fixed-split-size",
        other => return Wit(format!("flashinfer.plan.{}", kebab(other))),
    };
    Wit(format!("flashinfer.plan.{field}"))
}

fn input(name: &str) -> Place {
    match name {
        "config" | "method" | "note" => Left(RECORDING),
        "build_kwargs.num_accepted_tokens" | "build_kwargs.num_decode_draft_tokens_cpu" => {
            Wit("types.common-attention-metadata.extras".to_owned())
        }
        "cam.block_table_tensor" => Wit("types.input.block-table".to_owned()),
        "cam.slot_mapping" => Wit("types.input.slot-mapping".to_owned()),
        "cam.query_start_loc" => Wit("types.input.query-start-loc".to_owned()),
        "cam.seq_lens" => Wit("types.input.seq-lens".to_owned()),
        "cam.dcp_local_seq_lens" => Wit("types.input.dcp-local-seq-lens".to_owned()),
        other => {
            let field = other.strip_prefix("cam.").unwrap_or(other);
            Wit(format!("types.common-attention-metadata.{}", kebab(field)))
        }
    }
}

fn builder_attribute(name: &str) -> Place {
    match name {
        "class" => Left(RECORDING),
        "cudagraph_support"
        | "reorder_batch_threshold"
        | "varlen_cudagraph_max_query_len"
        | "supports_update_block_table"
        | "supports_draft_decode_metadata_update" => {
            Wit(format!("types.builder-info.{}", kebab(name)))
        }
        "num_heads" | "num_heads_q" | "num_qo_heads" => {
            Wit("types.attention-config.num-heads".to_owned())
        }
        "num_heads_kv" | "num_kv_heads" => Wit("types.kv-cache-spec.num-kv-heads".to_owned()),
        "head_dim" | "headdim" => Wit("types.kv-cache-spec.head-size".to_owned()),
        "block_size" | "page_size" => Wit("types.kv-cache-spec.block-size".to_owned()),
        "kv_cache_dtype" => Wit("types.kv-cache-spec.dtype".to_owned()),
        "window_left" => Wit("types.kv-cache-spec.sliding-window".to_owned()),
        "sm_scale" => Wit("types.attention-config.scale".to_owned()),
        "chunk_size" => Wit("types.mamba-spec.chunk-size".to_owned()),
        "dcp_world_size" => Wit("types.parallel-config.dcp-world-size".to_owned()),
        "max_num_splits" => Wit("types.builder-config.max-num-splits".to_owned()),
        "max_cudagraph_size" | "decode_cudagraph_max_bs" => {
            Wit("types.cudagraph-config.max-capture-size".to_owned())
        }
        "num_spec" | "num_spec_tokens" => {
            Wit("types.scheduler-config.num-speculative-tokens".to_owned())
        }
        "use_xqa" => Wit("types.device-config.xqa".to_owned()),
        "use_trtllm_decode_attention" => Wit("types.device-config.trtllm-attention".to_owned()),
        "q_data_type" | "q_data_type_prefill" | "q_data_type_decode" => {
            Wit("types.attention-config.model-dtype".to_owned())
        }
        "aot_schedule"
        | "fa_aot_schedule"
        | "use_full_cuda_graph"
        | "enable_cuda_graph"
        | "use_spec_decode"
        | "decode_cudagraph_enabled"
        | "use_trtllm_gen_varlen_decode"
        | "max_seqs_64_segments"
        | "num_par_softmax_segments"
        | "seq_threshold_3D"
        | "chunked_prefill_workspace_size"
        | "gdn_prefill_backend" => Left(CONFIGURATION),
        "scheduler_metadata" | "softmax_segm_max" | "softmax_segm_output" => {
            Left("a persistent device buffer of the builder; buffers are the host's here")
        }
        other => panic!("builder attribute {other} has neither a place nor a reason"),
    }
}

fn kebab(name: &str) -> String {
    name.to_lowercase().replace('_', "-")
}

/// Does `interface.type.member` exist?
fn exists(resolve: &Resolve, place: &str) -> bool {
    let mut parts = place.split('.');
    let (Some(interface), Some(name), Some(member)) = (parts.next(), parts.next(), parts.next())
    else {
        return false;
    };
    let Some((_, interface)) = resolve
        .interfaces
        .iter()
        .find(|(_, candidate)| candidate.name.as_deref() == Some(interface))
    else {
        return false;
    };
    let Some(&definition) = interface.types.get(name) else {
        return false;
    };
    match &resolve.types[definition].kind {
        TypeDefKind::Record(record) => record.fields.iter().any(|field| field.name == member),
        TypeDefKind::Variant(variant) => variant.cases.iter().any(|case| case.name == member),
        TypeDefKind::Enum(cases) => cases.cases.iter().any(|case| case.name == member),
        _ => false,
    }
}

fn metadata_place(resolve: &Resolve, file: &str, path: &str) -> Place {
    if let Some(place) = metadata_exception(path) {
        return place;
    }
    let (prefix, leaf) = match path.rfind('.') {
        Some(dot) => path.split_at(dot + 1),
        None => ("", path),
    };
    let candidates = records(file).iter().filter(|(of, _)| *of == prefix);
    let mut places = candidates.map(|(_, record)| format!("{record}.{}", kebab(leaf)));
    let found = places.clone().find(|place| exists(resolve, place));
    Wit(found
        .or_else(|| places.next())
        .unwrap_or_else(|| panic!("{file}: no record for the path {path}")))
}

#[test]
fn every_recorded_field_has_a_place_or_a_reason() {
    let text = include_str!("../vectors/builder_fields.json");
    let names: Value = serde_json::from_str(text).expect("JSON");
    let (resolve, _) = contract().expect("the contract parses");
    let list = |value: &Value| -> Vec<String> {
        value
            .as_array()
            .expect("a list")
            .iter()
            .map(|name| name.as_str().expect("a name").to_owned())
            .collect()
    };
    let (mut placed, mut left, mut missing) = (0, 0, Vec::new());
    for (file, groups) in names["files"].as_object().expect("files") {
        let mut places: Vec<(String, Place)> = Vec::new();
        for path in list(&groups["metadata"]) {
            places.push((
                format!("metadata {path}"),
                metadata_place(&resolve, file, &path),
            ));
        }
        for (call, arguments) in groups["calls"].as_object().expect("calls") {
            for argument in list(arguments) {
                places.push((
                    format!("{call}({argument})"),
                    call_argument(file, call, &argument),
                ));
            }
        }
        for name in list(&groups["input"]) {
            places.push((format!("input {name}"), input(&name)));
        }
        for name in list(&groups["builder"]) {
            places.push((format!("builder {name}"), builder_attribute(&name)));
        }
        let count = places.len();
        for (name, place) in places {
            match place {
                Wit(place) if exists(&resolve, &place) => placed += 1,
                Wit(place) => missing.push(format!(
                    "{file}: {name} → {place}, which wit/ does not have"
                )),
                Left(reason) => {
                    assert!(!reason.is_empty());
                    left += 1;
                }
            }
        }
        println!("{file}: {count} names");
    }
    println!("{placed} names in the contract, {left} left out with a reason");
    assert!(missing.is_empty(), "{}", missing.join("\n"));
    assert!(placed > 300, "the list of names has shrunk: {placed}");
}
