//! The component model's canonical ABI for the contract's types: how they lie in a guest's memory.
//!
//! Derived by the same macros that define the records, so that a guest needs no second definition and no conversion. Layouts
//! are those of a 32-bit guest on every host; a test in `tests/` compares them with what `wit-parser` computes from `wit/`.
//! This module must never know an allocator's policy: who owns a lowered list is the caller's business (`Lowering`).

#[cfg(target_arch = "wasm32")]
use alloc::{alloc::Layout, string::String, vec::Vec};
#[cfg(not(target_arch = "wasm32"))]
use alloc::{string::String, vec::Vec};

/// `offset` rounded up to a multiple of `align`, a power of two.
pub const fn align_to(offset: usize, align: usize) -> usize {
    (offset + align - 1) & !(align - 1)
}

/// The larger of two sizes, in constants.
pub const fn larger(a: usize, b: usize) -> usize {
    if a > b { a } else { b }
}

/// A type of the contract, as the canonical ABI stores it.
pub trait Canonical: Sized {
    /// Bytes of one value in a list or record.
    const SIZE: usize;
    /// Alignment in bytes, a power of two.
    const ALIGN: usize;
    /// Is the in-memory form of a value the value itself, so that lists move without a loop?
    const PLAIN: bool = false;

    /// Reads a value that the host lowered and takes over the allocations of its lists and strings.
    ///
    /// # Safety
    /// `at` points to a valid value of this type, lowered by the host through this guest's own allocator, that nobody
    /// else reads afterwards.
    #[cfg(target_arch = "wasm32")]
    unsafe fn load(at: *const u8) -> Self;

    /// Writes the value for the host to lift and hands its allocations to `lowering`.
    ///
    /// # Safety
    /// `at` points to `SIZE` writable bytes aligned to `ALIGN`.
    #[cfg(target_arch = "wasm32")]
    unsafe fn store(self, at: *mut u8, lowering: &mut impl Lowering);
}

/// Who keeps the allocations of lowered lists until the host has read them.
#[cfg(target_arch = "wasm32")]
pub trait Lowering {
    /// Takes over an allocation of the global allocator.
    fn keep(&mut self, block: *mut u8, layout: Layout);
}

macro_rules! scalar {
    ($($ty:ty),*) => {$(
        impl Canonical for $ty {
            const SIZE: usize = size_of::<$ty>();
            const ALIGN: usize = size_of::<$ty>();
            const PLAIN: bool = true;

            #[cfg(target_arch = "wasm32")]
            #[inline(always)]
            unsafe fn load(at: *const u8) -> Self {
                // SAFETY: `at` is valid for this type, by the trait's contract.
                unsafe { at.cast::<$ty>().read() }
            }

            #[cfg(target_arch = "wasm32")]
            #[inline(always)]
            unsafe fn store(self, at: *mut u8, _lowering: &mut impl Lowering) {
                // SAFETY: `at` is writable and aligned, by the trait's contract.
                unsafe { at.cast::<$ty>().write(self) }
            }
        }
    )*};
}

scalar!(u8, u32, i32, u64, i64, f64);

impl Canonical for bool {
    const SIZE: usize = 1;
    const ALIGN: usize = 1;

    #[cfg(target_arch = "wasm32")]
    #[inline(always)]
    unsafe fn load(at: *const u8) -> Self {
        // SAFETY: one readable byte, by the trait's contract.
        unsafe { at.read() != 0 }
    }

    #[cfg(target_arch = "wasm32")]
    #[inline(always)]
    unsafe fn store(self, at: *mut u8, _lowering: &mut impl Lowering) {
        // SAFETY: one writable byte, by the trait's contract.
        unsafe { at.write(u8::from(self)) }
    }
}

impl<T: Canonical> Canonical for Vec<T> {
    const SIZE: usize = 8;
    const ALIGN: usize = 4;

    #[cfg(target_arch = "wasm32")]
    #[inline]
    unsafe fn load(at: *const u8) -> Self {
        // SAFETY: a list is a pointer and a length, and its block came from this guest's allocator with exactly the layout
        // of `length` elements, by the trait's contract. A plain element's stored form is the element.
        unsafe {
            let block = at.cast::<u32>().read() as usize as *mut u8;
            let length = at.cast::<u32>().add(1).read() as usize;
            if length == 0 {
                return Vec::new();
            }
            if T::PLAIN {
                return Vec::from_raw_parts(block.cast::<T>(), length, length);
            }
            let mut values = Vec::with_capacity(length);
            for i in 0..length {
                values.push(T::load(block.add(i * T::SIZE)));
            }
            let layout = Layout::from_size_align_unchecked(length * T::SIZE, T::ALIGN);
            alloc::alloc::dealloc(block, layout);
            values
        }
    }

    #[cfg(target_arch = "wasm32")]
    #[inline]
    unsafe fn store(self, at: *mut u8, lowering: &mut impl Lowering) {
        let length = self.len();
        let block = if self.capacity() == 0 || (length == 0 && T::PLAIN) {
            core::ptr::without_provenance_mut(T::ALIGN)
        } else if T::PLAIN {
            let mut values = core::mem::ManuallyDrop::new(self);
            let block = values.as_mut_ptr().cast::<u8>();
            // SAFETY: the layout is the one that this vector was allocated with.
            let layout = unsafe {
                Layout::from_size_align_unchecked(
                    values.capacity() * size_of::<T>(),
                    align_of::<T>(),
                )
            };
            lowering.keep(block, layout);
            block
        } else {
            // SAFETY: `length` is positive here or the block is of one byte at least; every element is written once,
            // inside the block.
            unsafe {
                let layout =
                    Layout::from_size_align_unchecked(larger(length * T::SIZE, 1), T::ALIGN);
                let block = alloc::alloc::alloc(layout);
                if block.is_null() {
                    alloc::alloc::handle_alloc_error(layout);
                }
                lowering.keep(block, layout);
                for (i, value) in self.into_iter().enumerate() {
                    value.store(block.add(i * T::SIZE), lowering);
                }
                block
            }
        };
        // SAFETY: two words at `at`, by the trait's contract.
        unsafe {
            at.cast::<u32>().write(block as usize as u32);
            at.cast::<u32>().add(1).write(length as u32);
        }
    }
}

impl Canonical for String {
    const SIZE: usize = 8;
    const ALIGN: usize = 4;

    #[cfg(target_arch = "wasm32")]
    unsafe fn load(at: *const u8) -> Self {
        // SAFETY: a string is stored as its bytes; the host validates UTF-8 before it lowers one.
        unsafe { String::from_utf8_unchecked(Vec::<u8>::load(at)) }
    }

    #[cfg(target_arch = "wasm32")]
    unsafe fn store(self, at: *mut u8, lowering: &mut impl Lowering) {
        // SAFETY: passed on.
        unsafe { self.into_bytes().store(at, lowering) }
    }
}

impl<T: Canonical> Canonical for Option<T> {
    const SIZE: usize = align_to(align_to(1, T::ALIGN) + T::SIZE, T::ALIGN);
    const ALIGN: usize = T::ALIGN;

    #[cfg(target_arch = "wasm32")]
    #[inline]
    unsafe fn load(at: *const u8) -> Self {
        // SAFETY: the payload is valid exactly where the discriminant says so.
        unsafe { (at.read() != 0).then(|| T::load(at.add(align_to(1, T::ALIGN)))) }
    }

    #[cfg(target_arch = "wasm32")]
    #[inline]
    unsafe fn store(self, at: *mut u8, lowering: &mut impl Lowering) {
        // SAFETY: discriminant and payload lie inside `SIZE` bytes.
        unsafe {
            at.write(u8::from(self.is_some()));
            if let Some(value) = self {
                value.store(at.add(align_to(1, T::ALIGN)), lowering);
            }
        }
    }
}

impl<T: Canonical, E: Canonical> Canonical for Result<T, E> {
    const SIZE: usize = align_to(
        align_to(1, Self::ALIGN) + larger(T::SIZE, E::SIZE),
        Self::ALIGN,
    );
    const ALIGN: usize = larger(T::ALIGN, E::ALIGN);

    #[cfg(target_arch = "wasm32")]
    unsafe fn load(at: *const u8) -> Self {
        // SAFETY: the payload is of the case that the discriminant names.
        unsafe {
            let payload = at.add(align_to(1, Self::ALIGN));
            if at.read() == 0 {
                Ok(T::load(payload))
            } else {
                Err(E::load(payload))
            }
        }
    }

    #[cfg(target_arch = "wasm32")]
    #[inline]
    unsafe fn store(self, at: *mut u8, lowering: &mut impl Lowering) {
        // SAFETY: discriminant and payload lie inside `SIZE` bytes.
        unsafe {
            let payload = at.add(align_to(1, Self::ALIGN));
            match self {
                Ok(value) => {
                    at.write(0);
                    value.store(payload, lowering);
                }
                Err(error) => {
                    at.write(1);
                    error.store(payload, lowering);
                }
            }
        }
    }
}

macro_rules! tuple {
    ($($name:ident $index:tt),*) => {
        impl<$($name: Canonical),*> Canonical for ($($name,)*) {
            const SIZE: usize = {
                let mut offset = 0;
                $(offset = align_to(offset, $name::ALIGN) + $name::SIZE;)*
                align_to(offset, Self::ALIGN)
            };
            const ALIGN: usize = {
                let mut align = 1;
                $(align = larger(align, $name::ALIGN);)*
                align
            };

            #[cfg(target_arch = "wasm32")]
            #[inline]
            unsafe fn load(at: *const u8) -> Self {
                let mut offset = 0;
                // SAFETY: the elements lie at their canonical offsets.
                unsafe {
                    ($({
                        let start = align_to(offset, $name::ALIGN);
                        offset = start + $name::SIZE;
                        let _ = offset;
                        $name::load(at.add(start))
                    },)*)
                }
            }

            #[cfg(target_arch = "wasm32")]
            #[inline]
            unsafe fn store(self, at: *mut u8, lowering: &mut impl Lowering) {
                let mut offset = 0;
                // SAFETY: the elements lie at their canonical offsets, inside `SIZE` bytes.
                unsafe {
                    $(
                        let start = align_to(offset, $name::ALIGN);
                        offset = start + $name::SIZE;
                        self.$index.store(at.add(start), lowering);
                    )*
                }
                let _ = offset;
            }
        }
    };
}

tuple!(A 0, B 1);
tuple!(A 0, B 1, C 2);
