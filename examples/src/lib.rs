//! What several examples share: a step to serve, and numbers to serve it with. It must never know an example.

use timetable_attention::describe::{DescribedStep, StepDescription};

/// A step, described as JSON and checked: (query tokens, keys) of each request, 4 query heads on 2 KV heads of 64, pages of 16.
///
/// # Errors
/// If the lengths make no step.
pub fn step(requests: &[(i32, i32)]) -> anyhow::Result<DescribedStep> {
    let (mut query_start_loc, mut table, mut slots) = (vec![0], Vec::new(), Vec::new());
    let width = requests.iter().map(|&(_, keys)| (keys + 15) / 16).max();
    let mut next = 0;
    for &(query, keys) in requests {
        query_start_loc.push(query_start_loc[query_start_loc.len() - 1] + query);
        let pages: Vec<i32> = (0..width.unwrap_or(0))
            .map(|page| if page * 16 < keys { next + page } else { 0 })
            .collect();
        slots.extend((keys - query..keys).map(|at| pages[at as usize / 16] * 16 + at % 16));
        next += (keys + 15) / 16;
        table.push(pages);
    }
    let lens: Vec<i32> = requests.iter().map(|&(_, keys)| keys).collect();
    let queries = requests.iter().map(|&(query, _)| query);
    let json = format!(
        r#"{{"query_start_loc": {query_start_loc:?}, "seq_lens": {lens:?}, "block_table": {table:?},
            "slot_mapping": {slots:?}, "num_reqs": {}, "num_actual_tokens": {},
            "max_query_len": {}, "max_seq_len": {}, "seq_lens_cpu_upper_bound": {lens:?},
            "kv_cache_spec": {{"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": "float32"}},
            "config": {{"attention": {{"num_heads": 4}}, "max_num_splits": 8}}}}"#,
        requests.len(),
        slots.len(),
        queries.max().unwrap_or(0),
        lens.iter().max().copied().unwrap_or(0),
    );
    Ok(StepDescription::from_json(&json)?.validate()?)
}

/// Numbers in [−1, 1), always the same.
pub fn noise(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}
