//! Kernel blocks: rewriting keeps every token's cache slot; field case 9.

use proptest::prelude::*;
use timetable_attention::kernel_block::{
    BlockSizes, KernelBlockError, KernelBlockMap, KernelBlockSize, select_common_block_size,
};

fn slot(table: &[i32], block_size: usize, token: usize) -> i64 {
    i64::from(table[token / block_size]) * block_size as i64 + (token % block_size) as i64
}

/// Field case 9: manager block 256, kernel block 128, row [3], token 200 → slot 968, kernel block 7, offset 72.
#[test]
fn field_case_9_manager_blocks_split_into_kernel_blocks() {
    let map = KernelBlockMap::new(256, 128, 0, 16).unwrap();
    let mut out = [0; 2];
    map.rewrite(&[3], &mut out);
    assert_eq!(out, [6, 7]);
    assert_eq!(slot(&out, 128, 200), 968);
    assert_eq!((out[200 / 128], 200 % 128), (7, 72));
    let mut out = [0; 4];
    map.rewrite(&[5, 2], &mut out);
    assert_eq!(out, [10, 11, 4, 5]);
    let pages = 1000_usize.div_ceil(16);
    assert_eq!((pages, 1000 - (pages - 1) * 16), (63, 8));
    assert!(matches!(
        KernelBlockMap::new(256, 96, 0, 16),
        Err(KernelBlockError::NotADivisor { .. })
    ));
}

/// From the fact sheet's small vectors: FLASHMLA beside CUTLASS_MLA has no common block, FLASHMLA alone has.
#[test]
fn common_block_or_the_fields_error() {
    let flashmla = BlockSizes {
        name: "FLASHMLA",
        sizes: &[KernelBlockSize::Exact(64)],
    };
    let cutlass = BlockSizes {
        name: "CUTLASS_MLA",
        sizes: &[KernelBlockSize::Exact(128)],
    };
    let flash = BlockSizes {
        name: "FLASH_ATTN",
        sizes: &[KernelBlockSize::MultipleOf(16)],
    };
    assert_eq!(
        select_common_block_size(256, &[flashmla.clone(), cutlass])
            .unwrap_err()
            .to_string(),
        "No common block size for 256 (FLASHMLA: [64]; CUTLASS_MLA: [128])."
    );
    assert_eq!(select_common_block_size(256, &[flashmla]), Ok(64));
    assert_eq!(select_common_block_size(64, &[flash]), Ok(64));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    /// A token's slot computed from the rewritten table is the one computed from the manager's (dense blocks).
    #[test]
    fn rewriting_preserves_slots(
        row in proptest::collection::vec(0..1000_i32, 0..20),
        kernel_block in prop::sample::select(vec![1_u32, 8, 16, 48, 64]),
        ratio in 1..9_u32,
    ) {
        let manager = kernel_block * ratio;
        let map = KernelBlockMap::new(manager, kernel_block, 0, 1000).unwrap();
        let mut out = vec![-1; row.len() * ratio as usize];
        map.rewrite(&row, &mut out);
        for token in 0..row.len() * manager as usize {
            prop_assert_eq!(
                slot(&out, kernel_block as usize, token),
                slot(&row, manager as usize, token)
            );
        }
        prop_assert!(out.iter().all(|b| (0..map.num_kernel_blocks(1000) as i64).contains(&i64::from(*b))));
    }

    /// In a packed cache the kernel blocks of different manager blocks never meet, and stay inside the cache.
    #[test]
    fn strided_rewriting_keeps_blocks_apart(
        blocks in proptest::collection::hash_set(0..200_i32, 1..20),
        ratio in 1..9_u32,
        extra in 0..30_u32,
    ) {
        let row: Vec<i32> = blocks.into_iter().collect();
        let map = KernelBlockMap::new(16 * ratio, 16, ratio + extra, 200).unwrap();
        let mut out = vec![0; row.len() * ratio as usize];
        map.rewrite(&row, &mut out);
        let distinct: std::collections::HashSet<i32> = out.iter().copied().collect();
        prop_assert_eq!(distinct.len(), out.len());
        for (i, block) in out.iter().enumerate() {
            prop_assert_eq!(*block as u32 / map.stride(), row[i / ratio as usize] as u32);
            prop_assert!(u64::from(*block as u32) < map.num_kernel_blocks(200));
        }
    }
}
