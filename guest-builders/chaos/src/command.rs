//! What the builder is told to do wrong. It must never know how that is done.

use timetable_guest::{
    decline, option,
    types::{BuildError, BuilderConfig, CommonAttentionMetadata, ErrorKind},
};

macro_rules! mischief {
    ($($(#[$doc:meta])* $case:ident as $name:literal,)*) => {
        /// Ways to misbehave.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Mischief {
            $($(#[$doc])* $case,)*
        }

        impl Mischief {
            /// Every one.
            pub const ALL: &'static [Mischief] = &[$(Mischief::$case),*];

            /// Its name as an option's value.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Mischief::$case => $name,)*
                }
            }
        }
    };
}

mischief! {
    /// None.
    Behave as "behave",
    /// One of the others for each batch, by seed.
    Random as "random",
    /// Panics.
    Trap as "trap",
    /// Loads for ever, each from an address that the one before gave.
    SpinLoads as "spin-loads",
    /// Divides for ever.
    SpinDivisions as "spin-divisions",
    /// Touches all of its pages for ever.
    SpinPages as "spin-pages",
    /// Asks for more memory than it may have.
    Grow as "grow",
    /// Calls itself for ever.
    Recurse as "recurse",
    /// Returns lists over the same memory that together are above what the host lifts.
    HugeList as "huge-list",
    /// Returns a list that the host lifts, and that is far too long.
    LongList as "long-list",
    /// One value is one more, or one less; a reference names a row too much.
    OffByOne as "off-by-one",
    /// One value is out of all bounds.
    Wild as "wild",
    /// One element of a list is missing.
    Drop as "drop",
    /// One element of a list is there twice.
    Duplicate as "duplicate",
    /// Uses nine tenths of its fuel for divisions, and behaves.
    JustUnderFuel as "just-under-fuel",
    /// Uses nearly all the memory that it may have, and behaves.
    JustUnderMemory as "just-under-memory",
    /// Calls itself as deep as its stack nearly allows, and behaves.
    JustUnderStack as "just-under-stack",
    /// Returns good metadata that depends on how often it was called.
    State as "state",
    /// Never gives back 64 KiB of each call.
    Leak as "leak",
    /// Declines the batch.
    Decline as "decline",
    /// Refuses to be constructed.
    RefuseConfig as "refuse-config",
    /// Panics when it is constructed.
    TrapInCreate as "trap-in-create",
}

/// Those that `random` chooses among: each is over with the call, and needs no memory beforehand.
const FOR_RANDOM: [Mischief; 13] = [
    Mischief::Behave,
    Mischief::Trap,
    Mischief::SpinDivisions,
    Mischief::SpinPages,
    Mischief::Grow,
    Mischief::Recurse,
    Mischief::HugeList,
    Mischief::LongList,
    Mischief::OffByOne,
    Mischief::Wild,
    Mischief::Drop,
    Mischief::Duplicate,
    Mischief::Decline,
];

/// The options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    /// What.
    pub mischief: Mischief,
    /// The first call of an instance that misbehaves, counted from 1.
    pub from_call: u64,
    /// Batches with fewer rows are built well.
    pub min_rows: u32,
    /// Chooses where there is a choice.
    pub seed: u32,
    /// The field that is damaged; by seed without.
    pub field: Option<String>,
}

impl Command {
    /// Reads the options; `fields` are those that can be damaged.
    ///
    /// # Errors
    /// If a value is none, or an option that begins with `chaos` is unknown.
    pub fn of(config: &BuilderConfig, fields: &[&str]) -> Result<Command, BuildError> {
        let mut command = Command {
            mischief: Mischief::Behave,
            from_call: option(config, "chaos-from-call", 1, 1..=u32::MAX)?.into(),
            min_rows: option(config, "chaos-min-rows", 0, 0..=u32::MAX)?,
            seed: option(config, "chaos-seed", 0, 0..=u32::MAX)?,
            field: None,
        };
        for (name, value) in &config.options {
            let wrong = |known: String| {
                decline(
                    ErrorKind::InvalidValue,
                    format!("option {name}={value:?} is unknown; there are {known}"),
                )
            };
            match name.as_str() {
                "chaos" => {
                    let all = Mischief::ALL.iter().map(|known| known.name());
                    command.mischief = *Mischief::ALL
                        .iter()
                        .find(|known| known.name() == value)
                        .ok_or_else(|| wrong(all.collect::<Vec<_>>().join(", ")))?;
                }
                "chaos-field" if fields.contains(&value.as_str()) => {
                    command.field = Some(value.clone());
                }
                "chaos-field" => return Err(wrong(fields.join(", "))),
                "chaos-from-call" | "chaos-min-rows" | "chaos-seed" => {}
                other if other.starts_with("chaos") => {
                    return Err(wrong(
                        "chaos, chaos-from-call, chaos-min-rows, chaos-seed, chaos-field"
                            .to_owned(),
                    ));
                }
                _ => {}
            }
        }
        Ok(command)
    }

    /// What is done to this batch.
    #[must_use]
    pub fn of_batch(&self, common: &CommonAttentionMetadata) -> Command {
        if self.mischief != Mischief::Random {
            return self.clone();
        }
        let mut random = Random::new(u64::from(self.seed));
        for part in [
            common.num_reqs,
            common.num_actual_tokens,
            common.max_query_len,
            common.max_seq_len,
        ] {
            random.0 ^= random.next() ^ u64::from(part);
        }
        Command {
            mischief: FOR_RANDOM[random.below(FOR_RANDOM.len())],
            seed: random.next() as u32,
            ..self.clone()
        }
    }
}

/// SplitMix64: small, and the same everywhere.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `count`, which is at least 1.
    pub(crate) fn below(&mut self, count: usize) -> usize {
        (self.next() % count.max(1) as u64) as usize
    }
}
