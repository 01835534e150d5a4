//! The layers other than attention and products: norms, rotary embedding, activation, embedding, gathered rows, argmax, and the
//! merge of two attention states, each element against f64.

use timetable_device_cuda::{
    CudaError,
    kernels::Element,
    ops::{MergeStates, Rope},
};
use timetable_types::Dtype;

use super::{CheckError, Context, ELEMENTS, rows};
use crate::{
    compare::{lse_error, rounding_error, row_error},
    element,
    gpu::{Gpu, Poisoned, widen},
    report::Group,
};

const EPS: f32 = 1e-5;

pub(super) fn run(context: &mut Context<'_>) -> Result<Vec<Group>, CheckError> {
    let mut groups = Vec::new();
    for (element, dtype) in ELEMENTS {
        let mut case = Case {
            gpu: context.gpu,
            element,
            dtype,
        };
        let rounds = if context.quick { 1 } else { 4 };
        let add = |name: &str| {
            Group::with_bar(
                format!("{name} {}", element::name(dtype)),
                element::bar(dtype),
            )
        };
        let mut of_kernel = [
            add("rms_norm"),
            add("head_norm"),
            add("rope"),
            add("silu_mul"),
            add("embedding"),
            add("gather_rows"),
            add("argmax"),
            add("merge_states"),
        ];
        for round in 0..rounds {
            let [norm, head, rope, silu, embedding, gather, argmax, merge] = &mut of_kernel;
            case.rms_norm(context, norm, round)?;
            case.head_norm(context, head)?;
            case.rope(context, rope, round)?;
            case.silu_mul(context, silu)?;
            case.embedding(context, embedding)?;
            case.gather_rows(context, gather)?;
            case.argmax(context, argmax)?;
            case.merge_states(context, merge)?;
        }
        groups.extend(of_kernel);
    }
    Ok(groups)
}

/// One element type.
struct Case<'a> {
    gpu: &'a Gpu,
    element: Element,
    dtype: Dtype,
}

impl Case<'_> {
    fn draw(&self, context: &mut Context<'_>, count: usize, deviation: f32) -> Vec<f32> {
        element::rounded(self.dtype, &context.random.normal(count, deviation))
    }

    /// Compares a result of rows of `width` elements; `floor` is the size at which cancellation leaves errors.
    fn compare(
        &self,
        group: &mut Group,
        out: &Poisoned,
        want: &[f64],
        width: usize,
        floor: f64,
        what: &dyn Fn() -> String,
    ) -> Result<(), CudaError> {
        let (got, guarded) = out.values()?;
        group.error(row_error(&got, want, width), what);
        let beyond = rounding_error(&got, want, self.dtype, floor);
        group.check(beyond <= 1.0, || {
            format!("{}: an element is {beyond:.1} roundings off", what())
        });
        group.check(guarded, || format!("{}: wrote beyond its result", what()));
        Ok(())
    }

    fn rms_norm(
        &mut self,
        context: &mut Context<'_>,
        group: &mut Group,
        round: u32,
    ) -> Result<(), CudaError> {
        let (count, hidden) = (context.random.count(1, 9), 16 * context.random.count(1, 80));
        let stride = hidden + 16;
        let x = self.draw(context, count * stride, 1.0);
        let weight = self.draw(context, hidden, 1.0);
        let before = self.draw(context, count * hidden, 1.0);
        let Case { gpu, element, .. } = *self;
        let (d_x, d_weight) = (
            gpu.upload_as(self.dtype, &x)?,
            gpu.upload_as(self.dtype, &weight)?,
        );
        let with_residual = round.is_multiple_of(2);
        let residual = gpu.upload_as(self.dtype, &before)?;
        let out = gpu.poisoned(self.dtype, count * hidden)?;
        // SAFETY: every buffer has the rows that it is given with, and lives until the stream has been waited for.
        unsafe {
            gpu.kernels.rms_norm(
                &gpu.stream,
                element,
                rows(&out.buffer, hidden),
                rows(&d_x, stride),
                with_residual.then(|| rows(&residual, hidden)),
                d_weight.ptr(),
                count as u32,
                hidden as u32,
                EPS,
            )
        }?;
        gpu.stream.synchronize()?;
        let what = || format!("{count} x {hidden}, residual {with_residual}");
        let after = element::decode(self.dtype, &residual.to_host::<u8>()?);
        let mut sum = widen(&after);
        let dense: Vec<f64> = x
            .chunks(stride)
            .flat_map(|row| widen(&row[..hidden]))
            .collect();
        if with_residual {
            let want: Vec<f64> = dense
                .iter()
                .zip(&before)
                .map(|(x, &r)| x + f64::from(r))
                .collect();
            let beyond = rounding_error(&after, &want, self.dtype, 0.0);
            group.check(beyond <= 1.0, || {
                format!("{}: the residual is {beyond:.1} roundings off", what())
            });
        } else {
            group.equal(&after, &before, || format!("{}: the residual", what()));
            sum = dense;
        }
        let mut want = Vec::with_capacity(sum.len());
        for row in sum.chunks(hidden) {
            want.extend(normalised(row, &weight));
        }
        self.compare(group, &out, &want, hidden, 0.0, &what)
    }

    fn head_norm(&mut self, context: &mut Context<'_>, group: &mut Group) -> Result<(), CudaError> {
        let (tokens, heads) = (context.random.count(1, 20), context.random.count(1, 40));
        let size = *context.random.pick(&[64, 96, 128, 256]);
        // Heads of a fused projection: the row goes on behind them.
        let stride = heads * size + 64;
        let x = self.draw(context, tokens * stride, 1.0);
        let weight = self.draw(context, size, 1.0);
        let Case { gpu, element, .. } = *self;
        let mut out = gpu.poisoned(self.dtype, tokens * stride)?;
        out.buffer.write(0, &element::encode(self.dtype, &x))?;
        let d_weight = gpu.upload_as(self.dtype, &weight)?;
        // SAFETY: as above.
        unsafe {
            gpu.kernels.head_norm(
                &gpu.stream,
                element,
                rows(&out.buffer, stride),
                d_weight.ptr(),
                tokens as u32,
                heads as u32,
                size as u32,
                EPS,
            )
        }?;
        gpu.stream.synchronize()?;
        let mut want = widen(&x);
        for row in want.chunks_mut(stride) {
            for head in row[..heads * size].chunks_mut(size) {
                let normal = normalised(head, &weight);
                head.copy_from_slice(&normal);
            }
        }
        self.compare(group, &out, &want, stride, 0.0, &|| {
            format!("{tokens} tokens of {heads} x {size}")
        })
    }

    fn rope(
        &mut self,
        context: &mut Context<'_>,
        group: &mut Group,
        round: u32,
    ) -> Result<(), CudaError> {
        let (tokens, heads) = (context.random.count(1, 12), context.random.count(1, 12));
        let size = *context.random.pick(&[64usize, 96, 128]);
        let rotary = if context.random.one_in(2) {
            size
        } else {
            size / 2
        };
        let interleaved = round % 2 == 1;
        let positions = 300;
        let mut table = Vec::with_capacity(positions * rotary);
        for position in 0..positions {
            let angle =
                |pair: usize| position as f64 * 10_000f64.powf(-2.0 * pair as f64 / rotary as f64);
            table.extend((0..rotary / 2).map(|pair| angle(pair).cos() as f32));
            table.extend((0..rotary / 2).map(|pair| angle(pair).sin() as f32));
        }
        let at: Vec<i64> = (0..tokens)
            .map(|_| context.random.int(0, positions as i64 - 1))
            .collect();
        let stride = heads * size + 32;
        let x = self.draw(context, tokens * stride, 1.0);
        let Case { gpu, element, .. } = *self;
        let mut out = gpu.poisoned(self.dtype, tokens * stride)?;
        out.buffer.write(0, &element::encode(self.dtype, &x))?;
        let (d_at, d_table) = (gpu.upload(&at)?, gpu.upload(&table)?);
        let rope = Rope {
            cos_sin: d_table.ptr(),
            head_size: size as u32,
            rotary_size: rotary as u32,
            interleaved,
        };
        // SAFETY: as above; every position is a row of the table.
        unsafe {
            gpu.kernels.rope(
                &gpu.stream,
                element,
                rows(&out.buffer, stride),
                d_at.ptr(),
                rope,
                tokens as u32,
                heads as u32,
            )
        }?;
        gpu.stream.synchronize()?;
        let mut want = widen(&x);
        for (token, row) in want.chunks_mut(stride).enumerate() {
            let entry = &table[at[token] as usize * rotary..][..rotary];
            for head in row[..heads * size].chunks_mut(size) {
                for pair in 0..rotary / 2 {
                    let (a, b) = if interleaved {
                        (2 * pair, 2 * pair + 1)
                    } else {
                        (pair, pair + rotary / 2)
                    };
                    let (cosine, sine) =
                        (f64::from(entry[pair]), f64::from(entry[rotary / 2 + pair]));
                    (head[a], head[b]) = (
                        head[a] * cosine - head[b] * sine,
                        head[b] * cosine + head[a] * sine,
                    );
                }
            }
        }
        self.compare(group, &out, &want, stride, 0.5, &|| {
            format!(
                "{tokens} tokens of {heads} x {size}, {rotary} rotated, interleaved {interleaved}"
            )
        })
    }

    fn silu_mul(&mut self, context: &mut Context<'_>, group: &mut Group) -> Result<(), CudaError> {
        let (count, size) = (context.random.count(1, 9), 8 * context.random.count(1, 300));
        let x = self.draw(context, count * 2 * size, 2.0);
        let Case { gpu, element, .. } = *self;
        let d_x = gpu.upload_as(self.dtype, &x)?;
        let out = gpu.poisoned(self.dtype, count * size)?;
        // SAFETY: as above.
        unsafe {
            gpu.kernels.silu_mul(
                &gpu.stream,
                element,
                rows(&out.buffer, size),
                rows(&d_x, 2 * size),
                count as u32,
                size as u32,
            )
        }?;
        gpu.stream.synchronize()?;
        let mut want = Vec::with_capacity(count * size);
        for row in x.chunks(2 * size) {
            let (gate, up) = row.split_at(size);
            want.extend(gate.iter().zip(up).map(|(&gate, &up)| {
                let gate = f64::from(gate);
                gate / (1.0 + (-gate).exp()) * f64::from(up)
            }));
        }
        self.compare(group, &out, &want, size, 0.0, &|| {
            format!("{count} x {size}")
        })
    }

    fn embedding(&mut self, context: &mut Context<'_>, group: &mut Group) -> Result<(), CudaError> {
        let (vocabulary, hidden) = (
            context.random.count(5, 400),
            16 * context.random.count(1, 60),
        );
        let tokens = context.random.count(1, 50);
        let table = self.draw(context, vocabulary * hidden, 1.0);
        let mut ids: Vec<i32> = (0..tokens)
            .map(|_| context.random.int(0, vocabulary as i64 - 1) as i32)
            .collect();
        ids.extend([-1, vocabulary as i32, i32::MAX, i32::MIN]);
        let Case { gpu, element, .. } = *self;
        let (d_table, d_ids) = (gpu.upload_as(self.dtype, &table)?, gpu.upload(&ids)?);
        let out = gpu.poisoned(self.dtype, ids.len() * hidden)?;
        // SAFETY: as above; ids outside the table are the kernel's to refuse.
        unsafe {
            gpu.kernels.embedding(
                &gpu.stream,
                element,
                rows(&out.buffer, hidden),
                d_table.ptr(),
                d_ids.ptr(),
                ids.len() as u32,
                hidden as u32,
                vocabulary as u32,
            )
        }?;
        gpu.stream.synchronize()?;
        let want = picked(&table, &ids, vocabulary, hidden, hidden);
        let (got, guarded) = out.values()?;
        let what = || format!("{} ids of {vocabulary} x {hidden}", ids.len());
        group.equal(&got, &want, what);
        group.check(guarded, || format!("{}: wrote beyond its result", what()));
        Ok(())
    }

    fn gather_rows(
        &mut self,
        context: &mut Context<'_>,
        group: &mut Group,
    ) -> Result<(), CudaError> {
        let (num_rows, size) = (context.random.count(1, 60), context.random.count(1, 700));
        let stride = size + context.random.count(0, 9);
        let input = self.draw(context, num_rows * stride, 1.0);
        let wanted = context.random.count(1, 40);
        let mut indices: Vec<i32> = (0..wanted)
            .map(|_| context.random.int(0, num_rows as i64 - 1) as i32)
            .collect();
        indices.extend([-1, num_rows as i32]);
        let Case { gpu, element, .. } = *self;
        let (d_input, d_indices) = (gpu.upload_as(self.dtype, &input)?, gpu.upload(&indices)?);
        let out = gpu.poisoned(self.dtype, indices.len() * size)?;
        // SAFETY: as above; indices outside the rows are the kernel's to refuse.
        unsafe {
            gpu.kernels.gather_rows(
                &gpu.stream,
                element,
                rows(&out.buffer, size),
                rows(&d_input, stride),
                d_indices.ptr(),
                indices.len() as u32,
                size as u32,
                num_rows as u32,
            )
        }?;
        gpu.stream.synchronize()?;
        let want = picked(&input, &indices, num_rows, stride, size);
        let (got, guarded) = out.values()?;
        let what = || format!("{} rows of {num_rows} x {size}", indices.len());
        group.equal(&got, &want, what);
        group.check(guarded, || format!("{}: wrote beyond its result", what()));
        Ok(())
    }

    fn argmax(&mut self, context: &mut Context<'_>, group: &mut Group) -> Result<(), CudaError> {
        let vocabulary = *context.random.pick(&[1usize, 31, 49_152, 50_257]);
        let count = 4;
        let mut logits = self.draw(context, count * vocabulary, 3.0);
        // A row of nothing but NaN, and one NaN at the front of another.
        logits[..vocabulary].fill(f32::NAN);
        logits[vocabulary] = f32::NAN;
        let Case { gpu, element, .. } = *self;
        let d_logits = gpu.upload_as(self.dtype, &logits)?;
        let out = gpu.poisoned(Dtype::Int32, count)?;
        // SAFETY: as above.
        unsafe {
            gpu.kernels.argmax(
                &gpu.stream,
                element,
                out.buffer.ptr(),
                rows(&d_logits, vocabulary),
                count as u32,
                vocabulary as u32,
            )
        }?;
        gpu.stream.synchronize()?;
        let want: Vec<i32> = logits
            .chunks(vocabulary)
            .map(|row| {
                let mut best = (0, f32::NEG_INFINITY);
                for (index, &x) in row.iter().enumerate() {
                    if x > best.1 {
                        best = (index as i32, x);
                    }
                }
                best.0
            })
            .collect();
        let (got, guarded) = out.ints()?;
        let what = || format!("{count} rows of {vocabulary}");
        group.equal(&got, &want, what);
        group.check(guarded, || format!("{}: wrote beyond its result", what()));
        Ok(())
    }

    fn merge_states(
        &mut self,
        context: &mut Context<'_>,
        group: &mut Group,
    ) -> Result<(), CudaError> {
        let (tokens, heads) = (context.random.count(1, 9), context.random.count(1, 8));
        let size = *context.random.pick(&[64usize, 96, 128, 256]);
        let count = tokens * heads;
        let mut states = [0, 1].map(|_| self.draw(context, count * size, 1.0));
        let mut lse = [0, 1].map(|_| context.random.normal(count, 3.0));
        // States without keys: nothing wrote them, and what they hold counts for nothing.
        for (part, every) in [(0, 5), (1, 7)] {
            for index in (0..count).filter(|index| index % every == 3 || count == 1) {
                lse[part][index] = f32::NEG_INFINITY;
                states[part][index * size..(index + 1) * size].fill(f32::NAN);
            }
        }
        let Case { gpu, element, .. } = *self;
        let d_states = [
            gpu.upload_as(self.dtype, &states[0])?,
            gpu.upload_as(self.dtype, &states[1])?,
        ];
        let d_lse = [gpu.upload(&lse[0])?, gpu.upload(&lse[1])?];
        let (out, out_lse) = (
            gpu.poisoned(self.dtype, count * size)?,
            gpu.poisoned(Dtype::Float32, count)?,
        );
        let stride = heads * size;
        let merge = MergeStates {
            output: rows(&out.buffer, stride),
            output_lse: out_lse.buffer.ptr(),
            prefix: rows(&d_states[0], stride),
            prefix_lse: d_lse[0].ptr(),
            suffix: rows(&d_states[1], stride),
            suffix_lse: d_lse[1].ptr(),
        };
        // SAFETY: as above.
        unsafe {
            gpu.kernels.merge_states(
                &gpu.stream,
                element,
                &merge,
                tokens as u32,
                heads as u32,
                size as u32,
            )
        }?;
        gpu.stream.synchronize()?;
        let (mut want, mut want_lse) = (Vec::new(), Vec::new());
        let weights = lse[0].iter().zip(&lse[1]);
        let values = states[0].chunks(size).zip(states[1].chunks(size));
        for ((&a, &b), (first, second)) in weights.zip(values) {
            let weight = [a, b].map(|lse| f64::from(lse).exp());
            let total = weight[0] + weight[1];
            want_lse.push(total.ln());
            for pair in first.iter().zip(second) {
                let part = |weight: f64, value: f32| {
                    if weight == 0.0 {
                        0.0
                    } else {
                        weight * f64::from(value)
                    }
                };
                want.push(if total == 0.0 {
                    0.0
                } else {
                    (part(weight[0], *pair.0) + part(weight[1], *pair.1)) / total
                });
            }
        }
        let what = || format!("{tokens} tokens of {heads} x {size}");
        let (got_lse, guarded) = out_lse.values()?;
        let off = lse_error(&got_lse, &want_lse);
        group.check(off <= 2e-6 && guarded, || {
            format!("{}: LSE off by {off:.1e}", what())
        });
        self.compare(group, &out, &want, size, 0.5, &what)
    }
}

/// RMSNorm of a row.
fn normalised(row: &[f64], weight: &[f32]) -> Vec<f64> {
    let squares: f64 = row.iter().map(|x| x * x).sum();
    let factor = 1.0 / (squares / row.len() as f64 + f64::from(EPS)).sqrt();
    row.iter()
        .zip(weight)
        .map(|(x, &w)| x * factor * f64::from(w))
        .collect()
}

/// The rows of `table` that `ids` name, zeros for one that it does not have.
fn picked(table: &[f32], ids: &[i32], count: usize, stride: usize, size: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(ids.len() * size);
    for &id in ids {
        match usize::try_from(id) {
            Ok(id) if id < count => out.extend_from_slice(&table[id * stride..][..size]),
            _ => out.extend(std::iter::repeat_n(0.0, size)),
        }
    }
    out
}
