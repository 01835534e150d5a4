//! From bytes to a component that fits the contract, or one clear line that says why not.
//!
//! Must never know: configurations, versions, steps. Nothing of the component runs here but its start function.

use std::sync::Arc;

use timetable_types::Family;
use wasmparser::{ComponentExternalKind, Parser, Payload};
use wasmtime::component::{InstancePre, Linker, types::ComponentItem};

use crate::{
    ContentHash, Sandbox,
    abi::{self, Exports, FUNCTIONS},
    fault,
    sandbox::StoreState,
};

/// The contract's package and version.
const PACKAGE: &str = "timetable:attention/";
const VERSION: &str = "0.1.0";

/// A component that was checked and compiled. Cheap to clone.
#[derive(Clone)]
pub struct Component {
    pub(crate) inner: Arc<Inner>,
    /// Its limits are those of this component's instances.
    sandbox: Sandbox,
}

pub(crate) struct Inner {
    pub(crate) pre: InstancePre<StoreState>,
    pub(crate) exports: Exports,
    pub(crate) family: Family,
    hash: ContentHash,
    /// As they were given: a fault bundle holds them.
    bytes: Box<[u8]>,
}

/// Why a component is refused. Each message says what, with the value, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Larger than is looked at.
    #[error(
        "the component has {bytes} bytes, more than the {limit} that are loaded; strip it (wasm-ld --strip-all), or raise \
         max_component_bytes of the limits"
    )]
    TooLarge {
        /// Its size.
        bytes: usize,
        /// The bound.
        limit: usize,
    },
    /// No WebAssembly at all.
    #[error(
        "not a WebAssembly component: it begins with {found}, not with the bytes 00 61 73 6d; build the guest as a component"
    )]
    NotWasm {
        /// The first bytes.
        found: String,
    },
    /// A core module.
    #[error(
        "this is a core module, not a component; make it one with `timetable componentize MODULE.wasm -o COMPONENT.wasm`"
    )]
    CoreModule,
    /// Truncated, corrupt, or using a proposal that is off.
    #[error(
        "not a valid component: {0}; it is truncated, corrupt, or uses a WebAssembly feature that is off here (threads, \
         memory64, gc, relaxed-simd, component-model async); build it again"
    )]
    Invalid(String),
    /// WASI.
    #[error(
        "imports `{import}`: a builder has no clock, no randomness, no files and no network; build it for \
         wasm32-unknown-unknown, which imports no WASI"
    )]
    Wasi {
        /// The first WASI import.
        import: String,
    },
    /// Another import.
    #[error("imports `{import}`, which this host does not offer; a builder may import the types of `{types}` only", types = types_interface())]
    Import {
        /// The import.
        import: String,
    },
    /// Another version of the contract.
    #[error(
        "uses `{found}`, but this host speaks version {VERSION} of the contract; build it against wit/ of this host"
    )]
    ContractVersion {
        /// The interface with its version.
        found: String,
    },
    /// Another world.
    #[error(
        "exports {found}, but no builder interface ({PACKAGE}flash-attn@{VERSION}, …flashinfer, …triton-attn, …flash-mla \
         or …mamba); implement one of the worlds in wit/"
    )]
    OtherWorld {
        /// What it exports.
        found: String,
    },
    /// Builders of several families in one component.
    #[error("exports builders of several families ({found}); make one component for each")]
    SeveralFamilies {
        /// The interfaces.
        found: String,
    },
    /// A function of the interface is missing.
    #[error("`{interface}` lacks the function `{function}`; build it against wit/ of this host")]
    MissingFunction {
        /// The interface.
        interface: String,
        /// The function.
        function: &'static str,
    },
    /// A function with another type.
    #[error(
        "function `{function}` of `{interface}` has another type than in this host's contract: {detail}; build it against \
         wit/ of this host"
    )]
    WrongType {
        /// The interface.
        interface: String,
        /// The function.
        function: &'static str,
        /// Where the types differ.
        detail: String,
    },
    /// Its start function failed, its memory is above the cap, or the pool is full.
    #[error("cannot be instantiated: {kind}: {message}")]
    Instantiate {
        /// What kind of misbehaviour.
        kind: timetable_attention::FaultKind,
        /// What the sandbox saw.
        message: String,
    },
}

fn types_interface() -> String {
    format!("{PACKAGE}types@{VERSION}")
}

impl Component {
    pub(crate) fn load(sandbox: &Sandbox, bytes: &[u8]) -> Result<Component, LoadError> {
        let limit = sandbox.limits().max_component_bytes;
        if bytes.len() > limit {
            return Err(LoadError::TooLarge {
                bytes: bytes.len(),
                limit,
            });
        }
        let family = check_outside(&outside(bytes)?)?;
        let interface = format!("{PACKAGE}{}@{VERSION}", family.interface());

        let compiled = sandbox.compile(bytes)?;
        for (name, import) in compiled.component_type().imports(sandbox.engine()) {
            let types_only = match import.ty {
                ComponentItem::ComponentInstance(instance) => instance
                    .exports(sandbox.engine())
                    .all(|(_, item)| matches!(item.ty, ComponentItem::Type(_))),
                _ => false,
            };
            if !types_only {
                return Err(LoadError::Import {
                    import: name.to_owned(),
                });
            }
        }

        let instance = compiled.get_export_index(None, interface.as_str());
        let instance = instance.ok_or(LoadError::OtherWorld {
            found: "nothing of that name".into(),
        })?;
        let mut exports = [instance; FUNCTIONS.len()];
        for (export, function) in exports.iter_mut().zip(FUNCTIONS) {
            *export = compiled
                .get_export_index(Some(&instance), function)
                .ok_or_else(|| LoadError::MissingFunction {
                    interface: interface.clone(),
                    function,
                })?;
        }

        let pre = Linker::new(sandbox.engine())
            .instantiate_pre(&compiled)
            .map_err(|error| LoadError::Import {
                import: format!("{error:#}"),
            })?;

        // An instance that is made and dropped: its start function is known to work, and its functions' types to be right.
        let instantiate = |(kind, message)| LoadError::Instantiate { kind, message };
        let mut store = sandbox.store();
        sandbox
            .arm(&mut store, sandbox.limits().fuel_fixed)
            .map_err(|message| instantiate((timetable_attention::FaultKind::Watchdog, message)))?;
        let instance = pre.instantiate(&mut store).map_err(|error| {
            instantiate(fault::classify(&error, store.data(), sandbox.limits()))
        })?;
        abi::calls(family, &mut store, &instance, &exports).map_err(|wrong| {
            LoadError::WrongType {
                interface,
                function: wrong.function,
                detail: wrong.detail,
            }
        })?;

        Ok(Component {
            sandbox: sandbox.clone(),
            inner: Arc::new(Inner {
                pre,
                exports,
                family,
                hash: ContentHash::of(bytes),
                bytes: bytes.into(),
            }),
        })
    }

    /// The family whose metadata it builds.
    pub fn family(&self) -> Family {
        self.inner.family
    }

    /// The hash of its bytes.
    pub fn hash(&self) -> ContentHash {
        self.inner.hash
    }

    /// Its bytes, as they were loaded.
    pub fn bytes(&self) -> &[u8] {
        &self.inner.bytes
    }

    /// The sandbox that it runs in.
    pub fn sandbox(&self) -> &Sandbox {
        &self.sandbox
    }

    /// The same component under the limits of `sandbox`, if that is its own sandbox with other limits on calls.
    pub(crate) fn under_limits_of(&self, sandbox: &Sandbox) -> Component {
        let sandbox = match sandbox.shares_engine(&self.sandbox) {
            true => sandbox,
            false => &self.sandbox,
        };
        Component {
            inner: self.inner.clone(),
            sandbox: sandbox.clone(),
        }
    }
}

/// Names of a component's own imports and exports, read without compiling it.
#[derive(Default)]
struct Outside {
    imports: Vec<String>,
    exports: Vec<String>,
}

fn outside(bytes: &[u8]) -> Result<Outside, LoadError> {
    if !bytes.starts_with(b"\0asm") {
        let found = match bytes.len() {
            0 => "nothing: it is empty".to_owned(),
            _ => bytes
                .iter()
                .take(8)
                .map(|byte| format!("{byte:02x} "))
                .collect(),
        };
        return Err(LoadError::NotWasm {
            found: found.trim_end().to_owned(),
        });
    }
    if Parser::is_core_wasm(bytes) {
        return Err(LoadError::CoreModule);
    }
    let invalid = |error: wasmparser::BinaryReaderError| LoadError::Invalid(error.to_string());
    let mut names = Outside::default();
    let mut depth = 0_u32;
    for payload in Parser::new(0).parse_all(bytes) {
        match payload.map_err(invalid)? {
            Payload::ModuleSection { .. } | Payload::ComponentSection { .. } => depth += 1,
            Payload::End(_) => depth = depth.saturating_sub(1),
            Payload::ComponentImportSection(section) if depth == 0 => {
                for import in section {
                    names
                        .imports
                        .push(import.map_err(invalid)?.name.name.to_owned());
                }
            }
            Payload::ComponentExportSection(section) if depth == 0 => {
                for export in section {
                    let export = export.map_err(invalid)?;
                    if export.kind == ComponentExternalKind::Instance
                        || export.kind == ComponentExternalKind::Func
                    {
                        names.exports.push(export.name.name.to_owned());
                    }
                }
            }
            _ => {}
        }
    }
    Ok(names)
}

/// The family, if imports and exports are what they may be.
fn check_outside(names: &Outside) -> Result<Family, LoadError> {
    for import in &names.imports {
        if *import == types_interface() {
            continue;
        }
        if import.starts_with("wasi:") {
            return Err(LoadError::Wasi {
                import: import.clone(),
            });
        }
        if import.starts_with(&format!("{PACKAGE}types@")) {
            return Err(LoadError::ContractVersion {
                found: import.clone(),
            });
        }
        return Err(LoadError::Import {
            import: import.clone(),
        });
    }

    let mut families = Vec::new();
    let mut other_version = None;
    for export in &names.exports {
        let Some((interface, version)) = export
            .strip_prefix(PACKAGE)
            .and_then(|rest| rest.split_once('@'))
        else {
            continue;
        };
        match Family::ALL
            .into_iter()
            .find(|family| family.interface() == interface)
        {
            Some(family) if version == VERSION => families.push(family),
            Some(_) => other_version = Some(export.clone()),
            None => {}
        }
    }
    match (families.as_slice(), other_version) {
        ([family], _) => Ok(*family),
        ([], Some(found)) => Err(LoadError::ContractVersion { found }),
        ([], None) => Err(LoadError::OtherWorld {
            found: match names.exports.as_slice() {
                [] => "nothing".to_owned(),
                some => format!("`{}`", some.join("`, `")),
            },
        }),
        (several, _) => Err(LoadError::SeveralFamilies {
            found: several
                .iter()
                .map(|family| family.interface())
                .collect::<Vec<_>>()
                .join(", "),
        }),
    }
}
