//! Every vectors file that is not a builder's: passed and total of each, none left out, none shortened.

use std::{collections::BTreeMap, fs};

use crate::{
    backends, caches, chunks, graphs,
    harness::{Tally, VECTORS},
    rows, splits, tables,
};

/// One tally per file.
fn tallies() -> Vec<Tally> {
    vec![
        backends::backend_selection(),
        backends::backend_supports_tables(),
        tables::block_table_compute_slot_mapping(),
        rows::common_attn_metadata_methods(),
        chunks::compute_causal_conv1d_metadata(),
        graphs::cudagraph_dispatcher_v1(),
        graphs::cudagraph_manager_v2(),
        graphs::cudagraph_mode_properties(),
        rows::dcp_context_query_split(),
        chunks::get_dcp_local_seq_lens(),
        caches::get_supported_kv_cache_layouts(),
        caches::kv_cache_shape(),
        rows::make_kv_sharing_fast_prefill_common_attn_metadata(),
        rows::make_local_attention_virtual_batches(),
        chunks::mamba2_compute_varlen_chunk_metadata(),
        chunks::mamba_compute_chunk_metadata(),
        tables::mamba_get_block_table_tensor(),
        caches::map_to_kernel_block_table(),
        tables::mm_prefix_ranges(),
        tables::mrv2_block_tables(),
        chunks::plan_mla_context_chunks(),
        rows::reorder_batch_to_split_decodes_and_prefills(),
        graphs::resolve_modes(),
        caches::select_common_block_size(),
        rows::split_attn_metadata(),
        splits::split_decodes_and_prefills(),
        splits::split_decodes_prefills_and_extends(),
        splits::split_prefill_chunks(),
        rows::ubatch_thresholds(),
        backends::validate_configuration(),
    ]
}

/// What the provenance notes say was recorded: cases by file, without the files of builders, which are named after a class.
fn recorded() -> BTreeMap<String, usize> {
    let notes = fs::read_to_string(format!("{VECTORS}/PROVENANCE.md")).expect("the notes");
    let rows = notes.lines().filter_map(|line| {
        let mut cells = line.split('|').map(str::trim).skip(1);
        let file = cells.next()?.trim_matches('`').strip_suffix(".json")?;
        let cases = cells.next()?.parse().ok()?;
        Some((file.trim_end_matches("/*").to_owned(), cases))
    });
    rows.filter(|(file, _)| file.starts_with(|c: char| c.is_ascii_lowercase()))
        .filter(|(file, _)| !OTHERS.contains(&file.as_str()))
        .collect()
}

/// What lies beside the files of functions and is a builder's, the engine's or a model's; other tests read it.
const OTHERS: [&str; 7] = [
    "builder_fields",
    "chat_templates",
    "engine",
    "gguf_types",
    "smollm2-135m-q4_1-greedy",
    "tiny_models",
    "transformers_logits",
];

/// What lies in the folder, by the same rule.
fn present() -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(VECTORS)
        .expect("the vectors")
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .into_string()
                .expect("a name")
        })
        .filter(|name| name.starts_with(|c: char| c.is_ascii_lowercase()))
        .map(|name| name.trim_end_matches(".json").to_owned())
        .filter(|name| !OTHERS.contains(&name.as_str()))
        .collect();
    names.sort();
    names
}

#[test]
fn every_recorded_case_conforms() {
    let tallies = tallies();
    let (mut passed, mut total) = (0, 0);
    for tally in &tallies {
        println!("{:<52} {:>5}/{}", tally.file, tally.passed, tally.total);
        passed += tally.passed;
        total += tally.total;
    }
    println!("{:<52} {passed:>5}/{total}", "all");

    let counted: BTreeMap<String, usize> = tallies
        .iter()
        .map(|tally| (tally.file.to_owned(), tally.total))
        .collect();
    assert_eq!(counted, recorded(), "cases read, and cases recorded");
    let counted: Vec<String> = counted.into_keys().collect();
    assert_eq!(counted, present(), "files read, and files in the folder");
    assert_eq!(
        passed, total,
        "cases differ: the test of the file shows the first"
    );
}
