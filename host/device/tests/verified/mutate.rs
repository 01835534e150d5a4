//! Corruptions of a record in its serialised form, so that a field that is added to the contract is corrupted without anybody
//! remembering it: numbers, lists, flags, names, tensors, options and variants, each in every way that its shape allows. It must
//! never know a family, nor what a field means.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Number, Value, json};
use timetable_types::{Dtype, Input, KvCacheLayout, Metadata, flashinfer::PlanFunction};

use crate::case::Random;

/// What a place in a record holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    Integer,
    Real,
    Flag,
    Name,
    List,
    /// A list of records.
    Records,
    Tensor,
    Variant,
    Record,
    Nothing,
}

/// A place in a record.
#[derive(Clone, Debug)]
pub struct Place {
    /// Where it is in the serialised form.
    pub pointer: String,
    /// The field, by the record that it belongs to: a plan is a plan, of decodes or of prefills.
    pub field: String,
    pub shape: Shape,
}

pub fn to_json(metadata: &Metadata) -> Value {
    serde_json::to_value(metadata).expect("metadata serialises")
}

/// None: no record of the contract has that form.
pub fn parse(value: &Value) -> Option<Metadata> {
    serde_json::from_value(value.clone()).ok()
}

/// With another value at a place.
pub fn replaced(record: &Value, pointer: &str, value: Value) -> Value {
    let mut record = record.clone();
    if let Some(place) = record.pointer_mut(pointer) {
        *place = value;
    }
    record
}

/// Every place of a record.
pub fn places(record: &Value) -> Vec<Place> {
    let mut found = Vec::new();
    let Value::Object(fields) = record else {
        panic!("metadata is no object");
    };
    for name in fields.keys().filter(|name| *name != "family") {
        walk(record, &format!("/{name}"), name, &mut found);
    }
    found
}

fn walk(record: &Value, pointer: &str, field: &str, found: &mut Vec<Place>) {
    let value = record.pointer(pointer).expect("a place");
    let mut place = |shape| {
        found.push(Place {
            pointer: pointer.to_owned(),
            field: field.to_owned(),
            shape,
        });
    };
    let is_tensor = || parse(&replaced(record, pointer, a_tensor())).is_some();
    match value {
        Value::Number(number) if number.is_f64() => place(Shape::Real),
        Value::Number(_) => place(Shape::Integer),
        Value::Bool(_) => place(Shape::Flag),
        Value::Array(_) if parse(&replaced(record, pointer, json!([0]))).is_some() => {
            place(Shape::List);
        }
        Value::Array(records) => {
            place(Shape::Records);
            for index in 0..records.len() {
                walk_fields(record, &format!("{pointer}/{index}"), field, found);
            }
        }
        Value::String(_) if is_tensor() => place(Shape::Tensor),
        Value::String(_) => place(Shape::Name),
        Value::Null => place(Shape::Nothing),
        Value::Object(fields) if fields.len() == 1 => {
            place(if is_tensor() {
                Shape::Tensor
            } else {
                Shape::Variant
            });
            let case = fields.keys().next().expect("a case");
            let inner = match (field, case.as_str()) {
                ("decode" | "prefill", "wrapper") => "plan".to_owned(),
                ("decode" | "prefill", "trtllm") => format!("trtllm_{field}"),
                _ => format!("{field}.{case}"),
            };
            let pointer = format!("{pointer}/{case}");
            match &fields[case] {
                Value::Object(_) => walk_fields(record, &pointer, &inner, found),
                _ => walk(record, &pointer, &inner, found),
            }
        }
        Value::Object(_) => {
            place(Shape::Record);
            walk_fields(record, pointer, field, found);
        }
    }
}

fn walk_fields(record: &Value, pointer: &str, field: &str, found: &mut Vec<Place>) {
    let Some(Value::Object(fields)) = record.pointer(pointer) else {
        return;
    };
    for name in fields.keys() {
        let (pointer, field) = (format!("{pointer}/{name}"), format!("{field}.{name}"));
        walk(record, &pointer, &field, found);
    }
}

fn a_tensor() -> Value {
    json!({ "input": "positions" })
}

/// What other records hold at the same place, by pointer.
pub type Donors = BTreeMap<String, Vec<Value>>;

pub fn donors(records: &[Value]) -> Donors {
    let mut found = Donors::new();
    for record in records {
        for place in places(record) {
            let value = record.pointer(&place.pointer).expect("a place").clone();
            let values = found.entry(place.pointer).or_default();
            if !value.is_null() && !values.contains(&value) {
                values.push(value);
            }
        }
    }
    found
}

/// A kind of corruption, and a value that it makes.
pub type Mutant = (&'static str, Value);

/// The kinds that a place of this shape must have seen; fewer where `values`, all that records hold there, leave none.
pub fn kinds(shape: Shape, values: &[Value]) -> Vec<&'static str> {
    match shape {
        Shape::Integer => {
            let mut kinds = vec![
                "sign",
                "one more",
                "one less",
                "doubled",
                "huge",
                "wrap-around",
                "a neighbour's",
                "below its least",
                "above its most",
            ];
            if values.iter().any(|value| value.as_i64() != Some(0)) {
                kinds.extend(["zero", "halved"]);
            } else {
                kinds.retain(|kind| *kind != "doubled");
            }
            kinds
        }
        Shape::Real => vec![
            "sign",
            "zero",
            "doubled",
            "halved",
            "one step more",
            "one step less",
            "huge",
            "tiny",
            "rounded",
            "infinite",
            "not a number",
        ],
        Shape::Flag => vec!["flipped"],
        Shape::Name => vec!["another case"],
        Shape::Tensor => TENSOR_KINDS.to_vec(),
        Shape::Variant => vec!["another case"],
        // Its fields are broken, and it is replaced by what others hold, if they do.
        Shape::Record => Vec::new(),
        Shape::Records => vec!["dropped", "duplicated", "cleared"],
        Shape::Nothing => vec!["given"],
        Shape::List => {
            let varied = |value: &Value| {
                let list = value.as_array().expect("a list");
                list.windows(2).any(|pair| pair[0] != pair[1])
            };
            let mut kinds = vec![
                "sign",
                "one more",
                "one less",
                "huge",
                "wrap-around",
                "duplicated",
                "dropped",
                "inserted",
                "extended",
                "truncated",
                "cleared",
                "shifted",
                "another list",
            ];
            if values.iter().any(varied) {
                kinds.extend([
                    "swapped",
                    "swapped far",
                    "another's value",
                    "reversed",
                    "rotated",
                ]);
            }
            if values.iter().any(|value| {
                let list = value.as_array().expect("a list");
                list.iter().any(|value| value.as_i64() != Some(0))
            }) {
                kinds.push("zero");
            }
            kinds
        }
    }
}

/// Every corruption of one place.
pub fn mutants(record: &Value, place: &Place, donors: &Donors, random: &mut Random) -> Vec<Mutant> {
    let value = record.pointer(&place.pointer).expect("a place");
    let mut made = match (place.shape, value) {
        (Shape::Integer, Value::Number(number)) => {
            integers(number.as_i64().expect("an integer"), &neighbours(record))
        }
        (Shape::Real, Value::Number(number)) => reals(number.as_f64().expect("a number")),
        (Shape::Flag, Value::Bool(flag)) => vec![("flipped", json!(!flag))],
        (Shape::Name, _) => names()
            .into_iter()
            .map(|name| ("another case", name))
            .collect(),
        (Shape::List, Value::Array(list)) => {
            let list: Vec<i64> = list.iter().filter_map(Value::as_i64).collect();
            lists(&list, &sibling_lists(record, place), random)
        }
        (Shape::Tensor, tensor) => tensors(tensor),
        (Shape::Variant, _) => names()
            .into_iter()
            .map(|name| ("another case", name))
            .collect(),
        (Shape::Record, _) => Vec::new(),
        (Shape::Records, Value::Array(list)) => records(list),
        _ => {
            let pool = tensors(&a_tensor())
                .into_iter()
                .map(|(_, value)| ("given", value));
            pool.collect()
        }
    };
    let kind = match place.shape {
        Shape::Nothing => "given",
        Shape::Variant => "another case",
        _ => "another record's",
    };
    let others = donors.get(&place.pointer).map_or(&[][..], Vec::as_slice);
    made.extend(others.iter().map(|other| (kind, other.clone())));
    if place.shape != Shape::Nothing {
        made.push(("taken away", Value::Null));
    }
    made.retain(|(_, made)| made != value);
    made
}

/// The numbers of the record.
fn neighbours(record: &Value) -> BTreeSet<i64> {
    match record {
        Value::Object(fields) => fields.values().flat_map(neighbours).collect(),
        number => number.as_i64().into_iter().collect(),
    }
}

fn sibling_lists(record: &Value, place: &Place) -> Vec<Value> {
    let (parent, _) = place.pointer.rsplit_once('/').expect("a field");
    match record.pointer(parent) {
        Some(Value::Object(fields)) => fields.values().filter(|v| v.is_array()).cloned().collect(),
        _ => Vec::new(),
    }
}

/// Without one, with one twice, in another order, without any.
fn records(list: &[Value]) -> Vec<Mutant> {
    let mut made = Vec::new();
    for at in 0..list.len() {
        let mut fewer = list.to_vec();
        let again = fewer.remove(at);
        made.push(("dropped", json!(fewer)));
        let mut more = list.to_vec();
        more.insert(at, again);
        made.push(("duplicated", json!(more)));
    }
    let mut reversed = list.to_vec();
    reversed.reverse();
    made.push(("reversed", json!(reversed)));
    made.push(("cleared", json!([])));
    made
}

/// Numbers at the ends of what 32 bits hold, signed and not.
const EDGES: [i64; 6] = [
    i32::MAX as i64,
    i32::MIN as i64,
    -1,
    u32::MAX as i64,
    1 << 31,
    i32::MAX as i64 - 1,
];

fn integers(value: i64, neighbours: &BTreeSet<i64>) -> Vec<Mutant> {
    let wrapped = (value as u32 ^ (1 << 31)) as i64;
    let mut made = vec![
        ("sign", -value),
        ("sign", -value - 1),
        ("sign", wrapped),
        ("sign", i64::from(-(value as i32) as u32)),
        ("one more", value + 1),
        ("one less", value - 1),
        ("one less", i64::from((value as u32).wrapping_sub(1))),
        ("zero", 0),
        ("doubled", 2 * value),
        ("halved", value / 2),
        ("huge", 1 << 30),
        ("huge", 1 << 20),
    ];
    made.extend(EDGES.map(|edge| ("wrap-around", edge)));
    made.extend(neighbours.iter().map(|&other| ("a neighbour's", other)));
    made.into_iter()
        .map(|(kind, value)| (kind, json!(value)))
        .collect()
}

fn reals(value: f64) -> Vec<Mutant> {
    let made = [
        ("sign", -value),
        ("zero", 0.0),
        ("doubled", 2.0 * value),
        ("halved", value / 2.0),
        ("one step more", value.next_up()),
        ("one step less", value.next_down()),
        ("huge", 1e300),
        ("tiny", 1e-300),
        ("rounded", value.round()),
        ("rounded", f64::from(value as f32)),
    ];
    let number = |value| Number::from_f64(value).map(Value::Number);
    made.into_iter()
        .filter_map(|(kind, value)| Some((kind, number(value)?)))
        .collect()
}

fn names() -> Vec<Value> {
    let mut names: Vec<Value> = ["natural", "rows", "per_request", "all", "xqa", "trtllm_gen"]
        .map(Value::from)
        .into();
    let mut add = |name: Result<Value, _>| {
        let name: Result<Value, serde_json::Error> = name;
        names.push(name.expect("a name"));
    };
    Dtype::ALL
        .iter()
        .for_each(|case| add(serde_json::to_value(case)));
    Input::ALL
        .iter()
        .for_each(|case| add(serde_json::to_value(case)));
    KvCacheLayout::ALL
        .iter()
        .for_each(|case| add(serde_json::to_value(case)));
    PlanFunction::ALL
        .iter()
        .for_each(|case| add(serde_json::to_value(case)));
    names.extend(["seq_lens", "context_lens"].map(Value::from));
    names
}

fn lists(list: &[i64], siblings: &[Value], random: &mut Random) -> Vec<Mutant> {
    let mut made: Vec<(&'static str, Vec<i64>)> = Vec::new();
    let len = list.len();
    let with = |edit: &dyn Fn(&mut Vec<i64>)| {
        let mut list = list.to_vec();
        edit(&mut list);
        list
    };
    let mut at: Vec<usize> = match len {
        0 => vec![],
        _ => vec![0, len / 2, len - 1, random.below(len), random.below(len)],
    };
    // A place where exchanging neighbours changes something, if there is one.
    if let Some(differs) = list.windows(2).position(|pair| pair[0] != pair[1]) {
        at.extend([differs, differs + 1]);
    }
    at.sort_unstable();
    at.dedup();
    for &at in &at {
        let other = random.below(len);
        let set = |value: i64| with(&|list| list[at] = value);
        made.push(("sign", set(-list[at])));
        made.push(("sign", set(-list[at] - 1)));
        made.push(("one more", set(list[at] + 1)));
        made.push(("one less", set(list[at] - 1)));
        made.push(("zero", set(0)));
        made.push(("huge", set(1 << 30)));
        made.push(("huge", set(1 << 20)));
        made.extend(EDGES.map(|edge| ("wrap-around", set(edge))));
        made.push(("swapped", with(&|list| list.swap(at, (at + 1) % len))));
        made.push(("swapped far", with(&|list| list.swap(at, other))));
        made.push(("swapped far", with(&|list| list.swap(at, len - 1 - at))));
        made.push(("another's value", set(list[other])));
        made.push(("another's value", set(list[(at + 1) % len])));
        made.push(("duplicated", with(&|list| list.insert(at, list[at]))));
        made.push(("dropped", with(&|list| _ = list.remove(at))));
        made.push(("inserted", with(&|list| list.insert(at, 1))));
        made.push((
            "shifted",
            with(&|list| list[at..].iter_mut().for_each(|v| *v += 1)),
        ));
        made.push((
            "shifted",
            with(&|list| list[at..].iter_mut().for_each(|v| *v -= 1)),
        ));
        made.push(("reversed", with(&|list| list[..=at].reverse())));
        made.push(("rotated", with(&|list| list[at..].rotate_left(1))));
        made.push(("truncated", with(&|list| list.truncate(at))));
    }
    made.push(("cleared", Vec::new()));
    made.push(("reversed", with(&|list| list.reverse())));
    made.push(("inserted", with(&|list| list.push(0))));
    made.push((
        "extended",
        with(&|list| list.push(list.last().copied().unwrap_or(1))),
    ));
    made.push(("extended", with(&|list| list.extend_from_within(..))));
    made.push(("extended", with(&|list| list.extend([0; 40]))));
    let numbers = |value: &Value| -> Vec<i64> {
        let list = value.as_array().expect("a list");
        list.iter().filter_map(Value::as_i64).collect()
    };
    made.extend(
        siblings
            .iter()
            .map(|other| ("another list", numbers(other))),
    );
    made.push(("another list", (0..len as i64).collect()));
    made.push(("another list", (1..=len as i64).collect()));
    made.into_iter()
        .map(|(kind, list)| (kind, json!(list)))
        .collect()
}

const TENSOR_KINDS: [&str; 12] = [
    "another input",
    "by value",
    "a matrix",
    "scratch",
    "a slice",
    "a wild slice",
    "a range",
    "a wild range",
    "chosen rows",
    "chosen pages",
    "an extra",
    "another expression",
];

fn tensors(tensor: &Value) -> Vec<Mutant> {
    let mut made: Vec<Mutant> = Vec::new();
    for input in Input::ALL {
        let input = serde_json::to_value(input).expect("a name");
        made.push(("another input", json!({ "input": input })));
        for (start, end) in [(0, 1), (0, 2), (1, 3), (0, 5), (2, 5), (1, 5)] {
            let slice = json!({ "source": input, "start": start, "end": end });
            made.push(("a slice", json!({ "slice": slice })));
        }
        for (start, end) in [(0, u32::MAX), (u32::MAX, 0), (u32::MAX, u32::MAX), (3, 1)] {
            let slice = json!({ "source": input, "start": start, "end": end });
            made.push(("a wild slice", json!({ "slice": slice })));
        }
        let rows = json!({ "source": input, "rows": [1, 0, 2] });
        made.push(("chosen rows", json!({ "rows": rows })));
    }
    for expression in [
        "rebased_query_start_loc",
        "context_lens",
        "has_context",
        "cu_page_counts",
        "gather_pages",
    ] {
        for (start, end) in [
            (0, 1),
            (0, 2),
            (0, 4),
            (0, 5),
            (2, 5),
            (1, 5),
            (2, 4),
            (3, 5),
        ] {
            made.push((
                "a range",
                json!({ expression: { "start": start, "end": end } }),
            ));
        }
        for (start, end) in [(0, u32::MAX), (u32::MAX, 0), (u32::MAX, u32::MAX), (4, 2)] {
            made.push((
                "a wild range",
                json!({ expression: { "start": start, "end": end } }),
            ));
        }
    }
    let rows = json!({ "start": 0, "end": 2 });
    for columns in [
        vec![],
        vec![0],
        vec![0, 1, 2, 0, 1],
        vec![2, 1],
        vec![u32::MAX],
    ] {
        let chosen = json!({ "rows": rows, "columns": columns });
        made.push(("chosen pages", json!({ "select_pages": chosen })));
    }
    for values in [
        vec![],
        vec![0, 1, 2],
        vec![40, 17],
        vec![-1, i32::MAX],
        vec![0; 64],
    ] {
        made.push(("by value", json!({ "values": values })));
        let matrix = json!({ "rows": values.len(), "columns": 1, "values": values });
        made.push(("a matrix", json!({ "matrix": matrix })));
    }
    let wild = json!({ "rows": u32::MAX, "columns": u32::MAX, "values": [1] });
    made.push(("a matrix", json!({ "matrix": wild })));
    made.push((
        "scratch",
        json!({ "scratch": { "shape": [5], "dtype": "float32" } }),
    ));
    made.push(("an extra", json!({ "extra": "no such field" })));
    for source in ["seq_lens", "context_lens"] {
        for (start, end) in [(0, 2), (0, 5), (2, 5), (0, u32::MAX)] {
            let rows = json!({ "start": start, "end": end });
            let local = json!({ "source": source, "rows": rows });
            made.push(("another expression", json!({ "dcp_local": local })));
        }
    }
    made.push(("another expression", json!("token_to_row")));
    made.push(("another expression", json!("segment_ids")));
    made.push(("another expression", json!({ "row_mask": [0, 1] })));
    made.push(("another expression", json!({ "row_tokens": [0, 1] })));
    made.retain(|(_, made)| made != tensor);
    made
}

/// Sets a real number to one that JSON cannot say. Panics at a field that it does not know: add it.
pub fn poke(metadata: &mut Metadata, place: &Place, value: f64) {
    use timetable_types::flashinfer::{Decode, Prefill};
    let Metadata::Flashinfer(record) = metadata else {
        panic!("no real number of {} is known", place.field);
    };
    let plan = match (&mut record.decode, &mut record.prefill) {
        (Some(Decode::Wrapper(plan)), _) if place.pointer.starts_with("/decode") => plan,
        (_, Some(Prefill::Wrapper(plan))) => plan,
        _ => panic!("no plan"),
    };
    match place.field.as_str() {
        "plan.sm_scale" => plan.sm_scale = value,
        "plan.logits_soft_cap" => plan.logits_soft_cap = Some(value),
        other => panic!("the real number {other} is not known here"),
    }
}
