//! Batch rules and CUDA graph modes against the cases recorded from the real implementation: one function per vectors file.

mod chunks;
mod harness;
mod splits;

/// Every file of this binary: prints passed/total of each, and fails if one case does.
#[test]
fn summary() {
    let tallies = [
        chunks::compute_causal_conv1d_metadata(),
        chunks::get_dcp_local_seq_lens(),
        chunks::mamba2_compute_varlen_chunk_metadata(),
        chunks::mamba_compute_chunk_metadata(),
        chunks::plan_mla_context_chunks(),
        splits::split_decodes_and_prefills(),
        splits::split_decodes_prefills_and_extends(),
        splits::split_prefill_chunks(),
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
