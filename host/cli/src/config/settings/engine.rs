//! Rows of the table of settings: the engine, and the sandbox's bounds.

use super::{B, GIB, HOUR, KIB, MIB, MS, Setting, number, setting};
use crate::config::kind::Kind;
use crate::config::{COMPONENT_BYTES_MAX, names};
use timetable_engine::speculation::{MAX_PROMPT_LOOKUP, MAX_SPECULATIVE_TOKENS};

/// `[engine]`.
pub const ENGINE: &[Setting] = &[
    setting(
        "engine.device",
        Kind::Text("cpu, cuda (the first GPU), cuda:N", names::device),
        "Where the model runs.",
        "A GPU needs its driver and cuBLASLt.",
    )
    .flag("--device"),
    setting(
        "engine.dtype",
        Kind::OneOf(&["auto", "bfloat16", "float16", "float32"]),
        "Element type of the model: weights, activations and what attention is handed. auto: bfloat16 on a GPU, float32 on the CPU.",
        "float32 takes twice the memory of the others, and no tensor cores.",
    )
    .flag("--dtype"),
    setting(
        "engine.weights",
        Kind::OneOf(&["auto", "f32"]),
        "Weights in memory on the CPU. auto: as in the file, quantised blocks stay quantised.",
        "f32: four bytes for each weight.",
    )
    .flag("--weights"),
    setting(
        "engine.attention_backend",
        Kind::Text(
            "auto, FLASH_ATTN, FLASHINFER, TRITON_ATTN, FLASHMLA, FLASH_ATTN_MLA, TRITON_MLA",
            names::backend,
        ),
        "The backend of every attention layer, or of every layer of latent attention (the last three). A name never falls back to another; auto: the device's first that serves the model. A recurrent layer's type decides.",
        "None.",
    )
    .flag("--attention-backend"),
    setting(
        "engine.cudagraph_mode",
        Kind::Text(
            "NONE, PIECEWISE, FULL, FULL_DECODE_ONLY, FULL_AND_PIECEWISE",
            names::cudagraph_mode,
        ),
        "The CUDA graph mode to ask for; `timetable builders` says what is left of it.",
        "Graphs take device memory and time at the start, and save a step's launches.",
    )
    .flag("--cudagraph-mode")
    .unset("FULL_AND_PIECEWISE on a GPU; the CPU captures none", "\"FULL_AND_PIECEWISE\""),
    setting(
        "engine.cudagraph_capture_sizes",
        Kind::Counts("token counts"),
        "Token counts to capture graphs for.",
        "Device memory and a capture at the start for each.",
    )
    .flag("--cudagraph-capture-sizes")
    .unset("the field's list", "[1, 2, 4, 8, 16, 32]"),
    setting(
        "engine.async_scheduling",
        Kind::Switch,
        "Prepare a step while the one before it runs. On the CPU true is refused.",
        "An end is seen one step late: at most one wasted row for each request.",
    )
    .flag("--async-scheduling")
    .unset("true on a GPU, false on the CPU", "false"),
    setting(
        "engine.max_num_seqs",
        number("requests"),
        "Requests of one step; others wait. At most 65,536.",
        "Batch arrays and block tables for each, and logits of that many rows.",
    )
    .flag("--max-num-seqs"),
    setting(
        "engine.max_num_batched_tokens",
        number("tokens"),
        "Tokens of one step; a longer prompt is prefilled in chunks. At most 1,048,576.",
        "Activations of that many tokens are set aside from the KV cache; a step with a long chunk delays the others' tokens.",
    )
    .flag("--max-num-batched-tokens"),
    setting(
        "engine.max_model_len",
        number("tokens"),
        "Longest prompt with its answer; at least 2, at most what the model was made for.",
        "A block-table row of max_model_len / block_size entries for each request.",
    )
    .flag("--max-model-len")
    .unset("what the model was made for", "4096"),
    setting(
        "engine.block_size",
        number("tokens"),
        "Tokens of one KV block; on a GPU a multiple of 16. At most 65,536.",
        "Larger: fewer table entries, more unused slots at the end of each request, coarser sharing of prefixes.",
    )
    .flag("--block-size"),
    setting(
        "engine.kernel_block_size",
        number("tokens"),
        "Tokens of one block of the kernels' table; it divides block_size.",
        "Smaller: longer block tables.",
    )
    .unset("block_size", "16"),
    setting(
        "engine.enable_prefix_caching",
        Kind::Switch,
        "Share the KV blocks of equal prefixes.",
        "A hash for each full block.",
    )
    .flag("--no-enable-prefix-caching"),
    setting(
        "engine.kv_cache_dtype",
        Kind::OneOf(&["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_ds_mla"]),
        "Element type of the KV cache. auto: the model's. float16 and fp8 on a GPU only; fp8_ds_mla for latent attention.",
        "fp8 halves the cache of a 16-bit model, and rounds keys and values to 3 bits of mantissa.",
    )
    .flag("--kv-cache-dtype"),
    setting(
        "engine.num_gpu_blocks_override",
        Kind::Count {
            unit: "KV blocks",
            min: 2,
            max: (1 << 31) - 1,
        },
        "Number of KV cache blocks, instead of what fits the memory share. One of them is the null block.",
        "Memory: block_size × layers × KV heads × head size × 2 × element size for each.",
    )
    .flag("--num-gpu-blocks-override")
    .unset("what fits the memory share", "4096"),
    setting(
        "engine.memory_fraction",
        Kind::Fraction,
        "On the CPU: share of the machine's memory (or of its control group's limit) that model and KV cache may take together.",
        "What other processes of the machine do not have.",
    )
    .flag("--memory-fraction"),
    setting(
        "engine.gpu_memory_utilization",
        Kind::Fraction,
        "On a GPU: share of its memory that weights, activations, graphs and KV cache may take together.",
        "What other processes on the GPU do not have.",
    )
    .flag("--gpu-memory-utilization"),
    setting(
        "engine.speculative_method",
        Kind::OneOf(&["ngram", "ngram_gpu"]),
        "Verify draft tokens beside each next one. ngram: what followed the last tokens where they occurred before. ngram_gpu: as many drafts for every decode, the last token again where nothing was found, so that full CUDA graphs serve them; the lookup runs on the host here too.",
        "Drafts that are not accepted are computed for nothing; steps are not prepared ahead (async_scheduling).",
    )
    .flag("--speculative-method")
    .unset("no speculation", "\"ngram\""),
    setting(
        "engine.num_speculative_tokens",
        Kind::Count {
            unit: "draft tokens",
            min: 1,
            max: MAX_SPECULATIVE_TOKENS as u64,
        },
        "Draft tokens of a decode at most; it goes with speculative_method.",
        "A token of max_num_batched_tokens and a row of logits for each.",
    )
    .flag("--num-speculative-tokens")
    .unset("no speculation", "3"),
    setting(
        "engine.prompt_lookup_min",
        Kind::Count {
            unit: "tokens",
            min: 1,
            max: MAX_PROMPT_LOOKUP as u64,
        },
        "Tokens of the shortest n-gram that is looked for; at most prompt_lookup_max.",
        "Low: more drafts, and fewer of them accepted.",
    )
    .flag("--prompt-lookup-min")
    .unset("prompt_lookup_max, else 5", "1"),
    setting(
        "engine.prompt_lookup_max",
        Kind::Count {
            unit: "tokens",
            min: 1,
            max: MAX_PROMPT_LOOKUP as u64,
        },
        "Tokens of the longest n-gram that is looked for.",
        "Comparisons for each decode, 256 n-grams at most.",
    )
    .flag("--prompt-lookup-max")
    .unset("prompt_lookup_min, else 5", "3"),
    setting(
        "engine.max_num_splits",
        number("splits"),
        "The most KV splits of one request that a builder may choose.",
        "A partial result for each split and query token, on a GPU at most 512 MiB for an attention group.",
    ),
    setting(
        "engine.batch_invariant",
        Kind::Switch,
        "Give a request the bits that it has when it runs alone, whatever else is in the batch.",
        "Slower steps: no splits, one attention kernel, one algorithm of each matrix product.",
    )
    .flag("--batch-invariant"),
    setting(
        "engine.default_share",
        Kind::Number(0.001, 1000.0),
        "The weight of requests of nobody in particular, beside the tenants' shares.",
        "None.",
    ),
    setting(
        "engine.max_tenant_segments",
        number("slots"),
        "Builders that one step may have rows of; the others wait their turn. A device may take fewer.",
        "A build for each, and attention launched once for each.",
    ),
    setting(
        "engine.threads",
        Kind::Count {
            unit: "threads",
            min: 1,
            max: 256,
        },
        "Worker threads on the CPU.",
        "That many cores are busy during a step.",
    )
    .flag("--threads")
    .unset("one for each core", "4"),
    setting(
        "engine.nvtx",
        Kind::Switch,
        "Mark the parts of each step for a profiler of NVIDIA's, where its library is installed.",
        "A few calls a step.",
    )
    .flag("--nvtx"),
];

/// `[limits]`.
pub const LIMITS: &[Setting] = &[
    setting(
        "limits.max_instances",
        Kind::Count {
            unit: "instances",
            min: 1,
            max: 10_000,
        },
        "Live instances at once, in all groups. A group uses up to five: active, spare, previous, and two of a reload. One more is an error of whoever asks for it, never of a running builder.",
        "Address space: memory_reservation_bytes and a guard each; no memory until used.",
    ),
    setting(
        "limits.max_memory_bytes",
        Kind::Size(64 * KIB, 4 * GIB),
        "Linear memory of one instance. Growing beyond it is a fault.",
        "None for a call; it is looked at where memory grows.",
    ),
    setting(
        "limits.memory_reservation_bytes",
        Kind::Size(64 * KIB, 16 * GIB),
        "Address space for one instance's memory; at least max_memory_bytes.",
        "Below 4GiB: bounds checks in the component's loops. 4GiB: as much address space for each instance, which counts under `ulimit -v`.",
    ),
    setting(
        "limits.fuel_per_call",
        Kind::count("fuel units, about one for each wasm instruction", 63),
        "Fuel of every call, before rows are counted. A call without fuel left is a fault.",
        "Metering is 10 to 15 % of a build, whatever the number. Raised: a runaway call takes longer until it ends, about 1 ms for each million.",
    ),
    setting(
        "limits.fuel_per_row",
        Kind::count("fuel units", 63),
        "Additional fuel for each row of the batch. A FLASHINFER plan uses about 700.",
        "As fuel_per_call.",
    ),
    setting(
        "limits.fuel_per_token",
        Kind::count("fuel units", 63),
        "Additional fuel for each query token of the batch.",
        "As fuel_per_call.",
    ),
    setting(
        "limits.fuel_fixed",
        Kind::count("fuel units", 63),
        "Fuel for instantiating, constructing, `info` and `launch-promise`.",
        "Off the step thread, but for launch promises.",
    ),
    setting(
        "limits.watchdog",
        Kind::Time(100 * MS, HOUR),
        "Wall-clock time after which a call is interrupted, for what fuel does not see. Less than 100ms kills healthy builders on a busy machine.",
        "A check in every loop, shared with fuel's. Raised: a call that hangs delays its step so long.",
    ),
    setting(
        "limits.watchdog_tick",
        Kind::Time(MS, HOUR),
        "Period of the watchdog's thread; at most watchdog.",
        "One wake-up of a sleeping thread each.",
    ),
    setting(
        "limits.max_lifted_bytes",
        Kind::Size(KIB, GIB),
        "Bytes that one call may make the host allocate for its result. It bounds the length of every list as well.",
        "A subtraction for each list. Raised: as much memory for a moment.",
    ),
    setting(
        "limits.max_text_bytes",
        Kind::Size(16 * B, MIB),
        "Longest name or message taken over from a component; the rest is cut off.",
        "None.",
    ),
    setting(
        "limits.max_wasm_stack_bytes",
        Kind::Size(16 * KIB, MIB),
        "The component's stack. Exhausting it is a fault.",
        "None; it is part of the calling thread's stack of 2MiB.",
    ),
    setting(
        "limits.max_component_bytes",
        Kind::Size(KIB, COMPONENT_BYTES_MAX),
        "Largest component that is looked at.",
        "Compile time is linear in it, about a millisecond for 2 KB, off the step thread.",
    ),
    setting(
        "limits.max_table_elements",
        Kind::Count {
            unit: "elements",
            min: 1,
            max: 1_000_000,
        },
        "Elements of one wasm table.",
        "8 bytes of address space for each, in each instance's tables.",
    ),
];
