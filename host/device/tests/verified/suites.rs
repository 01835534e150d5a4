//! The mutation suites: a table of fields and kinds, and the promise that none of the mutants is both accepted and different.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use timetable_attention::{plain_builder, rules};
use timetable_types::{Family, Metadata, flashinfer::Prefill};

use crate::{
    bases::{Base, suite},
    bench::{Bench, Verdict},
    case::{Ran, Random, seed},
    mutate::{
        Donors, Place, Shape, donors, kinds, mutants, parse, places, poke, replaced, to_json,
    },
};

/// What became of the mutants of one kind.
#[derive(Clone, Copy, Default)]
struct Counts {
    refused: u32,
    inert: u32,
    /// The contract's types have no such value.
    unsayable: u32,
}

/// Refused mutants that were run all the same: what would the bench have seen?
#[derive(Clone, Copy, Default)]
struct Unverified {
    tried: u32,
    right: u32,
    wrong: u32,
}

type Table = BTreeMap<String, BTreeMap<&'static str, Counts>>;

/// Fields that are refused wherever they are given. What would be right in the first nothing says; MAMBA1 takes no drafts.
const ALWAYS_REFUSED: [&str; 3] = [
    "mamba2.replayssm",
    "mamba1.num_accepted_tokens",
    "mamba1.query_start_loc_d",
];

/// Searches for the last value in a direction that is accepted, from an accepted one on.
fn bound(from: i64, direction: i64, mut accepts: impl FnMut(i64) -> bool) -> i64 {
    let (mut good, mut step) = (from, 1i64);
    while step < 1 << 33 && accepts(good + direction * step) {
        good += direction * step;
        step *= 2;
    }
    while step > 0 {
        if accepts(good + direction * step) {
            good += direction * step;
        }
        step /= 2;
    }
    good
}

struct Suite<'b> {
    bench: Bench<'b>,
    record: Value,
    table: &'b mut Table,
    harmful: &'b mut Vec<String>,
    unverified: &'b mut Unverified,
}

impl Suite<'_> {
    fn judge(&mut self, place: &Place, kind: &'static str, metadata: &Metadata) -> bool {
        if *metadata == self.bench.base.metadata {
            return true;
        }
        let verdict = self.bench.verdict(metadata);
        let counts = self.counts(place, kind);
        match verdict {
            Verdict::Refused => {
                counts.refused += 1;
                self.without_verifier(metadata);
            }
            Verdict::Inert => counts.inert += 1,
            Verdict::Harmful(problem) => {
                let base = self.bench.base.name;
                let value = to_json(metadata).pointer(&place.pointer).cloned();
                self.harmful.push(format!(
                    "{base}: {} ({kind}): {problem}; it is {value:?}",
                    place.pointer
                ));
                return true;
            }
        }
        verdict == Verdict::Inert
    }

    /// Runs one in eight of the refused, so that it is known what they would have done.
    fn without_verifier(&mut self, metadata: &Metadata) {
        self.unverified.tried += 1;
        if !self.unverified.tried.is_multiple_of(8) {
            return;
        }
        match self.bench.base.case.run(metadata, None) {
            Ran::Right => self.unverified.right += 1,
            Ran::Wrong(_) => self.unverified.wrong += 1,
            Ran::NotHere(_) => {}
        }
    }

    fn counts(&mut self, place: &Place, kind: &'static str) -> &mut Counts {
        let kinds = self.table.entry(place.field.clone()).or_default();
        kinds.entry(kind).or_default()
    }

    /// Judges a serialised mutant; was it accepted?
    fn try_value(&mut self, place: &Place, kind: &'static str, value: Value) -> bool {
        match parse(&replaced(&self.record, &place.pointer, value)) {
            Some(metadata) => self.judge(place, kind, &metadata),
            None => {
                self.counts(place, kind).unsayable += 1;
                false
            }
        }
    }

    fn break_place(&mut self, place: &Place, donors: &Donors, random: &mut Random) {
        let record = self.record.clone();
        for (kind, value) in mutants(&record, place, donors, random) {
            self.try_value(place, kind, value);
        }
        let value = record.pointer(&place.pointer).expect("a place");
        match place.shape {
            Shape::Integer => self.break_bounds(place, value.as_i64().expect("an integer")),
            Shape::Real => {
                for (kind, value) in [
                    ("infinite", f64::INFINITY),
                    ("infinite", f64::NEG_INFINITY),
                    ("not a number", f64::NAN),
                ] {
                    let mut metadata = self.bench.base.metadata.clone();
                    poke(&mut metadata, place, value);
                    self.judge(place, kind, &metadata);
                }
            }
            _ => {}
        }
    }

    /// Off by one at each bound: the last values that are accepted, and the first that are not.
    fn break_bounds(&mut self, place: &Place, value: i64) {
        let bounds = [("below its least", -1), ("above its most", 1)];
        for (kind, direction) in bounds {
            let (record, base) = (self.record.clone(), self.bench.base);
            let verifier = &mut self.bench.verifier;
            let last = bound(value, direction, |value| {
                parse(&replaced(&record, &place.pointer, json!(value))).is_some_and(|metadata| {
                    base.case
                        .with(|ctx| verifier.verify(&metadata, ctx))
                        .is_ok()
                })
            });
            self.try_value(place, kind, json!(last));
            let accepted = self.try_value(place, kind, json!(last + direction));
            assert!(!accepted, "{}: {} has no bound", base.name, place.pointer);
        }
    }
}

#[test]
fn every_mutant_is_refused_or_inert() {
    let seed = seed();
    let mut harmful = Vec::new();
    for family in Family::ALL {
        let bases = match (rules(family), suite(family)) {
            (Some(_), Some(bases)) => bases,
            (None, None) => {
                println!("{}: no rules, so nothing passes", family.interface());
                continue;
            }
            (rules, _) => panic!(
                "{}: rules and mutation suite belong together, and it has only {}",
                family.interface(),
                if rules.is_some() { "rules" } else { "a suite" }
            ),
        };
        assert!(plain_builder(family, &bases[0].case.config).is_ok());
        let (mut table, mut unverified) = (Table::new(), Unverified::default());
        let mut held: BTreeMap<String, (Shape, Vec<Value>)> = BTreeMap::new();
        let mut absent = BTreeSet::new();
        let records: Vec<Value> = bases.iter().map(|base| to_json(&base.metadata)).collect();
        let donors = donors(&records);
        for (base, record) in bases.iter().zip(&records) {
            let mut bench = Bench::new(base);
            assert_eq!(
                bench.verdict(&base.metadata),
                Verdict::Inert,
                "{}",
                base.name
            );
            let mut suite = Suite {
                bench,
                record: record.clone(),
                table: &mut table,
                harmful: &mut harmful,
                unverified: &mut unverified,
            };
            let mut random = Random(seed);
            for place in places(record) {
                suite.break_place(&place, &donors, &mut random);
                if place.shape == Shape::Nothing {
                    absent.insert(place.field);
                    continue;
                }
                let value = record.pointer(&place.pointer).expect("a place").clone();
                let (_, values) = held.entry(place.field).or_insert((place.shape, Vec::new()));
                values.push(value);
            }
        }
        report(family, &table, harmful.len());
        let Unverified { right, wrong, .. } = unverified;
        println!(
            "{}: of the refused one in eight was run all the same: {wrong} gave a wrong answer, {right} a right one",
            family.interface()
        );
        // Every family has an impl on the CPU device.
        assert!(is_run(&bases[0]), "{}: only read", family.interface());
        assert!(wrong > 20, "the bench sees no harm: {wrong}");
        for field in absent
            .iter()
            .filter(|field| !ALWAYS_REFUSED.contains(&field.as_str()))
        {
            assert!(
                held.contains_key(field)
                    || held
                        .keys()
                        .any(|held| held.starts_with(&format!("{field}."))),
                "{}: no base record has a value for {field}: add one that does",
                family.interface()
            );
        }
        for (field, (shape, values)) in &held {
            for kind in kinds(*shape, values) {
                assert!(
                    table[field].contains_key(kind),
                    "{}: {field} was never broken by {kind:?}",
                    family.interface()
                );
            }
        }
    }
    for line in harmful.iter().take(40) {
        println!("{line}");
    }
    assert!(
        harmful.is_empty(),
        "{} mutants were accepted and differ",
        harmful.len()
    );
}

/// Does the CPU device run the family's records?
fn is_run(base: &Base) -> bool {
    !matches!(base.case.run(&base.metadata, None), Ran::NotHere(_))
}

fn report(family: Family, table: &Table, harmful: usize) {
    let mut total = Counts::default();
    println!(
        "\n{}: field: kind refused/inert (/not sayable)",
        family.interface()
    );
    for (field, kinds) in table {
        let cells: Vec<String> = kinds
            .iter()
            .map(|(kind, counts)| {
                total.refused += counts.refused;
                total.inert += counts.inert;
                total.unsayable += counts.unsayable;
                let unsayable = match counts.unsayable {
                    0 => String::new(),
                    count => format!("/{count}"),
                };
                format!("{kind} {}/{}{unsayable}", counts.refused, counts.inert)
            })
            .collect();
        println!("{field:32} {:2} kinds: {}", kinds.len(), cells.join(", "));
    }
    println!(
        "{}: {} fields, {} mutants: {} refused, {} inert, {harmful} accepted and different; {} cannot be said",
        family.interface(),
        table.len(),
        total.refused + total.inert,
        total.refused,
        total.inert,
        total.unsayable
    );
}

/// Records of a rank are run, not only read, and what they leave out is seen.
#[test]
fn records_of_a_rank_are_run() {
    for family in [Family::FlashAttn, Family::Flashinfer, Family::FlashMla] {
        let bases = suite(family).expect("a suite");
        let base = bases.iter().find(|base| base.name == "two ranks");
        let Base { case, metadata, .. } = base.expect("a rank's record");
        assert_eq!(case.run(metadata, None), Ran::Right);
        let mut wrong = metadata.clone();
        match &mut wrong {
            Metadata::FlashAttn(record) => record.max_dcp_context_kv_len = 0,
            Metadata::Flashinfer(record) => match &mut record.prefill {
                Some(Prefill::Wrapper(plan)) => plan.paged_kv_last_page_len[0] -= 1,
                other => panic!("a plan, not {other:?}"),
            },
            Metadata::FlashMla(record) => {
                let context = record
                    .prefill
                    .as_mut()
                    .and_then(|of| of.chunked_context.as_mut());
                let chunk = &mut context.expect("a context").chunks[0];
                chunk.dcp.as_mut().expect("a rank's").padded_local_seq_lens[0] -= 1;
            }
            _ => panic!("another family"),
        }
        assert!(matches!(case.run(&wrong, None), Ran::Wrong(_)));
    }
}
