//! `wit/` and `host/types` say the same: every record, variant and enum, field by field, in the same order, of the same
//! type; and each has the memory layout that the component model computes for it.

use std::{collections::BTreeMap, path::Path};

use timetable_componentize::contract;
use timetable_types::canonical::Canonical;
use wit_parser::{Resolve, SizeAlign, Type, TypeDef, TypeDefKind};

/// A definition: its kind, and (WIT name, type) of each member in order.
type Definition = (&'static str, Vec<(String, String)>);

/// Definitions of one interface by WIT name.
type Definitions = BTreeMap<String, Definition>;

/// A WIT type, as Rust spells it.
fn rust_type(resolve: &Resolve, ty: &Type) -> String {
    match ty {
        Type::Bool => "bool".to_owned(),
        Type::U8 => "u8".to_owned(),
        Type::U32 => "u32".to_owned(),
        Type::S32 => "i32".to_owned(),
        Type::U64 => "u64".to_owned(),
        Type::S64 => "i64".to_owned(),
        Type::F64 => "f64".to_owned(),
        Type::String => "String".to_owned(),
        Type::Id(id) => {
            let definition = &resolve.types[*id];
            match &definition.kind {
                TypeDefKind::List(inner) => format!("Vec<{}>", rust_type(resolve, inner)),
                TypeDefKind::Option(inner) => format!("Option<{}>", rust_type(resolve, inner)),
                TypeDefKind::Tuple(tuple) => {
                    let types: Vec<String> = tuple
                        .types
                        .iter()
                        .map(|ty| rust_type(resolve, ty))
                        .collect();
                    format!("({})", types.join(", "))
                }
                _ => pascal(definition.name.as_deref().expect("a named type")),
            }
        }
        other => panic!("the contract uses no {other:?}"),
    }
}

fn pascal(kebab: &str) -> String {
    kebab
        .split('-')
        .map(|word| {
            let mut letters = word.chars();
            letters
                .next()
                .map(|first| first.to_ascii_uppercase().to_string() + letters.as_str())
                .unwrap_or_default()
        })
        .collect()
}

/// What `wit/` defines in one interface.
fn of_wit(resolve: &Resolve, interface: &str) -> Definitions {
    let (_, interface) = resolve
        .interfaces
        .iter()
        .find(|(_, candidate)| candidate.name.as_deref() == Some(interface))
        .expect("the interface exists");
    let mut definitions = Definitions::new();
    for (name, id) in &interface.types {
        let TypeDef { kind, .. } = &resolve.types[*id];
        let definition: Definition = match kind {
            TypeDefKind::Record(record) => (
                "record",
                record
                    .fields
                    .iter()
                    .map(|field| (field.name.clone(), rust_type(resolve, &field.ty)))
                    .collect(),
            ),
            TypeDefKind::Variant(variant) => (
                "variant",
                variant
                    .cases
                    .iter()
                    .map(|case| {
                        (
                            case.name.clone(),
                            case.ty
                                .map(|ty| rust_type(resolve, &ty))
                                .unwrap_or_default(),
                        )
                    })
                    .collect(),
            ),
            TypeDefKind::Enum(cases) => (
                "enumeration",
                cases
                    .cases
                    .iter()
                    .map(|case| (case.name.clone(), String::new()))
                    .collect(),
            ),
            // Names of another interface, and the builder itself.
            TypeDefKind::Type(_) | TypeDefKind::Resource => continue,
            other => panic!("{name}: the contract uses no {other:?}"),
        };
        definitions.insert(pascal(name), definition);
    }
    definitions
}

/// What the sources of `host/types` define: the macros `record!`, `variant!` and `enumeration!` have one member a line.
fn of_rust(files: &[&str]) -> Definitions {
    let mut definitions = Definitions::new();
    for file in files {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../host/types/src")
            .join(file);
        let text = std::fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let mut kind = "";
        let mut current: Option<(String, Definition)> = None;
        for line in text.lines().map(str::trim) {
            for name in ["record", "variant", "enumeration"] {
                if line == format!("{name}! {{") {
                    kind = name;
                }
            }
            if kind.is_empty() {
                continue;
            }
            if let Some(rest) = line
                .strip_prefix("pub struct ")
                .or(line.strip_prefix("pub enum "))
            {
                let name = rest.split([' ', '{']).next().expect("a name").to_owned();
                current = Some((name, (kind, Vec::new())));
            } else if line == "}" {
                if let Some((name, definition)) = current.take() {
                    definitions.insert(name, definition);
                } else {
                    kind = "";
                }
            } else if let Some((_, (_, members))) = &mut current
                && !line.starts_with("//")
                && let Some((_, rest)) = line.split_once(" as \"")
            {
                let (name, ty) = rest.split_once('"').expect("a closed name");
                let ty = ty
                    .trim()
                    .trim_end_matches(',')
                    .trim_start_matches(':')
                    .trim();
                // A tuple's own parentheses stay; a variant's payload stands in one pair more.
                let ty = if kind == "variant" {
                    ty.strip_prefix('(')
                        .and_then(|ty| ty.strip_suffix(')'))
                        .unwrap_or(ty)
                } else {
                    ty
                };
                members.push((name.to_owned(), ty.to_owned()));
            }
        }
    }
    definitions
}

#[test]
fn the_contract_and_the_records_agree_field_by_field() {
    let (resolve, _) = contract().expect("the contract parses");
    for (interface, files) in [
        (
            "types",
            &["config.rs", "step.rs", "tensor.rs", "builder.rs"][..],
        ),
        ("flash-attn", &["flash_attn.rs"]),
        ("flashinfer", &["flashinfer.rs"]),
        ("triton-attn", &["triton_attn.rs"]),
        ("flash-mla", &["flash_mla.rs"]),
        ("mamba", &["mamba.rs"]),
    ] {
        let (wit, rust) = (of_wit(&resolve, interface), of_rust(files));
        assert!(!wit.is_empty(), "{interface} defines nothing");
        for (name, definition) in &wit {
            let ours = rust
                .get(name)
                .unwrap_or_else(|| panic!("host/types has no {name} of {interface}"));
            assert_eq!(
                ours, definition,
                "{interface}.{name}: host/types on the left, wit/ on the right"
            );
        }
        let extra: Vec<&String> = rust
            .keys()
            .filter(|name| !wit.contains_key(*name))
            .collect();
        assert!(
            extra.is_empty(),
            "host/types has what {interface} does not: {extra:?}"
        );
        println!("{interface}: {} definitions agree", wit.len());
    }
}

/// Bytes and alignment that the component model gives a type of an interface.
fn layout(resolve: &Resolve, interface: &str, name: &str) -> (usize, usize) {
    let mut sizes = SizeAlign::default();
    sizes.fill(resolve);
    let (_, interface) = resolve
        .interfaces
        .iter()
        .find(|(_, candidate)| candidate.name.as_deref() == Some(interface))
        .expect("the interface exists");
    let ty = Type::Id(interface.types[name]);
    (
        sizes.size(&ty).size_wasm32(),
        sizes.align(&ty).align_wasm32(),
    )
}

#[test]
fn guests_lay_the_records_out_as_the_component_model_does() {
    use timetable_types as t;
    let (resolve, _) = contract().expect("the contract parses");
    macro_rules! check {
        ($($interface:literal $name:literal $ty:ty),* $(,)?) => {$(
            assert_eq!(
                (<$ty as Canonical>::SIZE, <$ty as Canonical>::ALIGN),
                layout(&resolve, $interface, $name),
                "{}.{}", $interface, $name
            );
        )*};
    }
    check!(
        "types" "builder-config" t::BuilderConfig,
        "types" "kv-cache-spec" t::KvCacheSpec,
        "types" "attention-config" t::AttentionConfig,
        "types" "scheduler-config" t::SchedulerConfig,
        "types" "common-attention-metadata" t::CommonAttentionMetadata,
        "types" "causal" t::Causal,
        "types" "extra-value" t::ExtraValue,
        "types" "extra" t::Extra,
        "types" "tensor" t::Tensor,
        "types" "padded-tensor" t::PaddedTensor,
        "types" "builder-info" t::BuilderInfo,
        "types" "capture-shape" t::CaptureShape,
        "types" "launch-promise" t::LaunchPromise,
        "types" "build-error" t::BuildError,
        "flash-attn" "metadata" t::flash_attn::Metadata,
        "flash-attn" "schedule" t::flash_attn::Schedule,
        "flash-attn" "scheduler-metadata-call" t::flash_attn::SchedulerMetadataCall,
        "flashinfer" "metadata" t::flashinfer::Metadata,
        "flashinfer" "plan" t::flashinfer::Plan,
        "flashinfer" "work-list" t::flashinfer::WorkList,
        "flashinfer" "decode" t::flashinfer::Decode,
        "flashinfer" "prefill" t::flashinfer::Prefill,
        "triton-attn" "metadata" t::triton_attn::Metadata,
        "flash-mla" "metadata" t::flash_mla::Metadata,
        "flash-mla" "context-chunk" t::flash_mla::ContextChunk,
        "mamba" "metadata" t::mamba::Metadata,
        "mamba" "gdn-metadata" t::mamba::GdnMetadata,
    );
}

/// `guest-builders/c` says the sizes that its compiler holds it to.
#[test]
fn the_c_header_has_the_contracts_sizes() {
    use timetable_types as t;
    let header = include_str!("../../guest-builders/c/timetable_flash_attn.h");
    for (name, size) in [
        ("tt_kv_cache_spec", t::KvCacheSpec::SIZE),
        ("tt_attention_config", t::AttentionConfig::SIZE),
        ("tt_builder_config", t::BuilderConfig::SIZE),
        (
            "tt_common_attention_metadata",
            t::CommonAttentionMetadata::SIZE,
        ),
        ("tt_tensor", t::Tensor::SIZE),
        ("tt_metadata", t::flash_attn::Metadata::SIZE),
        ("tt_builder_info", t::BuilderInfo::SIZE),
        ("tt_launch_promise", t::LaunchPromise::SIZE),
        ("tt_build_error", t::BuildError::SIZE),
    ] {
        let line = format!("TT_SIZE({name}, {size});");
        assert!(header.contains(&line), "the header should say {line}");
    }
}
