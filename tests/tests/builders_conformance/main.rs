//! The reference builders against what the real ones did: every recorded case of FLASH_ATTN's and FLASHINFER's builders
//! (compute capability 8.0, 9.0 and 10.0), of TRITON_ATTN's, of the MLA backends' and of the Mamba family's, field by field, through the
//! native twins and through the components.
//!
//! Symbolic tensors are resolved from the case's inputs and compared with the recorded values. What is compared in another
//! form than it was recorded is said beside the comparison.

mod flash_attn;
mod flash_mla;
mod flashinfer;
mod mamba;
mod resolve;
mod triton_attn;
mod vectors;

use timetable_attention::{MetadataBuilder, rules};
use timetable_sandbox::{Limits, Sandbox, WasmBuilder};
use timetable_types::{BuilderConfig, Family};

/// How a builder is made from a configuration.
type MakeBuilder = dyn Fn(&BuilderConfig) -> Box<dyn MetadataBuilder>;
type Make<'a> = &'a MakeBuilder;

/// Runs every case of the file; prints passed/total, and fails with the first few differences.
fn run(
    how: &str,
    name: &str,
    check: impl FnMut(&vectors::File, &vectors::Case) -> Result<(), String>,
) {
    run_file(how, name, &vectors::File::load(name), check);
}

fn run_file(
    how: &str,
    name: &str,
    file: &vectors::File,
    mut check: impl FnMut(&vectors::File, &vectors::Case) -> Result<(), String>,
) {
    let mut failures = Vec::new();
    for case in &file.cases {
        if let Err(difference) = check(file, case) {
            failures.push(format!("case {} ({}): {difference}", case.id, case.kind));
        }
    }
    let total = file.cases.len();
    println!("{name}, {how}: {}/{total}", total - failures.len());
    assert!(
        failures.is_empty(),
        "{} of {total} cases differ:\n{}",
        failures.len(),
        failures[..failures.len().min(10)].join("\n")
    );
}

const FLASH_ATTN: [&str; 3] = [
    "FlashAttentionMetadataBuilder",
    "FlashAttentionMetadataBuilder@cc8.0",
    "FlashAttentionMetadataBuilder@cc10.0",
];

const FLASHINFER: [&str; 3] = [
    "FlashInferMetadataBuilder",
    "FlashInferMetadataBuilder@cc8.0",
    "FlashInferMetadataBuilder@cc10.0",
];

const TRITON_ATTN: [&str; 1] = ["TritonAttentionMetadataBuilder"];

/// Each backend's component, and its file.
const FLASH_MLA: [(&str, &str); 3] = [
    ("flash-mla", "FlashMLAMetadataBuilder"),
    ("flash-attn-mla", "FlashAttnMLAMetadataBuilder"),
    ("triton-mla", "MLACommonMetadataBuilder_TritonMLA"),
];

const MAMBA: [&str; 5] = [
    "Mamba1AttentionMetadataBuilder",
    "Mamba2AttentionMetadataBuilder",
    "ShortConvAttentionMetadataBuilder",
    "LinearAttentionMetadataBuilder",
    "GDNAttentionMetadataBuilder",
];

/// A backend is done or not there: where a family has rules there are recorded cases, a reference component with a native
/// twin, and a chaos builder. (Its mutation suite and its plain builder: `host/device/tests/verified`.)
#[test]
fn a_family_has_rules_and_everything_else_or_nothing() {
    for family in Family::ALL {
        let files = match family {
            Family::FlashAttn => FLASH_ATTN.len(),
            Family::Flashinfer => FLASHINFER.len(),
            Family::TritonAttn => TRITON_ATTN.len(),
            Family::FlashMla => FLASH_MLA.len(),
            Family::Mamba => MAMBA.len(),
        };
        let components = timetable_reference::components();
        for (what, is_there) in [
            ("recorded cases", files > 0),
            (
                "a reference component",
                components.iter().any(|one| one.family == family),
            ),
            (
                "a chaos builder",
                timetable_reference::chaos(family).is_some(),
            ),
        ] {
            assert_eq!(
                is_there,
                rules(family).is_some(),
                "{}: rules without {what}, or the other way round",
                family.interface()
            );
        }
    }
}

fn native(name: &str) -> impl Fn(&BuilderConfig) -> Box<dyn MetadataBuilder> + use<> {
    let name = name.to_owned();
    move |config| {
        timetable_reference::native_twin(&name, config).expect("the twin takes the configuration")
    }
}

#[test]
fn flash_attn_natively() {
    let make = native("flash-attn");
    for name in FLASH_ATTN {
        let mut suite = flash_attn::Suite::new(&make);
        run("native", name, |file, case| suite.check(file, case));
    }
}

#[test]
fn flash_attn_with_fixed_splits_natively() {
    let make = native("flash-attn-fixed-split");
    for name in FLASH_ATTN {
        let mut suite = flash_attn::Suite::new(&make);
        run("native, fixed splits", name, |file, case| {
            suite.check(file, case)
        });
    }
}

#[test]
fn flashinfer_natively() {
    let make = native("flashinfer");
    for name in FLASHINFER {
        let mut suite = flashinfer::Suite::new(&make);
        run("native", name, |file, case| suite.check(file, case));
    }
}

#[test]
fn triton_attn_natively() {
    let make = native("triton-attn");
    for name in TRITON_ATTN {
        let mut suite = triton_attn::Suite::new(&make);
        run("native", name, |file, case| suite.check(file, case));
    }
}

#[test]
fn flash_mla_natively() {
    for (builder, name) in FLASH_MLA {
        let make = native(builder);
        let mut suite = flash_mla::Suite::new(&make);
        run("native", name, |file, case| suite.check(file, case));
    }
}

#[test]
fn mamba_natively() {
    let make = native("mamba");
    for name in MAMBA {
        let mut suite = mamba::Suite::new(&make, name);
        run("native", name, |file, case| suite.check(file, case));
    }
}

/// What the builders did while the field's engine ran: the run, its builder there, the component, and steps.
const RUNS: [(&str, &str, &str, usize); 3] = [
    ("mamba2_mrv2", "Mamba2AttentionMetadataBuilder", "mamba", 14),
    ("qwen3next_mrv2", "GDNAttentionMetadataBuilder", "mamba", 21),
    // DeepSeek-V2 on the field's CPU backend, whose builder is the MLA common one: TRITON_MLA adds nothing to it.
    (
        "dsv2_mrv2_cpu_mla",
        "MLACommonMetadataBuilder",
        "triton-mla",
        13,
    ),
];

fn run_recorded(how: &str, make: impl Fn(&str) -> Box<MakeBuilder>) {
    for (name, recorded, builder, steps) in RUNS {
        let make = make(builder);
        let file = vectors::File::steps(name, recorded);
        assert_eq!(file.cases.len(), steps, "{name}");
        if builder == "mamba" {
            let mut suite = mamba::Suite::new(&*make, recorded);
            run_file(how, name, &file, |file, case| suite.check(file, case));
        } else {
            let mut suite = flash_mla::Suite::new(&*make);
            run_file(how, name, &file, |file, case| suite.check(file, case));
        }
    }
}

#[test]
fn recorded_runs_of_an_engine_natively() {
    run_recorded("native", |name| Box::new(native(name)));
}

#[test]
fn recorded_runs_of_an_engine_as_components() {
    run_recorded("component", |name| Box::new(component(name)));
}

/// The component called `name`, in a sandbox with the default limits.
fn component(name: &str) -> impl Fn(&BuilderConfig) -> Box<dyn MetadataBuilder> + use<> {
    let sandbox = Sandbox::new(Limits::default()).expect("the sandbox starts");
    let embedded = timetable_reference::component(name).expect("an embedded component");
    let component = sandbox.load(embedded.bytes).expect("the component loads");
    move |config| {
        Box::new(
            WasmBuilder::new(&component, config).expect("the component takes the configuration"),
        )
    }
}

#[test]
fn flash_attn_as_a_component() {
    let make = component("flash-attn");
    for name in FLASH_ATTN {
        let mut suite = flash_attn::Suite::new(&make);
        run("component", name, |file, case| suite.check(file, case));
    }
}

#[test]
fn flashinfer_as_a_component() {
    let make = component("flashinfer");
    for name in FLASHINFER {
        let mut suite = flashinfer::Suite::new(&make);
        run("component", name, |file, case| suite.check(file, case));
    }
}

#[test]
fn triton_attn_as_a_component() {
    let make = component("triton-attn");
    for name in TRITON_ATTN {
        let mut suite = triton_attn::Suite::new(&make);
        run("component", name, |file, case| suite.check(file, case));
    }
}

#[test]
fn flash_mla_as_a_component() {
    for (builder, name) in FLASH_MLA {
        let make = component(builder);
        let mut suite = flash_mla::Suite::new(&make);
        run("component", name, |file, case| suite.check(file, case));
    }
}

#[test]
fn mamba_as_a_component() {
    let make = component("mamba");
    for name in MAMBA {
        let mut suite = mamba::Suite::new(&make, name);
        run("component", name, |file, case| suite.check(file, case));
    }
}
