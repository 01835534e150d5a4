//! The kernels' images that this build embeds, and which devices they run on.
//!
//! Knows what the build script found. Must never know a kernel's name or arguments.

use std::fmt;

/// One embedded file: all that one source of `kernels/src` became, for every target.
#[derive(Clone, Copy)]
pub struct Image {
    /// The source's name, without extension.
    pub name: &'static str,
    /// A fatbin, aligned to 64 bytes.
    pub bytes: &'static [u8],
}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} bytes)", self.name, self.bytes.len())
    }
}

#[allow(unused_macros, reason = "unused where nothing is embedded")]
macro_rules! aligned {
    ($path:literal) => {{
        #[repr(C, align(64))]
        struct Aligned<B: ?Sized>(B);
        static ALIGNED: &Aligned<[u8]> = &Aligned(*include_bytes!($path));
        &ALIGNED.0
    }};
}

include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// The embedded images; empty where the build had neither built kernels nor a compiler.
#[must_use]
pub fn embedded() -> &'static [Image] {
    IMAGES
}

/// What the embedded images were built for, such as `90a` (machine code for compute capability 9.0 alone) or `ptx80`
/// (PTX, which the driver compiles for 8.0 and later).
#[must_use]
pub fn targets() -> &'static [&'static str] {
    TARGETS
}

/// Whether one of `targets` runs on a device of compute capability `capability`.
#[must_use]
pub fn run_on(targets: &[&str], capability: (u32, u32)) -> bool {
    targets.iter().any(|target| runs_on(target, capability))
}

/// A target as compilers name it: `sm_90a`, `PTX of compute_80`.
#[must_use]
pub fn describe(target: &str) -> String {
    match target.strip_prefix("ptx") {
        Some(number) => format!("PTX of compute_{number}"),
        None => format!("sm_{target}"),
    }
}

fn runs_on(target: &str, (major, minor): (u32, u32)) -> bool {
    let (number, ptx) = match target.strip_prefix("ptx") {
        Some(number) => (number, true),
        None => (target, false),
    };
    let (number, alone) = match number.strip_suffix('a') {
        Some(number) => (number, true),
        None => (number, false),
    };
    let Ok(number) = number.parse::<u32>() else {
        return false;
    };
    let built_for = (number / 10, number % 10);
    if alone {
        built_for == (major, minor)
    } else if ptx {
        (major, minor) >= built_for
    } else {
        major == built_for.0 && minor >= built_for.1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_code_runs_on_its_own_major_version_and_ptx_on_later_ones() {
        // (target, capability, runs)
        let cases = [
            ("80", (8, 0), true),
            ("80", (8, 9), true),
            ("89", (8, 6), false),
            ("80", (9, 0), false),
            ("90a", (9, 0), true),
            ("90a", (9, 1), false),
            ("90a", (10, 0), false),
            ("100", (10, 0), true),
            ("100", (10, 3), true),
            ("100", (12, 0), false),
            ("ptx80", (8, 0), true),
            ("ptx80", (7, 5), false),
            ("ptx80", (12, 0), true),
            ("ptx90", (8, 9), false),
            ("", (8, 0), false),
            ("ptx", (8, 0), false),
        ];
        for (target, capability, runs) in cases {
            assert_eq!(
                run_on(&[target], capability),
                runs,
                "{target} on {capability:?}"
            );
        }
        assert!(!run_on(&[], (9, 0)));
    }

    #[test]
    fn images_are_embedded_with_their_targets_or_not_at_all() {
        assert_eq!(embedded().is_empty(), targets().is_empty());
        for image in embedded() {
            // A fatbin's magic number, little-endian.
            assert_eq!(image.bytes[..4], [0x50, 0xed, 0x55, 0xba], "{image:?}");
            assert_eq!(image.bytes.as_ptr().align_offset(64), 0, "{image:?}");
        }
    }
}
