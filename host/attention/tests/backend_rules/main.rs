//! Backend classes, selection, cache shapes, layouts and kernel blocks against the cases recorded from the real
//! implementation: one function per vectors file.

mod caches;
mod harness;
mod selection;

/// Every file of this binary: prints passed/total of each, and fails if one case does.
#[test]
fn summary() {
    let tallies = [
        selection::backend_supports_tables(),
        selection::validate_configuration(),
        selection::backend_selection(),
        caches::kv_cache_shape(),
        caches::get_supported_kv_cache_layouts(),
        caches::select_common_block_size(),
        caches::map_to_kernel_block_table(),
    ];
    for tally in &tallies {
        println!("{tally}");
    }
    let failed: Vec<&str> = tallies.iter().flat_map(|t| t.failures()).collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}
