//! Names that a setting may have as its value, or as its key.

use std::net::SocketAddr;

use timetable_attention::backend::BackendRegistry;
use timetable_attention::graphs::GraphModes;
use timetable_provenance::{Digest, Source, TrustedKey};
use timetable_sandbox::TenantName;
use timetable_types::CudagraphMode;

use crate::device::DeviceArg;

/// A device.
pub fn device(text: &str) -> Result<(), String> {
    text.parse::<DeviceArg>().map(drop)
}

/// An attention backend, or auto.
pub fn backend(text: &str) -> Result<(), String> {
    attention_backend(text).map(drop)
}

/// The backend that `text` names, in capitals; none for auto.
pub fn attention_backend(text: &str) -> Result<Option<String>, String> {
    BackendRegistry::new()
        .parse(text)
        .map_err(|error| error.to_string())
}

/// Where a component is.
pub fn source(text: &str) -> Result<(), String> {
    if text.is_empty() {
        return Err("is empty".to_owned());
    }
    let source: Result<Source, _> = text.parse();
    source.map(drop).map_err(|error| error.to_string())
}

/// A tenant.
pub fn tenant(text: &str) -> Result<(), String> {
    let tenant: Result<TenantName, _> = text.parse();
    tenant.map(drop).map_err(|error| error.to_string())
}

/// A public key.
pub fn key(text: &str) -> Result<(), String> {
    TrustedKey::parse(text)
        .map(drop)
        .map_err(|error| error.to_string())
}

/// A SHA-256.
pub fn hash(text: &str) -> Result<(), String> {
    let digest: Result<Digest, _> = text.parse();
    digest.map(drop).map_err(|error| error.to_string())
}

/// An IP address and a port.
pub fn address(text: &str) -> Result<(), String> {
    let address: Result<SocketAddr, _> = text.parse();
    address
        .map(drop)
        .map_err(|_| "is not an IP address with a port".to_owned())
}

/// A CUDA graph mode.
pub fn cudagraph_mode(text: &str) -> Result<(), String> {
    mode(text).map(drop)
}

/// The CUDA graph mode that `text` names.
pub fn mode(text: &str) -> Result<CudagraphMode, String> {
    let modes = CudagraphMode::ALL;
    let found = modes
        .iter()
        .find(|mode| mode.name().eq_ignore_ascii_case(text));
    found.copied().ok_or_else(|| {
        let valid: Vec<&str> = modes.iter().map(|mode| mode.name()).collect();
        format!("{text}: unknown; valid are {}", valid.join(", "))
    })
}

/// Backends that have a builder in this binary.
pub fn backends() -> Vec<&'static str> {
    let components = timetable_reference::components().iter();
    components
        .filter(|component| component.default)
        .map(|component| component.backend)
        .collect()
}

/// A host and a port.
pub fn listen(text: &str) -> Result<(), String> {
    match text.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => Ok(()),
        _ => Err(format!("{text}: is not HOST:PORT, as 127.0.0.1:8000")),
    }
}

/// What is wrong with `name` as the name of a table in `table`, if anything.
pub fn problem(table: &str, name: &str) -> Option<String> {
    match table {
        "builders" if !backends().contains(&name) => Some(format!(
            "there is no such backend; the tables are {}",
            backends()
                .iter()
                .map(|backend| format!("[builders.{backend}]"))
                .collect::<Vec<_>>()
                .join(", ")
        )),
        "tenants" => tenant(name).err(),
        _ => None,
    }
}

/// The name of `known` that `name` may have been meant to be.
pub fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    known
        .map(|candidate| {
            (
                distance(&name.to_lowercase(), &candidate.to_lowercase()),
                candidate,
            )
        })
        .filter(|(distance, candidate)| *distance <= 1 + candidate.len().min(name.len()) / 4)
        .min()
        .map(|(_, candidate)| candidate)
}

/// Letters to insert, delete or replace. Names are bounded by what is worth comparing.
fn distance(a: &str, b: &str) -> usize {
    const LONGEST: usize = 64;
    let b: Vec<char> = b.chars().take(LONGEST).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().take(LONGEST).enumerate() {
        let mut before = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = before + usize::from(x != *y);
            before = row[j + 1];
            row[j + 1] = replaced.min(before + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn a_slip_finds_its_name_and_nonsense_finds_none() {
        let known = ["watchdog", "watchdog_tick", "max_memory_bytes"];
        for (slip, meant) in [
            ("watchdgo", Some("watchdog")),
            ("max-memory-bytes", Some("max_memory_bytes")),
            ("Watchdog_Tick", Some("watchdog_tick")),
            ("colour", None),
        ] {
            assert_eq!(nearest(slip, known.into_iter()), meant, "{slip}");
        }
    }
}
