//! Drafts by prompt lookup: the last tokens of a request are looked for earlier in it, and what followed them there is proposed
//! to follow them again.
//!
//! The rule is the field's: of the n-grams that end the request, n from `prompt_lookup_max` down to `prompt_lookup_min`, the longest
//! that occurred before, where it occurred last (vLLM's second-generation runner,
//! `vllm/v1/worker/gpu/spec_decode/ngram/speculator.py`; the first generation's `ngram_proposer.py` takes where it occurred first).
//! What is proposed may be wrong: the model is asked for every position, and what it chooses counts.
//!
//! An index for each request grows with its tokens: one step for each token, once. To propose costs [`MAX_CANDIDATES`] comparisons of
//! at most `prompt_lookup_max` tokens at most, whatever the request's length. This module must never know a model or a step.

use crate::config::EngineError;

/// Draft tokens of a row at most: a step's logits have one row for each, and one more.
pub const MAX_SPECULATIVE_TOKENS: usize = 16;
/// Tokens of an n-gram at most.
pub const MAX_PROMPT_LOOKUP: usize = 32;
/// Places of an n-gram that are looked at, the last ones first; those before them are not seen.
pub const MAX_CANDIDATES: usize = 256;

/// How drafts are made. Names are the field's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpeculativeMethod {
    /// `ngram`: what followed the n-gram, and no drafts where there is none. Never more than `max_tokens` leaves room for.
    Ngram,
    /// `ngram_gpu`: always `num_speculative_tokens`, so that all decodes have one length, as long as context and cache hold them.
    /// Where nothing was found the last token is repeated. As the field's method of this name in its second-generation runner; here
    /// too the lookup runs on the host.
    NgramGpu,
}

impl SpeculativeMethod {
    /// The field's name.
    pub const fn name(self) -> &'static str {
        match self {
            SpeculativeMethod::Ngram => "ngram",
            SpeculativeMethod::NgramGpu => "ngram_gpu",
        }
    }

    /// The method of that name.
    pub fn of(name: &str) -> Option<Self> {
        [SpeculativeMethod::Ngram, SpeculativeMethod::NgramGpu]
            .into_iter()
            .find(|method| method.name() == name)
    }
}

/// Speculation's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpeculativeConfig {
    /// How drafts are made.
    pub method: SpeculativeMethod,
    /// Draft tokens of a row, 1 to [`MAX_SPECULATIVE_TOKENS`]. Cost: a token of the step's budget and a row of logits for each.
    pub num_speculative_tokens: usize,
    /// Tokens of the shortest n-gram, at least 1.
    pub prompt_lookup_min: usize,
    /// Tokens of the longest one, at most [`MAX_PROMPT_LOOKUP`].
    pub prompt_lookup_max: usize,
}

impl SpeculativeConfig {
    /// Looks at every number.
    ///
    /// # Errors
    /// The first that is out of range, with what is accepted.
    pub fn check(&self, max_num_batched_tokens: usize) -> Result<(), EngineError> {
        let refuse = |name, value: usize, remedy| {
            Err(EngineError::Setting {
                name,
                value: value.to_string(),
                remedy,
            })
        };
        let (tokens, min, max) = (
            self.num_speculative_tokens,
            self.prompt_lookup_min,
            self.prompt_lookup_max,
        );
        if !(1..=MAX_SPECULATIVE_TOKENS).contains(&tokens) {
            let remedy =
                "give 1 to 16 draft tokens, or leave speculative_method out for no speculation";
            return refuse("num_speculative_tokens", tokens, remedy);
        }
        if tokens >= max_num_batched_tokens {
            let remedy = "a row verifies its drafts and one more token in one step; lower it, or raise max_num_batched_tokens";
            return refuse("num_speculative_tokens", tokens, remedy);
        }
        if min == 0 {
            return refuse("prompt_lookup_min", min, "it must be at least 1");
        }
        if max > MAX_PROMPT_LOOKUP {
            return refuse("prompt_lookup_max", max, "n-grams have at most 32 tokens");
        }
        if min > max {
            let remedy = "it must not exceed prompt_lookup_max; lower it, or raise that";
            return refuse("prompt_lookup_min", min, remedy);
        }
        Ok(())
    }

    /// Sets `drafts` to what may follow `tokens`, at most `most` tokens; `index` is of the same request.
    pub fn propose(
        &self,
        index: &mut TokenIndex,
        tokens: &[u32],
        most: usize,
        drafts: &mut Vec<u32>,
    ) {
        drafts.clear();
        index.extend(tokens);
        let most = self.num_speculative_tokens.min(most);
        if let Some(place) = index.find(tokens, self.prompt_lookup_max) {
            drafts.extend(tokens[place..].iter().take(most));
        }
        if let (SpeculativeMethod::NgramGpu, Some(&last)) = (self.method, tokens.last()) {
            drafts.resize(most, last);
        }
    }
}

/// Where the n-grams of one request's tokens ended: lists of places, by a hash of the `min` tokens before each. A *place* is the
/// number of tokens before it, so that what followed begins there. 4 bytes for each token, and up to 256 KiB.
#[derive(Clone, Debug)]
pub struct TokenIndex {
    min: usize,
    /// By hash: the last place; 0: none.
    last: Vec<u32>,
    /// By place: the one before it in its list. Its length is the next place that is entered.
    previous: Vec<u32>,
}

impl TokenIndex {
    /// Empty, for n-grams of at least `config.prompt_lookup_min` tokens; about `num_tokens` tokens are expected.
    pub fn new(config: &SpeculativeConfig, num_tokens: usize) -> Self {
        let min = config.prompt_lookup_min.max(1);
        Self {
            min,
            last: vec![0; num_tokens.clamp(64, 1 << 16).next_power_of_two()],
            previous: vec![0; min],
        }
    }

    /// Enters the places within `tokens`, which begin as they did at the last call. The end is none: nothing followed yet.
    pub fn extend(&mut self, tokens: &[u32]) {
        for place in self.previous.len()..tokens.len() {
            let list = self.list(&tokens[..place]);
            self.previous.push(self.last[list]);
            self.last[list] = place as u32;
        }
    }

    /// The last place whose tokens before it are those at the end of `tokens`, as many as can be: `min` to `max` of them.
    fn find(&self, tokens: &[u32], max: usize) -> Option<usize> {
        if tokens.len() < self.min {
            return None;
        }
        let (mut longest, mut found) = (self.min - 1, None);
        let mut place = self.last[self.list(tokens)] as usize;
        for _ in 0..MAX_CANDIDATES {
            if place == 0 || longest >= max {
                break;
            }
            let pairs = tokens[..place].iter().rev().zip(tokens.iter().rev());
            let equal = pairs.take(max).take_while(|(a, b)| a == b).count();
            if equal > longest {
                (longest, found) = (equal, Some(place));
            }
            place = self.previous[place] as usize;
        }
        found
    }

    /// The list of the `min` tokens that `tokens` end with. Others may have the same one.
    fn list(&self, tokens: &[u32]) -> usize {
        let ngram = &tokens[tokens.len() - self.min..];
        let hash = ngram.iter().fold(0_u64, |hash, &token| {
            (hash.rotate_left(5) ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        });
        (hash >> 32) as usize & (self.last.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(
        method: SpeculativeMethod,
        tokens: usize,
        min: usize,
        max: usize,
    ) -> SpeculativeConfig {
        SpeculativeConfig {
            method,
            num_speculative_tokens: tokens,
            prompt_lookup_min: min,
            prompt_lookup_max: max,
        }
    }

    /// The rule, by trying everything.
    fn naive(config: &SpeculativeConfig, tokens: &[u32], most: usize) -> Vec<u32> {
        let most = most.min(config.num_speculative_tokens);
        let end = tokens.len();
        let places = |n: usize| (n..end).rev().map(move |place| (n, place));
        let mut drafts: Vec<u32> = (config.prompt_lookup_min..=config.prompt_lookup_max)
            .rev()
            .filter(|&n| n < end)
            .flat_map(places)
            .find(|&(n, place)| tokens[place - n..place] == tokens[end - n..])
            .map(|(_, place)| tokens[place..].iter().copied().take(most).collect())
            .unwrap_or_default();
        if config.method == SpeculativeMethod::NgramGpu {
            drafts.resize(most, tokens[end - 1]);
        }
        drafts
    }

    fn proposed(config: &SpeculativeConfig, tokens: &[u32], most: usize) -> Vec<u32> {
        let mut drafts = vec![77; 5];
        let mut index = TokenIndex::new(config, tokens.len());
        config.propose(&mut index, tokens, most, &mut drafts);
        drafts
    }

    #[test]
    fn the_longest_that_occurred_before_where_it_occurred_last() {
        use SpeculativeMethod::{Ngram, NgramGpu};
        // The field's own example.
        let ngram = config(Ngram, 4, 2, 3);
        assert_eq!(proposed(&ngram, &[1, 2, 3, 4, 2, 3], 9), [4, 2, 3]);
        // One token occurred three times, two of them once: the longer one counts.
        let ngram = config(Ngram, 2, 1, 3);
        assert_eq!(
            proposed(&ngram, &[1, 2, 7, 8, 2, 9, 9, 2, 5, 1, 2], 9),
            [7, 8]
        );
        // Equal lengths: the last one.
        assert_eq!(proposed(&ngram, &[2, 7, 3, 2, 8, 3, 2], 9), [8, 3]);
        assert_eq!(proposed(&ngram, &[2, 7, 3, 2, 8, 3, 2], 1), [8]);
        assert_eq!(proposed(&ngram, &[2, 7, 3, 2, 8, 3, 2], 0), [0_u32; 0]);
        // Nothing occurred before; too short an n-gram did.
        assert_eq!(proposed(&ngram, &[1, 2, 3], 9), [0_u32; 0]);
        assert_eq!(proposed(&ngram, &[4], 9), [0_u32; 0]);
        assert_eq!(
            proposed(&config(Ngram, 2, 2, 3), &[1, 2, 9, 2], 9),
            [0_u32; 0]
        );
        // All decodes of one length.
        let filled = config(NgramGpu, 3, 1, 3);
        assert_eq!(proposed(&filled, &[1, 2, 3], 9), [3, 3, 3]);
        assert_eq!(proposed(&filled, &[5, 6, 5], 9), [6, 5, 5]);
        assert_eq!(proposed(&filled, &[5, 6, 5], 2), [6, 5]);
    }

    #[test]
    fn the_index_finds_what_a_search_finds() {
        let mut state = 9_u64;
        let mut random = |below: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) % below
        };
        let mut found = 0;
        for round in 0..60 {
            let (min, more) = (1 + random(3) as usize, random(4) as usize);
            let method = match round % 2 {
                0 => SpeculativeMethod::Ngram,
                _ => SpeculativeMethod::NgramGpu,
            };
            let config = config(method, 1 + random(5) as usize, min, min + more);
            let vocabulary = 2 + random(9);
            let mut tokens = vec![random(vocabulary) as u32];
            let mut index = TokenIndex::new(&config, 1);
            let mut drafts = Vec::new();
            // Below the number of places that are looked at, so that the search sees no more.
            while tokens.len() < MAX_CANDIDATES {
                for _ in 0..=random(6) {
                    tokens.push(random(vocabulary) as u32);
                }
                let most = random(7) as usize;
                config.propose(&mut index, &tokens, most, &mut drafts);
                assert_eq!(
                    drafts,
                    naive(&config, &tokens, most),
                    "{config:?} {tokens:?}"
                );
                found += usize::from(!drafts.is_empty());
            }
        }
        assert!(found > 1000, "{found}");
    }

    #[test]
    fn settings_out_of_range_are_refused_with_a_remedy() {
        let refused = |tokens, min, max, budget| {
            let config = config(SpeculativeMethod::Ngram, tokens, min, max);
            config.check(budget).map_err(|error| error.to_string())
        };
        assert_eq!(refused(16, 1, 32, 17), Ok(()));
        for (tokens, min, max, budget, text) in [
            (0, 1, 1, 64, "num_speculative_tokens is 0: give 1 to 16"),
            (17, 1, 1, 64, "num_speculative_tokens is 17: give 1 to 16"),
            (8, 1, 1, 8, "raise max_num_batched_tokens"),
            (3, 0, 2, 64, "prompt_lookup_min is 0: it must be at least 1"),
            (3, 4, 2, 64, "prompt_lookup_min is 4: it must not exceed"),
            (
                3,
                1,
                33,
                64,
                "prompt_lookup_max is 33: n-grams have at most",
            ),
        ] {
            let error = refused(tokens, min, max, budget).expect_err(text);
            assert!(error.contains(text), "{error}");
        }
    }
}
