//! Guests out of two halves: arbitrary code, which wasm-smith writes, and a frame around it with the world's exports, which
//! calls that code, lets it spoil the result, and returns. It must never know what a result means.

use std::convert::Infallible;

use arbitrary::Unstructured;
use wasm_encoder::{
    CodeSection, ConstExpr, DataSection, EntityType, ExportKind, ExportSection, Function,
    FunctionSection, GlobalSection, GlobalType, ImportSection, Instruction as I, MemArg,
    MemorySection, MemoryType, Module, TypeSection, ValType,
    reencode::{self, Reencode},
};
use wasmparser::{Parser, Payload};
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};

use crate::{
    case::Random,
    lower::{Contract, Image},
};

const CREATED: u32 = 64;
const INFO: u32 = 128;
const TEXTS: u32 = 256;
const PROMISE: u32 = 512;
/// Where the result lies, and its lists behind it.
pub const RESULT: u32 = 4096;
/// Where arguments are written.
const HEAP: i32 = 128 << 10;
const PAGES: u64 = 4;

/// A function of the arbitrary half.
#[derive(Clone)]
struct Noise {
    index: u32,
    params: Vec<ValType>,
    results: Vec<ValType>,
}

/// Makes room for the one import that every builder has.
struct Shifted;

impl Reencode for Shifted {
    type Error = Infallible;

    fn function_index(&mut self, index: u32) -> Result<u32, reencode::Error<Infallible>> {
        Ok(index + 1)
    }
}

/// Arbitrary code, and the functions in it that numbers go into and come out of. Most of it cannot trap.
fn noise(random: &mut Random) -> Option<(Sections, Vec<Noise>)> {
    let bytes: Vec<u8> = (0..512 + random.below(3072))
        .map(|_| random.next() as u8)
        .collect();
    let config = wasm_smith::Config {
        disallow_traps: !random.chance(5),
        allow_start_export: false,
        bulk_memory_enabled: false,
        exceptions_enabled: false,
        gc_enabled: false,
        memory64_enabled: false,
        reference_types_enabled: false,
        relaxed_simd_enabled: false,
        simd_enabled: false,
        tail_call_enabled: false,
        threads_enabled: false,
        max_imports: 0,
        min_funcs: 2,
        max_funcs: 8,
        max_instructions: 80,
        max_globals: 6,
        min_memories: 1,
        max_memories: 1,
        max_memory32_bytes: PAGES << 16,
        max_types: 8,
        max_tables: 1,
        max_table_elements: 100,
        max_element_segments: 2,
        max_data_segments: 2,
        max_nesting_depth: 6,
        ..wasm_smith::Config::default()
    };
    let module = wasm_smith::Module::new(config, &mut Unstructured::new(&bytes)).ok()?;
    let bytes = module.to_bytes();
    let mut shifted = Module::new();
    Shifted
        .parse_core_module(&mut shifted, Parser::new(0), &bytes)
        .ok()?;
    let mut sections = sections(&shifted.finish());
    // The frame brings its own exports and memory.
    sections.retain(|(id, _)| *id != 7 && *id != 5);
    Some((sections, functions(&bytes)))
}

fn functions(module: &[u8]) -> Vec<Noise> {
    let (mut types, mut found) = (Vec::new(), Vec::new());
    let numbers = |types: &[wasmparser::ValType]| -> Option<Vec<ValType>> {
        let number = |ty: &wasmparser::ValType| match ty {
            wasmparser::ValType::I32 => Some(ValType::I32),
            wasmparser::ValType::I64 => Some(ValType::I64),
            wasmparser::ValType::F32 => Some(ValType::F32),
            wasmparser::ValType::F64 => Some(ValType::F64),
            _ => None,
        };
        types.iter().map(number).collect()
    };
    for payload in Parser::new(0).parse_all(module).flatten() {
        match payload {
            Payload::TypeSection(section) => {
                let all = section.into_iter_err_on_gc_types().flatten();
                types.extend(all.map(|ty| (numbers(ty.params()), numbers(ty.results()))));
            }
            Payload::FunctionSection(section) => {
                for (index, ty) in section.into_iter().flatten().enumerate() {
                    if let (Some(params), Some(results)) = &types[ty as usize] {
                        found.push(Noise {
                            index: 1 + index as u32,
                            params: params.clone(),
                            results: results.clone(),
                        });
                    }
                }
            }
            _ => {}
        }
    }
    found
}

/// Calls `noise` with local 1 for every argument, and leaves what came of it in local 1.
fn call(noise: &Noise) -> Vec<I<'static>> {
    let mut code = Vec::new();
    for ty in &noise.params {
        code.push(I::LocalGet(1));
        match ty {
            ValType::I64 => code.push(I::I64ExtendI32S),
            ValType::F32 => code.push(I::F32ReinterpretI32),
            ValType::F64 => code.push(I::F64ConvertI32U),
            _ => {}
        }
    }
    code.push(I::Call(noise.index));
    for ty in noise.results.iter().rev() {
        match ty {
            ValType::I64 => code.push(I::I32WrapI64),
            ValType::F32 => code.push(I::I32ReinterpretF32),
            ValType::F64 => code.extend([I::I64ReinterpretF64, I::I32WrapI64]),
            _ => {}
        }
        code.push(I::LocalSet(1));
    }
    code
}

/// A module's sections: number and contents.
type Sections = Vec<(u8, Vec<u8>)>;

fn sections(module: &[u8]) -> Sections {
    let (mut found, mut at) = (Vec::new(), 8);
    while at < module.len() {
        let id = module[at];
        let (len, start) = leb(module, at + 1);
        found.push((id, module[start..start + len].to_vec()));
        at = start + len;
    }
    found
}

/// An unsigned number of up to 32 bits, and where it ends.
fn leb(bytes: &[u8], mut at: usize) -> (usize, usize) {
    let (mut value, mut shift) = (0, 0);
    loop {
        let byte = bytes[at];
        value |= usize::from(byte & 0x7f) << shift;
        (at, shift) = (at + 1, shift + 7);
        if byte & 0x80 == 0 {
            return (value, at);
        }
    }
}

fn put_leb(out: &mut Vec<u8>, mut value: usize) {
    loop {
        let byte = (value & 0x7f) as u8;
        value >>= 7;
        out.push(if value == 0 { byte } else { byte | 0x80 });
        if value == 0 {
            return;
        }
    }
}

/// Elements of a section that is a list.
fn count(sections: &[(u8, Vec<u8>)], id: u8) -> u32 {
    let section = sections.iter().find(|section| section.0 == id);
    section.map_or(0, |(_, bytes)| leb(bytes, 0).0 as u32)
}

/// `first` with the elements of `second`'s sections behind its own.
fn joined(first: &[(u8, Vec<u8>)], second: &[(u8, Vec<u8>)]) -> Vec<u8> {
    // The order of sections: tags stand before globals, the count of data segments before code.
    const ORDER: [u8; 13] = [1, 2, 3, 4, 5, 13, 6, 7, 8, 9, 12, 10, 11];
    let mut module = b"\0asm\x01\0\0\0".to_vec();
    for id in ORDER {
        let of = |sections: &[(u8, Vec<u8>)]| -> Option<(usize, Vec<u8>)> {
            let (_, bytes) = sections.iter().find(|section| section.0 == id)?;
            let (count, start) = leb(bytes, 0);
            Some((count, bytes[start..].to_vec()))
        };
        let parts: Vec<_> = [of(first), of(second)].into_iter().flatten().collect();
        if parts.is_empty() {
            continue;
        }
        let mut contents = Vec::new();
        put_leb(&mut contents, parts.iter().map(|part| part.0).sum());
        parts.iter().for_each(|part| contents.extend(&part.1));
        module.push(id);
        put_leb(&mut module, contents.len());
        module.extend(contents);
    }
    module
}

fn word(offset: u32) -> MemArg {
    MemArg {
        offset: u64::from(offset),
        align: 0,
        memory_index: 0,
    }
}

/// The canonical ABI's layout of what is not the result.
fn fixed(bytes: &mut Vec<u8>, value: u32) {
    bytes.extend(value.to_le_bytes());
}

/// A component of a world whose `build` returns `image`, more or less; none where the arbitrary half did not come about.
pub fn component(
    contract: &Contract,
    interface: &str,
    image: &Image,
    random: &mut Random,
) -> Option<Vec<u8>> {
    let (noise, arbitrary) = noise(random)?;
    let (types_before, globals_before) = (count(&noise, 1), count(&noise, 6));
    let functions_before = 1 + count(&noise, 3);
    let mut types = TypeSection::new();
    let i32s = |n: usize| std::iter::repeat_n(ValType::I32, n);
    types.ty().function(i32s(1), i32s(1));
    types.ty().function(i32s(4), i32s(1));
    types.ty().function(i32s(6), i32s(1));
    let prefix = format!("timetable:attention/{interface}@0.1.0#");
    let names = [
        ("cabi_realloc".to_owned(), 1),
        (format!("{prefix}[static]builder.create"), 0),
        (format!("{prefix}[method]builder.info"), 0),
        (format!("{prefix}[method]builder.launch-promise"), 2),
        (format!("{prefix}[method]builder.build"), 0),
        (
            format!("{prefix}[method]builder.build-for-cudagraph-capture"),
            0,
        ),
        (format!("{prefix}[method]builder.build-for-drafting"), 0),
        (format!("{prefix}[method]builder.update-block-table"), 0),
    ];
    let mut imports = ImportSection::new();
    imports.import(
        &format!("[export]timetable:attention/{interface}@0.1.0"),
        "[resource-new]builder",
        EntityType::Function(types_before),
    );
    let mut memories = MemorySection::new();
    memories.memory(MemoryType {
        minimum: PAGES,
        maximum: None,
        memory64: false,
        shared: false,
        page_size_log2: None,
    });
    let (mut functions, mut exports) = (FunctionSection::new(), ExportSection::new());
    exports.export("memory", ExportKind::Memory, 0);
    for (index, (name, ty)) in names.iter().enumerate() {
        functions.function(types_before + ty);
        exports.export(name, ExportKind::Func, functions_before + index as u32);
    }
    let mut globals = GlobalSection::new();
    let ty = GlobalType {
        val_type: ValType::I32,
        mutable: true,
        shared: false,
    };
    globals.global(ty, &ConstExpr::i32_const(HEAP));

    let heap = globals_before;
    let mut code = CodeSection::new();
    let mut function = |instructions: &[I<'_>]| {
        let mut function = Function::new([(2, ValType::I32)]);
        instructions.iter().for_each(|i| {
            function.instruction(i);
        });
        function.instruction(&I::End);
        code.function(&function);
    };
    // cabi_realloc(old, old size, align, size): bump, 16-aligned.
    function(&[
        I::GlobalGet(heap),
        I::LocalSet(4),
        I::GlobalGet(heap),
        I::LocalGet(3),
        I::I32Add,
        I::I32Const(15),
        I::I32Add,
        I::I32Const(-16),
        I::I32And,
        I::GlobalSet(heap),
        I::LocalGet(4),
    ]);
    let reset = [I::I32Const(HEAP), I::GlobalSet(heap)];
    let mut create = reset.to_vec();
    create.extend([
        I::I32Const(CREATED as i32),
        I::I32Const(7),
        I::Call(0),
        I::I32Store(word(4)),
        I::I32Const(CREATED as i32),
    ]);
    function(&create);
    function(&[I::I32Const(INFO as i32)]);
    function(&[I::I32Const(PROMISE as i32)]);
    for _ in 0..4 {
        let mut build = Vec::new();
        // The argument, or what arbitrary code made of it.
        build.extend([I::LocalGet(0), I::LocalSet(1)]);
        for _ in 0..random.below(4) {
            if arbitrary.is_empty() {
                return None;
            }
            build.extend(call(&arbitrary[random.below(arbitrary.len())]));
            if !image.words.is_empty() && !random.chance(3) {
                let at = image.words[random.below(image.words.len())];
                build.extend([I::I32Const(0), I::LocalGet(1), I::I32Store(word(at))]);
            }
        }
        // Numbers of the step's record, where the result has some.
        for _ in 0..random.below(3) {
            if !image.words.is_empty() {
                let at = image.words[random.below(image.words.len())];
                let from = 4 * random.below(8) as u32;
                build.extend([
                    I::I32Const(0),
                    I::LocalGet(0),
                    I::I32Load(word(from)),
                    I::I32Store(word(at)),
                ]);
            }
        }
        build.extend(reset.clone());
        match random.below(60) {
            0 => build.push(I::LocalGet(1)),
            1 => build.push(I::I32Const(RESULT as i32 + 8 * random.below(40) as i32)),
            _ => build.push(I::I32Const(RESULT as i32)),
        }
        function(&build);
    }

    let mut data = DataSection::new();
    let mut put = |at: u32, bytes: &[u8]| {
        data.active(0, &ConstExpr::i32_const(at as i32), bytes.iter().copied());
    };
    put(CREATED, &[0; 16]);
    let mut info = Vec::new();
    fixed(&mut info, TEXTS);
    fixed(&mut info, 9);
    info.extend([3, 0, 0, 0]);
    // reorder-batch-threshold: some(1); varlen-cudagraph-max-query-len: none; two flags.
    [1, 1, 0, 0, 0]
        .iter()
        .for_each(|&value| fixed(&mut info, value));
    info.truncate(28);
    info.extend([0, 0, 0, 0]);
    fixed(&mut info, TEXTS + 64);
    fixed(&mut info, 2);
    info.resize(info.len().next_multiple_of(8), 0);
    info.extend(0u64.to_le_bytes());
    put(INFO, &info);
    put(TEXTS, b"generated");
    put(TEXTS + 64, &[0, 1]);
    put(PROMISE, &[0; 40]);
    put(RESULT, &image.bytes);
    assert!(RESULT as usize + image.bytes.len() < HEAP as usize);

    let mut frame = Module::new();
    frame
        .section(&types)
        .section(&imports)
        .section(&functions)
        .section(&memories)
        .section(&globals)
        .section(&exports)
        .section(&code)
        .section(&data);
    let mut module = joined(&noise, &sections(&frame.finish()));
    let world = contract.world(interface);
    embed_component_metadata(&mut module, &contract.resolve, world, StringEncoding::UTF8).ok()?;
    let encoder = ComponentEncoder::default().module(&module).ok()?;
    Some(encoder.validate(true).encode().expect("a component"))
}
