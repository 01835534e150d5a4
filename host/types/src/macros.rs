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

            /// From the canonical ABI's discriminant. Called by generated guest bindings.
            ///
            /// # Safety
            /// None needed: a discriminant out of range gives the last case. The signature is the one that generated
            /// code expects.
            #[doc(hidden)]
            pub const unsafe fn _lift(discriminant: u8) -> Self {
                let last = Self::ALL.len() - 1;
                let index = if discriminant as usize > last { last } else { discriminant as usize };
                Self::ALL[index]
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
    };
}
