//! Loops over whole vectors without a branch per element, so that the compiler makes lanes of them. Each says only whether
//! something is wrong; the caller then looks for the first offender element by element.

/// Are all values in 0..=last?
pub(super) fn all_within_i32(values: &[i32], last: i32) -> bool {
    // Negative values set the sign bit themselves; too large ones set it in the difference, which then cannot wrap.
    let mut signs = 0i32;
    for &value in values {
        signs |= value | last.wrapping_sub(value);
    }
    signs >= 0
}

/// Are all values in low..=last, for low ∈ {−1, 0}?
pub(super) fn all_within_i64(values: &[i64], low: i64, last: i64) -> bool {
    let mut signs = 0i64;
    for &value in values {
        signs |= value.wrapping_sub(low) | last.wrapping_sub(value);
    }
    signs >= 0
}

/// Are all values `wanted`?
pub(super) fn all_equal_i64(values: &[i64], wanted: i64) -> bool {
    let mut differences = 0i64;
    for &value in values {
        differences |= value ^ wanted;
    }
    differences == 0
}

/// The largest value; 0 for none.
pub(super) fn max_i32(values: &[i32]) -> i32 {
    values.iter().fold(0, |max, &value| max.max(value))
}

/// The largest step of a running sum, and whether no value is negative and none falls.
pub(super) fn steps(values: &[i32]) -> (i32, bool) {
    let (mut max, mut signs) = (0i32, 0i32);
    if let Some(rest) = values.get(1..) {
        for (&a, &b) in values.iter().zip(rest) {
            let step = b.wrapping_sub(a);
            signs |= step | a | b;
            max = max.max(step);
        }
    }
    (max, signs >= 0)
}

/// Is each value larger than the one before? For values below 2³¹; with a larger one no is the answer.
pub(super) fn all_rise(values: &[u32]) -> bool {
    // Signed, which more machines compare in lanes: rising from a first that is not negative, none is.
    let mut falls = values.first().map_or(0, |&first| (first as i32) >> 31);
    if let Some(rest) = values.get(1..) {
        for (&a, &b) in values.iter().zip(rest) {
            falls |= -i32::from(b as i32 <= a as i32);
        }
    }
    falls == 0
}

/// Are `values` 0..n in some order, for n of them? `marks`: reused memory.
pub(super) fn is_permutation(values: &[i32], marks: &mut Vec<u8>) -> bool {
    marks.clear();
    marks.resize(values.len(), 0);
    // A mark is stored without looking: n values that leave no place unmarked are n places.
    for &value in values {
        // Negative values are large ones here.
        match marks.get_mut(value as u32 as usize) {
            Some(mark) => *mark = 1,
            None => return false,
        }
    }
    marks.iter().fold(1, |all, &mark| all & mark) == 1
}

/// Are all values `wanted`?
pub(super) fn all_equal_i32(values: &[i32], wanted: i32) -> bool {
    let mut differences = 0;
    for &value in values {
        differences |= value ^ wanted;
    }
    differences == 0
}

/// Are the values `first`, and each one more than the one before? For values that do not leave the type.
pub(super) fn counts_up(values: &[i32], first: i32) -> bool {
    let mut differences = 0;
    for (index, &value) in values.iter().enumerate() {
        differences |= value ^ first.wrapping_add(index as i32);
    }
    differences == 0
}

/// Is every pair of `values` this one?
pub(super) fn all_pairs(values: &[i32], [first, second]: [i32; 2]) -> bool {
    let mut differences = 0;
    for pair in values.chunks_exact(2) {
        differences |= (pair[0] ^ first) | (pair[1] ^ second);
    }
    differences == 0
}

/// Division by one number, by a shift where that will do.
#[derive(Clone, Copy)]
pub(super) struct Divisor {
    divisor: u64,
    /// 64: not a power of two.
    shift: u32,
}

impl Divisor {
    /// By `divisor`, at least 1.
    pub(super) fn new(divisor: u32) -> Self {
        let shift = if divisor.is_power_of_two() {
            divisor.trailing_zeros()
        } else {
            64
        };
        Divisor {
            divisor: u64::from(divisor.max(1)),
            shift,
        }
    }

    pub(super) fn floor(self, value: u64) -> u64 {
        if self.shift < 64 {
            value >> self.shift
        } else {
            value / self.divisor
        }
    }

    /// For values far below the type's end.
    pub(super) fn ceil(self, value: u64) -> u64 {
        self.floor(value + (self.divisor - 1))
    }
}

/// A bit set over reused memory.
pub(super) struct Bits<'s>(&'s mut [u64]);

impl<'s> Bits<'s> {
    /// `len` clear bits.
    pub(super) fn clear(memory: &'s mut Vec<u64>, len: usize) -> Self {
        let words = len.div_ceil(64);
        if memory.len() < words {
            memory.resize(words, 0);
        }
        memory[..words].fill(0);
        Bits(&mut memory[..words])
    }

    /// Sets a bit of those that there are; was it clear?
    pub(super) fn insert(&mut self, index: usize) -> bool {
        let (word, bit) = (index / 64, 1u64 << (index % 64));
        let fresh = self.0[word] & bit == 0;
        self.0[word] |= bit;
        fresh
    }
}
