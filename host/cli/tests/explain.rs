//! `timetable backends` and `timetable explain-graphs`: the rule book, made visible.

mod support;

use support::run;

fn chosen(arguments: &[&str]) -> serde_json::Value {
    let mut all = vec!["backends", "--json"];
    all.extend(arguments);
    run(&all).succeeds().json()
}

#[test]
fn each_backend_answers_and_the_others_say_why_not() {
    let hopper = chosen(&[
        "--capability",
        "9.0",
        "--head-size",
        "128",
        "--dtype",
        "bfloat16",
    ]);
    assert_eq!(hopper["chosen"], "FLASH_ATTN");
    let flashinfer = hopper["backends"]
        .as_array()
        .unwrap()
        .iter()
        .find(|backend| backend["name"] == "FLASHINFER")
        .unwrap();
    assert_eq!(flashinfer["valid"], true);
    assert_eq!(flashinfer["why_not"], "valid, but FLASH_ATTN comes first");

    let blackwell = chosen(&["--capability", "10.0", "--head-size", "128"]);
    assert_eq!(blackwell["chosen"], "FLASHINFER");
    let cpu = chosen(&["--head-size", "64", "--dtype", "float32"]);
    assert_eq!(cpu["chosen"], "FLASH_ATTN");
}

#[test]
fn an_explicit_choice_never_falls_back() {
    let arguments = [
        "backends",
        "--capability",
        "9.0",
        "--head-size",
        "48",
        "--attention-backend",
        "FLASHINFER",
    ];
    run(&arguments).fails(
        4,
        &[
            "Selected backend AttentionBackendEnum.FLASHINFER is not valid for this configuration",
            "head_size not supported",
        ],
    );
}

#[test]
fn the_component_says_what_graphs_it_supports_and_the_mode_follows() {
    let explain = |arguments: &[&str]| {
        let mut all = vec!["explain-graphs", "--json"];
        all.extend(arguments);
        run(&all)
    };
    let plain = explain(&["--mode", "FULL_AND_PIECEWISE", "--backend", "FLASHINFER"]);
    let plain = plain.succeeds().json();
    assert_eq!(plain["weakest_support"], "UNIFORM_SINGLE_TOKEN_DECODE");
    assert_eq!(plain["outcome"]["survived"]["mode"], "FULL_AND_PIECEWISE");

    let speculative = explain(&[
        "--mode",
        "FULL_AND_PIECEWISE",
        "--backend",
        "FLASHINFER",
        "--num-speculative-tokens",
        "3",
    ]);
    let speculative = speculative.succeeds().json();
    assert_eq!(speculative["outcome"]["survived"]["mode"], "PIECEWISE");
    let reason = speculative["changes"][0]["reason"].as_str().unwrap();
    assert_eq!(
        reason,
        "CUDAGraphMode.FULL_AND_PIECEWISE is not supported with spec-decode for attention backend FlashInferBackend \
         (support: AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE); setting cudagraph_mode=PIECEWISE"
    );

    explain(&["--mode", "FULL", "--backend", "FLASHINFER=NEVER"]).fails(
        4,
        &[
            "CUDAGraphMode.FULL is not supported with FlashInferBackend backend",
            "please try cudagraph_mode=PIECEWISE",
        ],
    );
    explain(&["--mode", "SOMETIMES"]).fails(2, &["SOMETIMES", "FULL_AND_PIECEWISE"]);
    explain(&["--backend", "FLASHINFER=OFTEN"]).fails(2, &["OFTEN", "UNIFORM_BATCH"]);
    explain(&["--capability", "nine"]).fails(2, &["nine", "9.0"]);
}
