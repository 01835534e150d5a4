//! Sampling: greedy, top-k, top-p and temperature, each token against a draw in f64 with the same uniform number.

use timetable_device_cuda::{CudaError, params::SampleRow};
use timetable_types::Dtype;

use super::{CheckError, Context, rows};
use crate::report::Group;

/// Where the draw or the nucleus's edge lies closer to another token than this share of the whole, either is right.
const NEAR: f64 = 1e-5;

pub(super) fn run(context: &mut Context<'_>) -> Result<Vec<Group>, CheckError> {
    let mut exact = Group::new("sampling, one row");
    let mut spread = Group::new("sampling, frequencies");
    let rounds = if context.quick { 2 } else { 12 };
    for round in 0..rounds {
        let vocabulary = [1usize, 17, 1_000, 49_152, 128_256][round % 5];
        tokens(context, &mut exact, vocabulary)?;
    }
    frequencies(context, &mut spread)?;
    Ok(vec![exact, spread])
}

/// Draws one token a row on the device.
fn draw(
    context: &Context<'_>,
    logits: &[f32],
    vocabulary: usize,
    how: &[SampleRow],
) -> Result<(Vec<i32>, bool), CudaError> {
    let gpu = context.gpu;
    let (d_logits, d_how) = (gpu.upload(logits)?, gpu.upload(how)?);
    let out = gpu.poisoned(Dtype::Int32, how.len())?;
    // SAFETY: a row of logits and one of parameters for each token; all live until the stream has been waited for.
    unsafe {
        gpu.kernels.sample(
            &gpu.stream,
            out.buffer.ptr(),
            rows(&d_logits, vocabulary),
            d_how.ptr(),
            how.len() as u32,
            vocabulary as u32,
        )
    }?;
    gpu.stream.synchronize()?;
    out.ints()
}

fn tokens(
    context: &mut Context<'_>,
    group: &mut Group,
    vocabulary: usize,
) -> Result<(), CudaError> {
    let count = if context.quick { 6 } else { 40 };
    let mut logits = context.random.normal(count * vocabulary, 3.0);
    // Ties, a NaN, and a row of nothing but NaN.
    for row in 0..count {
        let row = &mut logits[row * vocabulary..(row + 1) * vocabulary];
        for _ in 0..vocabulary / 100 {
            let (from, to) = (
                context.random.count(0, vocabulary - 1),
                context.random.count(0, vocabulary - 1),
            );
            row[to] = row[from];
        }
        if vocabulary > 1 {
            row[context.random.count(0, vocabulary - 1)] = f32::NAN;
        }
    }
    logits[..vocabulary].fill(f32::NAN);
    let how: Vec<SampleRow> = (0..count)
        .map(|_| SampleRow {
            temperature: *context.random.pick(&[0.0, 0.3, 0.8, 1.0, 2.5]),
            top_p: *context.random.pick(&[1.0, 0.95, 0.5, 0.01]),
            top_k: *context.random.pick(&[0, 1, 5, 50, 1 << 20]),
            reserved: 0,
            uniform: context.random.uniform(),
        })
        .collect();
    let (got, guarded) = draw(context, &logits, vocabulary, &how)?;
    for (row, (&token, how)) in got.iter().zip(&how).enumerate() {
        let logits = &logits[row * vocabulary..(row + 1) * vocabulary];
        let drawn = pick(logits, how, how.uniform, f64::from(how.top_p));
        group.check(token == drawn || is_near(token, logits, how), || {
            format!("row {row} of {vocabulary} logits, {how:?}: got {token}, wanted {drawn}")
        });
    }
    let (again, _) = draw(context, &logits, vocabulary, &how)?;
    group.equal(&again, &got, || "a second run of the same rows".to_owned());
    group.check(guarded, || "wrote beyond its tokens".to_owned());
    Ok(())
}

/// Many draws of one distribution: the frequencies are the probabilities'.
fn frequencies(context: &mut Context<'_>, group: &mut Group) -> Result<(), CudaError> {
    let (vocabulary, count) = (8, if context.quick { 2_000 } else { 20_000 });
    let row = context.random.normal(vocabulary, 1.0);
    let logits: Vec<f32> = row
        .iter()
        .copied()
        .cycle()
        .take(count * vocabulary)
        .collect();
    let how: Vec<SampleRow> = (0..count)
        .map(|_| SampleRow {
            temperature: 0.7,
            top_p: 1.0,
            top_k: 0,
            reserved: 0,
            uniform: context.random.uniform(),
        })
        .collect();
    let (got, _) = draw(context, &logits, vocabulary, &how)?;
    let weights: Vec<f64> = row.iter().map(|&x| (f64::from(x) / 0.7).exp()).collect();
    let total: f64 = weights.iter().sum();
    for (token, weight) in weights.iter().enumerate() {
        let p = weight / total;
        let seen = got.iter().filter(|&&t| t == token as i32).count() as f64;
        let deviation = (count as f64 * p * (1.0 - p)).sqrt().max(1.0);
        let off = (seen - count as f64 * p).abs() / deviation;
        group.check(off < 5.0, || {
            format!("token {token} of probability {p:.4}: drawn {seen} times of {count}, {off:.1} deviations off")
        });
    }
    Ok(())
}

/// Is `token` right where the draw or the nucleus ends at an edge?
fn is_near(token: i32, logits: &[f32], how: &SampleRow) -> bool {
    let nudges = [0.0, -NEAR, NEAR];
    nudges.iter().any(|nudge| {
        nudges.iter().any(|edge| {
            token
                == pick(
                    logits,
                    how,
                    how.uniform + nudge,
                    f64::from(how.top_p) + edge,
                )
        })
    })
}

/// The largest `top_k`, weights at the temperature, the likeliest that reach `top_p` of them, then the token at which their
/// running sum exceeds `uniform` of the whole: in order of ids or, below a `top_p` of 1, likeliest first. −1: no number.
fn pick(logits: &[f32], how: &SampleRow, uniform: f64, top_p: f64) -> i32 {
    let mut candidates: Vec<(usize, f32)> = logits
        .iter()
        .copied()
        .enumerate()
        .filter(|(_, x)| !x.is_nan())
        .collect();
    candidates.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let Some(&(best, max)) = candidates.first() else {
        return -1;
    };
    if how.temperature == 0.0 {
        return best as i32;
    }
    if how.top_k > 0 {
        candidates.truncate(how.top_k as usize);
    }
    let weight = |x: f32| ((f64::from(x) - f64::from(max)) / f64::from(how.temperature)).exp();
    let mut total: f64 = candidates.iter().map(|c| weight(c.1)).sum();
    if how.top_p < 1.0 {
        let (mut reached, mut kept) = (0.0, 0);
        for candidate in &candidates {
            reached += weight(candidate.1);
            kept += 1;
            if reached >= top_p * total {
                break;
            }
        }
        candidates.truncate(kept);
        total = reached;
    } else {
        candidates.sort_by_key(|c| c.0);
    }
    let mut left = uniform.clamp(0.0, 1.0) * total;
    for &(token, x) in &candidates {
        left -= weight(x);
        if left < 0.0 {
            return token as i32;
        }
    }
    candidates.last().map_or(-1, |c| c.0 as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_draw_follows_the_order_that_it_says() {
        let logits = [0.0, 2.0, f32::NAN, 2.0, 1.0];
        let how = |temperature, top_k, top_p| SampleRow {
            temperature,
            top_p,
            top_k,
            reserved: 0,
            uniform: 0.0,
        };
        assert_eq!(pick(&logits, &how(0.0, 0, 1.0), 0.9, 1.0), 1);
        // Ids in order: 0 first.
        assert_eq!(pick(&logits, &how(1.0, 0, 1.0), 0.0, 1.0), 0);
        // The two largest; of equals the lower id is the likelier.
        assert_eq!(pick(&logits, &how(1.0, 2, 1.0), 0.6, 1.0), 3);
        assert_eq!(pick(&logits, &how(1.0, 0, 0.3), 0.0, 0.3), 1);
        assert_eq!(pick(&[f32::NAN], &how(1.0, 0, 1.0), 0.5, 1.0), -1);
    }
}
