//! The component's calls, by the canonical ABI: load the arguments, run the builder, lower the result, clean up when the
//! host has read it. Only the export macros use this module. It must never know a family.

use std::{
    alloc::{GlobalAlloc, Layout},
    cell::UnsafeCell,
};

use timetable_types::{
    BuildError, BuilderConfig, CaptureShape, CommonAttentionMetadata,
    canonical::{Canonical, Lowering},
};

use crate::{
    Builder,
    heap::{Heap, Pages},
};

/// The guest's linear memory.
struct LinearMemory;

impl Pages for LinearMemory {
    fn grow(&mut self, bytes: usize) -> Option<(usize, usize)> {
        const PAGE: usize = 65_536;
        let pages = bytes.div_ceil(PAGE);
        match core::arch::wasm32::memory_grow(0, pages) {
            usize::MAX => None,
            before => Some((before * PAGE, pages * PAGE)),
        }
    }
}

/// A component has one thread; the host never enters an instance twice.
struct SingleThreaded<T>(UnsafeCell<T>);

// SAFETY: wasm32 without threads: nothing else can hold a reference at the same time.
unsafe impl<T> Sync for SingleThreaded<T> {}

impl<T> SingleThreaded<T> {
    const fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    #[inline(always)]
    #[allow(
        clippy::mut_from_ref,
        reason = "one thread; no caller keeps the reference across a call"
    )]
    fn get(&self) -> &mut T {
        // SAFETY: one thread, and every use in this module ends before another begins.
        unsafe { &mut *self.0.get() }
    }
}

static HEAP: SingleThreaded<Heap<LinearMemory>> = SingleThreaded::new(Heap::new(LinearMemory));

struct Global;

// SAFETY: the heap hands out disjoint, aligned blocks of linear memory.
unsafe impl GlobalAlloc for Global {
    #[inline(always)]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HEAP.get().allocate(layout.size(), layout.align()) as *mut u8
    }

    #[inline(always)]
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller's block, of this heap.
        unsafe {
            HEAP.get()
                .release(block as usize, layout.size(), layout.align());
        }
    }

    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's block, of this heap.
        unsafe {
            HEAP.get()
                .resize(block as usize, layout.size(), layout.align(), size) as *mut u8
        }
    }
}

#[global_allocator]
static GLOBAL: Global = Global;

/// Where the host asks for memory for a call's arguments.
#[unsafe(export_name = "cabi_realloc")]
unsafe extern "C" fn cabi_realloc(block: *mut u8, old: usize, align: usize, new: usize) -> *mut u8 {
    if new == 0 {
        return align as *mut u8;
    }
    let heap = HEAP.get();
    let address = if old == 0 {
        heap.allocate(new, align)
    } else {
        // SAFETY: the host passes a block that it got here.
        unsafe { heap.resize(block as usize, old, align, new) }
    };
    if address == 0 {
        core::arch::wasm32::unreachable();
    }
    address as *mut u8
}

/// Blocks of the result that the host is reading.
struct Kept(Vec<(*mut u8, Layout)>);

impl Lowering for Kept {
    #[inline(always)]
    fn keep(&mut self, block: *mut u8, layout: Layout) {
        self.0.push((block, layout));
    }
}

static KEPT: SingleThreaded<Kept> = SingleThreaded::new(Kept(Vec::new()));

const RESULT_SIZE: usize = 2048;

#[repr(align(8))]
struct ResultArea([u8; RESULT_SIZE]);

static RESULT: SingleThreaded<ResultArea> = SingleThreaded::new(ResultArea([0; RESULT_SIZE]));

/// Lowers `value` into the result area.
#[inline]
fn respond<T: Canonical>(value: T) -> *mut u8 {
    const { assert!(T::SIZE <= RESULT_SIZE && T::ALIGN <= 8) };
    let at = RESULT.get().0.as_mut_ptr();
    // SAFETY: the area is large and aligned enough, as the assertion says.
    unsafe { value.store(at, KEPT.get()) };
    at
}

/// Loads a call's arguments and frees their block.
#[inline]
unsafe fn arguments<T: Canonical>(at: *mut u8) -> T {
    // SAFETY: the host lowered a `T` there, in a block of that size.
    unsafe {
        let value = T::load(at);
        HEAP.get().release(at as usize, T::SIZE, T::ALIGN);
        value
    }
}

pub unsafe fn create<B: Builder>(
    config: *mut u8,
    new_handle: impl FnOnce(usize) -> u32,
) -> *mut u8 {
    // SAFETY: the host's arguments.
    let config: BuilderConfig = unsafe { arguments(config) };
    let call = HEAP.get().keep_allocations();
    // A copy, so that what the builder keeps lies in the heap and not among a call's arguments.
    let result: Result<u32, BuildError> = B::create(config.clone())
        .map(|builder| new_handle(Box::into_raw(Box::new(builder)) as usize));
    KEPT.get().0.reserve(32);
    HEAP.get().restore(call);
    drop(config);
    respond(result)
}

pub unsafe fn destroy<B: Builder>(builder: *mut u8) {
    // SAFETY: a builder that `create` made; the host drops its handle once.
    drop(unsafe { Box::from_raw(builder.cast::<B>()) });
}

#[inline(always)]
unsafe fn builder<'a, B: Builder>(builder: *mut u8) -> &'a mut B {
    // SAFETY: a live builder that `create` made; the host never enters an instance twice.
    unsafe { &mut *builder.cast::<B>() }
}

pub unsafe fn info<B: Builder>(this: *mut u8) -> *mut u8 {
    // SAFETY: passed on.
    respond(unsafe { builder::<B>(this) }.info())
}

pub unsafe fn launch_promise<B: Builder>(this: *mut u8, shape: &CaptureShape) -> *mut u8 {
    // SAFETY: passed on.
    respond(unsafe { builder::<B>(this) }.launch_promise(shape))
}

/// The arguments of `build`: the handle's representation, the batch, `fast-build`.
type BuildArguments<T> = (u32, CommonAttentionMetadata, T);

pub unsafe fn build<B: Builder>(at: *mut u8) -> *mut u8
where
    B::Metadata: Canonical,
{
    // SAFETY: the host's arguments, and its live handle.
    let (this, common, fast_build) = unsafe { arguments::<BuildArguments<bool>>(at) };
    // SAFETY: as above.
    let result = unsafe { builder::<B>(this as usize as *mut u8) }.build(&common, fast_build);
    respond(result)
}

pub unsafe fn build_for_cudagraph_capture<B: Builder>(at: *mut u8) -> *mut u8
where
    B::Metadata: Canonical,
{
    // SAFETY: the host's arguments, and its live handle.
    let (this, common) = unsafe { arguments::<(u32, CommonAttentionMetadata)>(at) };
    // SAFETY: as above.
    let this = unsafe { builder::<B>(this as usize as *mut u8) };
    respond(this.build_for_cudagraph_capture(&common))
}

pub unsafe fn build_for_drafting<B: Builder>(at: *mut u8) -> *mut u8
where
    B::Metadata: Canonical,
{
    // SAFETY: the host's arguments, and its live handle.
    let (this, common, draft_index) = unsafe { arguments::<BuildArguments<u32>>(at) };
    // SAFETY: as above.
    let this = unsafe { builder::<B>(this as usize as *mut u8) };
    respond(this.build_for_drafting(&common, draft_index))
}

pub unsafe fn update_block_table<B: Builder>(at: *mut u8) -> *mut u8
where
    B::Metadata: Canonical,
{
    // SAFETY: the host's arguments, and its live handle.
    let (this, metadata, common) =
        unsafe { arguments::<(u32, B::Metadata, CommonAttentionMetadata)>(at) };
    // SAFETY: as above.
    let this = unsafe { builder::<B>(this as usize as *mut u8) };
    respond(this.update_block_table(metadata, &common))
}

/// The host has read the result of a call: its blocks are free, and the arena starts anew.
#[inline]
pub fn after_call() {
    let heap = HEAP.get();
    for (block, layout) in KEPT.get().0.drain(..) {
        // SAFETY: kept by `respond`, freed once.
        unsafe { heap.release(block as usize, layout.size(), layout.align()) };
    }
    heap.end_call();
}

/// As `after_call`; from here on calls have their arena.
pub fn after_create() {
    after_call();
    HEAP.get().seal();
}
