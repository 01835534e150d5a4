//! The flags of `timetable generate` and `serve` as settings: the layer over the file.
//!
//! Must never know: what a flag's value means beyond its name.

use serde_json::{Value, json};

use super::effective::{Layer, default_of, setting};
use super::kind::Kind;
use super::{Key, names};
use crate::cli::{AttentionArgs, HostArgs, SchedulingArgs, ServerArgs, SettingArgs, TrustArgs};
use crate::exit::{Exit, Failure};
use crate::provenance;

/// What a host was started with.
#[derive(Clone, Debug)]
pub struct Flags {
    /// What every host has.
    pub settings: SettingArgs,
    /// What `serve` has as well.
    pub server: Option<ServerArgs>,
}

impl Flags {
    /// Of a host without a server.
    pub fn of(settings: &SettingArgs) -> Self {
        Flags {
            settings: settings.clone(),
            server: None,
        }
    }

    /// The settings that they give, over those of `file`.
    ///
    /// # Errors
    /// A name that there is not.
    pub fn layer(&self, file: Option<&Layer>) -> Result<Layer, Failure> {
        let mut layer = flags(&self.settings, file)?;
        if let Some(server) = &self.server {
            let ServerArgs {
                listen,
                served_model_name,
                chat_template,
                api_keys,
            } = server;
            let given = [
                ("server.listen", json!(listen)),
                ("server.served_model_name", json!(served_model_name)),
                ("server.chat_template", json!(chat_template)),
                ("server.api_keys", json!(api_keys)),
            ];
            let given = given.into_iter().filter(|(_, value)| !value.is_null());
            layer.extend(given.map(|(key, value)| (Key::of(key), value)));
            check(&layer)?;
        }
        Ok(layer)
    }
}

/// The settings that the flags give, over those of `file`: flags about the builder are about that of the backend in force.
///
/// # Errors
/// A name that there is not.
fn flags(arguments: &SettingArgs, file: Option<&Layer>) -> Result<Layer, Failure> {
    let SettingArgs {
        config: _,
        device,
        dtype,
        weights,
        attention,
        scheduling,
        host,
    } = arguments;
    let AttentionArgs {
        attention_backend,
        builder,
        builder_signature,
        builder_option,
        kv_cache_dtype,
        cudagraph_mode,
        cudagraph_capture_sizes,
    } = attention;
    let SchedulingArgs {
        block_size,
        max_num_seqs,
        max_num_batched_tokens,
        max_model_len,
        num_gpu_blocks_override,
        memory_fraction,
        gpu_memory_utilization,
        async_scheduling,
        no_async_scheduling,
        speculative_method,
        num_speculative_tokens,
        prompt_lookup_min,
        prompt_lookup_max,
        batch_invariant,
        no_enable_prefix_caching,
        threads,
    } = scheduling;
    let HostArgs {
        admin,
        admin_listen,
        admin_token_file,
        state_dir,
        cache_dir,
        fault_dir,
        record,
        record_max_mib,
        on_builder_fault,
        nvtx,
        trust,
    } = host;
    let on = |given: bool, value: bool| given.then_some(value);
    let either = on(*async_scheduling, true).or(on(*no_async_scheduling, false));
    let given = [
        ("engine.device", json!(device)),
        ("engine.dtype", json!(dtype)),
        ("engine.weights", json!(weights)),
        ("engine.attention_backend", json!(attention_backend)),
        ("engine.kv_cache_dtype", json!(kv_cache_dtype)),
        ("engine.cudagraph_mode", json!(cudagraph_mode)),
        (
            "engine.cudagraph_capture_sizes",
            json!(cudagraph_capture_sizes),
        ),
        ("engine.block_size", json!(block_size)),
        ("engine.max_num_seqs", json!(max_num_seqs)),
        (
            "engine.max_num_batched_tokens",
            json!(max_num_batched_tokens),
        ),
        ("engine.max_model_len", json!(max_model_len)),
        (
            "engine.num_gpu_blocks_override",
            json!(num_gpu_blocks_override),
        ),
        ("engine.memory_fraction", json!(memory_fraction)),
        (
            "engine.gpu_memory_utilization",
            json!(gpu_memory_utilization),
        ),
        ("engine.async_scheduling", json!(either)),
        ("engine.speculative_method", json!(speculative_method)),
        (
            "engine.num_speculative_tokens",
            json!(num_speculative_tokens),
        ),
        ("engine.prompt_lookup_min", json!(prompt_lookup_min)),
        ("engine.prompt_lookup_max", json!(prompt_lookup_max)),
        ("engine.batch_invariant", json!(on(*batch_invariant, true))),
        (
            "engine.enable_prefix_caching",
            json!(on(*no_enable_prefix_caching, false)),
        ),
        ("engine.threads", json!(threads)),
        ("engine.nvtx", json!(on(*nvtx, true))),
        ("faults.dir", json!(fault_dir)),
        ("recording.dir", json!(record)),
        (
            "recording.max_bytes",
            json!(record_max_mib.map(|mib| mib.saturating_mul(1 << 20))),
        ),
        ("admin.socket", json!(admin)),
        ("admin.listen", json!(admin_listen)),
        ("admin.token_file", json!(admin_token_file)),
        ("admin.state_dir", json!(state_dir)),
        ("admin.cache_dir", json!(cache_dir)),
    ];
    let mut layer: Layer = given
        .into_iter()
        .filter(|(_, value)| !value.is_null())
        .map(|(key, value)| (Key::of(key), value))
        .collect();
    for backend in builders(&layer, file)? {
        let table = Key(vec!["builders".to_owned(), backend]);
        for (option, value) in builder_option {
            layer.insert(table.child("options").child(option), json!(value));
        }
        if let Some(policy) = on_builder_fault {
            layer.insert(table.child("policy").child("on_fault"), json!(policy));
        }
    }
    for (backend, path) in builder {
        let table = Key(vec!["builders".to_owned(), backend.to_ascii_uppercase()]);
        layer.insert(table.child("component"), json!(path));
        // The file's signature, if it names one, is of another component.
        layer.insert(table.child("signature"), json!(builder_signature));
    }
    // A flag about provenance states the whole policy.
    let TrustArgs {
        trusted_key,
        allow_hashes,
        require_signature: _,
    } = trust;
    if !(trusted_key.is_empty() && allow_hashes.is_empty()) {
        let policy = json!(provenance::policy(trust));
        for (name, value) in policy.as_object().into_iter().flatten() {
            layer.insert(Key::of("provenance").child(name), value.clone());
        }
    }
    check(&layer)?;
    Ok(layer)
}

/// The backends that flags about the builder mean: that in force, or each that has a builder where the device chooses.
fn builders(flags: &Layer, file: Option<&Layer>) -> Result<Vec<String>, Failure> {
    let key = Key::of("engine.attention_backend");
    let backend = flags
        .get(&key)
        .or_else(|| file?.get(&key))
        .cloned()
        .or_else(|| setting(&key).map(default_of));
    let named =
        names::attention_backend(backend.as_ref().and_then(Value::as_str).unwrap_or("auto"))
            .map_err(|problem| {
                Failure::new(Exit::Usage, format!("--attention-backend {problem}"))
            })?;
    Ok(match named {
        Some(backend) => vec![backend],
        None => names::backends().into_iter().map(str::to_owned).collect(),
    })
}

/// Names are checked here; numbers with everything else, or by whoever uses them.
fn check(layer: &Layer) -> Result<(), Failure> {
    for (key, value) in layer {
        if let Some(setting) = setting(key)
            && let (Kind::Text(_, check) | Kind::Path(_, check), Some(text)) =
                (setting.kind, value.as_str())
            && let Err(problem) = check(text)
        {
            let flag = setting.flag.unwrap_or("?");
            return Err(Failure::new(Exit::Usage, format!("{flag} {problem}")));
        }
    }
    Ok(())
}
