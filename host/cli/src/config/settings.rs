//! The table of settings: what each is, what it may be, what it costs, and whether it changes while a host runs. The file's
//! keys, the file of defaults and docs/configuration.md are made of it; defaults are the code's own.
//!
//! Must never know: how a file is read, or what is done with a value.

use super::kind::Kind;
use super::{Key, names};

/// One setting.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Its tables and its name, with dots; `*` stands for a name that the operator chooses.
    pub key: &'static str,
    /// What its value may be.
    pub kind: Kind,
    /// What it does.
    pub what: &'static str,
    /// What it costs to have, or to raise.
    pub cost: &'static str,
    /// Does `timetable config apply` change it while the host runs?
    pub live: bool,
    /// The flag of `timetable generate` that says the same, if there is one.
    pub flag: Option<&'static str>,
    /// Where there is no value by default: what that means, and a value for the file of defaults.
    pub unset: Option<(&'static str, &'static str)>,
}

impl Setting {
    const fn flag(mut self, flag: &'static str) -> Setting {
        self.flag = Some(flag);
        self
    }

    const fn unset(mut self, meaning: &'static str, example: &'static str) -> Setting {
        self.unset = Some((meaning, example));
        self
    }

    const fn live(mut self) -> Setting {
        self.live = true;
        self
    }

    /// The parts of its key.
    pub fn parts(&self) -> impl Iterator<Item = &'static str> {
        self.key.split('.')
    }

    /// Its table, `builders.*.policy`, and its own name.
    pub fn split(&self) -> (&'static str, &'static str) {
        self.key.rsplit_once('.').unwrap_or(("", self.key))
    }

    /// Is it the setting at `key`?
    pub fn is_at(&self, key: &Key) -> bool {
        self.parts().count() == key.len() && self.begins_with(key)
    }

    /// Does it stand at `key`, or somewhere below?
    pub fn begins_with(&self, key: &Key) -> bool {
        let mut own = self.parts();
        key.parts()
            .all(|part| own.next().is_some_and(|own| own == "*" || own == part))
    }
}

const fn setting(key: &'static str, kind: Kind, what: &'static str, cost: &'static str) -> Setting {
    Setting {
        key,
        kind,
        what,
        cost,
        live: false,
        flag: None,
        unset: None,
    }
}

/// What a table is for, in the order of the file.
pub static TABLES: &[(&str, &str)] = &[
    (
        "engine",
        "The model's device, its steps and its KV cache. Names are the field's.",
    ),
    (
        "limits",
        "Bounds on every component. They belong to the sandbox, so they are one for all builders.",
    ),
    (
        "builders.*",
        "The builder of a backend: FLASH_ATTN, FLASHINFER. One table each.",
    ),
    (
        "builders.*.options",
        "Options of the builder's own, any names. They are part of its version: changing one makes a new version.",
    ),
    (
        "builders.*.policy",
        "What is done about this builder's faults. All but the build budget is counted in steps.",
    ),
    (
        "builders.*.policy.build_budget",
        "Measured time of its calls: a balance that starts at `reserve`, gains `per_step` with each step, and pays each call.",
    ),
    (
        "reload",
        "How a new version gets into service where `timetable reload` does not say it, and for `timetable config apply`.",
    ),
    (
        "reload.canary",
        "What a candidate serves before it serves everything. Without a share and without tenants there is no canary.",
    ),
    (
        "reload.gates",
        "What a candidate must keep to in shadow and canary; one that fails a gate is withdrawn, and what served goes on.",
    ),
    (
        "provenance",
        "Which components may run. Any flag about it states the whole policy, and this table is not used.",
    ),
    (
        "faults",
        "Fault bundles: a file for each fault, which `timetable replay-bundle` makes happen again.",
    ),
    ("admin", "The host's own places."),
];

const B: u64 = 1;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const MS: u64 = 1_000_000;
const HOUR: u64 = 3_600_000 * MS;

/// Rows, tokens, blocks: any number of them.
const fn number(unit: &'static str) -> Kind {
    Kind::Count {
        unit,
        min: 1,
        max: u32::MAX as u64,
    }
}

/// Every setting, table by table, in the order of the file.
pub static SETTINGS: &[Setting] = &[
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
        Kind::Text("auto, FLASH_ATTN, FLASHINFER", names::backend),
        "The attention backend of every layer. A name never falls back to another; auto: the device's first that serves the model.",
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
        Kind::OneOf(&["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3"]),
        "Element type of the KV cache. auto: the model's. float16 and fp8 on a GPU only.",
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
        Kind::Size(KIB, super::COMPONENT_BYTES_MAX),
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
    setting(
        "builders.*.component",
        Kind::Path("a path, or oci://REGISTRY/REPOSITORY@sha256:…", names::source),
        "The component that serves the backend. It comes before what the state directory says is active.",
        "Compiling it, off the step thread; kept in admin.cache_dir.",
    )
    .flag("--builder")
    .unset(
        "what the state directory says is active, else the component in the binary",
        "\"builders/mine.wasm\"",
    )
    .live(),
    setting(
        "builders.*.signature",
        Kind::path("the file of a detached signature"),
        "The component's signature, for [provenance].",
        "None.",
    )
    .flag("--builder-signature")
    .unset("PATH.minisig or PATH.sig beside the component, if there is one", "\"builders/mine.wasm.minisig\"")
    .live(),
    setting(
        "builders.*.options.*",
        Kind::text("the option's value"),
        "An option of the builder's own.",
        "A new version: constructed and tried off the step thread.",
    )
    .flag("--builder-option")
    .unset("none", "\"value\"")
    .live(),
    setting(
        "builders.*.policy.on_fault",
        Kind::OneOf(&["fallback", "fail-step", "fail-closed"]),
        "What becomes of the step: fallback, the plain builder builds it; fail-step, its requests fail; fail-closed, so do all later ones until a reload or a rollback.",
        "fallback: a plain build. The others: requests.",
    )
    .flag("--on-builder-fault")
    .live(),
    setting(
        "builders.*.policy.quarantine_faults",
        Kind::Count {
            unit: "faults",
            min: 1,
            max: 1000,
        },
        "Faults within the window after which the builder is not called until a reload or a rollback. Non-determinism and an overspent budget quarantine at once.",
        "Each costs a faulty call, a recovery (about 50 µs, off the step thread) and a plain build.",
    )
    .live(),
    setting(
        "builders.*.policy.window_steps",
        number("steps"),
        "The window; at least quarantine_faults.",
        "None.",
    )
    .live(),
    setting(
        "builders.*.policy.max_backoff_steps",
        Kind::count("steps", 32),
        "The longest back-off: after the n-th fault 2^(n−1) − 1 steps are built plainly. 0: none.",
        "None.",
    )
    .live(),
    setting(
        "builders.*.policy.return_to_last_good",
        Kind::Switch,
        "Once quarantined, does the version before take over by itself?",
        "None.",
    )
    .live(),
    setting(
        "builders.*.policy.rerun_every",
        Kind::count("steps", 32),
        "Every that many steps one is built again by a fresh instance and compared bit for bit. 0: never.",
        "A copy of input and output, a few microseconds, in these steps.",
    )
    .live(),
    setting(
        "builders.*.policy.build_budget.per_step",
        Kind::Time(1, 10_000 * MS),
        "What its calls may take for each step, in the long run. The largest reference build takes about 40us.",
        "Raised: a slow builder delays every step by as much.",
    )
    .live(),
    setting(
        "builders.*.policy.build_budget.reserve",
        Kind::Time(MS, HOUR),
        "What they may take beyond that, once, so that a busy machine is not charged to a healthy builder.",
        "Raised: a builder that became slow is found later.",
    )
    .live(),
    setting(
        "reload.shadow_steps",
        Kind::count("steps", 32),
        "Live steps that it is shown, and what it builds compared with what served. 0: no shadow.",
        "A copy of each step's input and output, about 20 µs for 256 decodes; two builds on another thread.",
    )
    .live(),
    setting(
        "reload.canary.per_mille",
        Kind::Count {
            unit: "steps of a thousand",
            min: 0,
            max: 1000,
        },
        "The share of the steps that it serves, evenly spread. 0: none.",
        "None.",
    )
    .live(),
    setting(
        "reload.canary.tenants",
        Kind::Texts("names of tenants", names::tenant),
        "Instead of a share: the tenants whose rows it builds.",
        "A segment of its own for them.",
    )
    .unset("none", "[\"acme\"]")
    .live(),
    setting(
        "reload.canary.steps",
        number("steps"),
        "How many steps it must build.",
        "None.",
    )
    .live(),
    setting(
        "reload.gates.max_build_ratio",
        Kind::Ratio,
        "Median build time over that of the version in service; less than 5 µs more is never too much. A large number is no gate.",
        "None.",
    )
    .live(),
    setting(
        "reload.gates.max_extra_build_us",
        Kind::count("microseconds", 32),
        "Median build time beyond that of the version in service.",
        "None.",
    )
    .live(),
    setting(
        "reload.gates.max_fuel_ratio",
        Kind::Ratio,
        "Fuel of all shadow steps over that of the version in service for the same steps. A large number is no gate.",
        "None.",
    )
    .live(),
    setting(
        "reload.gates.max_differences",
        Kind::count("steps", 32),
        "Shadow steps whose metadata mean something else than what was served.",
        "None.",
    )
    .live(),
    setting(
        "reload.gates.max_faults",
        Kind::count("faults", 32),
        "Faults in shadow and canary together.",
        "None.",
    )
    .live(),
    setting(
        "reload.gates.min_observed_per_mille",
        Kind::Count {
            unit: "steps of a thousand",
            min: 0,
            max: 1000,
        },
        "Shadow steps that must have been compared: not dropped while the comparison was behind, not too large, not declined.",
        "None.",
    )
    .live(),
    setting(
        "provenance.require",
        Kind::OneOf(&["none", "signature", "allow-list", "either", "both"]),
        "What must vouch for a component before it is loaded, or rolled back to. Those in the binary are always admitted; what serves already goes on.",
        "A SHA-256 of the component and a verification for each key, off the step thread.",
    )
    .flag("--require-signature")
    .live(),
    setting(
        "provenance.keys",
        Kind::Texts(
            "minisign's RW…, or ed25519 as PEM, base64 or hexadecimal",
            names::key,
        ),
        "Trusted public keys.",
        "As provenance.require.",
    )
    .unset("none", "[\"RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3\"]")
    .live(),
    setting(
        "provenance.key_files",
        Kind::Paths("files with one public key each"),
        "Trusted public keys in files of at most 16 KiB, read at the start and by `config apply`.",
        "As provenance.require.",
    )
    .flag("--trusted-key")
    .unset("none", "[\"trusted.pub\"]")
    .live(),
    setting(
        "provenance.allowed_hashes",
        Kind::Texts("SHA-256 as 64 hexadecimal digits", names::hash),
        "Components that may run, by content.",
        "32 bytes each.",
    )
    .unset("none", "[\"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\"]")
    .live(),
    setting(
        "provenance.allowed_hashes_files",
        Kind::Paths("files as sha256sum prints them"),
        "The same in files of at most 16 MiB, read at the start and by `config apply`.",
        "32 bytes for each line.",
    )
    .flag("--allow-hashes")
    .unset("none", "[\"allowed.sha256\"]")
    .live(),
    setting(
        "faults.dir",
        Kind::path("a directory, mode 0700"),
        "Keep faults as bundles in this directory.",
        "Disk, as bounded below; files are written off the step thread.",
    )
    .flag("--fault-dir")
    .unset("faults are not kept", "\"faults\"")
    .live(),
    setting(
        "faults.max_files",
        Kind::Count {
            unit: "files",
            min: 1,
            max: 1_000_000,
        },
        "Files in the directory; the oldest go.",
        "Disk.",
    )
    .live(),
    setting(
        "faults.max_bytes",
        Kind::Size(KIB, 1 << 50),
        "Bytes of all files; the oldest go.",
        "Disk.",
    )
    .live(),
    setting(
        "faults.max_bundle_bytes",
        Kind::Size(KIB, timetable_sandbox::MAX_BUNDLE_BYTES),
        "Bytes of one file; the step's tensors are left out first, then the file is not written. At most max_bytes.",
        "Disk, and as much memory while it is written.",
    )
    .live(),
    setting(
        "faults.max_alike",
        Kind::count("files", 32),
        "Bundles of one version and kind of fault; more tell nothing new. Counted anew when a setting of this table changes.",
        "Disk.",
    )
    .live(),
    setting(
        "faults.max_step_bytes",
        Kind::Size(0, GIB),
        "Bytes of a step's tensors that are kept where the verifier had no part in the fault.",
        "A copy on the step thread, about 20 µs for 256KiB.",
    )
    .live(),
    setting(
        "faults.max_refused_step_bytes",
        Kind::Size(0, GIB),
        "The same where the verifier refused the result, and they are needed to see why.",
        "A copy on the step thread, about 2 ms for 16MiB.",
    )
    .live(),
    setting(
        "admin.socket",
        Kind::path("a path, or none"),
        "The admin socket, mode 0600; \"none\" opens none.",
        "A thread that sleeps.",
    )
    .flag("--admin")
    .unset("admin.sock under the runtime directory", "\"/run/timetable/admin.sock\""),
    setting(
        "admin.state_dir",
        Kind::path("a directory, mode 0700"),
        "Keep components by content, and which are active; what is active survives a restart.",
        "Disk: every component that was reloaded.",
    )
    .flag("--state-dir")
    .unset("a restart begins with the configured components", "\"state\""),
    setting(
        "admin.cache_dir",
        Kind::path("a directory, mode 0700"),
        "Keep compiled components, so that a known one is not compiled again.",
        "Disk, for each component and version of this program.",
    )
    .flag("--cache-dir")
    .unset("components are compiled when they are loaded", "\"cache\""),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory;
    use serde_json::Value;

    use super::super::effective::{default_of, sample};
    use super::*;

    /// The keys of a tree of settings; a value that is a setting's own is no table.
    fn leaves(value: &Value, above: &str, found: &mut BTreeSet<String>) {
        for (name, value) in value.as_object().unwrap() {
            let key = if above.is_empty() {
                name.clone()
            } else {
                format!("{above}.{name}")
            };
            if value.is_object() && !SETTINGS.iter().any(|setting| setting.key == key) {
                leaves(value, &key, found);
            } else {
                found.insert(key);
            }
        }
    }

    #[test]
    fn the_table_has_every_field_of_the_configuration_and_no_other() {
        let mut fields = BTreeSet::new();
        leaves(&sample(), "", &mut fields);
        let rows: BTreeSet<String> = SETTINGS.iter().map(|s| s.key.to_owned()).collect();
        assert_eq!(rows.len(), SETTINGS.len(), "a key twice");
        assert_eq!(rows, fields);
        let tables: BTreeSet<&str> = SETTINGS.iter().map(|s| s.split().0).collect();
        assert_eq!(tables, TABLES.iter().map(|(table, _)| *table).collect());
    }

    #[test]
    fn every_default_is_one_that_its_kind_reads_and_every_row_is_documented() {
        for setting in SETTINGS {
            let key = setting.key;
            let value = default_of(setting);
            let none = value.is_null() || value == serde_json::json!([]);
            assert_eq!(none, setting.unset.is_some(), "{key}");
            let written = match setting.unset {
                Some((_, example)) => example.to_owned(),
                None => setting.kind.write(&value),
            };
            let text = format!("x = {written}");
            let read = toml::de::DeTable::parse(&text).unwrap();
            let read = setting.kind.read(read.get_ref()["x"].get_ref()).unwrap();
            assert!(none || read == value, "{key}: {value}, {read}");
            for text in [setting.what, setting.cost] {
                assert!(text.ends_with('.') || text.ends_with('?'), "{key}: {text}");
            }
        }
    }

    #[test]
    fn the_help_of_a_flag_says_the_default_of_its_setting() {
        let command = crate::cli::Cli::command();
        let generate = command.find_subcommand("generate").unwrap();
        for setting in SETTINGS {
            let Some(flag) = setting.flag else { continue };
            let argument = generate
                .get_arguments()
                .find(|argument| argument.get_long() == flag.strip_prefix("--"))
                .unwrap_or_else(|| panic!("{flag} is no flag of generate"));
            if setting.unset.is_none() && argument.get_action().takes_values() {
                let help = argument.get_help().unwrap().to_string();
                let value = setting.kind.write(&default_of(setting));
                let says = format!("[default: {}]", value.trim_matches('"'));
                assert!(help.contains(&says), "{flag}: {says} is missing in: {help}");
            }
        }
    }
}
