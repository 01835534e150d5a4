//! `timetable generate` with a tiny model: answers, and what bad input gets.

mod support;

use support::{file, run, timetable, tiny_llama};
use timetable_tests::tiny_models::Recorded;

fn generate(extra: &[&str]) -> support::Ran {
    let model = tiny_llama();
    let mut arguments = vec![
        "generate",
        "--model",
        model.to_str().unwrap(),
        "--admin",
        "none",
    ];
    arguments.extend(["--num-gpu-blocks-override", "64", "--weights", "f32"]);
    arguments.extend(extra);
    run(&arguments)
}

#[test]
fn both_backends_give_the_same_tokens() {
    let answer = |backend: &str| {
        let answer = generate(&[
            "--prompt",
            "t40 t5 t77",
            "--max-tokens",
            "24",
            "--ignore-eos",
            "--json",
            "--attention-backend",
            backend,
        ]);
        let answer = answer.succeeds().json();
        assert_eq!(answer["builders"][0]["backend"], backend);
        assert_eq!(answer["builders"][0]["layers"], 2);
        assert!(answer["builders"][0]["steps"].as_u64().unwrap() >= 24);
        assert_eq!(
            answer["builders"][0]["layer_names"],
            serde_json::json!([
                "model.layers.0.self_attn.attn",
                "model.layers.1.self_attn.attn"
            ])
        );
        assert_eq!(answer["builders"][0]["kv_cache_group"], 0);
        assert_eq!(answer["cudagraph_mode"]["survived"], "NONE");
        assert_eq!(answer["fallback_steps"], 0);
        answer["outputs"][0].clone()
    };
    let flash_attn = answer("FLASH_ATTN");
    assert_eq!(
        flash_attn["prompt_token_ids"],
        serde_json::json!([40, 5, 77])
    );
    assert_eq!(flash_attn["output_token_ids"].as_array().unwrap().len(), 24);
    assert_eq!(flash_attn["finish_reason"], "length");
    for other in ["FLASHINFER", "TRITON_ATTN"] {
        let tokens = &answer(other)["output_token_ids"];
        assert_eq!(&flash_attn["output_token_ids"], tokens, "{other}");
    }
}

#[test]
fn a_hybrid_model_has_a_builder_for_each_of_its_groups() {
    let recorded = Recorded::load();
    let bamba = recorded.cases.iter().find(|case| case.family() == "bamba");
    let model = tempfile::tempdir().unwrap();
    bamba.expect("a Bamba").write(model.path());
    let tokenizer = tiny_llama().join("tokenizer.json");
    std::fs::copy(tokenizer, model.path().join("tokenizer.json")).unwrap();
    let generate = |more: &[&str]| {
        let model = model.path().to_str().unwrap();
        let arguments = ["generate", "--model", model, "--prompt", "t40 t5 t77"];
        let rest = ["--max-tokens", "8", "--ignore-eos", "--json"];
        let sizes = ["--admin", "none", "--num-gpu-blocks-override", "64"];
        run(&[&arguments[..], &rest, &sizes, more].concat())
    };
    let serving = |more: &[&str]| {
        let answer = generate(more).succeeds().json();
        assert_eq!(answer["fallback_steps"], 0);
        let warned = &answer["hazards"][0]["code"];
        assert_eq!(*warned, "prefix_caching_disabled");
        let builders = answer["builders"].as_array().unwrap().clone();
        let of = |builder: &serde_json::Value| {
            let text = |key: &str| builder[key].as_str().unwrap_or_default().to_owned();
            assert!(builder["steps"].as_u64().unwrap() >= 8, "{builder}");
            (
                text("group"),
                text("view"),
                builder["active"]["origin"].clone(),
            )
        };
        let tokens = answer["outputs"][0]["output_token_ids"].clone();
        (builders.iter().map(of).collect::<Vec<_>>(), tokens)
    };
    let (builders, tokens) = serving(&[]);
    let embedded = |group: &str, view: &str, name: &str| {
        let origin = serde_json::json!(format!("embedded {name}"));
        (group.to_owned(), view.to_owned(), origin)
    };
    assert_eq!(
        builders,
        [
            embedded("FLASH_ATTN/0", "plain", "flash-attn"),
            embedded("MAMBA2/1", "states", "mamba")
        ]
    );
    // A component serves the groups of its interface, the others keep theirs.
    let scratch = tempfile::tempdir().unwrap();
    let bytes = |name: &str| timetable_reference::component(name).unwrap().bytes;
    let mamba = file(&scratch, "own.wasm", bytes("mamba"));
    let flashinfer = file(&scratch, "other.wasm", bytes("flashinfer"));
    let (own, same) = serving(&["--builder", &format!("MAMBA={mamba}")]);
    assert_eq!(own[0], builders[0]);
    assert_eq!(own[1].2, mamba.as_str());
    let builder = format!("MAMBA={mamba}");
    let named = ["--attention-backend", "FLASH_ATTN", "--builder", &builder];
    assert_eq!(serving(&named).0, own);
    assert_eq!(same, tokens);
    // What no group can use is refused, with what they need.
    generate(&["--builder", &format!("FLASHINFER={flashinfer}")])
        .fails(2, &["FLASHINFER", "FLASH_ATTN and MAMBA"]);
    generate(&["--builder", &format!("MAMBA={flashinfer}")])
        .fails(4, &["`flashinfer`", "MAMBA needs one of `mamba`"]);
    let drafts = [
        "--speculative-method",
        "ngram",
        "--num-speculative-tokens",
        "2",
    ];
    generate(&drafts).fails(4, &["recurrent layers", "num_speculative_tokens is 2"]);
    // What is recorded is each group's own view of a step, and another process builds the same from it.
    let recording = scratch.path().join("recording");
    let recording = recording.to_str().unwrap();
    serving(&["--record", recording]);
    let replayed = run(&["replay", recording, "--json"]).succeeds().json();
    assert!(replayed["steps"].as_u64() >= Some(16), "{replayed}");
    assert_eq!(replayed["reproduced"], true);
}

#[test]
fn the_log_says_which_backend_each_layer_got_and_what_became_of_the_graph_mode() {
    let model = tiny_llama();
    let logged = |mode: &str| {
        let mut command = timetable();
        command
            .env("TIMETABLE_LOG", "info")
            .args(["generate", "--model", model.to_str().unwrap()])
            .args(["--admin", "none", "--num-gpu-blocks-override", "64"])
            .args(["--prompt", "t1", "--max-tokens", "1", "--json"])
            .args(["--attention-backend", "auto", "--cudagraph-mode", mode]);
        let ran = support::Ran::from(command.output().unwrap());
        (ran.succeeds().json(), ran.stderr)
    };
    let (answer, log) = logged("FULL");
    let reason = "CUDAGraphMode.FULL is not used with a platform that cannot capture graphs; setting cudagraph_mode=NONE";
    for (level, part) in [
        (
            "INFO",
            "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'FLASHINFER', 'TRITON_ATTN'].",
        ),
        (
            "INFO",
            "model.layers.0.self_attn.attn … model.layers.1.self_attn.attn (2 layers): FLASH_ATTN (FULL_ATTENTION",
        ),
        ("WARN", reason),
    ] {
        assert!(
            log.lines()
                .any(|line| line.contains(level) && line.contains(part)),
            "{level} {part} is missing in\n{log}"
        );
    }
    assert_eq!(answer["cudagraph_mode"]["configured"], "FULL");
    assert_eq!(answer["cudagraph_mode"]["changes"][0]["reason"], reason);
    assert_eq!(answer["hazards"][0]["message"], reason);

    let (answer, _) = logged("none");
    assert_eq!(answer["cudagraph_mode"]["changes"], serde_json::json!([]));
    assert_eq!(answer["hazards"], serde_json::json!([]));
}

#[test]
fn several_prompts_run_as_one_batch_and_each_line_says_whose_it_is() {
    let answer = generate(&[
        "--prompt",
        "t1 t2 t3",
        "--prompt",
        "t9",
        "--max-tokens",
        "12",
        "--ignore-eos",
    ]);
    let stdout = &answer.succeeds().stdout;
    assert!(
        stdout.contains("[0] ") && stdout.contains("[1] "),
        "{stdout}"
    );
}

#[test]
fn the_same_seed_gives_the_same_tokens_whatever_the_batch() {
    let sampled = [
        "--temperature",
        "1.5",
        "--seed",
        "7",
        "--max-tokens",
        "10",
        "--ignore-eos",
        "--json",
    ];
    let tokens = |prompts: &[&str]| {
        let mut arguments = sampled.to_vec();
        for prompt in prompts {
            arguments.extend(["--prompt", prompt]);
        }
        generate(&arguments).succeeds().json()["outputs"][0]["output_token_ids"].clone()
    };
    let alone = tokens(&["t5 t6"]);
    assert_eq!(alone.as_array().unwrap().len(), 10);
    assert_eq!(alone, tokens(&["t5 t6", "t100", "t1 t2 t3 t4"]));
}

#[test]
fn bad_models_get_one_line() {
    let scratch = tempfile::tempdir().unwrap();
    let garbage = file(&scratch, "garbage.gguf", b"GGUF, one would think, but no");
    let truncated = file(
        &scratch,
        "truncated.gguf",
        b"GGUF\x03\0\0\0\xff\0\0\0\0\0\0\0",
    );
    let other = scratch.path().join("other");
    std::fs::create_dir(&other).unwrap();
    std::fs::write(
        other.join("config.json"),
        r#"{"architectures": ["MagicForCausalLM"], "model_type": "magic"}"#,
    )
    .unwrap();
    for (path, part) in [
        ("/nonexistent.gguf", "/nonexistent.gguf"),
        (garbage.as_str(), "garbage.gguf"),
        (truncated.as_str(), "truncated.gguf"),
        (other.to_str().unwrap(), "agic"),
    ] {
        run(&[
            "generate", "--model", path, "--prompt", "x", "--admin", "none",
        ])
        .fails(4, &[part]);
    }
}

#[test]
fn bad_requests_get_one_line() {
    let long = "t5 ".repeat(600);
    generate(&["--prompt", &long, "--max-model-len", "512"]).fails(4, &["600", "512"]);
    // Shorter than the steps that a new builder is tried with.
    generate(&["--prompt", "t5", "--max-model-len", "2"]).succeeds();
    for wrong in ["nan", "inf"] {
        let ran = generate(&["--prompt", "t5", "--memory-fraction", wrong]);
        assert_eq!(ran.code, 2, "{}", ran.stderr);
        assert!(ran.stderr.contains("give a number"), "{}", ran.stderr);
    }
    generate(&["--prompt", "t5", "--max-model-len", "4096"]).fails(4, &["4096", "max_model_len"]);
    generate(&["--prompt", "t1", "--temperature=-1"]).fails(2, &["temperature", "-1"]);
    generate(&["--prompt", "t1", "--top-p", "1.5"]).fails(2, &["top_p", "1.5"]);
    generate(&["--prompt", "t1", "--attention-backend", "MAGIC"]).fails(2, &["MAGIC"]);
    generate(&["--prompt", "t1", "--cudagraph-mode", "MAGIC"])
        .fails(2, &["--cudagraph-mode MAGIC", "FULL_AND_PIECEWISE"]);
    generate(&["--prompt", "t1", "--attention-backend", "FLEX_ATTENTION"])
        .fails(4, &["FLEX_ATTENTION"]);
    generate(&["--prompt", "t1", "--builder", "FLASHINFER=x.wasm"])
        .fails(2, &["FLASHINFER", "FLASH_ATTN"]);
    generate(&[
        "--prompt",
        "t1",
        "--builder",
        "FLASH_ATTN=/nonexistent.wasm",
    ])
    .fails(4, &["/nonexistent.wasm"]);
    generate(&["--prompt", "t1", "--block-size", "0"]).fails(4, &["block_size", "0"]);
    generate(&["--prompt", "t1", "--block-size", "18446744073709551615"])
        .fails(4, &["block_size", "65536"]);
    let model = tiny_llama();
    run(&[
        "generate",
        "--model",
        model.to_str().unwrap(),
        "--prompt",
        "t1",
        "--admin",
        "none",
        "--num-gpu-blocks-override",
        "2000000000",
    ])
    .fails(4, &["2000000000 blocks", "lower the number"]);
    generate(&["--prompt", "t1", "--builder", "FLASH_ATTN=/dev/zero"])
        .fails(4, &["/dev/zero", "not a regular file"]);
    generate(&["--prompt", "t1", "--chat"]).fails(4, &["chat template"]);
    let flashinfer = timetable_reference::component("flashinfer").unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let other = file(&scratch, "flashinfer.wasm", flashinfer.bytes);
    generate(&[
        "--prompt",
        "t1",
        "--builder",
        &format!("FLASH_ATTN={other}"),
    ])
    .fails(4, &["flashinfer", "flash-attn"]);
}

#[test]
fn a_directory_of_someone_else_is_refused() {
    use std::os::unix::fs::{MetadataExt, chown};
    let scratch = tempfile::tempdir().unwrap();
    let own = std::fs::metadata(scratch.path()).unwrap().uid();
    let foreign = scratch.path().join("foreign");
    std::fs::create_dir(&foreign).unwrap();
    // Root can give a directory away; anybody else uses one that is root's.
    let foreign = if own == 0 {
        chown(&foreign, Some(65_534), None).unwrap();
        foreign.to_str().unwrap().to_owned()
    } else {
        "/".to_owned()
    };
    for flag in ["--cache-dir", "--state-dir"] {
        generate(&["--prompt", "t1", flag, &foreign]).fails(4, &[&foreign, "belongs to"]);
    }
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    use std::process::Stdio;
    let mut child = timetable()
        .args([
            "generate",
            "--model",
            tiny_llama().to_str().unwrap(),
            "--admin",
            "none",
            "--prompt",
            "t1",
        ])
        .args([
            "--num-gpu-blocks-override",
            "64",
            "--max-tokens",
            "200",
            "--ignore-eos",
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.status.success() && !stderr.contains("panicked"),
        "{stderr}"
    );
}

/// The tiny model in a directory of its own, with some of its `config.json` and tokenizer configuration changed.
fn changed_model(
    scratch: &tempfile::TempDir,
    config: serde_json::Value,
    tokenizer_config: serde_json::Value,
) -> String {
    for name in ["model.safetensors", "tokenizer.json"] {
        std::fs::copy(tiny_llama().join(name), scratch.path().join(name)).unwrap();
    }
    for (name, changes) in [
        ("config.json", config),
        ("tokenizer_config.json", tokenizer_config),
    ] {
        let text = std::fs::read_to_string(tiny_llama().join(name)).unwrap();
        let mut value: serde_json::Value = serde_json::from_str(&text).unwrap();
        for (key, change) in changes.as_object().unwrap() {
            value[key] = change.clone();
        }
        std::fs::write(scratch.path().join(name), value.to_string()).unwrap();
    }
    scratch.path().to_str().unwrap().to_owned()
}

#[test]
fn a_model_whose_context_holds_one_token_is_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let model = changed_model(
        &scratch,
        serde_json::json!({ "max_position_embeddings": 1 }),
        serde_json::json!({}),
    );
    run(&[
        "generate", "--model", &model, "--prompt", "t5", "--admin", "none",
    ])
    .fails(4, &["max_position_embeddings", "1"]);
}

#[test]
fn a_chat_template_cannot_run_forever_or_fill_memory() {
    for template in [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ 'x'|indent(1000000000) }}",
        "{% for a in range(100000) %}{{ messages }}{{ messages }}{{ messages }}{{ messages }}{{ messages }}{{ messages }}{{ messages }}{{ messages }}{% endfor %}",
    ] {
        let scratch = tempfile::tempdir().unwrap();
        let model = changed_model(
            &scratch,
            serde_json::json!({}),
            serde_json::json!({ "chat_template": template }),
        );
        run(&[
            "generate", "--model", &model, "--chat", "--prompt", "t5", "--admin", "none",
        ])
        .fails(4, &["chat template"]);
    }
}

/// DeepSeek-V2, Bamba, Qwen3-Next, Gemma 3 and Llama 4, as a user runs them.
#[test]
fn every_hybrid_and_latent_family_answers_with_transformers_tokens() {
    let recorded = Recorded::load();
    let words = recorded.prompts[0].iter().map(|token| format!("t{token}"));
    let prompt = words.collect::<Vec<_>>().join(" ");
    for case in &recorded.cases {
        let dir = tempfile::tempdir().expect("a directory");
        case.write_with_tokenizer(dir.path());
        let tokens = case.greedy[0].len().to_string();
        let mut arguments = vec!["generate", "--model", dir.path().to_str().unwrap()];
        arguments.extend(["--admin", "none", "--num-gpu-blocks-override", "64"]);
        arguments.extend(["--prompt", &prompt, "--max-tokens", &tokens]);
        arguments.extend(["--ignore-eos", "--json"]);
        if case.config["attention_chunk_size"].is_u64() {
            // It must divide the chunk.
            arguments.extend(["--block-size", "8"]);
        }
        let answer = run(&arguments);
        let answer = answer.succeeds().json();
        let output = &answer["outputs"][0]["output_token_ids"];
        assert_eq!(*output, serde_json::json!(case.greedy[0]), "{}", case.name);
        assert_eq!(answer["fallback_steps"], 0, "{}", case.name);
    }
}
