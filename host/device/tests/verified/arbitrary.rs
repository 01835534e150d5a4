//! Arbitrary records: good ones changed in many places at once, up to all of them. They must never know which are refused.

use serde_json::Value;
use timetable_types::Family;

use crate::{
    bases::{Base, random_base, suite},
    bench::{Bench, Verdict},
    case::{Random, seed},
    mutate::{Donors, Place, Shape, donors, mutants, parse, places, to_json},
};

/// Records that are tried, all families together.
const RECORDS: usize = 100_000;

/// Of them, for each family, those that start from a random step rather than from one of its suite's.
const RANDOM_STEPS: usize = 50;

/// Numbers near every edge, and near what such a record holds.
fn number(random: &mut Random) -> i64 {
    match random.below(8) {
        0 => random.pick(&[-1, 0, 1]),
        1 => random.pick(&[i32::MAX as i64, i32::MIN as i64, u32::MAX as i64, 1 << 31]),
        2 => random.below(1 << 31) as i64,
        3 => -(random.below(1 << 20) as i64),
        _ => random.below(64) as i64,
    }
}

/// Changes one place of `record`, if it is still there.
fn change(record: &mut Value, place: &Place, donors: &Donors, random: &mut Random) {
    let Some(value) = record.pointer_mut(&place.pointer) else {
        return;
    };
    match (place.shape, value) {
        (Shape::Integer, value) => {
            *value = match (value.as_i64(), random.chance(2)) {
                (Some(held), true) => (held + random.pick(&[-2, -1, 1, 2, 16])).into(),
                _ => number(random).into(),
            };
        }
        (Shape::List, Value::Array(list)) => {
            for _ in 0..=random.below(3) {
                let at = random.below(list.len() + 1);
                let near = list.get(at).and_then(Value::as_i64).unwrap_or(0);
                let value = match random.chance(2) {
                    true => near + random.pick(&[-1, 1]),
                    false => number(random),
                };
                match random.below(6) {
                    0 if at < list.len() => drop(list.remove(at)),
                    1 => list.insert(at, value.into()),
                    2 if at < list.len() => list.rotate_left(at),
                    3 if at < list.len() => {
                        let other = random.below(list.len());
                        list.swap(at, other);
                    }
                    _ if at < list.len() => list[at] = value.into(),
                    _ => list.push(value.into()),
                }
            }
        }
        _ => {
            let made = mutants(record, place, donors, random);
            if !made.is_empty() {
                let (_, value) = made[random.below(made.len())].clone();
                *record.pointer_mut(&place.pointer).expect("a place") = value;
            }
        }
    }
}

#[test]
fn arbitrary_records_are_refused_or_right() {
    let random = &mut Random(seed());
    let mut families: Vec<Vec<Base>> = Family::ALL.into_iter().filter_map(suite).collect();
    for bases in &mut families {
        let family = bases[0].metadata.family();
        bases.extend((0..RANDOM_STEPS).map(|_| random_base(family, random)));
    }
    let total: usize = families.iter().map(Vec::len).sum();
    let (mut tried, mut refused, mut inert, mut unsayable, mut survived) = (0, 0, 0, 0, 0);
    for bases in &families {
        let records: Vec<Value> = bases.iter().map(|base| to_json(&base.metadata)).collect();
        let donors = donors(&records);
        for (base, record) in bases.iter().zip(&records) {
            let places = places(record);
            let mut bench = Bench::new(base);
            let verdict = bench.verdict(&base.metadata);
            assert_eq!(verdict, Verdict::Inert, "{}: {record}", base.name);
            let mut of_base = 0;
            while of_base < RECORDS.div_ceil(total) {
                let mut changed = record.clone();
                // Mostly a few places; sometimes a share of all of them, up to every one.
                if random.chance(8) {
                    let one_in = 1 + random.below(8) as u64;
                    for place in &places {
                        if random.chance(one_in) {
                            change(&mut changed, place, &donors, random);
                        }
                    }
                } else {
                    for _ in 0..=random.below(4) {
                        let place = &places[random.below(places.len())];
                        change(&mut changed, place, &donors, random);
                    }
                }
                let Some(metadata) = parse(&changed) else {
                    unsayable += 1;
                    continue;
                };
                of_base += 1;
                match bench.verdict(&metadata) {
                    Verdict::Refused => {
                        refused += 1;
                        // The device is no second verifier, but no refused record brings it down either.
                        if random.chance(8) {
                            survived += u32::from(base.case.survives(&metadata));
                        }
                    }
                    Verdict::Inert => inert += 1,
                    Verdict::Harmful(problem) => panic!("{}: {problem}\n{changed}", base.name),
                }
            }
            tried += of_base;
        }
    }
    println!(
        "{tried} records: {refused} refused ({survived} of them run all the same), {inert} accepted, run and right; \
         {unsayable} more had no form"
    );
    assert!(
        tried >= RECORDS && inert > 1_000,
        "{tried} tried, {inert} run"
    );
}
