//! The operator's configuration: one TOML file, the flags over it, the defaults under it, and where each value came from.
//!
//! [`settings`] is the table of what may be set; [`File`] reads a file by it and finds every problem; [`Effective`] lays flags
//! over file over defaults. A new setting is a field of [`Config`] and a row of the table.
//!
//! Must never know: a running engine.

mod document;
mod effective;
mod file;
mod flags;
mod kind;
mod names;
mod settings;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use timetable_attention::verify::Grant;
use timetable_engine::{
    CacheSize, DeviceChoice, EngineConfig, EngineError, KvCacheDtype, ModelDtype, SlotConfig,
    SpeculativeConfig, SpeculativeMethod, TenantConfig,
};
use timetable_provenance::{Fetched, ProvenancePolicy, Require, Source};
use timetable_record::RecorderOptions;
use timetable_sandbox::{
    BundleLimits, CallLimits, Canary, FaultPolicy, Gates, Limits, ReloadPlan, TenantName,
    TenantNameError,
};
use timetable_server::Options;
use timetable_types::CudagraphMode;

pub use document::{default_file, markdown};
pub use effective::{Effective, Layer, refused};
pub use file::{File, Problem};
pub use flags::Flags;
pub use names::mode;

use crate::cli::{DtypeArg, KvCacheDtypeArg, WeightsArg};
use crate::device::DeviceArg;
use crate::exit::{Exit, Failure};
use crate::provenance;

/// The largest component that `limits.max_component_bytes` may allow, in bytes: what the admin socket reads at most.
pub const COMPONENT_BYTES_MAX: u64 = 256 << 20;

/// Where a setting stands: its tables' names, then its own.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key(Vec<String>);

impl Key {
    /// Of a dotted key without quotes.
    pub fn of(dotted: &str) -> Key {
        Key(dotted.split('.').map(str::to_owned).collect())
    }

    /// What `name` is called below this.
    pub fn child(&self, name: &str) -> Key {
        let mut parts = self.0.clone();
        parts.push(name.to_owned());
        Key(parts)
    }

    /// The table that it stands in.
    pub fn parent(&self) -> Key {
        Key(self.0[..self.0.len().saturating_sub(1)].to_vec())
    }

    /// Its parts.
    pub fn parts(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }

    /// How many parts it has.
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

impl fmt::Display for Key {
    /// As in TOML: with dots, and quotes where a part needs them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, part) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str(".")?;
            }
            let bare = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '*');
            if !part.is_empty() && part.chars().all(bare) {
                f.write_str(part)?;
            } else {
                f.write_str(&kind::quote(part))?;
            }
        }
        Ok(())
    }
}

/// Everything that may be configured. Each table's keys are its fields' names.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The engine's settings.
    pub engine: EngineSettings,
    /// The sandbox's bounds on components.
    pub limits: Limits,
    /// Builders by their backend's name in capitals.
    pub builders: BTreeMap<String, BuilderSettings>,
    /// Tenants by name.
    pub tenants: BTreeMap<String, TenantSettings>,
    /// How a version gets into service.
    pub reload: ReloadSettings,
    /// Which components may run.
    pub provenance: ProvenancePolicy,
    /// Fault bundles.
    pub faults: FaultSettings,
    /// What is recorded.
    pub recording: RecordingSettings,
    /// The host's own places.
    pub admin: AdminSettings,
    /// The HTTP API.
    pub server: ServerSettings,
}

/// `[engine]`. Names are the field's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "the table of settings says what each is")]
pub struct EngineSettings {
    pub device: DeviceArg,
    pub dtype: DtypeArg,
    pub weights: WeightsArg,
    pub attention_backend: String,
    pub cudagraph_mode: Option<String>,
    pub cudagraph_capture_sizes: Option<Vec<u32>>,
    pub async_scheduling: Option<bool>,
    pub max_num_seqs: usize,
    pub max_num_batched_tokens: usize,
    pub max_model_len: Option<usize>,
    pub block_size: usize,
    pub kernel_block_size: Option<usize>,
    pub enable_prefix_caching: bool,
    pub kv_cache_dtype: KvCacheDtypeArg,
    pub num_gpu_blocks_override: Option<usize>,
    pub memory_fraction: f64,
    pub gpu_memory_utilization: f64,
    pub speculative_method: Option<String>,
    pub num_speculative_tokens: Option<usize>,
    pub prompt_lookup_min: Option<usize>,
    pub prompt_lookup_max: Option<usize>,
    pub max_num_splits: u32,
    pub batch_invariant: bool,
    pub default_share: f64,
    pub max_tenant_segments: usize,
    pub threads: Option<u16>,
    pub nvtx: bool,
}

impl Default for EngineSettings {
    /// The engine's own defaults, but for batches that suit a command line.
    fn default() -> Self {
        let engine = EngineConfig::default();
        EngineSettings {
            device: DeviceArg::Cpu,
            dtype: DtypeArg::Auto,
            weights: WeightsArg::Auto,
            attention_backend: "auto".to_owned(),
            cudagraph_mode: None,
            cudagraph_capture_sizes: None,
            async_scheduling: None,
            max_num_seqs: 64,
            max_num_batched_tokens: 512,
            max_model_len: None,
            block_size: engine.block_size,
            kernel_block_size: None,
            enable_prefix_caching: engine.enable_prefix_caching,
            kv_cache_dtype: KvCacheDtypeArg::Auto,
            num_gpu_blocks_override: None,
            memory_fraction: 0.4,
            gpu_memory_utilization: 0.9,
            speculative_method: None,
            num_speculative_tokens: None,
            prompt_lookup_min: None,
            prompt_lookup_max: None,
            max_num_splits: engine.max_num_splits,
            batch_invariant: false,
            default_share: engine.default_share,
            max_tenant_segments: engine.max_tenant_segments,
            threads: None,
            nvtx: false,
        }
    }
}

impl EngineSettings {
    /// Speculation, as the field reads its settings: n-grams of one length, 5 if it is not given, where only one of two is.
    fn speculative(&self) -> Result<Option<SpeculativeConfig>, String> {
        let (min, max) = (self.prompt_lookup_min, self.prompt_lookup_max);
        let Some(method) = &self.speculative_method else {
            let given = [
                ("num_speculative_tokens", self.num_speculative_tokens),
                ("prompt_lookup_min", min),
                ("prompt_lookup_max", max),
            ];
            let alone = given.iter().find(|(_, value)| value.is_some());
            return match alone {
                None => Ok(None),
                Some((name, _)) => Err(format!(
                    "{name} is given without speculative_method; name the method, ngram or ngram_gpu, or leave it out"
                )),
            };
        };
        let method = SpeculativeMethod::of(method).ok_or_else(|| {
            format!("speculative_method is {method}; give ngram or ngram_gpu, or leave it out")
        })?;
        let num_speculative_tokens = self.num_speculative_tokens.ok_or_else(|| {
            format!(
                "num_speculative_tokens is not given, and speculative_method is {}; give 1 to 16",
                method.name()
            )
        })?;
        const USUAL: usize = 5;
        Ok(Some(SpeculativeConfig {
            method,
            num_speculative_tokens,
            prompt_lookup_min: min.or(max).unwrap_or(USUAL),
            prompt_lookup_max: max.or(min).unwrap_or(USUAL),
        }))
    }
}

/// `[builders.BACKEND]`, and a tenant's own builder.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct BuilderSettings {
    /// Where the component is; none: what is active, else the embedded one.
    pub component: Option<String>,
    /// Its signature's file; none: what lies beside it.
    pub signature: Option<PathBuf>,
    /// What it may leave out.
    pub grant: Grant,
    /// Options of its own; part of its version.
    pub options: BTreeMap<String, String>,
    /// What is done about its faults.
    pub policy: FaultPolicy,
}

impl BuilderSettings {
    /// The options as a builder is given them.
    pub fn options(&self) -> Vec<(String, String)> {
        let options = self.options.iter();
        options.map(|(k, v)| (k.clone(), v.clone())).collect()
    }

    /// Brings the component, if one is named: as it is named, and its bytes.
    ///
    /// # Errors
    /// It cannot be brought.
    pub fn fetch(&self) -> Result<Option<(String, Fetched)>, Failure> {
        let name = match &self.component {
            Some(name) if name != "default" => name,
            _ => return Ok(None),
        };
        let source: Source = name.parse().map_err(Failure::of(Exit::Usage))?;
        let fetched = provenance::fetch(&source, self.signature.as_deref(), COMPONENT_BYTES_MAX)?;
        Ok(Some((name.clone(), fetched)))
    }
}

/// `[tenants.NAME]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TenantSettings {
    /// Its weight.
    pub share: f64,
    /// Its own builder, if that has a component.
    #[serde(flatten)]
    pub builder: BuilderSettings,
    /// Bounds on its calls.
    pub limits: CallSettings,
}

impl Default for TenantSettings {
    fn default() -> Self {
        TenantSettings {
            share: 1.0,
            builder: BuilderSettings::default(),
            limits: CallSettings::default(),
        }
    }
}

/// `[tenants.NAME.limits]`: what is not given is as in `[limits]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs, reason = "the table of settings says what each is")]
pub struct CallSettings {
    pub fuel_per_call: Option<u64>,
    pub fuel_per_row: Option<u64>,
    pub fuel_per_token: Option<u64>,
    pub fuel_fixed: Option<u64>,
    pub max_memory_bytes: Option<usize>,
    pub max_lifted_bytes: Option<usize>,
}

impl CallSettings {
    fn calls(&self, limits: &Limits) -> CallLimits {
        let all = limits.calls();
        CallLimits {
            fuel_per_call: self.fuel_per_call.unwrap_or(all.fuel_per_call),
            fuel_per_row: self.fuel_per_row.unwrap_or(all.fuel_per_row),
            fuel_per_token: self.fuel_per_token.unwrap_or(all.fuel_per_token),
            fuel_fixed: self.fuel_fixed.unwrap_or(all.fuel_fixed),
            max_memory_bytes: self.max_memory_bytes.unwrap_or(all.max_memory_bytes),
            max_lifted_bytes: self.max_lifted_bytes.unwrap_or(all.max_lifted_bytes),
        }
    }
}

/// `[recording]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs, reason = "the table of settings says what each is")]
pub struct RecordingSettings {
    pub dir: Option<PathBuf>,
    pub max_bytes: u64,
    pub segment_bytes: u64,
    pub queue: usize,
    pub max_step_bytes: usize,
}

impl Default for RecordingSettings {
    fn default() -> Self {
        let options = RecorderOptions::default();
        RecordingSettings {
            dir: None,
            max_bytes: options.max_bytes,
            segment_bytes: options.segment_bytes,
            queue: options.queue,
            max_step_bytes: options.max_step_bytes,
        }
    }
}

impl RecordingSettings {
    /// As a recorder takes them.
    pub fn options(&self) -> RecorderOptions {
        RecorderOptions {
            max_bytes: self.max_bytes,
            segment_bytes: self.segment_bytes,
            queue: self.queue,
            max_step_bytes: self.max_step_bytes,
            ..RecorderOptions::default()
        }
    }
}

/// `[reload]`: a plan, as it is written.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ReloadSettings {
    /// Steps in shadow.
    pub shadow_steps: u32,
    /// Without a share and without tenants there is none.
    pub canary: Canary,
    /// What a candidate must keep to.
    pub gates: Gates,
}

impl ReloadSettings {
    /// The stages that a version goes through where nobody says others.
    pub fn plan(&self) -> ReloadPlan {
        let Canary {
            per_mille, tenants, ..
        } = &self.canary;
        ReloadPlan {
            shadow_steps: self.shadow_steps,
            canary: (*per_mille > 0 || !tenants.is_empty()).then(|| self.canary.clone()),
            gates: self.gates,
        }
    }
}

/// `[faults]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FaultSettings {
    /// The fault directory; none: faults are not kept.
    pub dir: Option<PathBuf>,
    /// What it keeps.
    #[serde(flatten)]
    pub limits: BundleLimits,
}

/// `[admin]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdminSettings {
    /// The admin socket; `none`: there is none.
    pub socket: Option<PathBuf>,
    /// The admin page's address; none: there is none.
    pub listen: Option<SocketAddr>,
    /// The file of the token that the admin page asks for.
    pub token_file: Option<PathBuf>,
    /// Components by content, and what is active.
    pub state_dir: Option<PathBuf>,
    /// Compiled code.
    pub cache_dir: Option<PathBuf>,
}

/// `[server]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs, reason = "the table of settings says what each is")]
pub struct ServerSettings {
    pub listen: String,
    pub served_model_name: Option<String>,
    pub chat_template: Option<PathBuf>,
    pub api_keys: Option<PathBuf>,
    pub max_waiting_requests: usize,
    pub request_timeout: Duration,
    pub header_timeout: Duration,
    pub drain_timeout: Duration,
    pub max_body_bytes: usize,
    pub max_connections: usize,
}

impl Default for ServerSettings {
    fn default() -> Self {
        let options = Options::default();
        ServerSettings {
            listen: "127.0.0.1:8000".to_owned(),
            served_model_name: None,
            chat_template: None,
            api_keys: None,
            max_waiting_requests: options.max_waiting_requests,
            request_timeout: options.request_timeout,
            header_timeout: options.header_timeout,
            drain_timeout: options.drain_timeout,
            max_body_bytes: options.max_body_bytes,
            max_connections: options.max_connections,
        }
    }
}

impl ServerSettings {
    /// As a server takes them, without the keys.
    pub fn options(&self) -> Options {
        Options {
            max_waiting_requests: self.max_waiting_requests,
            request_timeout: self.request_timeout,
            header_timeout: self.header_timeout,
            drain_timeout: self.drain_timeout,
            max_body_bytes: self.max_body_bytes,
            max_connections: self.max_connections,
            ..Options::default()
        }
    }
}

impl Config {
    /// What is configured for the builder of `backend`.
    pub fn builder(&self, backend: &str) -> BuilderSettings {
        self.builders.get(backend).cloned().unwrap_or_default()
    }

    /// What is configured for a slot: that of `backend`, or of a tenant that has its own.
    pub fn slot(&self, backend: &str, tenant: Option<&TenantName>) -> BuilderSettings {
        match tenant {
            None => self.builder(backend),
            Some(name) => {
                let tenant = self.tenants.get(name.as_str());
                tenant
                    .map(|tenant| tenant.builder.clone())
                    .unwrap_or_default()
            }
        }
    }

    /// The tenants as the engine takes them.
    fn tenants(&self) -> Result<Vec<TenantConfig>, String> {
        let tenant = |(name, tenant): (&String, &TenantSettings)| {
            let builder = &tenant.builder;
            Ok(TenantConfig {
                name: name
                    .parse()
                    .map_err(|error: TenantNameError| error.to_string())?,
                share: tenant.share,
                slot: builder.component.is_some().then(|| SlotConfig {
                    limits: Some(tenant.limits.calls(&self.limits)),
                    grant: builder.grant,
                    policy: builder.policy,
                    options: builder.options(),
                }),
            })
        };
        self.tenants.iter().map(tenant).collect()
    }

    /// The engine's settings, without the builder's options and grant: which backend it will be may not be known yet.
    pub fn engine_config(&self) -> Result<EngineConfig, String> {
        let engine = &self.engine;
        let defaults = EngineConfig::default();
        let (device, graphs, fraction) = match engine.device {
            DeviceArg::Cpu => (
                DeviceChoice::Cpu,
                CudagraphMode::None,
                engine.memory_fraction,
            ),
            DeviceArg::Cuda(ordinal) => (
                DeviceChoice::Cuda {
                    ordinal: ordinal as usize,
                },
                CudagraphMode::FullAndPiecewise,
                engine.gpu_memory_utilization,
            ),
        };
        Ok(EngineConfig {
            device,
            model_dtype: match engine.dtype {
                DtypeArg::Auto => ModelDtype::Auto,
                DtypeArg::Bfloat16 => ModelDtype::Bfloat16,
                DtypeArg::Float16 => ModelDtype::Float16,
                DtypeArg::Float32 => ModelDtype::Float32,
            },
            attention_backend: names::attention_backend(&engine.attention_backend)?,
            cudagraph_mode: match &engine.cudagraph_mode {
                Some(mode) => names::mode(mode)?,
                None => graphs,
            },
            cudagraph_capture_sizes: engine.cudagraph_capture_sizes.clone(),
            async_scheduling: engine.async_scheduling,
            max_num_seqs: engine.max_num_seqs,
            max_num_batched_tokens: engine.max_num_batched_tokens,
            max_model_len: engine.max_model_len,
            block_size: engine.block_size,
            kernel_block_size: engine.kernel_block_size,
            enable_prefix_caching: engine.enable_prefix_caching,
            kv_cache_dtype: match engine.kv_cache_dtype {
                KvCacheDtypeArg::Auto => KvCacheDtype::Auto,
                KvCacheDtypeArg::Float32 => KvCacheDtype::Float32,
                KvCacheDtypeArg::Bfloat16 => KvCacheDtype::Bfloat16,
                KvCacheDtypeArg::Float16 => KvCacheDtype::Float16,
                KvCacheDtypeArg::Fp8 => KvCacheDtype::Fp8E4m3,
                KvCacheDtypeArg::Fp8DsMla => KvCacheDtype::Fp8DsMla,
            },
            cache_size: match engine.num_gpu_blocks_override {
                Some(blocks) => CacheSize::Blocks(blocks),
                None => CacheSize::MemoryFraction(fraction),
            },
            speculative: engine.speculative()?,
            max_num_splits: engine.max_num_splits,
            batch_invariant: engine.batch_invariant,
            tenants: self.tenants()?,
            default_share: engine.default_share,
            max_tenant_segments: engine.max_tenant_segments,
            num_workers: engine.threads.map_or(defaults.num_workers, u32::from),
            ..defaults
        })
    }

    /// What is wrong with numbers that each may have the value that they have: the setting (or its table), and what to do.
    fn problems(&self) -> Vec<(Key, String)> {
        let below = |table: Key, problems: Vec<String>| {
            let key = |problem: &str| {
                let name = problem.split([' ', '.']).next().unwrap_or_default();
                table.child(name)
            };
            let found: Vec<(Key, String)> = problems
                .into_iter()
                .map(|problem| (key(&problem), problem))
                .collect();
            found
        };
        let mut found = below(Key::of("limits"), self.limits.problems());
        for (backend, builder) in &self.builders {
            let table = Key::of("builders").child(backend).child("policy");
            found.extend(below(table, builder.policy.problems()));
        }
        for (name, tenant) in &self.tenants {
            let table = Key::of("tenants").child(name);
            let policy = tenant.builder.policy.problems();
            found.extend(below(table.child("policy"), policy));
            let calls = tenant.limits.calls(&self.limits).problems(&self.limits);
            found.extend(below(table.child("limits"), calls));
            let plain = TenantSettings {
                share: tenant.share,
                ..TenantSettings::default()
            };
            if tenant.builder.component.is_none() && *tenant != plain {
                let problem = "component is not given, so nothing but the share has an effect; give one, or \"default\"";
                found.extend(below(table, vec![problem.to_owned()]));
            }
        }
        if self.recording.segment_bytes > self.recording.max_bytes / 8 {
            let problem = format!(
                "segment_bytes is {}, more than an eighth of max_bytes {}; lower it, or raise max_bytes",
                self.recording.segment_bytes, self.recording.max_bytes
            );
            found.extend(below(Key::of("recording"), vec![problem]));
        }
        let plan = self.reload.plan().problem();
        found.extend(below(Key::of("reload"), plan.into_iter().collect()));
        let ProvenancePolicy {
            require,
            keys,
            key_files,
            allowed_hashes,
            allowed_hashes_files,
        } = &self.provenance;
        let signed = !(keys.is_empty() && key_files.is_empty());
        let listed = !(allowed_hashes.is_empty() && allowed_hashes_files.is_empty());
        let lacking = match require {
            Require::Signature | Require::Both if !signed => "keys or key_files",
            Require::AllowList | Require::Both if !listed => {
                "allowed_hashes or allowed_hashes_files"
            }
            Require::Either if !signed && !listed => "keys or hashes",
            _ => "",
        };
        if !lacking.is_empty() {
            let problem = format!("require would admit nothing: give {lacking} as well");
            found.extend(below(Key::of("provenance"), vec![problem]));
        }
        if let AdminSettings {
            listen: Some(address),
            token_file: None,
            ..
        } = self.admin
            && !address.ip().is_loopback()
        {
            let problem = format!(
                "listen is {address}, which others can reach, and there is no token_file; give one, or an address as 127.0.0.1:9090"
            );
            found.extend(below(Key::of("admin"), vec![problem]));
        }
        found.extend(below(Key::of("faults"), self.faults.limits.problems()));
        let engine = match self.engine_config() {
            Ok(engine) => engine.check(usize::MAX).err(),
            // Each name was looked at when it was read.
            Err(problem) => Some(EngineError::Refused(problem)),
        };
        let blocks = self.engine.kernel_block_size.unwrap_or(1).max(1);
        let engine = engine.map(|error| error.to_string()).or_else(|| {
            (!self.engine.block_size.is_multiple_of(blocks)).then(|| {
                format!(
                    "kernel_block_size is {blocks}, which does not divide block_size {}; give a divisor of it",
                    self.engine.block_size
                )
            })
        });
        found.extend(below(Key::of("engine"), engine.into_iter().collect()));
        found
    }
}
