//! What went wrong in a call, told from wasmtime's errors.
//!
//! Must never know: what is done about a fault.

use timetable_attention::FaultKind;
use wasmtime::{Error, Trap, WasmBacktrace};

use crate::{Limits, sandbox::StoreState};

/// The kind of an error of a call into a component, and one line for people.
pub(crate) fn classify(error: &Error, state: &StoreState, limits: &Limits) -> (FaultKind, String) {
    let place = innermost_function(error)
        .map(|name| format!(", in `{name}`"))
        .unwrap_or_default();
    let (kind, what) = if let Some(bytes) = state.refused_bytes {
        let cap = limits.max_memory_bytes;
        (
            FaultKind::Memory,
            format!("asked for {bytes} bytes of memory; its cap is {cap}"),
        )
    } else if error
        .downcast_ref::<wasmtime::PoolConcurrencyLimitError>()
        .is_some()
    {
        let limit = limits.max_instances;
        (
            FaultKind::Memory,
            format!("all {limit} instances of the pool are in use; raise Limits::max_instances"),
        )
    } else {
        match error.downcast_ref::<Trap>() {
            Some(Trap::OutOfFuel) => (FaultKind::Fuel, "used up the call's fuel".to_owned()),
            Some(Trap::Interrupt) => (
                FaultKind::Watchdog,
                format!("ran longer than the watchdog's {:?}", limits.watchdog),
            ),
            Some(Trap::StackOverflow) => (
                FaultKind::StackDepth,
                format!(
                    "{}: its stack has {} bytes",
                    Trap::StackOverflow,
                    limits.max_wasm_stack_bytes
                ),
            ),
            Some(trap) => (FaultKind::Trap, trap.to_string()),
            // wasm itself did not trap: its result could not be taken over.
            None => (FaultKind::LiftBound, error.root_cause().to_string()),
        }
    };
    (kind, cut(&format!("{what}{place}"), limits.max_text_bytes))
}

fn innermost_function(error: &Error) -> Option<String> {
    let backtrace = error.downcast_ref::<WasmBacktrace>()?;
    backtrace
        .frames()
        .iter()
        .find_map(|frame| frame.func_name().map(str::to_owned))
}

/// At most `max` bytes of `text`, whole characters, control characters replaced: it goes to logs and terminals.
pub(crate) fn cut(text: &str, max: usize) -> String {
    let mut end = text.len().min(max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end]
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::cut;

    #[test]
    fn text_from_a_guest_is_cut_at_a_character_and_made_harmless() {
        assert_eq!(cut("abcdef", 4), "abcd");
        assert_eq!(cut("aéé", 4), "aé");
        assert_eq!(cut("a\u{1b}[31m\nb", 100), "a [31m b");
    }
}
