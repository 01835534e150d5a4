use super::super::gguf::GgufFile;
use super::super::testing::{GgufBuilder, random_values};
use super::*;

/// Q6_K has no tile form and goes through candle; Q4_0 beside it is tiled. Merged, both must land in their columns.
#[test]
fn a_merged_projection_of_mixed_types_equals_its_dequantised_self() {
    let k = 256;
    let quantised = |dtype: GgmlDType, n: usize, seed: u32| {
        let mut blocks = dtype.cpu_zeros(n * k);
        blocks.from_float(&random_values(n * k, seed));
        // SAFETY: the pointer and the size are those of candle's live allocation of plain blocks.
        unsafe { std::slice::from_raw_parts(blocks.as_ptr(), blocks.storage_size_in_bytes()) }
            .to_vec()
    };
    let file = GgufBuilder::new()
        .tensor("a.weight", &[20, k], 14, quantised(GgmlDType::Q6K, 20, 1))
        .tensor("b.weight", &[9, k], 2, quantised(GgmlDType::Q4_0, 9, 2))
        .random("c.weight", &[5, k])
        .random("b.bias", &[9])
        .write();
    let gguf = GgufFile::open(file.path()).expect("valid");
    let part = |name: &str, n: usize, bias: bool| Part {
        weight: format!("{name}.weight"),
        bias: bias.then(|| format!("{name}.bias")),
        n,
    };
    let parts = [
        part("a", 20, false),
        part("b", 9, true),
        part("c", 5, false),
    ];
    let pool = Pool::new(Some(2));
    let run = |weights: Weights, m: usize| {
        let projection = Projection::load(&gguf, weights, k, &parts).expect("loads");
        assert_eq!(projection.rows(), 34);
        let x = random_values(m * k, 3);
        let mut out = Vec::new();
        let mut scratch = ProjectionScratch::default();
        projection
            .forward(&pool, m, &x, &mut scratch, &mut out)
            .expect("multiplies");
        let mut table = vec![0.0; 34 * k];
        for (row, out) in table.chunks_exact_mut(k).enumerate() {
            projection.weight_row(row, out).expect("in range");
        }
        assert!(projection.weight_row(34, &mut table[..k]).is_err());
        (out, table)
    };
    for m in [1, 3] {
        let (quantised, quantised_table) = run(Weights::Auto, m);
        let (full, full_table) = run(Weights::F32, m);
        assert_eq!(quantised_table, full_table);
        let mut largest = 0f32;
        for (a, b) in quantised.iter().zip(&full) {
            assert!((a - b).abs() < 5e-3, "{a} against {b}");
            largest = largest.max(b.abs());
        }
        assert!(largest > 0.05, "the comparison means something");
    }
}
