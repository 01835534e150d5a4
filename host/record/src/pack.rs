//! Whole numbers and block tables as differences, of which nearly all are 0 or 1 from step to step.
//!
//! Must never know: files, frames, or what a number means.

use serde::{Deserialize, Serialize};

/// Entries of the largest block table that is unpacked: 64 MiB.
const MAX_BLOCKS: usize = 1 << 24;

/// A vector of whole numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Ints {
    /// Each less the one before it; the first less 0.
    Within(Vec<i64>),
    /// Each less the one at its place in the step before.
    Since(Vec<i64>),
    /// As another vector of the same step.
    Same,
}

impl Ints {
    /// `now`, given what stood there in the step before.
    pub(crate) fn pack<T: Copy + Into<i64>>(now: &[T], before: &[T]) -> Ints {
        let less = |(a, b): (i64, i64)| a.wrapping_sub(b);
        let wide = now.iter().map(|&value| value.into());
        if before.len() == now.len() && !now.is_empty() {
            let before = before.iter().map(|&value| value.into());
            return Ints::Since(wide.zip(before).map(less).collect());
        }
        let shifted = std::iter::once(0).chain(wide.clone());
        Ints::Within(wide.zip(shifted).map(less).collect())
    }

    /// As [`Ints::pack`], where the vector may be equal to `twin`.
    pub(crate) fn pack_or_same<T: Copy + Into<i64> + PartialEq>(
        now: &[T],
        before: &[T],
        twin: &[T],
    ) -> Ints {
        if now == twin {
            Ints::Same
        } else {
            Ints::pack(now, before)
        }
    }

    /// The inverse.
    pub(crate) fn unpack<T: Copy + Into<i64> + TryFrom<i64>>(
        &self,
        before: &[T],
        twin: &[T],
    ) -> Result<Vec<T>, String> {
        let narrow = |value: i64| {
            T::try_from(value).map_err(|_| format!("a vector holds {value}, which does not fit it"))
        };
        match self {
            Ints::Same => Ok(twin.to_vec()),
            Ints::Since(deltas) if deltas.len() != before.len() => Err(format!(
                "a vector of {} is told by its difference to one of {}",
                deltas.len(),
                before.len()
            )),
            Ints::Since(deltas) => deltas
                .iter()
                .zip(before)
                .map(|(delta, &before)| narrow(before.into().wrapping_add(*delta)))
                .collect(),
            Ints::Within(deltas) => deltas
                .iter()
                .scan(0i64, |sum, delta| {
                    *sum = sum.wrapping_add(*delta);
                    Some(narrow(*sum))
                })
                .collect(),
        }
    }
}

/// The kept columns of a block table: row after row, with each row's number of columns and its request's place in the table of
/// running requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows<'a> {
    pub(crate) req_idx: &'a [u32],
    pub(crate) columns: &'a [u32],
    pub(crate) blocks: &'a [i32],
}

/// A block table, by what it has in common with that of the step before.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Table {
    /// For each row 1 + the row of the step before that it is told by; 0: none.
    base: Vec<u32>,
    /// For each row with a base: its first columns that are that row's.
    same: Vec<u32>,
    /// The columns after them, row after row, each less the one before it.
    rest: Vec<i64>,
}

impl Rows<'_> {
    /// A row's request; its place where the step does not say.
    fn request(&self, row: usize) -> u32 {
        self.req_idx.get(row).copied().unwrap_or(row as u32)
    }

    /// Where each row's columns begin in `blocks`, and where the last one's end.
    fn starts(&self) -> Vec<usize> {
        let ends = self.columns.iter().scan(0, |end, columns| {
            *end += *columns as usize;
            Some(*end)
        });
        std::iter::once(0).chain(ends).collect()
    }
}

impl Table {
    /// `now`, given the step before.
    pub(crate) fn pack(now: Rows<'_>, before: Rows<'_>) -> Table {
        let (starts, starts_before) = (now.starts(), before.starts());
        // Requests' rows in the step before, by place in the table of running requests.
        let mut row_of: Vec<u32> = Vec::new();
        for (row, &columns) in before.columns.iter().enumerate() {
            let request = before.request(row) as usize;
            // Padded rows all name request 0; places are few.
            if request < 1 << 20 && columns > 0 {
                if row_of.len() <= request {
                    row_of.resize(request + 1, 0);
                }
                row_of[request] = row as u32 + 1;
            }
        }
        let mut table = Table::default();
        for (row, range) in starts.windows(2).enumerate() {
            let blocks = &now.blocks[range[0]..range[1]];
            let base = row_of.get(now.request(row) as usize).copied().unwrap_or(0);
            let mut same = 0;
            if base > 0 {
                let base = base as usize - 1;
                let of_base = &before.blocks[starts_before[base]..starts_before[base + 1]];
                same = common_prefix(blocks, of_base);
            }
            let base = if same > 0 { base } else { 0 };
            table.base.push(base);
            if base > 0 {
                table.same.push(same as u32);
            }
            let mut last = 0;
            for &block in &blocks[same..] {
                table.rest.push(i64::from(block) - last);
                last = i64::from(block);
            }
        }
        table
    }

    /// The blocks of rows with so many `columns`.
    pub(crate) fn unpack(&self, columns: &[u32], before: Rows<'_>) -> Result<Vec<i32>, String> {
        let total: u64 = columns.iter().map(|&columns| u64::from(columns)).sum();
        if self.base.len() != columns.len() || total > MAX_BLOCKS as u64 {
            return Err(format!(
                "a block table of {} rows has {} lengths and {total} entries, of which at most {MAX_BLOCKS} are read",
                self.base.len(),
                columns.len()
            ));
        }
        let starts = before.starts();
        let mut blocks = Vec::with_capacity(total as usize);
        let (mut same, mut rest) = (self.same.iter(), self.rest.iter());
        for (row, (&base, &columns)) in self.base.iter().zip(columns).enumerate() {
            let short = || format!("row {row} of a block table is told by a row that is not there");
            let columns = columns as usize;
            let mut kept = 0;
            if base > 0 {
                kept = *same.next().ok_or_else(short)? as usize;
                let base = base as usize - 1;
                let of_base = starts
                    .get(base + 1)
                    .and_then(|&end| before.blocks.get(starts[base]..end))
                    .and_then(|of_base| of_base.get(..kept))
                    .filter(|_| kept <= columns)
                    .ok_or_else(short)?;
                blocks.extend_from_slice(of_base);
            }
            let mut last = 0i64;
            for _ in kept..columns {
                last = last.wrapping_add(*rest.next().ok_or_else(short)?);
                blocks.push(i32::try_from(last).map_err(|_| {
                    format!("row {row} of a block table holds {last}, which is no block id")
                })?);
            }
        }
        Ok(blocks)
    }
}

/// Entries that both begin with.
fn common_prefix(a: &[i32], b: &[i32]) -> usize {
    // Rows mostly agree to the end of the shorter one: compared whole first, which is a memcmp.
    let len = a.len().min(b.len());
    if a[..len] == b[..len] {
        return len;
    }
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_come_back_whatever_the_step_before() {
        let vectors: [&[i32]; 5] = [&[], &[0], &[5, 6, 7], &[i32::MIN, i32::MAX, -1], &[3, 3, 4]];
        for now in vectors {
            for before in vectors {
                let packed = Ints::pack(now, before);
                assert_eq!(packed.unpack(before, &[]).as_deref(), Ok(now));
                let packed = Ints::pack_or_same(now, before, now);
                assert_eq!(packed, Ints::Same);
                assert_eq!(packed.unpack(before, now).as_deref(), Ok(now));
            }
        }
        let wide = [i64::MIN, 0, i64::MAX];
        let packed = Ints::pack(&wide, &[7, 7, 7]);
        assert_eq!(packed.unpack(&[7, 7, 7], &[]).as_deref(), Ok(&wide[..]));
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        assert!(Ints::Within(vec![1 << 40]).unpack::<i32>(&[], &[]).is_err());
        assert!(Ints::Since(vec![1]).unpack::<i32>(&[1, 2], &[]).is_err());
        let nothing = Rows {
            req_idx: &[],
            columns: &[],
            blocks: &[],
        };
        for (table, columns) in [
            (Table::default(), vec![1]),
            (
                Table {
                    base: vec![1],
                    same: vec![1],
                    rest: vec![],
                },
                vec![1],
            ),
            (
                Table {
                    base: vec![0],
                    same: vec![],
                    rest: vec![1],
                },
                vec![u32::MAX],
            ),
            (
                Table {
                    base: vec![0],
                    same: vec![],
                    rest: vec![1 << 40],
                },
                vec![1],
            ),
        ] {
            assert!(table.unpack(&columns, nothing).is_err(), "{table:?}");
        }
    }

    #[test]
    fn tables_come_back_and_repeated_rows_cost_nothing() {
        let before = Rows {
            req_idx: &[4, 2, 9],
            columns: &[3, 2, 1],
            blocks: &[10, 11, 12, 7, 8, 5],
        };
        // Request 2 first and one block longer, request 9 with other blocks, request 5 new, a padded row.
        let now = Rows {
            req_idx: &[2, 4, 9, 5, 0],
            columns: &[3, 3, 2, 2, 0],
            blocks: &[7, 8, 30, 10, 11, 12, 6, 5, 40, 41],
        };
        let table = Table::pack(now, before);
        assert_eq!(table.base, [2, 1, 0, 0, 0]);
        assert_eq!(table.rest, [30, 6, -1, 40, 1]);
        assert_eq!(table.unpack(now.columns, before).as_deref(), Ok(now.blocks));
        let again = Table::pack(now, now);
        assert!(again.rest.is_empty());
        assert_eq!(again.unpack(now.columns, now).as_deref(), Ok(now.blocks));
    }
}
