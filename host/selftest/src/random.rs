//! Fresh random inputs from one printed seed. It must never know what they are for.

use std::sync::OnceLock;

use rand::{Rng, RngCore, SeedableRng, seq::SliceRandom};
use rand_pcg::Pcg64;

/// Bits of an index into the table of normal values.
const TABLE_BITS: u32 = 16;

/// A generator of everything that a check needs.
pub struct Random(Pcg64);

impl Random {
    /// The same seed gives the same values.
    pub fn new(seed: u64) -> Self {
        Random(Pcg64::seed_from_u64(seed))
    }

    /// A generator of its own, so that one check's draws do not move the next one's.
    pub fn fork(&mut self) -> Self {
        Random::new(self.0.next_u64())
    }

    /// An integer in `low..=high`.
    pub fn int(&mut self, low: i64, high: i64) -> i64 {
        self.0.random_range(low..=high)
    }

    /// A count in `low..=high`.
    pub fn count(&mut self, low: usize, high: usize) -> usize {
        self.0.random_range(low..=high)
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: u32) -> bool {
        self.0.random_range(0..n) == 0
    }

    /// A number in [0, 1).
    pub fn uniform(&mut self) -> f64 {
        self.0.random::<f64>()
    }

    /// One of `from`.
    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.0.random_range(0..from.len())]
    }

    /// `list` in a random order.
    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        list.shuffle(&mut self.0);
    }

    /// `count` normal values of that deviation. Drawn from a table of 65,536, since a cache has millions.
    pub fn normal(&mut self, count: usize, deviation: f32) -> Vec<f32> {
        let table = normal_table();
        let mut values = Vec::with_capacity(count);
        while values.len() < count {
            let bits = self.0.next_u64();
            for part in 0..4 {
                let index = (bits >> (part * TABLE_BITS)) as usize & ((1 << TABLE_BITS) - 1);
                values.push(table[index] * deviation);
            }
        }
        values.truncate(count);
        values
    }
}

fn normal_table() -> &'static [f32] {
    static TABLE: OnceLock<Vec<f32>> = OnceLock::new();
    TABLE.get_or_init(|| {
        let mut random = Pcg64::seed_from_u64(0x7461_626c_6500_0001);
        (0..1usize << TABLE_BITS)
            .map(|_| {
                // Box and Muller; the first number is never 0.
                let (a, b) = (1.0 - random.random::<f64>(), random.random::<f64>());
                ((-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()) as f32
            })
            .collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seed_decides_and_the_values_are_normal() {
        let draw = |seed| Random::new(seed).normal(100_000, 2.0);
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
        let values = draw(9);
        let mean: f64 = values.iter().map(|&x| f64::from(x)).sum::<f64>() / 1e5;
        let square: f64 = values.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / 1e5;
        assert!(
            mean.abs() < 0.05 && (square - 4.0).abs() < 0.1,
            "{mean} {square}"
        );
    }
}
