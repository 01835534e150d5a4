//! Results of `build` in the canonical ABI's memory layout, written by walking the contract's own text: near what a good record
//! is, or far from it. It must never know a family.

use serde_json::Value;
use wit_parser::{Int, Resolve, SizeAlign, Type, TypeDefKind, TypeId, WorldItem};

use crate::case::Random;

/// The contract, and the layout of its types.
pub struct Contract {
    pub resolve: Resolve,
    pub package: wit_parser::PackageId,
    sizes: SizeAlign,
}

impl Contract {
    pub fn new() -> Self {
        let text = [
            include_str!("../../../../wit/types.wit"),
            include_str!("../../../../wit/flash-attn.wit"),
            include_str!("../../../../wit/flashinfer.wit"),
            include_str!("../../../../wit/triton-attn.wit"),
            include_str!("../../../../wit/flash-mla.wit"),
            include_str!("../../../../wit/mamba.wit"),
        ]
        .join("\n");
        let mut resolve = Resolve::default();
        let package = resolve
            .push_str("contract.wit", &text)
            .expect("the contract parses");
        let mut sizes = SizeAlign::default();
        sizes.fill(&resolve);
        Contract {
            resolve,
            package,
            sizes,
        }
    }

    /// `result<metadata, build-error>` of an interface's `build`.
    fn result_of_build(&self, interface: &str) -> Type {
        let interfaces = &self.resolve.packages[self.package].interfaces;
        let functions = &self.resolve.interfaces[interfaces[interface]].functions;
        functions["[method]builder.build"].result.expect("a result")
    }

    pub fn world(&self, interface: &str) -> wit_parser::WorldId {
        let name = format!("{interface}-builder");
        let world = self.resolve.packages[self.package].worlds[&name];
        let exports = &self.resolve.worlds[world].exports;
        assert!(
            exports
                .values()
                .any(|item| matches!(item, WorldItem::Interface { .. }))
        );
        world
    }
}

/// One 32-bit place of the result that code may overwrite.
pub type Word = u32;

/// A lowered result.
pub struct Image {
    /// Memory from `base` on: the result first, then its lists.
    pub bytes: Vec<u8>,
    pub words: Vec<Word>,
}

/// How far from the good record a result is.
#[derive(Clone, Copy)]
pub struct Wildness {
    /// One in so many values is another; 0: none.
    pub values: u64,
    /// One in so many cases, list pointers and lengths is none; 0: none.
    pub structure: u64,
}

struct Writer<'c> {
    contract: &'c Contract,
    random: &'c mut Random,
    wildness: Wildness,
    base: u32,
    image: Image,
}

/// The result of `build` for a world, at address `base`; `good` is the record that it is near to, serialised.
pub fn lower(
    contract: &Contract,
    interface: &str,
    good: Option<&Value>,
    wildness: Wildness,
    base: u32,
    random: &mut Random,
) -> Image {
    let ty = contract.result_of_build(interface);
    let size = contract.sizes.size(&ty).size_wasm32();
    let mut writer = Writer {
        contract,
        random,
        wildness,
        base,
        image: Image {
            bytes: vec![0; size],
            words: Vec::new(),
        },
    };
    let result = good.map(|good| serde_json::json!({ "ok": good }));
    writer.write(&ty, 0, result.as_ref());
    writer.image
}

/// The name that a record of the contract has in its serialised form.
fn same_name(wit: &str, serialised: &str) -> bool {
    let plain = |name: &str| name.replace(['-', '_'], "").to_lowercase();
    plain(wit) == plain(serialised)
}

const EDGES: [u32; 8] = [0, 1, 2, 16, u32::MAX, 1 << 31, i32::MAX as u32, 1 << 20];

impl Writer<'_> {
    fn wild(&mut self, one_in: u64) -> bool {
        one_in > 0 && self.random.chance(one_in)
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.image.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn put_u32(&mut self, at: usize, value: u32) {
        self.put(at, &value.to_le_bytes());
    }

    /// A number: the good one, one near it, an edge, or a small one where none is known.
    fn number(&mut self, at: usize, good: Option<i64>) {
        let value = match good {
            Some(good) if !self.wild(self.wildness.values) => good as u32,
            Some(good) if self.random.chance(2) => {
                (good as u32).wrapping_add(self.random.pick(&[1, u32::MAX, 16]))
            }
            _ if self.random.chance(3) => self.random.pick(&EDGES),
            _ => self.random.below(40) as u32,
        };
        self.put_u32(at, value);
        self.image.words.push(self.base + at as u32);
    }

    /// The number of a case: one that there is, mostly.
    fn case(&mut self, at: usize, tag: Int, good: usize) {
        let value = match self.wild(self.wildness.structure) {
            true => self.random.below(256),
            false => good,
        };
        assert!(matches!(tag, Int::U8), "few cases");
        self.put(at, &[value as u8]);
    }

    fn allocate(&mut self, size: usize, align: usize) -> usize {
        let at = self.image.bytes.len().next_multiple_of(align);
        self.image.bytes.resize(at + size, 0);
        at
    }

    fn list(&mut self, at: usize, element: &Type, good: Option<&Value>, is_text: bool) {
        let sizes = &self.contract.sizes;
        let (size, align) = (
            sizes.size(element).size_wasm32(),
            sizes.align(element).align_wasm32(),
        );
        let text = good.and_then(Value::as_str).unwrap_or("text");
        let held: Vec<Value> = match good {
            _ if is_text => text.bytes().map(Value::from).collect(),
            Some(Value::Array(values)) => values.clone(),
            _ => Vec::new(),
        };
        let mut count = match good {
            Some(_) => held.len(),
            None if is_text => held.len(),
            None => self.random.below(20),
        };
        if !is_text && self.wild(4 * self.wildness.values) {
            count = (count + self.random.pick(&[0, 1, 2, 9])).saturating_sub(1);
        }
        let block = self.allocate(count * size, align);
        for index in 0..count {
            self.write(element, block + index * size, held.get(index));
        }
        let (mut pointer, mut len) = (self.base + block as u32, count as u32);
        if self.wild(self.wildness.structure) {
            match self.random.below(4) {
                0 => pointer = self.random.pick(&EDGES),
                1 => len = self.random.pick(&EDGES),
                2 => pointer += 2,
                _ => len += self.random.below(4000) as u32,
            }
        }
        self.put_u32(at, pointer);
        self.put_u32(at + 4, len);
        if self.wild(self.wildness.structure) {
            self.image
                .words
                .extend([self.base + at as u32, self.base + at as u32 + 4]);
        }
    }

    fn write(&mut self, ty: &Type, at: usize, good: Option<&Value>) {
        match ty {
            Type::Bool => {
                let value = match good.and_then(Value::as_bool) {
                    Some(value) if !self.wild(self.wildness.values) => u8::from(value),
                    _ => self.random.below(2) as u8,
                };
                self.put(at, &[value]);
            }
            Type::U8 | Type::S8 => {
                let value = good.and_then(Value::as_i64).unwrap_or(1) as u8;
                self.put(at, &[value]);
            }
            Type::U32 | Type::S32 => self.number(at, good.and_then(Value::as_i64)),
            Type::U64 | Type::S64 => self.number(at, good.and_then(Value::as_i64)),
            Type::F64 => {
                let value = match good.and_then(Value::as_f64) {
                    Some(value) if !self.wild(self.wildness.values) => value,
                    _ => self
                        .random
                        .pick(&[0.0, f64::NAN, f64::INFINITY, -1.0, 30.0]),
                };
                self.put(at, &value.to_le_bytes());
            }
            Type::String => self.list(at, &Type::U8, good, true),
            Type::Id(id) => self.write_defined(*id, at, good),
            other => panic!("the contract has no {other:?}"),
        }
    }

    fn write_defined(&mut self, id: TypeId, at: usize, good: Option<&Value>) {
        let contract = self.contract;
        let kind = &contract.resolve.types[id].kind;
        match kind {
            TypeDefKind::Type(ty) => self.write(ty, at, good),
            TypeDefKind::Record(record) => {
                let offsets = contract
                    .sizes
                    .field_offsets(record.fields.iter().map(|f| &f.ty));
                for (field, (offset, ty)) in record.fields.iter().zip(offsets) {
                    let good = good.and_then(Value::as_object).and_then(|fields| {
                        let mut found = fields
                            .iter()
                            .filter(|(name, _)| same_name(&field.name, name));
                        found.next().map(|(_, value)| value)
                    });
                    self.write(ty, at + offset.size_wasm32(), good);
                }
            }
            TypeDefKind::Tuple(tuple) => {
                let offsets = contract.sizes.field_offsets(&tuple.types);
                for (index, (offset, ty)) in offsets.into_iter().enumerate() {
                    let good = good.and_then(|good| good.get(index));
                    self.write(ty, at + offset.size_wasm32(), good);
                }
            }
            TypeDefKind::Enum(cases) => {
                let name = good.and_then(Value::as_str);
                let held = cases
                    .cases
                    .iter()
                    .position(|case| name.is_some_and(|name| same_name(&case.name, name)));
                let case = match held {
                    Some(case) if !self.wild(self.wildness.values) => case,
                    _ => self.random.below(cases.cases.len()),
                };
                self.case(at, cases.tag(), case);
            }
            TypeDefKind::Variant(variant) => {
                let cases: Vec<(&str, Option<&Type>)> = variant
                    .cases
                    .iter()
                    .map(|case| (case.name.as_str(), case.ty.as_ref()))
                    .collect();
                self.write_case(variant.tag(), &cases, at, good);
            }
            TypeDefKind::Option(ty) => {
                let some = good.filter(|good| !good.is_null());
                let given = match good {
                    Some(_) if !self.wild(2 * self.wildness.values) => some.is_some(),
                    _ => self.random.chance(4),
                };
                let cases = [None, Some(ty)];
                let payload = contract.sizes.payload_offset(Int::U8, cases);
                self.case(at, Int::U8, usize::from(given));
                if given {
                    self.write(ty, at + payload.size_wasm32(), some);
                }
            }
            TypeDefKind::Result(result) => {
                let cases = [("ok", result.ok.as_ref()), ("err", result.err.as_ref())];
                self.write_case(Int::U8, &cases, at, good);
            }
            TypeDefKind::List(element) => self.list(at, element, good, false),
            other => panic!("the contract has no {}", other.as_str()),
        }
    }

    fn write_case(
        &mut self,
        tag: Int,
        cases: &[(&str, Option<&Type>)],
        at: usize,
        good: Option<&Value>,
    ) {
        let contract = self.contract;
        let named = |name: &str| cases.iter().position(|(case, _)| same_name(case, name));
        let (held, inner) = match good {
            Some(Value::String(name)) => (named(name), None),
            Some(Value::Object(fields)) => match fields.iter().next() {
                Some((name, inner)) => (named(name), Some(inner)),
                None => (None, None),
            },
            _ => (None, None),
        };
        let is_result = cases[0].0 == "ok";
        let (case, inner) = match held {
            Some(case) if is_result || !self.wild(2 * self.wildness.values) => (case, inner),
            // Without a good one: metadata, mostly.
            _ if is_result => (usize::from(self.random.chance(20)), None),
            _ => (self.random.below(cases.len()), None),
        };
        let payload = contract
            .sizes
            .payload_offset(tag, cases.iter().map(|case| case.1));
        self.case(at, tag, case);
        if let Some(ty) = cases[case].1 {
            self.write(ty, at + payload.size_wasm32(), inner);
        }
    }
}
