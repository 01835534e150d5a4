//! Rows of the table of settings: builders, tenants, and what may get into service, and how.

use super::{GIB, HOUR, KIB, MS, Setting, number, setting};
use crate::config::kind::Kind;
use crate::config::names;

/// `[builders.*]`. All but the component is of a tenant's own builder as well.
pub const BUILDERS: &[Setting] = &[
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
        "builders.*.grant",
        Kind::OneOf(&["exact", "subset"]),
        "What it may leave out. exact: nothing; subset: whole blocks of the context, never blocks that the step writes. Only FLASHINFER's builders can say which.",
        "subset: answers depend on what the builder leaves out.",
    ),
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
];

/// `[tenants.*]`: what its builder does not have in common with everybody's.
pub const TENANT: &[Setting] = &[
    setting(
        "tenants.*.share",
        Kind::Number(0.001, 1000.0),
        "Its weight where tenants compete for a step's tokens and rows, and for blocks. What it does not use, others get.",
        "None.",
    ),
    setting(
        "tenants.*.component",
        Kind::Path(
            "a path, oci://REGISTRY/REPOSITORY@sha256:…, or default",
            names::source,
        ),
        "A builder of its own, which sees its rows only. default: what the state directory says is active, else the component in the binary. From everybody's builder to its own, or back, is a restart.",
        "Five instances; a build, and attention launched once more, in steps with its rows.",
    )
    .unset("everybody's builder serves it", "\"builders/acme.wasm\"")
    .live(),
];

/// `[tenants.*.limits]`.
pub const TENANT_LIMITS: &[Setting] = &[
    setting(
        "tenants.*.limits.fuel_per_call",
        Kind::count("fuel units", 63),
        "Fuel of each of its calls.",
        "As limits.fuel_per_call.",
    )
    .unset("as in [limits]", "100_000"),
    setting(
        "tenants.*.limits.fuel_per_row",
        Kind::count("fuel units", 63),
        "Additional fuel for each of its rows.",
        "As limits.fuel_per_row.",
    )
    .unset("as in [limits]", "200"),
    setting(
        "tenants.*.limits.fuel_per_token",
        Kind::count("fuel units", 63),
        "Additional fuel for each of its query tokens.",
        "As limits.fuel_per_token.",
    )
    .unset("as in [limits]", "200"),
    setting(
        "tenants.*.limits.fuel_fixed",
        Kind::count("fuel units", 63),
        "Fuel for instantiating, constructing, `info` and `launch-promise`.",
        "As limits.fuel_fixed.",
    )
    .unset("as in [limits]", "20_000_000"),
    setting(
        "tenants.*.limits.max_memory_bytes",
        Kind::Size(64 * KIB, 4 * GIB),
        "Linear memory of one of its instances.",
        "As limits.max_memory_bytes.",
    )
    .unset("as in [limits]", "\"1MiB\""),
    setting(
        "tenants.*.limits.max_lifted_bytes",
        Kind::Size(KIB, GIB),
        "Bytes that one of its calls may make the host allocate.",
        "As limits.max_lifted_bytes.",
    )
    .unset("as in [limits]", "\"1MiB\""),
];

/// `[reload]`.
pub const RELOAD: &[Setting] = &[
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
        Kind::Number(0.001, 1e9),
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
        Kind::Number(0.001, 1e9),
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
];

/// `[provenance]`.
pub const PROVENANCE: &[Setting] = &[
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
];
