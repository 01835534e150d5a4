use super::*;

#[test]
fn a_blocks_threads_are_whole_warps_within_a_blocks_limit() {
    // (elements, elements a thread, threads)
    let cases = [
        (0, 8, 32),
        (1, 8, 32),
        (576, 8, 96),
        (4096, 8, 512),
        (14336, 8, 1024),
        (u32::MAX, 1, 1024),
    ];
    for (size, each, expected) in cases {
        assert_eq!(threads(size, each), expected, "{size} by {each}");
    }
}

#[test]
fn scatter_blocks_cover_every_token_once() {
    // (tokens, vectors of a token, grid, block)
    let cases = [
        (8192, 256, 8192, (256, 1)),
        (8192, 1024, 8192, (256, 1)),
        (3, 48, 1, (64, 4)),
        (5, 48, 2, (64, 4)),
        (9, 8, 2, (32, 8)),
        (0, 8, 0, (32, 8)),
    ];
    for (tokens, vectors, blocks, block) in cases {
        let launch = scatter_launch(tokens, vectors);
        assert_eq!(launch.grid, (blocks, 1, 1), "{tokens} by {vectors}");
        assert_eq!(launch.block, (block.0, block.1, 1), "{tokens} by {vectors}");
    }
}

#[test]
fn arguments_point_at_values_of_the_kernels_types() {
    let params = UnpackParams {
        num_ops: 7,
        ..UnpackParams::default()
    };
    let read: &mut [*mut c_void] = arguments![params, 5_i64];
    // SAFETY: the first pointer is at `params`, which lives.
    let copy = unsafe { *read[0].cast::<UnpackParams>() };
    assert_eq!(copy, params);
    assert_eq!(read.len(), 2);
}

/// What the launches above pass, in order: a kernel that declares something else would read it at other offsets.
#[test]
fn kernels_declare_the_arguments_that_are_passed() {
    const LAYERS: &str = include_str!("../../../../kernels/src/layers.cu");
    const MERGE: &str = include_str!("../../../../kernels/src/merge.cu");
    const SAMPLING: &str = include_str!("../../../../kernels/src/sampling.cu");
    let declarations = [
        (
            LAYERS,
            "tt_embedding_##suffix(E *output, const E *table, const int32_t *ids, int64_t output_stride, int hidden, \
             int vocabulary)",
        ),
        (
            LAYERS,
            "tt_rms_norm_##suffix(E *output, const E *input, E *residual, const E *weight, int64_t output_stride, \
             int64_t input_stride, int64_t residual_stride, int hidden, float eps)",
        ),
        (
            LAYERS,
            "tt_head_norm_##suffix(E *x, const E *weight, int64_t stride, int num_heads, int head_size, float eps)",
        ),
        (
            LAYERS,
            "tt_rope_##suffix(E *x, const int64_t *positions, const float *cos_sin, int64_t stride, int num_heads, \
             int head_size, int rotary_size, int interleaved)",
        ),
        (
            LAYERS,
            "tt_silu_mul_##suffix(E *output, const E *input, int64_t output_stride, int64_t input_stride, int size)",
        ),
        (
            LAYERS,
            "tt_gather_rows_##suffix(E *output, const E *input, const int32_t *indices, int64_t output_stride, \
             int64_t input_stride, int size, int num_rows)",
        ),
        (
            LAYERS,
            "tt_argmax_##suffix(int32_t *output, const E *logits, int64_t stride, int vocabulary)",
        ),
        (
            MERGE,
            "tt_merge_states_##suffix(E *output, float *output_lse, const E *prefix, const float *prefix_lse, \
             const E *suffix_output, const float *suffix_lse, int64_t output_stride, int64_t prefix_stride, \
             int64_t suffix_stride, int head_size)",
        ),
        (
            SAMPLING,
            "tt_sample_f32(int32_t *tokens, const float *logits, int64_t stride, int vocabulary, \
             const TtSampleRow *rows)",
        ),
    ];
    for (source, declaration) in declarations {
        let source: Vec<&str> = source
            .split_whitespace()
            .filter(|word| *word != "\\")
            .collect();
        assert!(
            source.join(" ").contains(declaration),
            "no kernel is declared as {declaration}"
        );
    }
}

#[test]
fn numbers_that_a_kernel_cannot_count_are_refused_with_their_value() {
    let error = int("the hidden size", 1 << 31).expect_err("it needs 32 bits");
    assert_eq!(
        error.to_string(),
        "the hidden size is 2147483648: kernels count in 31 bits"
    );
    assert_eq!(int("the hidden size", 4096), Ok(4096));
    assert!(count("the number of tokens", -1).is_err());
}
