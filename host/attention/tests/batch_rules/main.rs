//! Batch rules and CUDA graph modes against the cases recorded from the real implementation: one function per vectors file.

mod chunks;
mod field_cases;
mod graphs;
mod harness;
mod properties;
mod rows;
mod rules;
mod splits;
mod steps;
mod tables;

/// Every file of this binary: prints passed/total of each, and fails if one case does.
#[test]
fn summary() {
    let tallies = [
        chunks::compute_causal_conv1d_metadata(),
        chunks::get_dcp_local_seq_lens(),
        chunks::mamba2_compute_varlen_chunk_metadata(),
        chunks::mamba_compute_chunk_metadata(),
        chunks::plan_mla_context_chunks(),
        graphs::cudagraph_dispatcher_v1(),
        graphs::cudagraph_manager_v2(),
        graphs::cudagraph_mode_properties(),
        graphs::resolve_modes(),
        rows::common_attn_metadata_methods(),
        rows::dcp_context_query_split(),
        rows::make_kv_sharing_fast_prefill_common_attn_metadata(),
        rows::make_local_attention_virtual_batches(),
        rows::reorder_batch_to_split_decodes_and_prefills(),
        rows::split_attn_metadata(),
        rows::ubatch_thresholds(),
        splits::split_decodes_and_prefills(),
        splits::split_decodes_prefills_and_extends(),
        splits::split_prefill_chunks(),
        tables::block_table_compute_slot_mapping(),
        tables::mamba_get_block_table_tensor(),
        tables::mm_prefix_ranges(),
        tables::mrv2_block_tables(),
    ];
    let (mut passed, mut total) = (0, 0);
    for tally in &tallies {
        println!("{:<52} {:>5}/{}", tally.file, tally.passed, tally.total);
        passed += tally.passed;
        total += tally.total;
    }
    println!("{:<52} {passed:>5}/{total}", "all");
    assert_eq!(
        passed, total,
        "cases differ: run the test of the file for the first differences"
    );
}
