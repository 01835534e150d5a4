use super::super::testing::random_values;
use super::*;
use candle_core::CpuStorage;
use candle_core::quantized::QuantizedType;

const TYPES: [GgmlDType; 5] = [
    GgmlDType::Q4_0,
    GgmlDType::Q4_1,
    GgmlDType::Q5_0,
    GgmlDType::Q5_1,
    GgmlDType::Q8_0,
];

/// `[n, k]` random weights in candle's blocks.
fn blocks(dtype: GgmlDType, n: usize, k: usize) -> Box<dyn QuantizedType> {
    let mut blocks = dtype.cpu_zeros(n * k);
    blocks.from_float(&random_values(n * k, 5));
    blocks
}

fn bytes(blocks: &dyn QuantizedType) -> &[u8] {
    // SAFETY: the pointer and the size are those of candle's live allocation of plain blocks.
    unsafe { std::slice::from_raw_parts(blocks.as_ptr(), blocks.storage_size_in_bytes()) }
}

fn available() -> Vec<Simd> {
    let mut out = vec![Simd::Portable];
    if tiles_x86::has_avx2() {
        out.push(Simd::Avx2);
    }
    if tiles_x86::has_avx512_vnni() {
        out.push(Simd::Avx512Vnni);
    }
    out
}

#[test]
fn rows_dequantise_as_candle_does() {
    let (n, k) = (37, 96);
    for dtype in TYPES {
        let blocks = blocks(dtype, n, k);
        let Ok(CpuStorage::F32(expected)) = blocks.dequantize(n * k) else {
            panic!("candle dequantises {dtype:?} to f32");
        };
        let all = bytes(&*blocks);
        let (first, second) = all.split_at(16 * all.len() / n);
        let tiles = QuantTiles::pack(dtype, k, &[(16, first), (21, second)]);
        assert_eq!(tiles.rows(), n);
        let mut row = vec![0.0; k];
        for r in 0..n {
            tiles.dequantise_row(r, &mut row);
            assert_eq!(row, &expected[r * k..][..k], "{dtype:?}, row {r}");
        }
    }
}

#[test]
fn every_kernel_agrees_with_candle_and_ignores_the_batch() {
    let pool = Pool::new(Some(2));
    let (n, k) = (37, 192);
    for dtype in TYPES {
        let blocks = blocks(dtype, n, k);
        let mut tiles = QuantTiles::pack(dtype, k, &[(n, bytes(&*blocks))]);
        for m in [1, 2, 3, 5, 9] {
            let x: Vec<f32> = random_values(m * k, 9).iter().map(|v| v * 30.0).collect();
            let mut candle = vec![0.0; m * n];
            blocks
                .matmul_t((m, k, n), &x, &mut candle)
                .expect("candle multiplies");
            let mut acts = QuantActs::default();
            acts.quantise(&pool, m, k, &x);
            let mut alone_acts = QuantActs::default();
            let mut portable = Vec::new();
            for simd in available() {
                tiles.simd = simd;
                let stride = n + 5;
                let mut out = vec![f32::NAN; m * stride];
                tiles.matmul(&pool, m, &acts, &mut out, stride, 3);
                for i in 0..m {
                    let row = &out[i * stride + 3..][..n];
                    // candle's scales and sums are f16.
                    for (ours, theirs) in row.iter().zip(&candle[i * n..][..n]) {
                        assert!(
                            (ours - theirs).abs() < 0.02,
                            "{dtype:?} {simd:?}: {ours} against {theirs}"
                        );
                    }
                    let mut alone = vec![0.0; n];
                    alone_acts.quantise(&pool, 1, k, &x[i * k..][..k]);
                    tiles.matmul(&pool, 1, &alone_acts, &mut alone, n, 0);
                    assert_eq!(row, alone, "{dtype:?} {simd:?}, row {i} of {m}");
                }
                if simd == Simd::Portable {
                    portable = out;
                } else {
                    for (a, b) in portable.iter().zip(&out).filter(|(a, _)| !a.is_nan()) {
                        assert!((a - b).abs() < 1e-4, "{dtype:?} {simd:?}: {b} against {a}");
                    }
                }
            }
        }
    }
}

/// The largest products that the narrow sums of the kernels must hold.
#[test]
fn extreme_codes_do_not_overflow() {
    let pool = Pool::new(Some(1));
    let k = 64;
    for dtype in TYPES {
        for byte in [0x00u8, 0xff, 0x80, 0x7f] {
            let size = dtype.type_size();
            // Scales and minima of 1.0, every other byte extreme.
            let block: Vec<u8> = (0..size)
                .map(|i| match (dtype, i) {
                    (_, 0) | (GgmlDType::Q4_1 | GgmlDType::Q5_1, 2) => 0x00,
                    (_, 1) | (GgmlDType::Q4_1 | GgmlDType::Q5_1, 3) => 0x3c,
                    _ => byte,
                })
                .collect();
            let mut tiles = QuantTiles::pack(dtype, k, &[(1, &block.repeat(2))]);
            let mut w = vec![0.0; k];
            tiles.dequantise_row(0, &mut w);
            for sign in [1.0, -1.0] {
                let x = vec![127.0 * sign; k];
                let exact: f32 = w.iter().zip(&x).map(|(w, x)| w * x).sum();
                let mut acts = QuantActs::default();
                acts.quantise(&pool, 1, k, &x);
                for simd in available() {
                    tiles.simd = simd;
                    let mut out = [0.0];
                    tiles.matmul(&pool, 1, &acts, &mut out, 1, 0);
                    assert_eq!(out[0], exact, "{dtype:?} {simd:?} {byte:#x}");
                }
            }
        }
    }
}
