//! Every build of the kernel that this machine can run gives the same attention.

use super::*;
use crate::cpu::{CacheDtype, KvCache, kv_cache::Storage};

/// Cheap noise in [−1, 1).
fn noise(count: usize, mut state: u32) -> Vec<f32> {
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

fn builds<E: Element>(task: &Task<'_, E>, rows: usize) {
    let size = task.content.value_size;
    let mut workspace = Workspace::default();
    let mut portable = (vec![f32::NAN; rows * size], vec![f64::NAN; rows]);
    attend_portable(
        task,
        0..rows,
        &mut workspace,
        &mut portable.0,
        &mut portable.1,
    );
    assert!(portable.0.iter().any(|&x| x != 0.0));
    let same = |output: &[f32], lse: &[f64], build: &str| {
        for (a, b) in output.iter().zip(&portable.0) {
            assert!((a - b).abs() < 2e-6, "{build}: {a} {b}");
        }
        for (a, b) in lse.iter().zip(&portable.1) {
            assert!(a == b || (a - b).abs() < 2e-6, "{build}: lse {a} {b}");
        }
    };
    let mut output = vec![f32::NAN; rows * size];
    let mut lse = vec![f64::NAN; rows];
    attend(task, 0..rows, &mut workspace, &mut output, &mut lse);
    same(&output, &lse, instruction_set());
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        output.fill(f32::NAN);
        // SAFETY: the features were found just now.
        unsafe { attend_avx2(task, 0..rows, &mut workspace, &mut output, &mut lse) }
        same(&output, &lse, "avx2");
    }
}

#[test]
fn all_builds_agree() {
    for (heads_per_kv_head, head_size) in [(1, 64), (3, 64), (4, 40), (8, 128), (5, 33), (2, 256)] {
        for dtype in [CacheDtype::F32, CacheDtype::Bf16] {
            for (q_len, kv_len, window, cap) in [
                (1, 150, None, None),
                (21, 130, None, Some(5.0)),
                (13, 90, Some(40), None),
            ] {
                let config = AttentionConfig {
                    num_heads: 2 * heads_per_kv_head,
                    head_size,
                    scale: 0.3,
                    num_kv_heads: 2,
                    sliding_window: window,
                    logits_soft_cap: cap,
                    kv_cache_dtype: dtype,
                    block_size: 16,
                    batch_invariant: false,
                };
                let query = noise(q_len * config.num_heads * head_size, 1);
                let pages: Vec<i32> = (0..10).rev().collect();
                let mut cache = KvCache::new(10, 2, 16, head_size, dtype);
                let slots: Vec<i64> = (0..160).collect();
                let elements = slots.len() * 2 * head_size;
                cache.scatter(&noise(elements, 2), &noise(elements, 3), &slots);
                let rows = q_len * heads_per_kv_head;
                macro_rules! task {
                    ($cache:expr) => {
                        Task {
                            query: &query,
                            cache: $cache,
                            content: Content::key_then_value(head_size),
                            pages: &pages,
                            config: &config,
                            token: 0,
                            q_len,
                            kv_len,
                            causal: true,
                            kv_head: 1,
                            keys: 16..kv_len,
                        }
                    };
                }
                match &cache.storage {
                    Storage::F32(cache) => builds(&task!(cache), rows),
                    Storage::Bf16(cache) => builds(&task!(cache), rows),
                }
            }
        }
    }
}

/// A key of latent attention has its value within itself.
#[test]
fn all_builds_agree_on_latents() {
    for (heads, q_len, latent, rotated) in [(1, 1, 33, 7), (3, 1, 64, 16), (5, 4, 40, 8)] {
        let size = latent + rotated;
        let config = AttentionConfig {
            num_heads: heads,
            head_size: size,
            scale: 0.3,
            num_kv_heads: 1,
            sliding_window: None,
            logits_soft_cap: None,
            kv_cache_dtype: CacheDtype::F32,
            block_size: 16,
            batch_invariant: false,
        };
        let query = noise(q_len * heads * size, 1);
        let pages: Vec<i32> = (0..10).rev().collect();
        let cache = noise(160 * size, 2);
        let task = Task {
            query: &query,
            cache: &cache,
            content: Content {
                stride: size,
                value_size: latent,
                value_start: 0,
            },
            pages: &pages,
            config: &config,
            token: 0,
            q_len,
            kv_len: 150,
            causal: true,
            kv_head: 0,
            keys: 16..150,
        };
        builds(&task, q_len * heads);
    }
}
