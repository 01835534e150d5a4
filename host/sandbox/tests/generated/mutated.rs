//! Real components with damage: wasm-mutate on the code inside, flipped and cut bytes outside.

use std::time::Instant;

use timetable_reference::{chaos, components};
use timetable_types::Family;
use wasm_mutate::WasmMutate;

use crate::{
    Counts,
    bases::suite,
    benches,
    case::{Random, seed},
    exercise, sandbox, soak,
};

/// Components that are damaged, with their family.
fn originals() -> Vec<(Family, &'static [u8])> {
    let mut found: Vec<_> = components()
        .iter()
        .map(|embedded| (embedded.family, embedded.bytes))
        .collect();
    for family in Family::ALL
        .into_iter()
        .filter(|family| chaos(*family).is_some())
    {
        found.push((family, chaos(family).expect("a chaos builder")));
    }
    found
}

/// The largest core module of a component: where its section's number stands, where its bytes begin and end.
fn core_module(component: &[u8]) -> (usize, std::ops::Range<usize>) {
    let (mut at, mut largest) = (8, (0, 0..0));
    while at < component.len() {
        let (mut len, mut shift, mut start) = (0usize, 0, at + 1);
        loop {
            let byte = component[start];
            len |= usize::from(byte & 0x7f) << shift;
            (start, shift) = (start + 1, shift + 7);
            if byte & 0x80 == 0 {
                break;
            }
        }
        // 1: a core module.
        if component[at] == 1 && len > largest.1.len() {
            largest = (at, start..start + len);
        }
        at = start + len;
    }
    largest
}

/// The component with another core module in that place.
fn spliced(component: &[u8], module: &[u8]) -> Vec<u8> {
    let (section, range) = core_module(component);
    let mut made = component[..=section].to_vec();
    let mut len = module.len();
    loop {
        let byte = (len & 0x7f) as u8;
        len >>= 7;
        made.push(if len == 0 { byte } else { byte | 0x80 });
        if len == 0 {
            break;
        }
    }
    made.extend_from_slice(module);
    made.extend_from_slice(&component[range.end..]);
    made
}

#[test]
fn mutated_components_are_refused_or_right() {
    let random = &mut Random(seed());
    let sandbox = sandbox();
    let start = Instant::now();
    let mut counts = Counts::default();
    for (family, original) in originals() {
        let bases = suite(family).expect("a suite");
        let mut benches = benches(&bases);
        let (_, range) = core_module(original);
        assert!(spliced(original, &original[range.clone()]) == original);
        let mut damaged: Vec<(&str, Vec<u8>)> = Vec::new();
        let mut module = original[range.clone()].to_vec();
        for _ in 0..20 * soak() {
            // Now and then on top of the change before.
            if random.chance(2) {
                module = original[range.clone()].to_vec();
            }
            let mut mutate = WasmMutate::default();
            mutate
                .seed(random.next())
                .preserve_semantics(false)
                .fuel(200);
            let changed = mutate.run(&module).ok().and_then(|mut all| all.next());
            let Some(Ok(changed)) = changed else {
                counts.add("no mutation");
                continue;
            };
            damaged.push(("code", spliced(original, &changed)));
            module = changed;
        }
        for _ in 0..40 * soak() {
            let mut bytes = original.to_vec();
            // In the code half of the time, anywhere else otherwise.
            for _ in 0..=random.below(3) {
                let at = match random.chance(2) {
                    true => range.start + random.below(range.len()),
                    false => random.below(bytes.len()),
                };
                bytes[at] ^= 1 << random.below(8);
            }
            damaged.push(("flipped", bytes));
        }
        for _ in 0..20 * soak() {
            let len = random.below(original.len());
            damaged.push(("cut", original[..len].to_vec()));
            let (from, to) = (random.below(original.len()), random.below(original.len()));
            let mut bytes = original.to_vec();
            bytes.drain(from.min(to)..from.max(to));
            damaged.push(("cut", bytes));
        }
        for (how, bytes) in damaged {
            let component = match sandbox.load(&bytes) {
                Ok(component) => component,
                Err(error) => {
                    assert!(!error.to_string().is_empty());
                    counts.add(format!("{how}: not loaded"));
                    continue;
                }
            };
            counts.add(format!("{how}: loaded"));
            let at = random.below(benches.len());
            if exercise(&component, &mut benches[at], &mut counts) {
                counts.add(format!("{how}: returned from build"));
            }
        }
    }
    counts.print("damaged components", start);
    assert!(counts.of("code: returned from build") > 20);
    assert!(counts.of("flipped: not loaded") > 100);
    assert_eq!(counts.of("cut: loaded"), 0);
}
