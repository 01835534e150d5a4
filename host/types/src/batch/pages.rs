//! Pages and context-parallel shares of sequence lengths. It must never know a block table.
//!
//! Page counts: vLLM 0.33 `FlashInferMetadataBuilder` (ceil(length / page size); the last page of a full one is the page size).

use alloc::vec::Vec;

/// Division of non-negative s32 values by one divisor, without a division instruction in the loop (in a sandbox a division
/// costs up to 20 times what its count of instructions says): a shift for powers of two, else a multiplication by the
/// rounded-up reciprocal 2^k / d with k = 31 + ⌈log2 d⌉, which is exact for numerators below 2^31.
#[derive(Clone, Copy, Debug)]
enum Divisor {
    Shift(u32),
    Reciprocal { factor: u64, shift: u32 },
}

impl Divisor {
    #[inline]
    fn new(divisor: u32) -> Self {
        if divisor.is_power_of_two() {
            return Divisor::Shift(divisor.trailing_zeros());
        }
        let shift = 31 + (32 - divisor.leading_zeros());
        Divisor::Reciprocal {
            factor: (1u64 << shift).div_ceil(u64::from(divisor)),
            shift,
        }
    }
}

/// Runs `$body` with `$div` a closure that divides a non-negative s32; one loop per kind of divisor.
macro_rules! with_divisor {
    ($divisor:expr, |$div:ident| $body:expr) => {
        match Divisor::new($divisor) {
            Divisor::Shift(shift) => {
                let $div = |x: i32| x >> shift;
                $body
            }
            Divisor::Reciprocal { factor, shift } => {
                let $div = |x: i32| ((x as u32 as u64 * factor) >> shift) as i32;
                $body
            }
        }
    };
}

/// Pages that each sequence occupies: ⌈len / page_size⌉, `s32 [R]`. `out` is cleared first.
///
/// # Panics
/// If `page_size` is 0 or above 2^30.
pub fn page_counts_into(seq_lens: &[i32], page_size: u32, out: &mut Vec<i32>) {
    assert!(
        (1..=1 << 30).contains(&page_size),
        "page size {page_size} is not in 1..=2^30"
    );
    let round_up = page_size as i32 - 1;
    out.clear();
    with_divisor!(page_size, |div| out.extend(
        seq_lens
            .iter()
            .map(|&len| div(len.saturating_add(round_up)))
    ));
}

/// Running sum of the page counts, `s32 [R + 1]`, from 0: FlashInfer's `paged_kv_indptr`. `out` is cleared first. Returns the
/// number of pages. A sum above s32 saturates: the returned count says so, and the verifier refuses it.
///
/// # Panics
/// If `page_size` is 0 or above 2^30.
pub fn paged_kv_indptr_into(seq_lens: &[i32], page_size: u32, out: &mut Vec<i32>) -> u64 {
    assert!(
        (1..=1 << 30).contains(&page_size),
        "page size {page_size} is not in 1..=2^30"
    );
    let round_up = page_size as i32 - 1;
    out.clear();
    out.reserve(seq_lens.len() + 1);
    out.push(0);
    let mut sum = 0u64;
    with_divisor!(page_size, |div| out.extend(seq_lens.iter().map(|&len| {
        sum += div(len.max(0).saturating_add(round_up)) as u64;
        sum.min(i32::MAX as u64) as i32
    })));
    sum
}

/// Tokens in each sequence's last page, `s32 [R]`: 1..=page_size, 0 only for an empty sequence; a full last page is
/// `page_size`, not 0. FlashInfer's `paged_kv_last_page_len`. `out` is cleared first.
///
/// # Panics
/// If `page_size` is 0 or above 2^30.
pub fn last_page_lens_into(seq_lens: &[i32], page_size: u32, out: &mut Vec<i32>) {
    assert!(
        (1..=1 << 30).contains(&page_size),
        "page size {page_size} is not in 1..=2^30"
    );
    let page = page_size as i32;
    out.clear();
    with_divisor!(page_size, |div| out.extend(seq_lens.iter().map(|&len| {
        let last = len.max(1) - 1;
        (last - div(last) * page + 1).min(len)
    })));
}

/// This rank's share of each sequence under decode context parallelism, `s32 [R]`; `out` is cleared first.
///
/// Tokens are dealt to `dcp_size` ranks in runs of `interleave`: with base = len / interleave / dcp_size · interleave and
/// rem = len − base · dcp_size, the share is base + clamp(rem − rank · interleave, 0, interleave). The shares of all ranks
/// sum to the length. (vLLM 0.33 `get_dcp_local_seq_lens`.)
///
/// # Panics
/// If `dcp_size · interleave` is 0 or above 2^30.
pub fn dcp_local_seq_lens_into(
    seq_lens: &[i32],
    dcp_size: u32,
    dcp_rank: u32,
    interleave: u32,
    out: &mut Vec<i32>,
) {
    let round = dcp_size
        .checked_mul(interleave)
        .filter(|round| (1..=1 << 30).contains(round));
    let Some(round) = round else {
        panic!("dcp size {dcp_size} times interleave {interleave} is not in 1..=2^30");
    };
    let (run, before) = (
        interleave as i32,
        dcp_rank.saturating_mul(interleave).min(1 << 30) as i32,
    );
    out.clear();
    with_divisor!(round, |div| out.extend(seq_lens.iter().map(|&len| {
        let rounds = div(len);
        let rem = len - rounds * round as i32;
        rounds * run + (rem - before).clamp(0, run)
    })));
}

/// [`dcp_local_seq_lens_into`] of every rank, `s32 [R, dcp_size]`, row-major.
///
/// # Panics
/// If `dcp_size · interleave` is 0 or above 2^30.
#[must_use]
pub fn dcp_local_seq_lens_all_ranks(seq_lens: &[i32], dcp_size: u32, interleave: u32) -> Vec<i32> {
    let ranks = dcp_size as usize;
    let mut all = alloc::vec![0; seq_lens.len() * ranks];
    let mut of_rank = Vec::with_capacity(seq_lens.len());
    for rank in 0..ranks {
        dcp_local_seq_lens_into(seq_lens, dcp_size, rank as u32, interleave, &mut of_rank);
        for (row, &local) in of_rank.iter().enumerate() {
            all[row * ranks + rank] = local;
        }
    }
    all
}

/// The largest share that any rank has of `len` tokens: ⌈len / (dcp_size · interleave)⌉ · interleave rounds up, which is the
/// bound the field uses for `max_seq_len` under decode context parallelism.
#[must_use]
pub fn dcp_local_seq_len_upper_bound(len: u32, dcp_size: u32, interleave: u32) -> u32 {
    len.div_ceil((dcp_size * interleave).max(1)) * interleave
}
