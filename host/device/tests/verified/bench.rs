//! A good record and its step, and the verdict on any other record for it: refused, or run with everything poisoned that is
//! not the request's own. It must never know where records come from.

use timetable_attention::{Verifier, verify_step};
use timetable_types::{Family, Metadata};

use crate::{
    bases::Base,
    case::Ran,
    reading::{Reading, read, selected},
};

/// A base with what its mutants are held against.
pub struct Bench<'b> {
    pub base: &'b Base,
    reading: Result<Reading, String>,
    pub verifier: Verifier,
}

/// The verdict on metadata.
#[derive(Debug, PartialEq)]
pub enum Verdict {
    Refused,
    Inert,
    Harmful(String),
}

impl<'b> Bench<'b> {
    pub fn new(base: &'b Base) -> Self {
        let bench = Bench {
            base,
            reading: read(&base.case, &base.metadata),
            verifier: Verifier::new(),
        };
        base.case.with(verify_step).expect(base.name);
        bench
    }

    pub fn verdict(&mut self, metadata: &Metadata) -> Verdict {
        let case = &self.base.case;
        let verifier = &mut self.verifier;
        if case.with(|ctx| verifier.verify(metadata, ctx)).is_err() {
            return Verdict::Refused;
        }
        let expected = match selected(case, metadata) {
            Ok(None) => None,
            Ok(Some(kept)) => Some(case.attention(|row, key| kept[row][key])),
            Err(problem) => return Verdict::Harmful(problem),
        };
        match case.run(metadata, expected.as_deref()) {
            // A launch is told numbers that this device needs not.
            Ran::Right if matches!(metadata.family(), Family::FlashMla | Family::Mamba) => {
                self.reads(metadata)
            }
            Ran::Right => Verdict::Inert,
            Ran::Wrong(problem) => Verdict::Harmful(problem),
            Ran::NotHere(_) => self.reads(metadata),
        }
    }

    /// The verdict by reading alone.
    pub fn reads(&self, metadata: &Metadata) -> Verdict {
        match (read(&self.base.case, metadata), &self.reading) {
            (Ok(found), Ok(wanted)) if found == *wanted => Verdict::Inert,
            (found, _) => Verdict::Harmful(format!("attends otherwise: {:?}", found.err())),
        }
    }
}
