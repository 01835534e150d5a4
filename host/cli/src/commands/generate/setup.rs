//! From the command line to a running engine: model, tokenizer, sandbox, builder.

use std::sync::Arc;

use timetable_attention::backend::{BackendRegistry, Configuration, Device};
use timetable_attention::select::{Request, select};
use timetable_device::cpu::CacheDtype;
use timetable_engine::model::{LoadOptions, Model, Weights};
use timetable_engine::tokenizer::Tokenizer;
use timetable_engine::{BuilderSource, CacheSize, Engine, EngineConfig, EngineHandle};
use timetable_sandbox::{CodeCache, Limits, Sandbox, StateDir};
use timetable_types::{Dtype, Family};

use crate::admin::{Group, Host};
use crate::cli::{Generate, KvCacheDtypeArg, WeightsArg};
use crate::commands::embedded;
use crate::commands::progress::Progress;
use crate::exit::{Exit, Failure};

/// What `generate` works with.
pub struct Running {
    pub engine: EngineHandle,
    pub tokenizer: Arc<Tokenizer>,
    pub host: Host,
}

pub fn start(arguments: &Generate) -> Result<Running, Failure> {
    let bad = |error: &dyn std::fmt::Display| Failure::new(Exit::BadInput, error);
    if let Some(threads) = arguments.scheduling.threads {
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build_global()
            .map_err(Failure::of(Exit::Failure))?;
    }
    let backend = backend_name(&arguments.attention.attention_backend)?;
    let sandbox = match &arguments.host.cache_dir {
        Some(path) => {
            let cache = CodeCache::open(path).map_err(|error| bad(&error))?;
            Sandbox::with_cache(Limits::default(), cache)
        }
        None => Sandbox::new(Limits::default()),
    }
    .map_err(Failure::of(Exit::Failure))?;
    let state = arguments
        .host
        .state_dir
        .as_deref()
        .map(StateDir::open)
        .transpose()
        .map_err(|error| bad(&error))?;
    let (origin, bytes) = component(arguments, &backend, state.as_ref())?;
    let component = sandbox
        .load(&bytes)
        .map_err(|error| bad(&format!("component {origin}: {error}")))?;
    let family = component.family();

    let progress = Progress::start(
        &format!("loading {}", arguments.model.display()),
        !arguments.json,
    );
    let model = Model::load(
        &arguments.model,
        LoadOptions {
            weights: match arguments.weights {
                WeightsArg::Auto => Weights::Auto,
                WeightsArg::F32 => Weights::F32,
            },
            threads: arguments.scheduling.threads,
        },
    )
    .map_err(|error| bad(&error))?;
    let tokenizer = Arc::new(Tokenizer::load(&arguments.model).map_err(|error| bad(&error))?);
    check_backend(arguments, &backend, family, &model)?;
    progress.next("profiling and sizing the KV cache");
    let config = config(arguments, family);
    let source = BuilderSource::Component { component, origin };
    let engine = Engine::new(
        &config,
        Box::new(model),
        Some(Arc::clone(&tokenizer)),
        &sandbox,
        &source,
    )
    .map_err(|error| bad(&error))?;
    progress.finish();

    let groups = engine
        .group_handles()
        .into_iter()
        .map(|(handle, layers)| Group {
            backend: backend.clone(),
            layers,
            handle,
        })
        .collect();
    let engine = EngineHandle::spawn(engine).map_err(Failure::of(Exit::Failure))?;
    Ok(Running {
        engine,
        tokenizer,
        host: Host::new(sandbox, groups, state),
    })
}

/// The backend's name as the field spells it.
fn backend_name(given: &str) -> Result<String, Failure> {
    let name = BackendRegistry::new()
        .parse(given)
        .map_err(Failure::of(Exit::Usage))?;
    // `auto` takes the CPU device's first choice.
    Ok(name.unwrap_or_else(|| "FLASH_ATTN".to_owned()))
}

/// The component that serves: given on the command line, else what was active before, else the embedded one.
fn component(
    arguments: &Generate,
    backend: &str,
    state: Option<&StateDir>,
) -> Result<(String, Vec<u8>), Failure> {
    for (name, _) in &arguments.attention.builder {
        if !name.eq_ignore_ascii_case(backend) {
            return Err(Failure::new(
                Exit::Usage,
                format!(
                    "--builder {name}=…: the layers use {backend}; name that, or choose {name} with --attention-backend"
                ),
            ));
        }
    }
    if let Some((_, path)) = arguments.attention.builder.last() {
        let bytes = std::fs::read(path).map_err(|error| {
            Failure::new(
                Exit::BadInput,
                format!("component {path}: cannot be read ({error}); give the path of a component (.wasm)"),
            )
        })?;
        return Ok((path.clone(), bytes));
    }
    let embedded = embedded(backend)?;
    if let Some(state) = state
        && let Some(active) = state.active(embedded.family)
    {
        let bytes = state
            .component(active.component)
            .map_err(Failure::of(Exit::BadInput))?;
        return Ok((active.origin.clone(), bytes));
    }
    Ok((
        format!("embedded {}", embedded.name),
        embedded.bytes.to_vec(),
    ))
}

/// Does the backend serve this model on this device? An explicit choice never falls back.
fn check_backend(
    arguments: &Generate,
    backend: &str,
    family: Family,
    model: &Model,
) -> Result<(), Failure> {
    let sizes = model.config();
    let config = Configuration {
        kv_cache_dtype: Some(
            match arguments.attention.kv_cache_dtype {
                KvCacheDtypeArg::Auto => "auto",
                KvCacheDtypeArg::Float32 => "float32",
                KvCacheDtypeArg::Bfloat16 => "bfloat16",
            }
            .to_owned(),
        ),
        block_size: u32::try_from(arguments.scheduling.block_size).ok(),
        has_sliding_window: sizes.sliding_window.is_some(),
        ..Configuration::new(sizes.head_dim as u32, Dtype::Float32)
    };
    let request = Request {
        config: &config,
        num_heads: sizes.num_attention_heads as u32,
        device: Device::Cpu,
        requested: Some(backend),
    };
    let selection =
        select(&BackendRegistry::new(), &request).map_err(Failure::of(Exit::BadInput))?;
    tracing::info!("{}", selection.log);
    let needed = embedded(backend)?.family;
    if family != needed {
        return Err(Failure::new(
            Exit::BadInput,
            format!(
                "the component is a builder of `{}`, and {backend} needs one of `{}`; give one with --builder {backend}=PATH",
                family.interface(),
                needed.interface()
            ),
        ));
    }
    Ok(())
}

fn config(arguments: &Generate, family: Family) -> EngineConfig {
    let scheduling = &arguments.scheduling;
    let defaults = EngineConfig::default();
    EngineConfig {
        attention_backend: family,
        max_num_seqs: scheduling.max_num_seqs,
        max_num_batched_tokens: scheduling.max_num_batched_tokens,
        max_model_len: scheduling.max_model_len,
        block_size: scheduling.block_size,
        enable_prefix_caching: !scheduling.no_enable_prefix_caching,
        kv_cache_dtype: match arguments.attention.kv_cache_dtype {
            KvCacheDtypeArg::Auto | KvCacheDtypeArg::Float32 => CacheDtype::F32,
            KvCacheDtypeArg::Bfloat16 => CacheDtype::Bf16,
        },
        cache_size: match scheduling.num_gpu_blocks_override {
            Some(blocks) => CacheSize::Blocks(blocks),
            None => CacheSize::MemoryFraction(scheduling.memory_fraction),
        },
        num_workers: scheduling
            .threads
            .map_or(defaults.num_workers, |threads| threads as u32),
        builder_options: arguments.attention.builder_option.clone(),
        ..defaults
    }
}
