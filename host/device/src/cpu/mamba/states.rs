//! One layer's states on the CPU. It must never know metadata.

use std::ops::Range;

use super::MambaConfig;

/// Channels of a unit where no head divides them.
pub(super) const CHANNELS: usize = 16;

/// States of one kind: for each channel `rows` elements of each state. Channels lie in *units*, `[states, rows, width]` each, so
/// that a thread has what is its own in one piece.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Bank {
    pub rows: usize,
    /// (channels, channels of a unit): one after the other. A last unit may be narrower.
    pub segments: Vec<(usize, usize)>,
    pub data: Vec<f32>,
}

impl Bank {
    fn new(num_states: usize, rows: usize, segments: Vec<(usize, usize)>) -> Self {
        let channels: usize = segments.iter().map(|segment| segment.0).sum();
        let len = num_states
            .checked_mul(rows)
            .and_then(|len| len.checked_mul(channels))
            .expect("a layer's states have a number of elements that fits in usize");
        Bank {
            rows,
            segments,
            data: vec![0.0; len],
        }
    }

    /// First channel and width of each unit.
    fn units(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let mut first = 0;
        let segments = self.segments.clone().into_iter();
        segments.flat_map(move |(channels, width)| {
            let start = first;
            first += channels;
            (start..first)
                .step_by(width)
                .map(move |at| (at, width.min(start + channels - at)))
        })
    }

    fn place(
        &self,
        num_states: usize,
        (first, width): (usize, usize),
        state: usize,
    ) -> Range<usize> {
        let start = self.rows * (num_states * first + state * width);
        start..start + self.rows * width
    }

    fn copy(&mut self, num_states: usize, from: usize, to: usize) {
        for unit in self.units() {
            let from = self.place(num_states, unit, from);
            let to = self.place(num_states, unit, to).start;
            self.data.copy_within(from, to);
        }
    }

    /// `values`: f32 [channels, rows].
    fn set(&mut self, num_states: usize, state: usize, values: &[f32]) {
        for unit in self.units() {
            let (first, width) = unit;
            let place = self.place(num_states, unit, state);
            for (at, own) in self.data[place].iter_mut().enumerate() {
                *own = values[(first + at % width) * self.rows + at / width];
            }
        }
    }

    /// `f32 [channels, rows]`
    fn state(&self, num_states: usize, state: usize) -> Vec<f32> {
        let mut out = Vec::new();
        for unit in self.units() {
            let own = &self.data[self.place(num_states, unit, state)];
            let of = |channel: usize| own.iter().skip(channel).step_by(unit.1).copied();
            (0..unit.1).for_each(|channel| out.extend(of(channel)));
        }
        out
    }
}

/// One layer's states, owned: for each the last inputs of the convolution and the recurrence's state, f32, zero when new. A state's
/// id is its block's. State 0 is the null state, at which rows of padding point: it is never read nor written.
#[derive(Clone, Debug, PartialEq)]
pub struct MambaStates {
    num_states: usize,
    config: MambaConfig,
    pub(super) conv: Bank,
    pub(super) recurrent: Bank,
}

impl MambaStates {
    /// Zeroed states 0..`num_states` of a layer; the memory is the process's, `MambaConfig::state_shapes` f32 elements each.
    ///
    /// # Panics
    /// If the size overflows `usize`.
    pub fn new(num_states: usize, config: &MambaConfig) -> Self {
        let channels = config.output_size();
        let (windows, rows, width) = match config {
            MambaConfig::Mamba2(c) => {
                let shared = (c.n_groups * c.state_size, c.state_size);
                let windows = vec![(channels, c.head_dim), shared, shared];
                (windows, c.state_size, c.head_dim)
            }
            MambaConfig::Gdn(c) => {
                let keys = (c.num_k_heads * c.head_k_dim, c.head_k_dim);
                let windows = vec![keys, keys, (channels, c.head_v_dim)];
                (windows, c.head_k_dim, c.head_v_dim)
            }
            MambaConfig::Mamba1(c) => (vec![(channels, CHANNELS)], c.state_size, CHANNELS),
            MambaConfig::ShortConv(_) => (vec![(channels, CHANNELS)], 0, CHANNELS),
            MambaConfig::Linear(c) => (Vec::new(), c.head_dim, c.head_dim),
        };
        let history = config.conv_kernel().saturating_sub(1);
        MambaStates {
            num_states,
            config: *config,
            conv: Bank::new(num_states, history, windows),
            recurrent: Bank::new(num_states, rows, vec![(channels, width)]),
        }
    }

    /// Number of states, the null state included.
    pub fn num_states(&self) -> usize {
        self.num_states
    }

    /// The layer they were made for.
    pub fn config(&self) -> &MambaConfig {
        &self.config
    }

    /// Makes state `to` what state `from` is: where a request's last token goes on in another block.
    ///
    /// # Panics
    /// If there is no such state.
    pub fn copy(&mut self, from: usize, to: usize) {
        assert!(
            from.max(to) < self.num_states,
            "state {} of {}",
            from.max(to),
            self.num_states
        );
        self.conv.copy(self.num_states, from, to);
        self.recurrent.copy(self.num_states, from, to);
    }

    /// Makes `state` what [`Self::window`] and [`Self::recurrent`] gave.
    ///
    /// # Panics
    /// If there is no such state, or the values are too few.
    pub fn set(&mut self, state: usize, window: &[f32], recurrent: &[f32]) {
        assert!(
            state < self.num_states,
            "state {state} of {}",
            self.num_states
        );
        self.conv.set(self.num_states, state, window);
        self.recurrent.set(self.num_states, state, recurrent);
    }

    /// Sets every element of every state: poison for tests, or zero.
    pub fn fill(&mut self, value: f32) {
        self.conv.data.fill(value);
        self.recurrent.data.fill(value);
    }

    /// A state's window of the convolution, oldest input first: `f32 [conv_dim, conv_kernel − 1]`.
    ///
    /// # Panics
    /// If there is no such state.
    pub fn window(&self, state: usize) -> Vec<f32> {
        assert!(
            state < self.num_states,
            "state {state} of {}",
            self.num_states
        );
        self.conv.state(self.num_states, state)
    }

    /// A state of the recurrence, in the shape of `MambaConfig::state_shapes`.
    ///
    /// # Panics
    /// If there is no such state.
    pub fn recurrent(&self, state: usize) -> Vec<f32> {
        assert!(
            state < self.num_states,
            "state {state} of {}",
            self.num_states
        );
        self.recurrent.state(self.num_states, state)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Mamba2Config, MambaConfig};
    use super::MambaStates;

    #[test]
    fn a_copy_is_one_state_and_no_other() {
        let config = MambaConfig::Mamba2(Mamba2Config {
            num_heads: 2,
            head_dim: 3,
            n_groups: 1,
            state_size: 4,
            conv_kernel: 3,
            chunk_size: 8,
            time_step_limit: (0.0, f32::INFINITY),
        });
        let mut states = MambaStates::new(4, &config);
        let [window, recurrent] = config.state_shapes();
        assert_eq!((window, recurrent), (vec![14, 2], vec![2, 3, 4]));
        let numbers = (1u16..).map(f32::from);
        states
            .conv
            .data
            .iter_mut()
            .zip(numbers.clone())
            .for_each(|(x, n)| *x = n);
        states
            .recurrent
            .data
            .iter_mut()
            .zip(numbers)
            .for_each(|(x, n)| *x = n);
        let before = states.clone();
        states.copy(3, 1);
        for state in 0..4 {
            let from = if state == 1 { 3 } else { state };
            assert_eq!(states.window(state), before.window(from));
            assert_eq!(states.recurrent(state), before.recurrent(from));
            assert_eq!(
                (states.window(state).len(), states.recurrent(state).len()),
                (28, 24)
            );
        }
        states.set(2, &before.window(1), &before.recurrent(1));
        assert_eq!(states.window(2), before.window(1));
        assert_eq!(states.recurrent(2), before.recurrent(1));
        assert_eq!(states.recurrent(1), before.recurrent(3));
        // Unit 0 of the recurrence is head 0: [states, state_size, head_dim].
        assert_eq!(before.recurrent(0)[..5], [1.0, 4.0, 7.0, 10.0, 2.0]);
    }
}
