//! How many instances of each version live: what a leak of instances, or of versions, would show in.
//!
//! Counted where instances are made and dropped, which is never the step thread. Must never know: why they live.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use crate::{ContentHash, mailbox::lock};

/// Living instances by version.
#[derive(Clone, Default)]
pub(crate) struct Census(Arc<Mutex<BTreeMap<ContentHash, u64>>>);

/// One living instance.
pub(crate) struct Alive {
    census: Census,
    version: ContentHash,
}

impl Census {
    /// Counts an instance for as long as what is returned lives.
    pub(crate) fn born(&self, version: ContentHash) -> Alive {
        *lock(&self.0).entry(version).or_default() += 1;
        Alive {
            census: self.clone(),
            version,
        }
    }

    pub(crate) fn count(&self) -> BTreeMap<ContentHash, u64> {
        lock(&self.0).clone()
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        let mut census = lock(&self.census.0);
        if let Some(count) = census.get_mut(&self.version) {
            *count -= 1;
            if *count == 0 {
                census.remove(&self.version);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_are_counted_while_they_live() {
        let census = Census::default();
        let [one, other] = [b"one", b"two"].map(|bytes| ContentHash::of(bytes));
        let (first, second) = (census.born(one), census.born(one));
        let third = census.born(other);
        assert_eq!(census.count(), BTreeMap::from([(one, 2), (other, 1)]));
        drop((second, third));
        assert_eq!(census.count(), BTreeMap::from([(one, 1)]));
        drop(first);
        assert!(census.count().is_empty());
    }
}
