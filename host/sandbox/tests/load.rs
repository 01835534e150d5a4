//! What is refused at load, each with one line that says what, and what to do.

mod support;

use support::{Act, Guest, sandbox};
use timetable_sandbox::{Limits, LoadError, Sandbox};
use timetable_types::Family;

fn refusal(bytes: &[u8]) -> LoadError {
    match sandbox().load(bytes) {
        Ok(_) => panic!("the component was accepted"),
        Err(error) => error,
    }
}

#[track_caller]
fn says(error: &LoadError, parts: &[&str]) {
    let text = error.to_string();
    assert!(!text.contains('\n'), "more than one line: {text}");
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

#[test]
fn every_family_is_told_by_its_interface() {
    let sandbox = sandbox();
    for family in Family::ALL {
        let guest = Guest {
            interface: family.interface(),
            ..Guest::default()
        };
        let component = sandbox
            .load(&guest.component())
            .unwrap_or_else(|e| panic!("{family:?}: {e}"));
        assert_eq!(component.family(), family);
    }
}

#[test]
fn no_wasm() {
    says(&refusal(b""), &["empty", "build the guest as a component"]);
    says(&refusal(b"\x7fELF\x02\x01\x01\x00rest"), &["7f 45 4c 46"]);
    assert!(matches!(refusal(b"hello"), LoadError::NotWasm { .. }));
}

#[test]
fn a_core_module() {
    let error = refusal(&Guest::default().core_module());
    assert!(matches!(error, LoadError::CoreModule));
    says(
        &error,
        &[
            "is a core module, not a component",
            "timetable componentize",
        ],
    );
}

#[test]
fn a_truncated_or_corrupt_component() {
    let bytes = Guest::default().component();
    let sandbox = sandbox();
    for len in [9, 40, bytes.len() / 2, bytes.len() - 1] {
        let error = sandbox.load(&bytes[..len]).err().expect("truncated");
        assert!(
            matches!(error, LoadError::Invalid(_) | LoadError::OtherWorld { .. }),
            "{len}: {error:?}"
        );
        says(&error, &[]);
    }
    // One flipped byte is refused, or gives a component that fits the contract as well; never a panic.
    for at in (8..bytes.len()).step_by(bytes.len() / 60) {
        let mut bytes = bytes.clone();
        bytes[at] ^= 0x55;
        if let Err(error) = sandbox.load(&bytes) {
            says(&error, &[]);
        }
    }
}

#[test]
fn a_component_that_is_too_large() {
    let limits = Limits {
        max_component_bytes: 1000,
        ..Limits::default()
    };
    let sandbox = Sandbox::new(limits).unwrap();
    let error = sandbox
        .load(&Guest::default().component())
        .err()
        .expect("too large");
    says(&error, &["more than the 1000", "max_component_bytes"]);
}

#[test]
fn wasi_imports() {
    let error = refusal(
        &Guest {
            wasi: true,
            ..Guest::default()
        }
        .component(),
    );
    assert!(matches!(error, LoadError::Wasi { .. }), "{error:?}");
    says(
        &error,
        &["wasi:clocks/wall-clock@0.2.0", "wasm32-unknown-unknown"],
    );
}

#[test]
fn another_world() {
    let mut empty = wasm_encoder::Component::new();
    let error = refusal(empty.as_slice());
    assert!(matches!(error, LoadError::OtherWorld { .. }), "{error:?}");
    says(&error, &["exports nothing", "wit/"]);
    empty.section(&wasm_encoder::CustomSection {
        name: "x".into(),
        data: [].as_slice().into(),
    });
    says(&refusal(empty.as_slice()), &["exports nothing"]);
    let other = Guest {
        package: "someone:else",
        edit: &[("timetable:attention@0.1.0", "someone:else@0.1.0")],
        ..Guest::default()
    };
    let error = refusal(&other.component());
    says(&error, &["someone:else/"]);
}

#[test]
fn another_contract_version() {
    let guest = Guest {
        version: "0.2.0",
        edit: &[("timetable:attention@0.1.0", "timetable:attention@0.2.0")],
        ..Guest::default()
    };
    let error = refusal(&guest.component());
    assert!(
        matches!(error, LoadError::ContractVersion { .. }),
        "{error:?}"
    );
    says(&error, &["@0.2.0", "0.1.0", "build it against wit/"]);
}

#[test]
fn a_missing_function() {
    let guest = Guest {
        edit: &[(
            "        launch-promise: func(shape: capture-shape) -> launch-promise;\n",
            "",
        )],
        without: &["launch-promise"],
        ..Guest::default()
    };
    let error = refusal(&guest.component());
    assert!(
        matches!(error, LoadError::MissingFunction { .. }),
        "{error:?}"
    );
    says(
        &error,
        &[
            "timetable:attention/flash-attn@0.1.0",
            "[method]builder.launch-promise",
        ],
    );
}

#[test]
fn a_function_of_another_type() {
    let guest = Guest {
        edit: &[("fast-build: bool", "fast-build: u32")],
        ..Guest::default()
    };
    let error = refusal(&guest.component());
    assert!(matches!(error, LoadError::WrongType { .. }), "{error:?}");
    says(&error, &["[method]builder.build", "bool"]);

    // A record with a field that this host does not know.
    let guest = Guest {
        edit: &[(
            "        num-splits: list<s32>,\n",
            "        num-splits: list<s32>,\n        extra: u32,\n",
        )],
        ..Guest::default()
    };
    says(&refusal(&guest.component()), &["[method]builder.build"]);
}

#[test]
fn memory_above_the_cap_from_the_start() {
    // 100 pages are 6.25 MiB; the cap is 4 MiB.
    let error = refusal(
        &Guest {
            pages: 100,
            ..Guest::default()
        }
        .component(),
    );
    says(&error, &["memory"]);
}

#[test]
fn one_function_is_enough_to_be_refused_and_none_is_called() {
    // A constructor that traps is none of load's business.
    let guest = Guest {
        create: Act::Unreachable,
        ..Guest::default()
    };
    assert!(sandbox().load(&guest.component()).is_ok());
}
