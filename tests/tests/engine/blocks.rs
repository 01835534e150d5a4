//! The KV block manager: ownership, counting, prefixes, eviction.

use std::collections::HashMap;

use proptest::prelude::*;
use timetable_engine::kv::{BlockPool, KvCacheManager, NULL_BLOCK_ID, RequestBlocks};

#[test]
fn blocks_rise_from_one_and_the_last_freed_returns_first() {
    let mut pool = BlockPool::new(6);
    let taken: Vec<_> = std::iter::from_fn(|| pool.allocate()).collect();
    assert_eq!(taken, [1, 2, 3, 4, 5]);
    pool.release(&[2, 3]);
    pool.release(&[5]);
    assert_eq!(pool.free_list(), [5, 3, 2]);
}

fn tokens(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

/// Admits `tokens` whole and publishes what is full.
fn admit(kv: &mut KvCacheManager, tokens: &[u32]) -> Option<(RequestBlocks, usize)> {
    let mut request = RequestBlocks::default();
    let hit = kv.cached_prefix(&mut request, tokens);
    if !kv.admit(&mut request, hit, tokens.len(), tokens.len()) {
        return None;
    }
    kv.publish(&mut request, tokens, tokens.len());
    Some((request, hit.num_tokens))
}

#[test]
fn a_prefix_is_shared_and_its_last_token_is_always_computed() {
    let mut kv = KvCacheManager::new(20, 4, true);
    let (first, hit) = admit(&mut kv, &tokens(0..8)).unwrap();
    assert_eq!((first.ids.as_slice(), hit), ([1, 2].as_slice(), 0));
    let (same, hit) = admit(&mut kv, &tokens(0..8)).unwrap();
    assert_eq!(
        (same.ids[0], hit),
        (1, 4),
        "one block, because token 8 must have logits"
    );
    assert_ne!(same.ids[1], 2);
    let (longer, hit) = admit(&mut kv, &tokens(0..9)).unwrap();
    assert_eq!((&longer.ids[..2], hit), ([1, 2].as_slice(), 8));
    assert_eq!(kv.pool().ref_count(1), 3);
}

#[test]
fn equal_tokens_after_another_prefix_are_another_block() {
    let mut kv = KvCacheManager::new(20, 2, true);
    admit(&mut kv, &[7, 7, 1, 2, 3]).unwrap();
    let (_, hit) = admit(&mut kv, &[1, 2, 3]).unwrap();
    assert_eq!(hit, 0);
}

#[test]
fn eviction_takes_the_least_recent_and_the_tail_first() {
    let mut kv = KvCacheManager::new(6, 2, true);
    let (mut old, _) = admit(&mut kv, &tokens(0..4)).unwrap();
    let (mut new, _) = admit(&mut kv, &tokens(10..14)).unwrap();
    kv.release(&mut old);
    kv.release(&mut new);
    assert_eq!(kv.pool().free_list(), [5, 2, 1, 4, 3]);
    // Two blocks: the never used one, and the tail of the oldest.
    admit(&mut kv, &tokens(20..24)).unwrap();
    assert_eq!(kv.pool().num_evictions(), 1);
    let (_, hit) = admit(&mut kv, &tokens(0..5)).unwrap();
    assert_eq!(hit, 2, "the head of the oldest is still there");
}

#[test]
fn a_refused_admission_changes_nothing() {
    let mut kv = KvCacheManager::new(4, 2, true);
    let (mut first, _) = admit(&mut kv, &tokens(0..4)).unwrap();
    kv.release(&mut first);
    let before = kv.pool().free_list();
    assert!(admit(&mut kv, &tokens(0..9)).is_none(), "5 blocks of 3");
    assert_eq!(kv.pool().free_list(), before);
}

#[test]
fn what_a_failed_step_published_is_taken_back() {
    let mut kv = KvCacheManager::new(10, 2, true);
    let (mut request, _) = admit(&mut kv, &tokens(0..6)).unwrap();
    kv.unpublish(&mut request, 1);
    kv.release(&mut request);
    let (_, hit) = admit(&mut kv, &tokens(0..7)).unwrap();
    assert_eq!(hit, 2);
}

/// What a test does to the manager.
#[derive(Clone, Debug)]
enum Action {
    /// A request of these tokens: `family` chooses a token stream that families share with none but themselves.
    Admit {
        family: u32,
        len: usize,
    },
    Extend {
        pick: usize,
        by: usize,
    },
    Release {
        pick: usize,
    },
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        (0..3u32, 1..40usize).prop_map(|(family, len)| Action::Admit { family, len }),
        (any::<usize>(), 1..9usize).prop_map(|(pick, by)| Action::Extend { pick, by }),
        any::<usize>().prop_map(|pick| Action::Release { pick }),
    ]
}

/// A request in the test: its tokens, its blocks, and how much of it is written.
struct Live {
    tokens: Vec<u32>,
    blocks: RequestBlocks,
}

/// What is in the cache, slot by slot, as a kernel would see it: the whole history of the token that was written there. Equal
/// histories are equal keys and values.
struct Cache {
    slots: HashMap<(u32, usize), Vec<u32>>,
    block_size: usize,
}

impl Cache {
    fn write(&mut self, live: &Live, from: usize) {
        for position in from..live.tokens.len() {
            let slot = (
                live.blocks.ids[position / self.block_size],
                position % self.block_size,
            );
            self.slots.insert(slot, live.tokens[..=position].to_vec());
        }
    }

    fn check(&self, live: &Live) {
        for position in 0..live.tokens.len() {
            let slot = (
                live.blocks.ids[position / self.block_size],
                position % self.block_size,
            );
            assert_eq!(
                self.slots[&slot],
                live.tokens[..=position],
                "position {position}"
            );
        }
    }
}

/// Every block is free or held, and the counts are those of the holders.
fn check_ownership(kv: &KvCacheManager, live: &[Live]) {
    let mut holders = vec![0; kv.pool().num_blocks()];
    for request in live {
        for &block in &request.blocks.ids {
            assert_ne!(block, NULL_BLOCK_ID);
            holders[block as usize] += 1;
        }
    }
    let free = kv.pool().free_list();
    assert_eq!(free.len(), kv.pool().num_free());
    let mut is_free = vec![false; kv.pool().num_blocks()];
    for block in free {
        assert!(!is_free[block as usize], "block {block} is free twice");
        is_free[block as usize] = true;
    }
    for block in 1..kv.pool().num_blocks() {
        assert_eq!(
            kv.pool().ref_count(block as u32),
            holders[block],
            "block {block}"
        );
        assert_eq!(is_free[block], holders[block] == 0, "block {block}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// No block has two contents, counts balance, a cached prefix is the content it is taken for.
    #[test]
    fn blocks_hold_what_their_requests_think(
        block_size in 1..6usize,
        num_blocks in 2..30usize,
        caching in any::<bool>(),
        actions in prop::collection::vec(action(), 1..80),
    ) {
        let mut kv = KvCacheManager::new(num_blocks, block_size, caching);
        let mut cache = Cache { slots: HashMap::new(), block_size };
        let mut live: Vec<Live> = Vec::new();
        for action in actions {
            match action {
                Action::Admit { family, len } => {
                    let tokens: Vec<u32> = (0..len as u32).map(|index| family * 1000 + index).collect();
                    if let Some((blocks, hit)) = admit(&mut kv, &tokens) {
                        let request = Live { tokens, blocks };
                        cache.write(&request, hit);
                        live.push(request);
                    }
                }
                Action::Extend { pick, by } if !live.is_empty() => {
                    let index = pick % live.len();
                    let request = &mut live[index];
                    let from = request.tokens.len();
                    let to = from + by;
                    if kv.grow(&mut request.blocks, to) {
                        request.tokens.extend((from..to).map(|position| (pick as u32 % 7) * 100 + position as u32));
                        kv.publish(&mut request.blocks, &request.tokens, to);
                        cache.write(&live[index], from);
                    }
                }
                Action::Release { pick } if !live.is_empty() => {
                    let mut request = live.swap_remove(pick % live.len());
                    kv.release(&mut request.blocks);
                }
                _ => {}
            }
            check_ownership(&kv, &live);
            for request in &live {
                cache.check(request);
            }
        }
        for mut request in live.drain(..) {
            kv.release(&mut request.blocks);
        }
        prop_assert_eq!(kv.pool().num_free(), num_blocks - 1);
    }
}
