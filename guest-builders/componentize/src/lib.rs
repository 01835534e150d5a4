//! From a builder crate to a component: the nested wasm build, and the wrapping of its core module.
//!
//! A core module says by the names of its exports which interface it implements; the contract itself (`wit/`) is part of this
//! library, so a builder written in any language needs nothing but the right exports. This library must never know what a
//! builder does, and it never runs one.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::{PackageId, Resolve, SourceMap, WorldItem};

/// The contract's files: name and text.
pub const WIT: [(&str, &str); 6] = [
    ("types.wit", include_str!("../../../wit/types.wit")),
    (
        "flash-attn.wit",
        include_str!("../../../wit/flash-attn.wit"),
    ),
    (
        "flashinfer.wit",
        include_str!("../../../wit/flashinfer.wit"),
    ),
    (
        "triton-attn.wit",
        include_str!("../../../wit/triton-attn.wit"),
    ),
    ("flash-mla.wit", include_str!("../../../wit/flash-mla.wit")),
    ("mamba.wit", include_str!("../../../wit/mamba.wit")),
];

/// The target that builders are compiled for. WASI targets import a dozen interfaces; this one imports nothing.
pub const TARGET: &str = "wasm32-unknown-unknown";

/// The contract, parsed.
///
/// # Errors
/// Only if the files of `wit/` do not form a package.
pub fn contract() -> Result<(Resolve, PackageId)> {
    let mut sources = SourceMap::default();
    for (name, text) in WIT {
        sources.push_str(name, text);
    }
    let group = sources
        .parse()
        .map_err(|(_, error)| anyhow::anyhow!("{error}"))
        .context("the contract in wit/ does not parse")?;
    let mut resolve = Resolve::new();
    let package = resolve
        .push_group(group)
        .context("the contract in wit/ does not resolve")?;
    Ok((resolve, package))
}

/// Wraps a core module that implements one of the contract's worlds.
///
/// # Errors
/// If the bytes are not a core module, if its exports are not those of a builder, or if it imports anything that the
/// contract does not offer.
pub fn wrap(core: &[u8]) -> Result<Vec<u8>> {
    let exports = exports(core)?;
    let (resolve, package) = contract()?;
    let world = resolve.packages[package]
        .worlds
        .iter()
        .find(|(_, world)| {
            resolve.worlds[**world].exports.iter().any(|(key, item)| {
                let WorldItem::Interface { .. } = item else {
                    return false;
                };
                let interface = format!("{}#", resolve.name_world_key(key));
                exports.iter().any(|export| export.starts_with(&interface))
            })
        })
        .map(|(_, world)| *world);
    let Some(world) = world else {
        bail!(
            "the module exports none of the contract's interfaces (it exports {}); export a builder with \
             `timetable_guest::export_flash_attn!` or its sibling",
            if exports.is_empty() {
                "nothing".to_owned()
            } else {
                exports.join(", ")
            }
        );
    };
    let mut module = core.to_vec();
    embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8)
        .context("the contract could not be attached to the module")?;
    let component = ComponentEncoder::default()
        .validate(true)
        .module(&module)
        .with_context(|| {
            format!(
                "the module does not fit world {}",
                resolve.worlds[world].name
            )
        })?
        .encode()
        .with_context(|| {
            format!(
                "the module does not fit world {}",
                resolve.worlds[world].name
            )
        })?;
    refuse_imports(&component)?;
    Ok(component)
}

/// Names that a core module exports.
fn exports(core: &[u8]) -> Result<Vec<String>> {
    if !core.starts_with(b"\0asm") {
        bail!("not a WebAssembly module: it does not begin with the magic number \\0asm");
    }
    let mut names = Vec::new();
    for payload in wasmparser::Parser::new(0).parse_all(core) {
        match payload.context("the module is malformed")? {
            wasmparser::Payload::Version {
                encoding: wasmparser::Encoding::Component,
                ..
            } => {
                bail!("already a component: pass the core module that the compiler wrote");
            }
            wasmparser::Payload::ExportSection(section) => {
                for export in section {
                    names.push(export.context("the module is malformed")?.name.to_owned());
                }
            }
            _ => {}
        }
    }
    Ok(names)
}

/// Fails unless the component's only import is the contract's types.
fn refuse_imports(component: &[u8]) -> Result<()> {
    let mut depth = 0_u32;
    for payload in wasmparser::Parser::new(0).parse_all(component) {
        match payload.context("the component is malformed")? {
            wasmparser::Payload::ModuleSection { .. }
            | wasmparser::Payload::ComponentSection { .. } => depth += 1,
            wasmparser::Payload::End(_) => depth = depth.saturating_sub(1),
            wasmparser::Payload::ComponentImportSection(section) if depth == 0 => {
                for import in section {
                    let name = import.context("the component is malformed")?.name.name;
                    if !name.starts_with("timetable:attention/types@") {
                        bail!("the component imports {name}; a builder may import nothing");
                    }
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// A nested build of builder crates.
#[derive(Clone, Debug)]
pub struct GuestBuild {
    /// Directory that cargo runs in: its `.cargo/config.toml` gives the flags, its workspace the lock file.
    pub directory: PathBuf,
    /// Where cargo keeps the build; never the outer build's own target directory, whose lock the outer build holds.
    pub target_dir: PathBuf,
    /// Cargo packages, each with a cdylib.
    pub packages: Vec<String>,
    /// Cargo profile.
    pub profile: String,
}

/// One built component.
#[derive(Clone, Debug)]
pub struct Guest {
    /// The cargo package.
    pub package: String,
    /// The component.
    pub bytes: Vec<u8>,
}

impl GuestBuild {
    /// Builds and wraps every package.
    ///
    /// # Errors
    /// If the target is not installed, a crate does not compile, or its module is not a builder.
    pub fn run(&self) -> Result<Vec<Guest>> {
        require_target()?;
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(cargo);
        command
            .current_dir(&self.directory)
            .args(["build", "--target", TARGET, "--profile", &self.profile])
            .arg("--target-dir")
            .arg(&self.target_dir);
        for package in &self.packages {
            command.args(["--package", package]);
        }
        // What the outer build was told is not for the guests: flags come from the directory's own configuration.
        for name in [
            "RUSTFLAGS",
            "CARGO_ENCODED_RUSTFLAGS",
            "CARGO_BUILD_RUSTFLAGS",
            "CARGO_BUILD_TARGET",
            "RUSTC_WRAPPER",
            "RUSTC_WORKSPACE_WRAPPER",
            "CLIPPY_ARGS",
            "RUSTC",
            "RUSTDOC",
            "TARGET",
            "HOST",
        ] {
            command.env_remove(name);
        }
        let output = command
            .output()
            .context("cargo could not be started for the guest builders")?;
        if !output.status.success() {
            bail!(
                "the guest builders do not compile ({}):\n{}",
                output.status,
                String::from_utf8_lossy(&output.stderr)
            );
        }
        self.packages
            .iter()
            .map(|package| self.wrapped(package))
            .collect()
    }

    fn wrapped(&self, package: &str) -> Result<Guest> {
        let module = self
            .target_dir
            .join(TARGET)
            .join(&self.profile)
            .join(package.replace('-', "_"))
            .with_extension("wasm");
        let core = std::fs::read(&module).with_context(|| {
            format!(
                "{} was not built; does {package} have crate-type = [\"cdylib\"]?",
                module.display()
            )
        })?;
        let bytes =
            wrap(&core).with_context(|| format!("{package} does not become a component"))?;
        Ok(Guest {
            package: package.to_owned(),
            bytes,
        })
    }
}

/// Fails with the remedy if the compiler has no standard library for `TARGET`.
fn require_target() -> Result<()> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc)
        .args(["--print", "target-libdir", "--target", TARGET])
        .output()
        .context("rustc could not be started")?;
    let libdir = String::from_utf8_lossy(&output.stdout);
    let libdir = Path::new(libdir.trim());
    if !output.status.success() || !libdir.is_dir() {
        bail!("the target {TARGET} is not installed; run: rustup target add {TARGET}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_contract_has_a_world_for_every_family() {
        let (resolve, package) = contract().unwrap();
        let worlds: Vec<&str> = resolve.packages[package]
            .worlds
            .keys()
            .map(String::as_str)
            .collect();
        for family in [
            "flash-attn",
            "flashinfer",
            "triton-attn",
            "flash-mla",
            "mamba",
        ] {
            assert!(
                worlds.contains(&format!("{family}-builder").as_str()),
                "no world for {family}: {worlds:?}"
            );
        }
    }

    #[test]
    fn what_is_not_a_builder_is_refused_with_a_reason() {
        let message = |bytes: &[u8]| format!("{:#}", wrap(bytes).unwrap_err());
        assert!(message(b"MZ\x90").contains("not a WebAssembly module"));
        assert!(
            message(b"\0asm\x01\0\0\0")
                .contains("exports none of the contract's interfaces (it exports nothing)")
        );
        assert!(message(b"\0asm\x0d\0\x01\0").contains("already a component"));
    }
}
