//! Three macros that write a contract type once: its Rust form, its WIT names, and the derives of each feature.
//!
//! A name is given after `as` where WIT spells it differently (kebab case).

/// A WIT record.
macro_rules! record {
    ($(#[$meta:meta])* pub struct $name:ident {
        $($(#[$field_meta:meta])* $field:ident as $wit:literal: $ty:ty,)*
    }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
        #[cfg_attr(
            feature = "component",
            derive(wasmtime::component::ComponentType, wasmtime::component::Lift, wasmtime::component::Lower),
            component(record)
        )]
        pub struct $name {
            $($(#[$field_meta])*
            #[cfg_attr(feature = "component", component(name = $wit))]
            pub $field: $ty,)*
        }

        #[cfg(feature = "guest")]
        impl crate::canonical::Canonical for $name {
            const SIZE: usize = {
                let mut offset = 0;
                $(offset = crate::canonical::align_to(offset, <$ty as crate::canonical::Canonical>::ALIGN)
                    + <$ty as crate::canonical::Canonical>::SIZE;)*
                crate::canonical::align_to(offset, Self::ALIGN)
            };
            const ALIGN: usize = {
                let mut align = 1;
                $(align = crate::canonical::larger(align, <$ty as crate::canonical::Canonical>::ALIGN);)*
                align
            };

            #[cfg(target_arch = "wasm32")]
            #[inline]
            unsafe fn load(at: *const u8) -> Self {
                let mut offset = 0;
                // SAFETY: the fields lie at their canonical offsets.
                unsafe {
                    $(
                        let start = crate::canonical::align_to(offset, <$ty as crate::canonical::Canonical>::ALIGN);
                        offset = start + <$ty as crate::canonical::Canonical>::SIZE;
                        let $field = <$ty as crate::canonical::Canonical>::load(at.add(start));
                    )*
                    let _ = offset;
                    Self { $($field),* }
                }
            }

            #[cfg(target_arch = "wasm32")]
            #[inline]
            unsafe fn store(self, at: *mut u8, lowering: &mut impl crate::canonical::Lowering) {
                let mut offset = 0;
                // SAFETY: the fields lie at their canonical offsets, inside `SIZE` bytes.
                unsafe {
                    $(
                        let start = crate::canonical::align_to(offset, <$ty as crate::canonical::Canonical>::ALIGN);
                        offset = start + <$ty as crate::canonical::Canonical>::SIZE;
                        crate::canonical::Canonical::store(self.$field, at.add(start), lowering);
                    )*
                }
                let _ = offset;
            }
        }
    };
}

/// A WIT enum. `$case` is serde's renaming rule.
macro_rules! enumeration {
    ($(#[$meta:meta])* pub enum $name:ident in $rule:literal {
        $($(#[$case_meta:meta])* $case:ident as $wit:literal,)*
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = $rule))]
        #[cfg_attr(
            feature = "component",
            derive(wasmtime::component::ComponentType, wasmtime::component::Lift, wasmtime::component::Lower),
            component(enum)
        )]
        pub enum $name {
            $($(#[$case_meta])*
            #[cfg_attr(feature = "component", component(name = $wit))]
            $case,)*
        }

        impl $name {
            /// Every case, in declaration order.
            pub const ALL: &'static [$name] = &[$($name::$case),*];
        }

        #[cfg(feature = "guest")]
        impl crate::canonical::Canonical for $name {
            const SIZE: usize = 1;
            const ALIGN: usize = 1;

            #[cfg(target_arch = "wasm32")]
            #[inline]
            unsafe fn load(at: *const u8) -> Self {
                // SAFETY: the host lowers only discriminants of the enum, which has one byte; the index is checked anyway.
                unsafe { Self::ALL[at.read() as usize] }
            }

            #[cfg(target_arch = "wasm32")]
            #[inline]
            unsafe fn store(self, at: *mut u8, _lowering: &mut impl crate::canonical::Lowering) {
                // SAFETY: one writable byte.
                unsafe { at.write(self as u8) }
            }
        }
    };
}

/// A WIT variant.
macro_rules! variant {
    ($(#[$meta:meta])* pub enum $name:ident {
        $($(#[$case_meta:meta])* $case:ident as $wit:literal $(($payload:ty))?,)*
    }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
        #[cfg_attr(
            feature = "component",
            derive(wasmtime::component::ComponentType, wasmtime::component::Lift, wasmtime::component::Lower),
            component(variant)
        )]
        pub enum $name {
            $($(#[$case_meta])*
            #[cfg_attr(feature = "component", component(name = $wit))]
            $case $(($payload))?,)*
        }

        #[cfg(feature = "guest")]
        impl crate::canonical::Canonical for $name {
            const SIZE: usize = {
                let mut payload = 0;
                $($(payload = crate::canonical::larger(payload, <$payload as crate::canonical::Canonical>::SIZE);)?)*
                crate::canonical::align_to(crate::canonical::align_to(1, Self::ALIGN) + payload, Self::ALIGN)
            };
            const ALIGN: usize = {
                let mut align = 1;
                $($(align = crate::canonical::larger(align, <$payload as crate::canonical::Canonical>::ALIGN);)?)*
                align
            };

            #[cfg(target_arch = "wasm32")]
            #[inline]
            unsafe fn load(at: *const u8) -> Self {
                enum Discriminant { $($case),* }
                // SAFETY: the payload is of the case that the discriminant names.
                unsafe {
                    let discriminant = at.read();
                    let _payload = at.add(crate::canonical::align_to(1, Self::ALIGN));
                    $(if discriminant == Discriminant::$case as u8 {
                        return Self::$case $((<$payload as crate::canonical::Canonical>::load(_payload)))?;
                    })*
                }
                unreachable!("the host lowers only cases of the variant")
            }

            #[cfg(target_arch = "wasm32")]
            #[inline]
            unsafe fn store(self, at: *mut u8, lowering: &mut impl crate::canonical::Lowering) {
                enum Discriminant { $($case),* }
                // SAFETY: discriminant and payload lie inside `SIZE` bytes.
                unsafe {
                    let _payload = at.add(crate::canonical::align_to(1, Self::ALIGN));
                    let _ = &lowering;
                    match self {
                        $(Self::$case $((bind!(value $payload)))? => {
                            at.write(Discriminant::$case as u8);
                            $(<$payload as crate::canonical::Canonical>::store(bind!(value $payload), _payload, lowering);)?
                        })*
                    }
                }
            }
        }
    };
}

/// The identifier, whatever the type: lets a repetition over optional payloads name its value.
#[cfg(all(feature = "guest", target_arch = "wasm32"))]
macro_rules! bind {
    ($name:ident $ty:ty) => {
        $name
    };
}
