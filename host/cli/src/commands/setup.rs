//! From the command line to a running engine: model, tokenizer, sandbox, builder.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use serde_json::{Value, json};
use timetable_attention::backend::BackendRegistry;
use timetable_attention::graphs::Outcome;
use timetable_engine::cuda::{CudaExecutor, CudaStartError, MemoryReport};
use timetable_engine::model::{LoadOptions, Model, Weights};
use timetable_engine::tokenizer::Tokenizer;
use timetable_engine::{
    AttentionPlan, BuilderSource, Builders, CpuExecutor, DeviceChoice, Engine, EngineConfig,
    EngineError, EngineHandle, Executor, FamilyBuilder, Timeline,
};
use timetable_provenance::Fetched;
use timetable_record::RecorderHandle;
use timetable_sandbox::{CodeCache, Component, FaultDir, Sandbox, StateDir, TenantName};
use timetable_server::Bounds;
use timetable_types::Family;

use crate::admin::{self, Group, Host};
use crate::cli::{SettingArgs, WeightsArg};
use crate::commands::progress::Progress;
use crate::commands::{builder_name, embedded, slot_name};
use crate::config::{Config, Effective, EngineSettings, Flags};
use crate::device;
use crate::exit::{Exit, Failure};
use crate::provenance;

/// Steps that the admin page can look back at: 74 kB.
const STEPS_KEPT: usize = 512;

/// An executor, and on a GPU the cell that gets its memory report.
type OnDevice = (Box<dyn Executor>, Option<Arc<OnceLock<MemoryReport>>>);

/// What a host is started with.
pub struct Start<'a> {
    /// A GGUF file or a Hugging Face directory.
    pub model: &'a Path,
    /// What metrics call it.
    pub name: &'a str,
    /// The flags, which come before any file.
    pub flags: &'a Flags,
    /// The configuration in force.
    pub settings: &'a Effective,
    /// Says on standard error how far it is, and where a GPU's memory went.
    pub talks: bool,
}

/// What `generate` and `serve` work with.
pub struct Running {
    pub engine: EngineHandle,
    pub tokenizer: Arc<Tokenizer>,
    pub host: Host,
    pub recording: Option<RecorderHandle>,
    pub bounds: Bounds,
}

/// The configuration in force: flags over the file over the defaults.
pub fn settings(flags: &Flags) -> Result<Effective, Failure> {
    Effective::load(flags.settings.config.as_deref(), |file| flags.layer(file))
}

/// The admin socket to open, checked; none if the user wants none.
pub fn socket(given: Option<&Path>) -> Result<Option<PathBuf>, Failure> {
    let path = match given {
        Some(path) if path == Path::new("none") => return Ok(None),
        Some(path) => path.to_path_buf(),
        None => admin::default_path(),
    };
    admin::prepare(&path)?;
    Ok(Some(path))
}

/// Loads everything and starts the step thread.
pub fn start(arguments: &Start<'_>) -> Result<Running, Failure> {
    let settings = arguments.settings;
    let bad = |error: &dyn std::fmt::Display| Failure::new(Exit::BadInput, error);
    let Config {
        engine,
        limits,
        faults,
        recording,
        admin,
        ..
    } = &settings.config;
    if let Some(threads) = engine.threads {
        rayon::ThreadPoolBuilder::new()
            .num_threads(usize::from(threads))
            .build_global()
            .map_err(Failure::of(Exit::Failure))?;
    }
    let config = settings.config.engine_config().map_err(|e| bad(&e))?;
    let sandbox = match &admin.cache_dir {
        Some(path) => {
            let cache = CodeCache::open(path).map_err(|error| bad(&error))?;
            Sandbox::with_cache(limits.clone(), cache)
        }
        None => Sandbox::new(limits.clone()),
    }
    .map_err(Failure::of(Exit::Failure))?;
    if let Some(path) = &faults.dir {
        let dir = FaultDir::open(path, faults.limits).map_err(|error| bad(&error))?;
        sandbox.keep_faults_in(dir);
    }
    let (recorder, recording) = match &recording.dir {
        Some(path) => timetable_record::record(path, sandbox.limits(), recording.options())
            .map(|(recorder, handle)| (Some(recorder), Some(handle)))
            .map_err(|error| bad(&error))?,
        None => (None, None),
    };
    let state = admin
        .state_dir
        .as_deref()
        .map(StateDir::open)
        .transpose()
        .map_err(|error| bad(&error))?;
    let trust = provenance::trust(&settings.config.provenance)?;
    let open = |builder: &str, tenant: Option<&TenantName>, wanted: Wanted| {
        let (origin, fetched, options) =
            component(settings, builder, tenant, (state.as_ref(), wanted))?;
        let evidence = trust
            .admit(&fetched.component, fetched.signature.as_deref())
            .map_err(|error| bad(&format!("component {origin}: {error}")))?;
        let component = sandbox
            .load(&fetched.component)
            .map_err(|error| bad(&format!("component {origin}: {error}")))?;
        Ok((origin, component, evidence, options))
    };
    // With a backend that was named, its component can be refused before a model is loaded.
    let mut opened = config
        .attention_backend
        .as_deref()
        .map(|backend| {
            open(backend, None, Wanted::Configured).map(|found| (backend.to_owned(), found))
        })
        .transpose()?;

    let progress = Progress::start(
        &format!("loading {}", arguments.model.display()),
        arguments.talks,
    );
    if engine.nvtx && !timetable_device_cuda::nvtx::enable() {
        eprintln!("timetable: NVIDIA's NVTX library was not found: steps run without ranges");
    }
    let (executor, memory) = executor(arguments.model, engine, &config)?;
    let tokenizer = Arc::new(Tokenizer::load(arguments.model).map_err(|error| bad(&error))?);
    let facts = executor.facts(&config).map_err(|error| refused(&error))?;
    let plan = AttentionPlan::for_device(&config, executor.model_config(), facts)
        .map_err(|error| refused(&error))?;
    let needed = needed(&plan);
    let names: Vec<&str> = needed.iter().map(|(name, _)| name.as_str()).collect();
    check_names(&arguments.flags.settings, &names)?;
    let mut evidence = Vec::new();
    let mut everybodys = Vec::new();
    for (name, family) in &needed {
        let found = match opened.take_if(|(backend, _)| backend == name) {
            Some((_, found)) => found,
            None => open(name, None, Wanted::Configured)?,
        };
        let (origin, component, known, options) = found;
        check_family(&component, &[(name.clone(), *family)])?;
        let builder = settings.config.builder(name);
        evidence.push(known);
        everybodys.push(FamilyBuilder {
            family: *family,
            source: BuilderSource::Component { component, origin },
            options: Some(match builder.options.is_empty() {
                true => options,
                false => builder.options(),
            }),
            grant: Some(builder.grant),
        });
    }
    let mut own = Vec::new();
    for tenant in &config.tenants {
        let Some(slot) = &tenant.slot else {
            continue;
        };
        let mut builders = Vec::new();
        let mut fits = false;
        for (name, family) in &needed {
            let mut found = open(name, Some(&tenant.name), Wanted::Configured)?;
            // A tenant has one component; groups that it is not for have the embedded one.
            match found.1.family() == *family {
                true => fits = true,
                false if needed.len() == 1 => check_family(&found.1, &needed)?,
                false => found = open(name, Some(&tenant.name), Wanted::Embedded)?,
            }
            let (origin, component, known, options) = found;
            evidence.push(known);
            builders.push(FamilyBuilder {
                family: *family,
                source: BuilderSource::Component { component, origin },
                options: (slot.options.is_empty() && !options.is_empty()).then_some(options),
                grant: None,
            });
        }
        if !fits {
            let (_, component, ..) = open(&needed[0].0, Some(&tenant.name), Wanted::Configured)?;
            check_family(&component, &needed)?;
        }
        own.push((tenant.name.clone(), BuilderSource::ByFamily(builders)));
    }
    progress.next("profiling and sizing the KV cache");
    let source = BuilderSource::ByFamily(everybodys);
    let mut engine = Engine::with_executor(
        &config,
        plan,
        executor,
        Some(Arc::clone(&tokenizer)),
        &sandbox,
        Builders {
            default: &source,
            tenants: &own,
        },
    )
    .map_err(|error| refused(&error))?;
    if let Some(recorder) = recorder {
        engine.set_step_observer(Some(Box::new(recorder)));
    }
    let timeline = (admin.listen.is_some()).then(|| Arc::new(Timeline::new(STEPS_KEPT)));
    engine.set_timeline(timeline.clone());
    progress.finish();

    for (handle, layers) in engine.group_handles() {
        let builder = builder_name(&layers.backend.name, handle.family());
        handle
            .set_policy(settings.config.builder(builder).policy)
            .map_err(Failure::of(Exit::Failure))?;
    }
    let everybodys = engine.group_handles().into_iter();
    let of_tenants = engine.tenant_handles().into_iter();
    let groups = everybodys
        .map(|(handle, layers)| (None, handle, layers))
        .chain(of_tenants.map(|(tenant, handle, layers)| (Some(tenant), handle, layers)))
        .map(|(tenant, handle, layers)| Group {
            layers: layers.clone(),
            tenant: tenant.cloned(),
            handle,
        })
        .collect();
    let mut startup = startup(&engine);
    startup["model_name"] = json!(arguments.name);
    if let Some(report) = memory.and_then(|memory| memory.get().copied()) {
        if arguments.talks {
            eprintln!("{}", device::summary(&report, config.block_size));
        }
        startup["memory"] = device::table(&report, config.block_size);
    }
    let bounds = Bounds::of(&engine);
    let engine = EngineHandle::spawn(engine).map_err(Failure::of(Exit::Failure))?;
    let (stats, tenants) = (engine.stats_reader(), engine.tenant_stats_reader());
    let stats = Box::new(move || (stats(), tenants()));
    Ok(Running {
        engine,
        tokenizer,
        host: Host::new(sandbox, groups, startup, stats, state)
            .recording_steps_in(timeline)
            .trusting(trust, evidence)
            .reloading_by(settings.config.reload.plan())
            .configured(arguments.flags.clone(), settings.clone()),
        recording,
        bounds,
    })
}

/// The model on its device; for a GPU, with what will say where its memory went.
fn executor(
    model: &Path,
    settings: &EngineSettings,
    config: &EngineConfig,
) -> Result<OnDevice, Failure> {
    if let DeviceChoice::Cuda { .. } = config.device {
        let executor = CudaExecutor::new(config, model).map_err(|error| {
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
        model,
        LoadOptions {
            weights: match settings.weights {
                WeightsArg::Auto => Weights::Auto,
                WeightsArg::F32 => Weights::F32,
            },
            threads: settings.threads.map(usize::from),
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

/// Which of the components that there may be.
#[derive(Clone, Copy, PartialEq)]
enum Wanted {
    /// The configured one, else what was active before, else the embedded one.
    Configured,
    Embedded,
}

/// The builders that the plan's groups need, by name, each with its family.
fn needed(plan: &AttentionPlan) -> Vec<(String, Family)> {
    let mut needed = Vec::new();
    for (backend, family) in plan.backends() {
        let builder = (builder_name(backend, family).to_owned(), family);
        if !needed.contains(&builder) {
            needed.push(builder);
        }
    }
    needed
}

/// Is every `--builder` for a backend that the layers use?
fn check_names(flags: &SettingArgs, used: &[&str]) -> Result<(), Failure> {
    let given = flags.attention.builder.iter().map(|(name, _)| name);
    for name in given {
        if !used.iter().any(|used| used.eq_ignore_ascii_case(name)) {
            let used = used.join(" and ");
            // Recurrent layers have no choice.
            let choice = match BackendRegistry::new().parse(name) {
                Ok(Some(_)) => format!(", or choose {name} with --attention-backend"),
                _ => String::new(),
            };
            return Err(Failure::new(
                Exit::Usage,
                format!("--builder {name}=…: the layers use {used}; name that{choice}"),
            ));
        }
    }
    Ok(())
}

/// The component that serves.
fn component(
    settings: &Effective,
    builder: &str,
    tenant: Option<&TenantName>,
    (state, wanted): (Option<&StateDir>, Wanted),
) -> Result<Found, Failure> {
    let embedded = embedded(builder)?;
    let built_in = || Fetched {
        component: embedded.bytes.to_vec(),
        signature: None,
    };
    let origin = format!("embedded {}", embedded.name);
    if wanted == Wanted::Embedded {
        return Ok((origin, built_in(), Vec::new()));
    }
    if let Some((origin, fetched)) = settings.config.slot(builder, tenant).fetch()? {
        return Ok((origin, fetched, Vec::new()));
    }
    if let Some(state) = state
        && let tenant = tenant.map(TenantName::as_str)
        && let Some(slot) = state.slot(&slot_name(builder, embedded.family, tenant))
        && let Some(active) = &slot.active
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
    Ok((origin, built_in(), Vec::new()))
}

/// Does the component make what one of the backends reads?
fn check_family(component: &Component, needed: &[(String, Family)]) -> Result<(), Failure> {
    let family = component.family();
    if needed.iter().any(|(_, needed)| *needed == family) {
        return Ok(());
    }
    let wanted: Vec<String> = needed
        .iter()
        .map(|(name, family)| {
            let interface = family.interface();
            format!("{name} needs one of `{interface}`; give one with --builder {name}=PATH")
        })
        .collect();
    Err(Failure::new(
        Exit::BadInput,
        format!(
            "the component is a builder of `{}`, and {}",
            family.interface(),
            wanted.join("; ")
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
