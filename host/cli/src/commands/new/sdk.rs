//! The SDK's sources in this binary. Written into a new crate as they are; only their manifests are others, without the
//! workspace and without the host's features.

/// Paths below the new crate's `sdk/`, and texts.
macro_rules! sources {
    ($($crate_name:literal from $folder:literal: $($file:literal)*;)*) => {
        &[$($((
            concat!($crate_name, "/src/", $file),
            include_str!(concat!("../../../../../", $folder, "/src/", $file)),
        ),)*)*]
    };
}

const SOURCES: &[(&str, &str)] = sources! {
    "timetable-guest" from "guest-builders/sdk":
        "abi.rs" "builder.rs" "flash_attn.rs" "flash_mla.rs" "flashinfer.rs" "heap.rs" "lib.rs" "mamba.rs" "mamba/gdn.rs"
        "mamba/rows.rs" "testing.rs" "triton_attn.rs";
    "timetable-types" from "host/types":
        "batch.rs" "batch/mamba.rs" "batch/mla.rs" "batch/mla_context.rs" "batch/mm_prefix.rs" "batch/pages.rs" "builder.rs"
        "canonical.rs" "config.rs" "flash_attn.rs" "flash_mla.rs" "flashinfer.rs" "lib.rs" "macros.rs" "mamba.rs" "metadata.rs" "step.rs" "tensor.rs" "triton_attn.rs";
};

const MANIFESTS: [(&str, &str); 2] = [
    (
        "timetable-guest/Cargo.toml",
        include_str!("template/timetable-guest.toml"),
    ),
    (
        "timetable-types/Cargo.toml",
        include_str!("template/timetable-types.toml"),
    ),
];

/// Every file of the SDK, and the contract: path and text.
pub fn files() -> impl Iterator<Item = (String, String)> {
    let contract = timetable_componentize::WIT
        .iter()
        .map(|(name, text)| (format!("sdk/wit/{name}"), (*text).to_owned()));
    SOURCES
        .iter()
        .chain(&MANIFESTS)
        .map(|(path, text)| (format!("sdk/{path}"), (*text).to_owned()))
        .chain(contract)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    fn collect(folder: &Path, below: &str, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).expect("the repository") {
            let path = entry.expect("an entry").path();
            let name = path.file_name().expect("a name").to_string_lossy();
            if path.is_dir() {
                collect(&path, &format!("{below}{name}/"), found);
            } else {
                found.push(format!("{below}{name}"));
            }
        }
    }

    #[test]
    fn a_new_crate_has_every_source_of_the_sdk() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut there = Vec::new();
        for (name, folder) in [
            ("timetable-guest/src/", "guest-builders/sdk/src"),
            ("timetable-types/src/", "host/types/src"),
        ] {
            collect(&root.join(folder), name, &mut there);
        }
        there.sort();
        let mut given: Vec<&str> = super::SOURCES.iter().map(|(path, _)| *path).collect();
        given.sort_unstable();
        assert_eq!(given, there);
    }
}
