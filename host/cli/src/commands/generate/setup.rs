//! From the command line to a running engine: model, tokenizer, sandbox, builder.

use std::sync::{Arc, OnceLock};

use serde_json::{Value, json};
use timetable_attention::backend::BackendRegistry;
use timetable_attention::graphs::Outcome;
use timetable_engine::cuda::{CudaExecutor, CudaStartError, MemoryReport};
use timetable_engine::model::{LoadOptions, Model, Weights};
use timetable_engine::tokenizer::Tokenizer;
use timetable_engine::{
    AttentionPlan, BuilderSource, CacheSize, CpuExecutor, DeviceChoice, Engine, EngineConfig,
    EngineError, EngineHandle, Executor, KvCacheDtype, ModelDtype,
};
use timetable_provenance::{Fetched, Source};
use timetable_record::{RecorderHandle, RecorderOptions};
use timetable_sandbox::{
    BundleLimits, CodeCache, Component, FaultDir, FaultPolicy, Limits, OnFault, ReloadPlan,
    Sandbox, StateDir,
};

use crate::admin::{Group, Host, component_bytes_max};
use crate::cli::{DtypeArg, Generate, KvCacheDtypeArg, OnFaultArg, WeightsArg};
use crate::commands::embedded;
use crate::commands::explain_graphs::mode;
use crate::commands::progress::Progress;
use crate::device::{self, DeviceArg};
use crate::exit::{Exit, Failure};
use crate::provenance;

/// An executor, and on a GPU the cell that gets its memory report.
type OnDevice = (Box<dyn Executor>, Option<Arc<OnceLock<MemoryReport>>>);

/// What `generate` works with.
pub struct Running {
    pub engine: EngineHandle,
    pub tokenizer: Arc<Tokenizer>,
    pub host: Host,
    pub recording: Option<RecorderHandle>,
}

pub fn start(arguments: &Generate) -> Result<Running, Failure> {
    let bad = |error: &dyn std::fmt::Display| Failure::new(Exit::BadInput, error);
    if let Some(threads) = arguments.scheduling.threads {
        rayon::ThreadPoolBuilder::new()
            .num_threads(usize::from(threads))
            .build_global()
            .map_err(Failure::of(Exit::Failure))?;
    }
    let requested = BackendRegistry::new()
        .parse(&arguments.attention.attention_backend)
        .map_err(Failure::of(Exit::Usage))?;
    let mut config = config(arguments, requested)?;
    let sandbox = match &arguments.host.cache_dir {
        Some(path) => {
            let cache = CodeCache::open(path).map_err(|error| bad(&error))?;
            Sandbox::with_cache(Limits::default(), cache)
        }
        None => Sandbox::new(Limits::default()),
    }
    .map_err(Failure::of(Exit::Failure))?;
    if let Some(path) = &arguments.host.fault_dir {
        let dir = FaultDir::open(path, BundleLimits::default()).map_err(|error| bad(&error))?;
        sandbox.keep_faults_in(dir);
    }
    let (recorder, recording) = match &arguments.host.record {
        Some(path) => {
            let options = RecorderOptions {
                max_bytes: arguments.host.record_max_mib << 20,
                ..RecorderOptions::default()
            };
            timetable_record::record(path, sandbox.limits(), options)
                .map(|(recorder, handle)| (Some(recorder), Some(handle)))
                .map_err(|error| bad(&error))?
        }
        None => (None, None),
    };
    let state = arguments
        .host
        .state_dir
        .as_deref()
        .map(StateDir::open)
        .transpose()
        .map_err(|error| bad(&error))?;
    let trust = provenance::trust(&provenance::policy(&arguments.host.trust))?;
    let open = |backend: &str| {
        let (origin, fetched, options) = component(arguments, backend, state.as_ref())?;
        let evidence = trust
            .admit(&fetched.component, fetched.signature.as_deref())
            .map_err(|error| bad(&format!("component {origin}: {error}")))?;
        let component = sandbox
            .load(&fetched.component)
            .map_err(|error| bad(&format!("component {origin}: {error}")))?;
        Ok((origin, component, evidence, options))
    };
    // With a backend that was named, its component can be refused before a model is loaded.
    let opened = config.attention_backend.as_deref().map(open).transpose()?;

    let progress = Progress::start(
        &format!("loading {}", arguments.model.display()),
        !arguments.json,
    );
    if arguments.host.nvtx && !timetable_device_cuda::nvtx::enable() {
        eprintln!("timetable: NVIDIA's NVTX library was not found: steps run without ranges");
    }
    let (executor, memory) = executor(arguments, &config)?;
    let tokenizer = Arc::new(Tokenizer::load(&arguments.model).map_err(|error| bad(&error))?);
    let facts = executor.facts(&config).map_err(|error| refused(&error))?;
    let plan = AttentionPlan::for_device(&config, executor.model_config(), facts)
        .map_err(|error| refused(&error))?;
    let (origin, component, evidence, options) = opened.map_or_else(|| open(plan.backend()), Ok)?;
    if config.builder_options.is_empty() {
        config.builder_options = options;
    }
    check_family(&component, &plan)?;
    progress.next("profiling and sizing the KV cache");
    let source = BuilderSource::Component { component, origin };
    let mut engine = Engine::with_executor(
        &config,
        plan,
        executor,
        Some(Arc::clone(&tokenizer)),
        &sandbox,
        &source,
    )
    .map_err(|error| refused(&error))?;
    if let Some(recorder) = recorder {
        engine.set_step_observer(Some(Box::new(recorder)));
    }
    progress.finish();

    let policy = FaultPolicy {
        on_fault: match arguments.host.on_builder_fault {
            OnFaultArg::Fallback => OnFault::Fallback,
            OnFaultArg::FailStep => OnFault::FailStep,
            OnFaultArg::FailClosed => OnFault::FailClosed,
        },
        ..FaultPolicy::default()
    };
    for (handle, _) in engine.group_handles() {
        handle
            .set_policy(policy)
            .map_err(Failure::of(Exit::Failure))?;
    }
    let groups = engine
        .group_handles()
        .into_iter()
        .map(|(handle, layers)| Group {
            layers: layers.clone(),
            handle,
        })
        .collect();
    let mut startup = startup(&engine);
    if let Some(report) = memory.and_then(|memory| memory.get().copied()) {
        if !arguments.json {
            eprintln!("{}", device::summary(&report, config.block_size));
        }
        startup["memory"] = device::table(&report, config.block_size);
    }
    let engine = EngineHandle::spawn(engine).map_err(Failure::of(Exit::Failure))?;
    let stats = Box::new(engine.stats_reader());
    Ok(Running {
        engine,
        tokenizer,
        host: Host::new(sandbox, groups, startup, stats, state)
            .trusting(trust, evidence)
            .reloading_by(ReloadPlan::default()),
        recording,
    })
}

/// The model on its device; for a GPU, with what will say where its memory went.
fn executor(arguments: &Generate, config: &EngineConfig) -> Result<OnDevice, Failure> {
    if let DeviceChoice::Cuda { .. } = config.device {
        let executor = CudaExecutor::new(config, &arguments.model).map_err(|error| {
            let exit = match error {
                CudaStartError::Cuda(_) | CudaStartError::NoCacheMemory(_) => Exit::Device,
                _ => Exit::BadInput,
            };
            Failure::new(exit, error)
        })?;
        let memory = executor.memory();
        return Ok((Box::new(executor), Some(memory)));
    }
    let model = Model::load(
        &arguments.model,
        LoadOptions {
            weights: match arguments.weights {
                WeightsArg::Auto => Weights::Auto,
                WeightsArg::F32 => Weights::F32,
            },
            threads: arguments.scheduling.threads.map(usize::from),
        },
    )
    .map_err(Failure::of(Exit::BadInput))?;
    Ok((Box::new(CpuExecutor::new(Box::new(model))), None))
}

/// Why there is no engine, with the exit status of its kind.
fn refused(error: &EngineError) -> Failure {
    let exit = match error {
        EngineError::Device(_) => Exit::Device,
        _ => Exit::BadInput,
    };
    Failure::new(exit, error)
}

/// Where a component came from, its bytes, and the options that it had.
type Found = (String, Fetched, Vec<(String, String)>);

/// The component that serves: given on the command line, else what was active before, else the embedded one.
fn component(
    arguments: &Generate,
    backend: &str,
    state: Option<&StateDir>,
) -> Result<Found, Failure> {
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
        let source: Source = path.parse().map_err(Failure::of(Exit::Usage))?;
        let signature = arguments.attention.builder_signature.as_deref();
        let fetched = provenance::fetch(&source, signature, component_bytes_max())?;
        return Ok((path.clone(), fetched, Vec::new()));
    }
    let embedded = embedded(backend)?;
    if let Some(state) = state
        && let Some(active) = state.active(embedded.family)
    {
        let kept = state.component(active.component).and_then(|component| {
            let signature = state.signature(active.component)?;
            Ok(Fetched {
                component,
                signature,
            })
        });
        let kept = kept.map_err(Failure::of(Exit::BadInput))?;
        return Ok((active.origin.clone(), kept, active.options.clone()));
    }
    let built_in = Fetched {
        component: embedded.bytes.to_vec(),
        signature: None,
    };
    Ok((format!("embedded {}", embedded.name), built_in, Vec::new()))
}

/// Does the component make what the backend reads?
fn check_family(component: &Component, plan: &AttentionPlan) -> Result<(), Failure> {
    if component.family() == plan.family() {
        return Ok(());
    }
    let backend = plan.backend();
    Err(Failure::new(
        Exit::BadInput,
        format!(
            "the component is a builder of `{}`, and {backend} needs one of `{}`; give one with --builder {backend}=PATH",
            component.family().interface(),
            plan.family().interface()
        ),
    ))
}

/// What start-up found, for the table of builders.
fn startup(engine: &Engine) -> Value {
    let graphs = engine.cudagraph_mode();
    let survived = match &graphs.outcome {
        Outcome::Survived { mode, .. } => json!(mode),
        Outcome::Refused { .. } => Value::Null,
    };
    json!({
        "cudagraph_mode": {
            "configured": graphs.configured,
            "survived": survived,
            "changes": graphs.changes,
        },
        "hazards": engine.startup_report().hazards,
    })
}

/// The engine's settings; `requested` is the backend that was named.
fn config(arguments: &Generate, requested: Option<String>) -> Result<EngineConfig, Failure> {
    let Generate {
        attention,
        scheduling,
        device,
        ..
    } = arguments;
    let defaults = EngineConfig::default();
    let (device, graphs, fraction) = match device {
        DeviceArg::Cpu => (DeviceChoice::Cpu, "NONE", scheduling.memory_fraction),
        DeviceArg::Cuda(ordinal) => (
            DeviceChoice::Cuda {
                ordinal: *ordinal as usize,
            },
            "FULL_AND_PIECEWISE",
            scheduling.gpu_memory_utilization,
        ),
    };
    Ok(EngineConfig {
        device,
        model_dtype: match arguments.dtype {
            DtypeArg::Auto => ModelDtype::Auto,
            DtypeArg::Bfloat16 => ModelDtype::Bfloat16,
            DtypeArg::Float16 => ModelDtype::Float16,
            DtypeArg::Float32 => ModelDtype::Float32,
        },
        attention_backend: requested,
        cudagraph_mode: mode(
            "--cudagraph-mode",
            attention.cudagraph_mode.as_deref().unwrap_or(graphs),
        )?,
        cudagraph_capture_sizes: attention.cudagraph_capture_sizes.clone(),
        async_scheduling: match (scheduling.async_scheduling, scheduling.no_async_scheduling) {
            (true, _) => Some(true),
            (_, true) => Some(false),
            _ => None,
        },
        max_num_seqs: scheduling.max_num_seqs,
        max_num_batched_tokens: scheduling.max_num_batched_tokens,
        max_model_len: scheduling.max_model_len,
        block_size: scheduling.block_size,
        batch_invariant: scheduling.batch_invariant,
        enable_prefix_caching: !scheduling.no_enable_prefix_caching,
        kv_cache_dtype: match attention.kv_cache_dtype {
            KvCacheDtypeArg::Auto => KvCacheDtype::Auto,
            KvCacheDtypeArg::Float32 => KvCacheDtype::Float32,
            KvCacheDtypeArg::Bfloat16 => KvCacheDtype::Bfloat16,
            KvCacheDtypeArg::Float16 => KvCacheDtype::Float16,
            KvCacheDtypeArg::Fp8 => KvCacheDtype::Fp8E4m3,
        },
        cache_size: match scheduling.num_gpu_blocks_override {
            Some(blocks) => CacheSize::Blocks(blocks),
            None => CacheSize::MemoryFraction(fraction),
        },
        num_workers: scheduling.threads.map_or(defaults.num_workers, u32::from),
        builder_options: attention.builder_option.clone(),
        ..defaults
    })
}
