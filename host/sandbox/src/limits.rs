//! Every bound that the sandbox puts on a component, in one struct.
//!
//! Must never know: which family a component serves, or what a step is made of beyond its number of rows.

use std::time::Duration;

use serde::{Deserialize, Serialize};

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// Bounds on components. The defaults are those of the design; each field says unit, default and cost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Limits {
    /// Live instances at once, in all groups. Unit: instances. Default: 64.
    ///
    /// An attention group (and micro-batch) uses up to five: active, its spare, the previous version, and the two that a
    /// reload is preparing. Cost: address space (`memory_reservation` + a guard each), no resident memory until used.
    /// Exceeding it is a hard error of the one who asks for the instance, never of a running builder.
    pub max_instances: u32,
    /// Linear memory of one instance. Unit: bytes. Default: 4 MiB. Growing beyond it traps.
    ///
    /// Cost: none per call; it is looked at in `memory.grow` only.
    pub max_memory_bytes: usize,
    /// Address space reserved for one instance's memory. Unit: bytes. Default: `max_memory_bytes`.
    ///
    /// 4 GiB would let the compiler leave out bounds checks, at 4 GiB of address space for each instance, which counts under
    /// RLIMIT_AS and some container policies. Cost of the small default: explicit bounds checks in the guest's loops.
    pub memory_reservation_bytes: u64,
    /// Fuel of every call, before rows are counted. Unit: fuel (about one per wasm instruction). Default: 400,000.
    ///
    /// Fuel costs 10–15 % of a build. It never kills a healthy builder on a busy machine, and it replays.
    pub fuel_per_call: u64,
    /// Additional fuel for each row of the batch. Unit: fuel. Default: 1,500. A FLASHINFER plan uses about 700 a row; with more
    /// than this the slowest call that 1,024 rows pay for took more than 10 ms.
    pub fuel_per_row: u64,
    /// Additional fuel for each query token of the batch. Unit: fuel. Default: 200.
    ///
    /// Rows alone do not do: FLASHINFER's plan for one prefill of 8,192 tokens deals out thousands of work items, and ran out
    /// of the fuel of one row.
    pub fuel_per_token: u64,
    /// Fuel for instantiating, constructing, `info` and `launch-promise`. Unit: fuel. Default: 20 million, about 1 ms of a
    /// tight loop.
    pub fuel_fixed: u64,
    /// Wall-clock time after which a call is interrupted. Default: 200 ms; at least 100 ms.
    ///
    /// A coarse watchdog, for what fuel does not see. At 1 ms it killed healthy builders on a busy machine. Cost: a check in
    /// every loop, shared with fuel's.
    pub watchdog: Duration,
    /// Period of the watchdog's ticker thread. Default: 20 ms. Cost: one wake-up of a sleeping thread each.
    pub watchdog_tick: Duration,
    /// Bytes that one call may make the host allocate for its result. Default: 4 MiB.
    ///
    /// Charged by wasmtime while it lifts lists and strings, before it allocates. The contract's list elements are at least a
    /// byte, so this bounds every list's length as well. Cost: a subtraction for each list.
    pub max_lifted_bytes: usize,
    /// Longest name or message taken over from a component. Unit: bytes. Default: 1 KiB. The rest is cut off.
    pub max_text_bytes: usize,
    /// The wasm stack. Unit: bytes. Default: 256 KiB. Exhausting it traps. Cost: none.
    pub max_wasm_stack_bytes: usize,
    /// Largest component that is looked at. Unit: bytes. Default: 16 MiB. Cost: compile time is linear in it, about a
    /// millisecond for 2 KB.
    pub max_component_bytes: usize,
    /// Elements of one wasm table. Default: 4,096.
    pub max_table_elements: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            max_instances: 64,
            max_memory_bytes: 4 * MIB,
            memory_reservation_bytes: 4 * MIB as u64,
            fuel_per_call: 400_000,
            fuel_per_row: 1_500,
            fuel_per_token: 200,
            fuel_fixed: 20_000_000,
            watchdog: Duration::from_millis(200),
            watchdog_tick: Duration::from_millis(20),
            max_lifted_bytes: 4 * MIB,
            max_text_bytes: KIB,
            max_wasm_stack_bytes: 256 * KIB,
            max_component_bytes: 16 * MIB,
            max_table_elements: 4096,
        }
    }
}

/// Those of [`Limits`] that may differ from builder to builder of one sandbox: a tenant's may be tighter. Fields are as there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CallLimits {
    /// Unit: fuel.
    pub fuel_per_call: u64,
    /// Unit: fuel.
    pub fuel_per_row: u64,
    /// Unit: fuel.
    pub fuel_per_token: u64,
    /// Unit: fuel.
    pub fuel_fixed: u64,
    /// Unit: bytes.
    pub max_memory_bytes: usize,
    /// Unit: bytes.
    pub max_lifted_bytes: usize,
}

impl Default for CallLimits {
    /// Those of the default [`Limits`].
    fn default() -> Self {
        Limits::default().calls()
    }
}

impl CallLimits {
    /// What exceeds `most` first, if anything: field, value, remedy.
    pub(crate) fn beyond(&self, most: &Limits) -> Option<String> {
        self.problems(most).into_iter().next()
    }

    /// Everything that exceeds `most`, the sandbox's. Each begins with the field and its value and ends with the remedy.
    pub fn problems(&self, most: &Limits) -> Vec<String> {
        let bounds = [
            ("fuel_per_call", self.fuel_per_call, most.fuel_per_call),
            ("fuel_per_row", self.fuel_per_row, most.fuel_per_row),
            ("fuel_per_token", self.fuel_per_token, most.fuel_per_token),
            ("fuel_fixed", self.fuel_fixed, most.fuel_fixed),
            (
                "max_memory_bytes",
                self.max_memory_bytes as u64,
                most.max_memory_bytes as u64,
            ),
            (
                "max_lifted_bytes",
                self.max_lifted_bytes as u64,
                most.max_lifted_bytes as u64,
            ),
        ];
        let beyond = bounds.into_iter().filter(|(_, value, most)| value > most);
        beyond
            .map(|(field, value, bound)| {
                format!(
                    "{field} is {value}, above the sandbox's {bound}; lower it, or raise the sandbox's"
                )
            })
            .collect()
    }
}

impl Limits {
    /// The bounds on calls.
    pub fn calls(&self) -> CallLimits {
        CallLimits {
            fuel_per_call: self.fuel_per_call,
            fuel_per_row: self.fuel_per_row,
            fuel_per_token: self.fuel_per_token,
            fuel_fixed: self.fuel_fixed,
            max_memory_bytes: self.max_memory_bytes,
            max_lifted_bytes: self.max_lifted_bytes,
        }
    }

    /// These limits with other bounds on calls.
    pub fn with_calls(&self, calls: &CallLimits) -> Limits {
        Limits {
            fuel_per_call: calls.fuel_per_call,
            fuel_per_row: calls.fuel_per_row,
            fuel_per_token: calls.fuel_per_token,
            fuel_fixed: calls.fuel_fixed,
            max_memory_bytes: calls.max_memory_bytes,
            max_lifted_bytes: calls.max_lifted_bytes,
            ..self.clone()
        }
    }

    /// Fuel of a build for `rows` rows and `tokens` query tokens: 4 × (100 k + 1 k × rows + 100 × tokens) by default.
    pub fn fuel_for_batch(&self, rows: u32, tokens: u32) -> u64 {
        let rows = self.fuel_per_row.saturating_mul(u64::from(rows));
        let tokens = self.fuel_per_token.saturating_mul(u64::from(tokens));
        self.fuel_per_call
            .saturating_add(rows)
            .saturating_add(tokens)
    }

    /// Fuel of a build for `rows` decodes of one token each.
    pub fn fuel_for(&self, rows: u32) -> u64 {
        self.fuel_for_batch(rows, rows)
    }

    /// Ticks of the watchdog until a call is interrupted; never less than the time in `watchdog`.
    pub(crate) fn watchdog_ticks(&self) -> u64 {
        let tick = self.watchdog_tick.as_nanos().max(1);
        (self.watchdog.as_nanos().div_ceil(tick) + 1) as u64
    }

    /// The first thing that is wrong with these limits, if anything: field, value, remedy.
    pub(crate) fn problem(&self) -> Option<String> {
        self.problems().into_iter().next()
    }

    /// Everything that is wrong with these limits. Each begins with the field and its value and ends with the remedy.
    pub fn problems(&self) -> Vec<String> {
        let mut found = Vec::new();
        if self.watchdog < Duration::from_millis(100) {
            found.push(format!(
                "watchdog is {:?}; use at least 100 ms, or healthy builders die on a busy machine",
                self.watchdog
            ));
        }
        if self.watchdog_tick < Duration::from_millis(1) || self.watchdog_tick > self.watchdog {
            found.push(format!(
                "watchdog_tick is {:?}; use 1 ms up to watchdog ({:?})",
                self.watchdog_tick, self.watchdog
            ));
        }
        if self.max_memory_bytes < 64 * KIB || self.max_memory_bytes as u64 > 1 << 32 {
            found.push(format!(
                "max_memory_bytes is {}; use 64 KiB (one wasm page) up to 4 GiB",
                self.max_memory_bytes
            ));
        }
        if self.memory_reservation_bytes < self.max_memory_bytes as u64 {
            found.push(format!(
                "memory_reservation_bytes is {}, below max_memory_bytes {}; reserve at least the cap",
                self.memory_reservation_bytes, self.max_memory_bytes
            ));
        }
        if self.max_instances == 0 || self.max_instances > 10_000 {
            found.push(format!(
                "max_instances is {}; use 1 to 10,000",
                self.max_instances
            ));
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fuel_grows_with_rows_and_tokens() {
        let limits = Limits::default();
        for (rows, tokens, fuel) in [
            (0, 0, 400_000),
            (1, 8192, 2_039_900),
            (256, 256, 835_200),
            (1024, 1024, 2_140_800),
        ] {
            assert_eq!(limits.fuel_for_batch(rows, tokens), fuel);
        }
        let endless = Limits {
            fuel_per_row: u64::MAX,
            ..limits
        };
        assert_eq!(endless.fuel_for(u32::MAX), u64::MAX);
    }

    #[test]
    fn the_deadline_is_never_earlier_than_the_watchdog() {
        let limits = Limits::default();
        assert!(limits.watchdog_ticks() > 10, "{}", limits.watchdog_ticks());
        // The first tick may come at once, so that n ticks last at least n - 1 periods.
        let at_least = limits.watchdog_tick * (limits.watchdog_ticks() as u32 - 1);
        assert!(at_least >= limits.watchdog);
    }

    #[test]
    fn limits_that_kill_healthy_builders_are_refused() {
        assert_eq!(Limits::default().problem(), None);
        let eager = Limits {
            watchdog: Duration::from_millis(1),
            ..Limits::default()
        };
        assert!(eager.problem().unwrap().contains("at least 100 ms"));
        let small = Limits {
            memory_reservation_bytes: 1,
            ..Limits::default()
        };
        assert!(
            small
                .problem()
                .unwrap()
                .contains("memory_reservation_bytes is 1")
        );
    }
}
