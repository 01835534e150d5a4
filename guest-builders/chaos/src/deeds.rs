//! The deeds themselves: loops, recursion, memory. It must never know metadata.

use std::hint::black_box;

/// Elements of lists that fit memory one by one, and are together above the 4 MiB that are lifted.
pub(crate) const HUGE_LIST: usize = 550_000;
/// Elements of a list that is lifted, and longer than any batch's.
pub(crate) const LONG_LIST: usize = 100_000;
/// Bytes that `leak` keeps of each call.
const LEAK: usize = 65_536;
/// Calls within one another that take most of a stack of 256 KiB.
pub(crate) const DEEP: u64 = 2_500;
/// Bytes of a wasm page.
const PAGE: usize = 65_536;

#[cold]
#[inline(never)]
pub(crate) fn trap() {
    panic!("told to trap");
}

/// A ring of 2 MiB whose order no cache or prefetcher guesses.
pub(crate) fn ring() -> Vec<u32> {
    const LEN: u32 = 1 << 19;
    // A full period: the factor is 1 modulo 4, the summand odd.
    (0..LEN)
        .map(|at| (at.wrapping_mul(1_664_525).wrapping_add(1_013_904_223)) % LEN)
        .collect()
}

/// Never returns.
pub(crate) fn spin_loads(ring: &[u32]) {
    let mut at = 0_usize;
    while let Some(next) = ring.get(at) {
        at = *next as usize;
    }
    black_box(at);
}

/// That many rounds of a division each, every one of a large number that the one before gave.
pub(crate) fn spin_divisions(rounds: u64) {
    let (mut value, by) = (black_box(u64::MAX), black_box(3));
    for _ in 0..rounds {
        value = !(value / by);
    }
    black_box(value);
}

/// Rounds of divisions that, with the metadata, take about nine tenths of a call's fuel under the host's default limits.
pub(crate) fn iterations_within(rows: u32, tokens: u32) -> u64 {
    // Fuel of ten rounds, as measured; and what building the metadata takes, at most.
    const TEN_ROUNDS: u64 = 52;
    let (rows, tokens) = (u64::from(rows), u64::from(tokens));
    let build = 20_000 + 400 * rows + 40 * tokens;
    let fuel = 400_000 + 1_500 * rows + 200 * tokens;
    (fuel * 9 / 10).saturating_sub(build) * 10 / TEN_ROUNDS
}

/// Never returns.
pub(crate) fn spin_pages() {
    const PAGES: usize = 24;
    let mut memory: Vec<u8> = Vec::with_capacity(PAGES * PAGE);
    loop {
        for page in 0..PAGES * PAGE / 4096 {
            let spare = memory.spare_capacity_mut();
            if let Some(byte) = spare.get_mut(page * 4096) {
                byte.write(black_box(page as u8));
            }
        }
        black_box(&mut memory);
    }
}

/// 64 MiB at once.
pub(crate) fn grow() {
    #[cfg(target_arch = "wasm32")]
    black_box(core::arch::wasm32::memory_grow(0, 1024));
    #[cfg(not(target_arch = "wasm32"))]
    black_box(());
}

/// Pages up to nearly 4 MiB.
pub(crate) fn fill_memory() {
    #[cfg(target_arch = "wasm32")]
    {
        const CAP: usize = (4 << 20) / PAGE;
        let have = core::arch::wasm32::memory_size(0);
        black_box(core::arch::wasm32::memory_grow(
            0,
            CAP.saturating_sub(have + 1),
        ));
    }
}

/// So many calls within one another.
pub(crate) fn recurse(depth: u64) {
    black_box(dive(depth));
}

#[inline(never)]
fn dive(depth: u64) -> u64 {
    if black_box(depth) == 0 {
        return depth;
    }
    dive(depth - 1).wrapping_add(black_box(depth))
}

/// What one call keeps.
pub(crate) fn leak() -> Vec<u8> {
    let mut kept = Vec::with_capacity(LEAK);
    kept.push(black_box(1));
    kept
}
