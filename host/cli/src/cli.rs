//! The command line: names and flags as the field has them, each with its help beside it.

mod author;

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};

use serde::{Deserialize, Serialize};
use timetable_sandbox::TenantName;

use crate::commands::bench::BenchCommand;
use crate::commands::config::ConfigCommand;
use crate::commands::reload::Reload;
use crate::device::DeviceArg;

pub use author::{Check, Componentize, GrantArg, New};

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  something failed while it ran
  2  the command line was not understood
  3  a batch was refused, by the verifier or by the builder itself
  4  an input is not usable: a model, a component, a step description, a directory, a configuration
  5  no running host answers at the admin socket, or another one holds it, or the address to serve at
  6  the GPU cannot be used, has too little memory, or was lost";

/// LLM attention with sandboxed, hot-swappable metadata builders.
#[derive(Debug, Parser)]
#[command(name = "timetable", version, after_help = EXIT_CODES, max_term_width = 110)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
#[allow(clippy::large_enum_variant, reason = "parsed once")]
pub enum Command {
    /// Answer prompts with a model; every step's attention metadata is made by a component
    #[command(after_help = "\
Examples:
  timetable generate --model SmolLM2-135M-Instruct.Q4_1.gguf --chat --prompt 'Why do trains need a timetable?'
  timetable generate --model ./my-llama --prompt 'Once' --prompt 'Twice' --max-tokens 64 --json
  timetable generate --model m.gguf --prompt Hi --attention-backend FLASHINFER --builder FLASHINFER=mine.wasm
  timetable generate --model m.gguf --prompt Hi --device cuda:0 --kv-cache-dtype fp8")]
    Generate(Generate),

    /// Serve a model over HTTP, as OpenAI's API: completions, chat, streaming; builders are replaced while it does
    #[command(after_help = "\
It says `timetable: serving MODEL at http://ADDRESS` on standard error once it answers. SIGTERM or SIGINT lets running requests end,
refuses new ones, and ends with 0; a second signal ends at once.

Examples:
  timetable serve --model SmolLM2-135M-Instruct.Q4_1.gguf
  timetable serve --model ./my-llama --listen 0.0.0.0:8000 --api-keys ./api-keys --config timetable.toml
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{\"model\": \"my-llama\", \"prompt\": \"Once\"}'")]
    Serve(Serve),

    /// Replace the builder of a backend in the running host, at once or in stages; requests go on
    #[command(after_help = "\
Examples:
  timetable reload FLASH_ATTN target/guests/flash-attn-fixed-split.wasm
  timetable reload FLASH_ATTN oci://registry.example/me/builder@sha256:… --signature builder.wasm.minisig
  timetable reload FLASH_ATTN mine.wasm --shadow 1000 --canary 5% --wait
  timetable reload FLASH_ATTN --builder-option splits=4 --shadow 1000
  timetable rollback FLASH_ATTN")]
    Reload(Reload),

    /// Withdraw the candidate that is being tried, or return to the version before the last reload
    Rollback(Rollback),

    /// Show the running host's builders: version, state, steps, build times, choices, faults
    Builders(Builders),

    /// Watch a running host: builders, versions, stages, build times, faults, rates, tenants; q leaves
    #[command(after_help = "\
Examples:
  timetable top
  timetable top --admin ./admin.sock --interval 0.5
  timetable top --once | head -20")]
    Top(Top),

    /// Build one step's metadata outside the engine, verified and with its tensors resolved
    #[command(after_help = "\
The input is CommonAttentionMetadata's fields in snake case (lists of integers; `block_table` a list of rows), plus
`kv_cache_spec` and `config`. `--input -` reads standard input.

Examples:
  timetable build --builder mine.wasm --input step.json
  timetable build --backend FLASHINFER --input step.json --json | jq .metadata.decode")]
    Build(Build),

    /// Show each attention backend's answer to a configuration, which one is chosen, and why each other is not
    #[command(after_help = "\
Examples:
  timetable backends --capability 9.0 --head-size 128 --dtype bfloat16
  timetable backends --capability 10.0 --head-size 576 --mla --kv-cache-dtype fp8 --block-size 64 --json
  timetable backends --head-size 64 --dtype float32                       # this program's CPU device")]
    Backends(Backends),

    /// Show what becomes of a configured CUDA graph mode: each change, its reason, and what survives
    #[command(after_help = "\
Examples:
  timetable explain-graphs --mode FULL_AND_PIECEWISE --backend FLASHINFER --num-speculative-tokens 3
  timetable explain-graphs --mode FULL --backend FLASH_ATTN=UNIFORM_BATCH --backend TRITON_ATTN --no-splitting-ops")]
    ExplainGraphs(ExplainGraphs),

    /// Check, show or print the operator's configuration, or apply it to the running host
    #[command(subcommand)]
    Config(ConfigCommand),

    /// Check every CUDA kernel on this machine's GPU against references in f64, on fresh random inputs
    #[command(after_help = "\
Examples:
  timetable selftest --device cuda
  timetable selftest --device cuda:1 --quick --json
  timetable selftest --device cuda --only attention --seed 7          # one group again, with the inputs of that seed
  timetable selftest --device cuda --only soak --soak 10000")]
    Selftest(Selftest),

    /// Measure the CUDA kernels and the engine's steps on this machine's GPU, beside the GPU's ceilings and FlashInfer; or a server
    #[command(after_help = "\
Times are medians of CUDA graph replays, the inputs rotating beyond the L2 cache; each ceiling is measured in the same run, and
so is FlashInfer where the Python that --python names has it.

Examples:
  timetable bench --device cuda
  timetable bench --device cuda --only decode --python /opt/venv/bin/python3 --json
  timetable bench --device cuda --only gap --model SmolLM2-135M-Instruct.Q4_1.gguf
  timetable bench serve --help                                        # a server under load")]
    Bench(Bench),

    /// Try a builder on recorded steps, or on a public request trace; needs no model and no GPU
    #[command(after_help = "\
A recording is what `generate --record DIR` wrote. Without --builder the recorded builders run again and must build what they
built, bit for bit. With it, what the new one builds is verified and compared with what served, in meaning and in cost. Ends with
0 if nothing differs but the division of the work, with 3 if the verifier refused something, and with 1 if something else differs.

A trace (Azure's CSV, Mooncake's JSON lines) drives the scheduler, the KV blocks and the builders; the device is simulated: a step
of t tokens whose rows have k keys takes 6 ms + 20 µs × t + 45 ns × k, as an 8-billion-parameter model on an H100 might.

Examples:
  timetable generate --model m.gguf --prompt Hi --record ./yesterday
  timetable replay ./yesterday
  timetable replay ./yesterday --builder new.wasm --json | jq .candidate
  timetable replay --trace AzureLLMInferenceTrace_conv.csv --backend FLASHINFER --max-requests 1000
  timetable replay --trace conversation_trace.jsonl --builder new.wasm --speed 2 --record ./from-the-trace")]
    Replay(crate::commands::replay::Replay),

    /// Make a builder's fault happen again from the bundle that a host wrote into its fault directory; needs no model and no GPU
    #[command(after_help = "\
Ends with 0 if the fault happened again, or is of a kind that does not replay (watchdog, stack depth, build budget) and says so,
and with 1 if it should have happened and did not.

Examples:
  timetable generate --model m.gguf --prompt Hi --builder FLASH_ATTN=mine.wasm --fault-dir ./faults
  timetable replay-bundle ./faults/*-trap.ttfault
  timetable replay-bundle FILE --json | jq .replay")]
    ReplayBundle(ReplayBundle),

    /// Write the crate of a builder of your own, with all that it needs to compile
    #[command(after_help = "\
Examples:
  timetable new my-builder --backend FLASHINFER
  cd my-builder && cargo test && cargo wasm")]
    New(New),

    /// Make a component of the core module that a compiler wrote for wasm32-unknown-unknown
    #[command(after_help = "\
Examples:
  timetable componentize target/wasm32-unknown-unknown/release/my_builder.wasm -o my-builder.wasm")]
    Componentize(Componentize),

    /// Say whether a host would take a component, and what it costs: contract, verifier, determinism, limits, fuel and time
    #[command(after_help = "\
Ends with 3 if a host would refuse it. Needs no host, no model and no device.

Examples:
  timetable check my-builder.wasm
  timetable check my-builder.wasm --grant subset --builder-option window=512 --json
  timetable check my-builder.wasm --json | jq '.findings[0].step' > step.json        # the step that was refused")]
    Check(Check),

    /// List the components in this binary, or write them to a directory
    Components(Components),

    /// Print a completion script for a shell
    Completions(Completions),
}

/// Weights in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WeightsArg {
    /// As in the file: quantised blocks stay quantised
    Auto,
    /// Everything in 32-bit floats
    F32,
}

/// Element type of the model: weights, activations and what attention is handed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DtypeArg {
    /// bfloat16 on a GPU, float32 on the CPU
    Auto,
    /// Brain floats of 16 bits
    Bfloat16,
    /// 16-bit floats
    Float16,
    /// 32-bit floats
    Float32,
}

/// Element type of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KvCacheDtypeArg {
    /// The model's
    Auto,
    /// 32-bit floats
    Float32,
    /// Brain floats of 16 bits
    Bfloat16,
    /// 16-bit floats; on a GPU
    Float16,
    /// 8-bit floats of 4 exponent bits; on a GPU
    #[value(alias = "fp8_e4m3")]
    #[serde(alias = "fp8_e4m3")]
    Fp8,
    /// DeepSeek's form of a latent: 8-bit floats with a scale for each 128; latent attention on the CPU
    #[value(name = "fp8_ds_mla")]
    #[serde(rename = "fp8_ds_mla")]
    Fp8DsMla,
}

#[derive(Debug, Args)]
pub struct Generate {
    /// A GGUF file, or a Hugging Face directory (config.json, *.safetensors, tokenizer.json)
    #[arg(short, long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub model: PathBuf,

    /// A prompt; give it several times to run several as one batch
    #[arg(short, long, value_name = "TEXT", required = true)]
    pub prompt: Vec<String>,

    /// Whose the prompts are: a tenant of the configuration; where none is configured, a name that keeps cached prefixes apart
    #[arg(long, value_name = "NAME")]
    pub tenant: Option<TenantName>,

    /// Apply the model's chat template, each prompt as one user message
    #[arg(long)]
    pub chat: bool,

    /// Tokens to generate for each prompt, at most
    #[arg(short = 'n', long, value_name = "N", default_value_t = 128)]
    pub max_tokens: usize,

    /// 0 is greedy
    #[arg(short, long, value_name = "T", default_value_t = 0.0)]
    pub temperature: f32,

    /// Sample among the K most likely tokens; 0: all
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub top_k: usize,

    /// Sample among the most likely tokens that together have probability P
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    pub top_p: f32,

    /// Seed of sampling, the same for every prompt: the same seed gives the same tokens, whatever the batch [default: random]
    #[arg(long, value_name = "S")]
    pub seed: Option<u64>,

    /// Stop at this text; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,

    /// Go on after the end-of-sequence token, up to --max-tokens
    #[arg(long)]
    pub ignore_eos: bool,

    /// Print one JSON object at the end instead of streaming text
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub settings: SettingArgs,
}

#[derive(Debug, Args)]
pub struct Serve {
    /// A GGUF file, or a Hugging Face directory (config.json, *.safetensors, tokenizer.json)
    #[arg(short, long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub model: PathBuf,

    #[command(flatten)]
    pub server: ServerArgs,

    #[command(flatten)]
    pub settings: SettingArgs,
}

/// Flags of `serve` that a configuration file may say as well.
#[derive(Clone, Debug, Args)]
pub struct ServerArgs {
    /// Where clients connect; port 0 takes a free one [default: 127.0.0.1:8000]
    #[arg(long, value_name = "HOST:PORT")]
    pub listen: Option<String>,

    /// What clients call the model [default: the last part of --model, without .gguf]
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,

    /// The chat template, a Jinja file, instead of the model's own
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub chat_template: Option<PathBuf>,

    /// A file with a line for each key, KEY or sha256:HEX, each with its tenant after it if it has one [default: all may ask]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub api_keys: Option<PathBuf>,
}

/// Flags that a configuration file may say as well: each comes before the file, and the file before the default.
#[derive(Clone, Debug, Args)]
pub struct SettingArgs {
    /// A TOML file with settings; flags come before it. `timetable config default` prints a complete one
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,

    /// Where the model runs: cpu, cuda (the first GPU), cuda:N [default: cpu]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<DeviceArg>,

    /// Element type of the model [default: auto]
    #[arg(long, value_enum)]
    pub dtype: Option<DtypeArg>,

    /// Weights in memory; a GPU has them in --dtype [default: auto]
    #[arg(long, value_enum)]
    pub weights: Option<WeightsArg>,

    #[command(flatten, next_help_heading = "Attention")]
    pub attention: AttentionArgs,

    #[command(flatten, next_help_heading = "Scheduling and memory")]
    pub scheduling: SchedulingArgs,

    #[command(flatten, next_help_heading = "Host")]
    pub host: HostArgs,
}

#[derive(Clone, Debug, Args)]
pub struct AttentionArgs {
    /// The backend of every layer with attention, or with latent attention; an explicit choice never falls back [default: auto, the
    /// device's first that serves the model]
    #[arg(long, value_name = "NAME")]
    pub attention_backend: Option<String>,

    /// A component for a backend instead of the embedded one, as BACKEND=PATH or BACKEND=oci://REGISTRY/REPOSITORY@sha256:…
    #[arg(long, value_name = "BACKEND=PATH", value_parser = key_value)]
    pub builder: Vec<(String, String)>,

    /// The detached signature of --builder's component [default: PATH.minisig or PATH.sig, if there is one]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "builder")]
    pub builder_signature: Option<PathBuf>,

    /// An option of the builder's own, as KEY=VALUE; part of its version
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    pub builder_option: Vec<(String, String)>,

    /// Element type of the KV cache [default: auto]
    #[arg(long, value_enum)]
    pub kv_cache_dtype: Option<KvCacheDtypeArg>,

    /// The CUDA graph mode to ask for: NONE, PIECEWISE, FULL, FULL_DECODE_ONLY, FULL_AND_PIECEWISE [default:
    /// FULL_AND_PIECEWISE on a GPU; the CPU captures none, whatever is asked]
    #[arg(long, value_name = "MODE")]
    pub cudagraph_mode: Option<String>,

    /// Token counts to capture graphs for, instead of the field's default list
    #[arg(long, value_name = "N,N,…", value_delimiter = ',')]
    pub cudagraph_capture_sizes: Option<Vec<u32>>,
}

#[derive(Clone, Debug, Args)]
pub struct SchedulingArgs {
    /// Tokens of one KV cache block [default: 16]
    #[arg(long, value_name = "N")]
    pub block_size: Option<usize>,

    /// Requests that run at the same time, at most [default: 64]
    #[arg(long, value_name = "N")]
    pub max_num_seqs: Option<usize>,

    /// Tokens of one step, at most; a longer prompt is prefilled in chunks [default: 512]
    #[arg(long, value_name = "N")]
    pub max_num_batched_tokens: Option<usize>,

    /// Longest prompt with its answer, in tokens; default: what the model was trained for
    #[arg(long, value_name = "N")]
    pub max_model_len: Option<usize>,

    /// Number of KV cache blocks, instead of what fits the memory fraction
    #[arg(long, value_name = "N")]
    pub num_gpu_blocks_override: Option<usize>,

    /// On the CPU: share of the machine's memory that model and KV cache may take together, found by a profile run
    /// [default: 0.4]
    #[arg(long, value_name = "F", value_parser = finite)]
    pub memory_fraction: Option<f64>,

    /// On a GPU: share of its memory that weights, activations, graphs and KV cache may take together [default: 0.9]
    #[arg(long, value_name = "F", value_parser = finite)]
    pub gpu_memory_utilization: Option<f64>,

    /// Prepare a step while the one before it runs [default: on a GPU]
    #[arg(long, overrides_with = "no_async_scheduling")]
    pub async_scheduling: bool,

    /// Prepare a step when the one before it has ended
    #[arg(long, overrides_with = "async_scheduling")]
    pub no_async_scheduling: bool,

    /// Verify draft tokens beside each next one, from n-grams of the request: ngram, or ngram_gpu for decodes of one length
    #[arg(long, value_name = "METHOD", value_parser = ["ngram", "ngram_gpu"])]
    pub speculative_method: Option<String>,

    /// Draft tokens of a decode, 1 to 16; with --speculative-method
    #[arg(long, value_name = "N")]
    pub num_speculative_tokens: Option<usize>,

    /// Tokens of the shortest n-gram that is looked for [default: --prompt-lookup-max, else 5]
    #[arg(long, value_name = "N")]
    pub prompt_lookup_min: Option<usize>,

    /// Tokens of the longest n-gram that is looked for [default: --prompt-lookup-min, else 5]
    #[arg(long, value_name = "N")]
    pub prompt_lookup_max: Option<usize>,

    /// Give a request the bits that it has when it runs alone, whatever else is in the batch; slower
    #[arg(long)]
    pub batch_invariant: bool,

    /// Do not reuse the blocks of equal prefixes
    #[arg(long)]
    pub no_enable_prefix_caching: bool,

    /// Worker threads, 1 to 256; default: one per core
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
}

#[derive(Clone, Debug, Args)]
pub struct HostArgs {
    /// The admin socket, mode 0600; `none` opens none [default: under the runtime directory]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub admin: Option<PathBuf>,

    /// Serve the admin page at this address, as 127.0.0.1:9090; port 0 takes any that is free [default: no page]
    #[arg(long, value_name = "ADDR")]
    pub admin_listen: Option<SocketAddr>,

    /// A file whose token, of at least 16 characters, whoever uses the admin page must show; needed if others can reach it
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub admin_token_file: Option<PathBuf>,

    /// Keep components by content, and which are active, in this directory; what is active survives a restart
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub state_dir: Option<PathBuf>,

    /// Keep compiled components in this directory, mode 0700
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub cache_dir: Option<PathBuf>,

    /// Keep builders' faults as bundles in this directory, mode 0700; at most 64 files and 256 MiB, the oldest go
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub fault_dir: Option<PathBuf>,

    /// Keep every step's inputs and outputs in this directory, mode 0700, for `timetable replay`
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub record: Option<PathBuf>,

    /// MiB that a recording may have; the oldest steps go [default: 1GiB]
    #[arg(long, value_name = "MIB")]
    pub record_max_mib: Option<u64>,

    /// What becomes of a step in which the builder faults [default: fallback]
    #[arg(long, value_enum)]
    pub on_builder_fault: Option<OnFaultArg>,

    /// Mark the parts of each step for a profiler of NVIDIA's (NVTX ranges), where its library is installed
    #[arg(long)]
    pub nvtx: bool,

    #[command(flatten)]
    pub trust: TrustArgs,
}

/// Which components may run. Those in this program are part of it and always may.
#[derive(Clone, Debug, Default, Args)]
pub struct TrustArgs {
    /// Run only components that this key signed: the file of a minisign or ed25519 public key; may be given several times
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub trusted_key: Vec<PathBuf>,

    /// Run only components whose SHA-256 is in this file, as `sha256sum` prints it; with --trusted-key, either is enough
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub allow_hashes: Vec<PathBuf>,

    /// With --allow-hashes and --trusted-key: require both
    #[arg(long, requires = "trusted_key")]
    pub require_signature: bool,
}

#[derive(Debug, Args)]
pub struct Rollback {
    /// As `timetable builders` names it: FLASH_ATTN, FLASHINFER, TRITON_MLA, MAMBA2, …
    pub backend: String,

    /// The builder of this tenant's own, instead of everybody's
    #[arg(long, value_name = "NAME")]
    pub tenant: Option<TenantName>,

    #[command(flatten)]
    pub admin: AdminArgs,
}

#[derive(Debug, Args)]
pub struct Builders {
    #[command(flatten)]
    pub admin: AdminArgs,
}

#[derive(Debug, Args)]
pub struct Top {
    /// The running host's admin socket [default: under the runtime directory]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub admin: Option<PathBuf>,

    /// Seconds from one sample to the next, 0.1 to 3600
    #[arg(long, value_name = "S", default_value_t = 1.0, value_parser = seconds)]
    pub interval: f64,

    /// Print one picture, of two samples, as plain text
    #[arg(long)]
    pub once: bool,
}

#[derive(Debug, Args)]
pub struct AdminArgs {
    /// The running host's admin socket [default: under the runtime directory]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub admin: Option<PathBuf>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Build {
    /// The component; default: the embedded one of --backend
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath, conflicts_with = "backend")]
    pub builder: Option<PathBuf>,

    /// The backend whose embedded component builds
    #[arg(long, value_name = "NAME", default_value = "FLASH_ATTN")]
    pub backend: String,

    /// The step, as JSON; `-` is standard input
    #[arg(short, long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub input: PathBuf,

    /// Print the metadata as one line of JSON instead of indented
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
#[allow(
    clippy::struct_excessive_bools,
    reason = "each is a question that the field asks by itself"
)]
pub struct Backends {
    /// CUDA compute capability, as 9.0; without it, the CPU device answers
    #[arg(long, value_name = "X.Y")]
    pub capability: Option<String>,

    /// Elements of a key
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub head_size: u32,

    /// Query heads per rank
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub num_heads: u32,

    /// The model's dtype
    #[arg(long, value_name = "DTYPE", default_value = "bfloat16")]
    pub dtype: String,

    /// The cache dtype: auto, float16, bfloat16, fp8, fp8_e4m3, fp8_e5m2, nvfp4, …
    #[arg(long, value_name = "DTYPE", default_value = "auto")]
    pub kv_cache_dtype: String,

    /// The block size that the user asked for, in tokens
    #[arg(long, value_name = "N")]
    pub block_size: Option<u32>,

    /// An explicit choice: it never falls back
    #[arg(long, value_name = "NAME")]
    pub attention_backend: Option<String>,

    /// decoder, encoder, encoder_only, encoder_decoder
    #[arg(long, value_name = "TYPE", default_value = "decoder")]
    pub attn_type: String,

    /// Multi-head latent attention
    #[arg(long)]
    pub mla: bool,

    /// Sparse attention
    #[arg(long)]
    pub sparse: bool,

    /// Attention sinks
    #[arg(long)]
    pub sinks: bool,

    /// Bidirectional attention within multimodal prefixes
    #[arg(long)]
    pub mm_prefix: bool,

    /// A sliding window
    #[arg(long)]
    pub sliding_window: bool,

    /// Queries see later keys
    #[arg(long)]
    pub non_causal: bool,

    /// Results must not depend on the batch
    #[arg(long)]
    pub batch_invariant: bool,

    /// Quantisation scales per head
    #[arg(long)]
    pub per_head_quant_scales: bool,

    /// A KV connector moves blocks
    #[arg(long)]
    pub kv_connector: bool,

    /// Prefill context parallelism
    #[arg(long)]
    pub pcp: bool,

    /// Decode context parallelism
    #[arg(long)]
    pub dcp: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
#[allow(
    clippy::struct_excessive_bools,
    reason = "each is a fact of the configuration by itself"
)]
pub struct ExplainGraphs {
    /// NONE, PIECEWISE, FULL, FULL_DECODE_ONLY, FULL_AND_PIECEWISE
    #[arg(long, value_name = "MODE", default_value = "FULL_AND_PIECEWISE")]
    pub mode: String,

    /// A backend that serves some layers; its builder says what it supports, or NAME=SUPPORT does (NEVER,
    /// UNIFORM_SINGLE_TOKEN_DECODE, UNIFORM_BATCH, ALWAYS)
    #[arg(long, value_name = "NAME[=SUPPORT]", default_value = "FLASH_ATTN")]
    pub backend: Vec<String>,

    /// CUDA compute capability
    #[arg(long, value_name = "X.Y", default_value = "9.0")]
    pub capability: String,

    /// Draft tokens of a decode
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub num_speculative_tokens: u32,

    /// Requests that run at the same time, at most
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub max_num_seqs: u32,

    /// Tokens of one step, at most
    #[arg(long, value_name = "N", default_value_t = 8192)]
    pub max_num_batched_tokens: u32,

    /// Token counts to capture, instead of the field's default list
    #[arg(long, value_name = "N,N,…", value_delimiter = ',')]
    pub cudagraph_capture_sizes: Vec<u32>,

    /// Which generation of the field's model runner
    #[arg(long, value_name = "1|2", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=2))]
    pub runner: u8,

    /// The model is not cut at attention
    #[arg(long)]
    pub no_splitting_ops: bool,

    /// The model is not compiled
    #[arg(long)]
    pub no_compile: bool,

    /// enforce_eager
    #[arg(long)]
    pub enforce_eager: bool,

    /// A pooling model
    #[arg(long)]
    pub pooling: bool,

    /// An encoder-decoder model
    #[arg(long)]
    pub encoder_decoder: bool,

    /// A KV connector that works between layers
    #[arg(long)]
    pub kv_connector_piecewise: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Selftest {
    /// The GPU: cuda, cuda:N
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceArg::Cuda(0))]
    pub device: DeviceArg,

    /// Fewer and smaller inputs, for a memory checker to look at
    #[arg(long)]
    pub quick: bool,

    /// Only the groups whose names begin with this; may be given several times
    #[arg(long, value_name = "GROUP")]
    pub only: Vec<String>,

    /// Batches of the soak: metadata from the components, everything that is not a request's own poisoned
    #[arg(long, value_name = "N")]
    pub soak: Option<u32>,

    /// Seed of the inputs [default: random, and printed]
    #[arg(long, value_name = "S")]
    pub seed: Option<u64>,

    /// Print one JSON object at the end
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Bench {
    #[command(subcommand)]
    pub command: Option<BenchCommand>,

    /// The GPU: cuda, cuda:N
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceArg::Cuda(0))]
    pub device: DeviceArg,

    /// Only these: ceilings, decode, prefill, scatter, host, gap; may be given several times
    #[arg(long, value_name = "NAME")]
    pub only: Vec<String>,

    /// A model for the time between steps, besides a small one with random weights
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub model: Option<PathBuf>,

    /// The Python that has FlashInfer
    #[arg(long, value_name = "PATH", default_value = "python3", value_hint = ValueHint::ExecutablePath)]
    pub python: PathBuf,

    /// Do not measure FlashInfer
    #[arg(long)]
    pub no_peer: bool,

    /// Print one JSON object at the end
    #[arg(long)]
    pub json: bool,
}

/// What becomes of a step in which the builder faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnFaultArg {
    /// The plain builder builds it
    Fallback,
    /// Its requests fail; the plain builder never builds in the component's place
    FailStep,
    /// Its requests fail, and so does every later step until a reload or a rollback
    FailClosed,
}

#[derive(Debug, Args)]
pub struct ReplayBundle {
    /// The bundle
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub path: PathBuf,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Components {
    /// Write each as NAME.wasm
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub export: Option<PathBuf>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Completions {
    /// The shell
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}

/// A time between samples.
fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err(format!(
            "`{text}` is not a number of seconds from 0.1 to 3600"
        )),
    }
}

/// A number: a configuration has no other.
fn finite(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().map_err(|error| error.to_string())?;
    match number.is_finite() {
        true => Ok(number),
        false => Err("give a number".to_owned()),
    }
}

/// KEY=VALUE.
pub fn key_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() && !value.is_empty() => {
            Ok((key.to_owned(), value.to_owned()))
        }
        _ => Err(format!("`{text}` is not of the form KEY=VALUE")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn a_builder_is_named_with_its_backend() {
        assert_eq!(
            key_value("FLASH_ATTN=a=b.wasm").unwrap(),
            ("FLASH_ATTN".to_owned(), "a=b.wasm".to_owned())
        );
        for bad in ["FLASH_ATTN", "=x", "FLASH_ATTN="] {
            assert!(key_value(bad).unwrap_err().contains("KEY=VALUE"), "{bad}");
        }
    }
}
