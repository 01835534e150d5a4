//! 02: the sandbox in the smallest program: one attention group, one step, no device. Example 05 is a whole engine around it.
//!
//! ```sh
//! cargo run --release -p timetable-examples --example 02_embed_sandbox            # the embedded FLASH_ATTN builder
//! cargo run --release -p timetable-examples --example 02_embed_sandbox -- my-builder.wasm
//! ```
//!
//! It loads a component, gives it a step's `CommonAttentionMetadata`, holds the result against the verifier, and prints the
//! metadata with its symbolic tensors resolved. A builder that misbehaves costs nothing: the plain builder serves the step.

use anyhow::{Context, Result};
use timetable_attention::{
    Resolver,
    describe::{StepDescription, metadata_to_json},
    plain_builder, verify, verify_step,
};
use timetable_sandbox::{BuiltBy, GroupBuilder, GroupSetup, Limits, Sandbox};

/// Two decodes and a prefill, as an engine's persistent batch has them: three rows of a block table, blocks of 16 tokens.
const STEP: &str = r#"{
    "query_start_loc": [0, 1, 2, 22],
    "seq_lens": [5, 17, 32],
    "num_reqs": 3,
    "num_actual_tokens": 22,
    "max_query_len": 20,
    "max_seq_len": 32,
    "block_table": [[1, 0], [2, 3], [4, 5]],
    "slot_mapping": [20, 48, 76, 77, 78, 79, 80, 81, 82, 83, 84, 85, 86, 87, 88, 89, 90, 91, 92, 93, 94, 95],
    "is_prefilling": [false, false, true],
    "kv_cache_spec": {"block_size": 16, "num_kv_heads": 2, "head_size": 64},
    "config": {"attention": {"num_heads": 8}, "device": {"num_workers": 4}}
}"#;

fn main() -> Result<()> {
    let (bytes, origin) = match std::env::args().nth(1) {
        Some(path) => (
            std::fs::read(&path).with_context(|| format!("cannot read {path}"))?,
            path,
        ),
        None => embedded()?,
    };

    // Once per process: the engine with its limits, and each component.
    let sandbox = Sandbox::new(Limits::default())?;
    let component = sandbox.load(&bytes).with_context(|| origin.clone())?;

    // Once per attention group: the component's builder, and the plain one that serves when it cannot.
    let step = StepDescription::from_json(STEP)?.validate()?;
    let plain = plain_builder(component.family(), &step.config)
        .map_err(|error| anyhow::anyhow!(error.message))?;
    let setup = GroupSetup {
        name: "model.layers.0-29".into(),
        config: step.config.clone(),
        plain,
        acceptance: None,
    };
    let mut group = GroupBuilder::new(&sandbox, setup, &component, &origin)?;

    // Once per step: build and verify. The host's own tensors are checked first, for the verifier relies on them.
    let inputs = step.inputs(&[]);
    let context = step.context(&inputs);
    verify_step(&context)?;
    let built = group.build(&step.step.cam, false, |metadata| verify(metadata, &context))?;
    if let Some(fault) = &built.fault {
        eprintln!("the component: {fault}");
    }

    let resolver = Resolver::new(&step.config, &step.step.cam, inputs);
    let metadata = metadata_to_json(&built.metadata, &resolver)?;
    println!("{}", serde_json::to_string_pretty(&metadata)?);
    let by = match built.built_by {
        BuiltBy::Component | BuiltBy::Candidate => group.info().name.clone(),
        BuiltBy::Plain => "the plain builder".to_owned(),
    };
    let status = group.handle().status();
    eprintln!(
        "built by {by}, in {:.1} µs, {} work items",
        status.build_p50_ns.unwrap_or(0) as f64 / 1e3,
        status.work_items.last
    );
    Ok(())
}

fn embedded() -> Result<(Vec<u8>, String)> {
    let embedded =
        timetable_reference::component("flash-attn").context("no embedded FLASH_ATTN builder")?;
    Ok((embedded.bytes.to_vec(), "embedded".to_owned()))
}
