//! Who requests belong to: what an operator says of each tenant, and what the engine makes of it.
//!
//! A *slot* is an attention group's place for a builder: one for everybody, and one for each tenant that has a builder of its
//! own. The rows of a step that one slot serves are its *segment*. This module must never know a builder, a step or a device.

use std::collections::HashMap;

use timetable_attention::Grant;
use timetable_sandbox::{CallLimits, FaultPolicy, TenantName};

use crate::{
    config::EngineError,
    kv::BlockHash,
    output::RequestError,
    scheduler::{Owner, TenantIndex, TenantShare},
};

/// The least and the largest weight of a tenant.
const SHARES: std::ops::RangeInclusive<f64> = 0.001..=1000.0;
/// Tenants at most.
const MAX_TENANTS: usize = 1024;

/// Everybody's slot.
const DEFAULT_SLOT: u32 = 0;

/// One tenant.
#[derive(Clone, Debug, PartialEq)]
pub struct TenantConfig {
    /// As requests name it.
    pub name: TenantName,
    /// Its weight where tenants compete for a step's tokens and rows, and for blocks. Default: 1. What it does not use, others
    /// get.
    pub share: f64,
    /// With a builder of its own. None: the default slot's builder serves it.
    pub slot: Option<SlotConfig>,
}

impl TenantConfig {
    /// Served by the default slot, with weight 1.
    pub fn new(name: TenantName) -> Self {
        Self {
            name,
            share: 1.0,
            slot: None,
        }
    }
}

/// What an operator says of a tenant's own builder. The builder itself comes with the engine's
/// [`Builders`](crate::Builders); the plain one serves until there is one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SlotConfig {
    /// Bounds on its calls; none: the sandbox's. They must not exceed the sandbox's.
    pub limits: Option<CallLimits>,
    /// What it may leave out.
    pub grant: Grant,
    /// What is done about its faults.
    pub policy: FaultPolicy,
    /// Options of the builder's own.
    pub options: Vec<(String, String)>,
}

/// What became of one tenant's requests. Counts since the start, but for `running` and `waiting`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TenantStats {
    /// Whose; none: of nobody in particular.
    pub name: Option<TenantName>,
    /// Requests taken in.
    pub requests: u64,
    /// Requests that ended with an error.
    pub failed_requests: u64,
    /// Steps with at least one row of its own.
    pub steps: u64,
    /// Tokens computed.
    pub tokens_computed: u64,
    /// Tokens sampled.
    pub tokens_sampled: u64,
    /// Requests that hold blocks.
    pub running: usize,
    /// Requests that wait.
    pub waiting: usize,
}

/// The tenants of an engine. The first stands for requests of nobody in particular, and, where no tenant is configured, for
/// every name.
#[derive(Debug)]
pub(crate) struct Tenants {
    index_of: HashMap<TenantName, TenantIndex>,
    shares: Vec<TenantShare>,
    roots: Vec<BlockHash>,
    pub(crate) stats: Vec<TenantStats>,
    /// The step that is counted, and each one's last with a row.
    step: u64,
    last_step: Vec<u64>,
}

impl Tenants {
    pub(crate) fn new(configs: &[TenantConfig], default_share: f64) -> Self {
        let mut tenants = Self {
            index_of: HashMap::with_capacity(configs.len()),
            shares: vec![TenantShare {
                weight: default_share,
                slot: DEFAULT_SLOT,
            }],
            roots: vec![BlockHash::default()],
            stats: vec![TenantStats::default()],
            step: 0,
            last_step: vec![0; configs.len() + 1],
        };
        let mut last_slot = DEFAULT_SLOT;
        for config in configs {
            let index = TenantIndex(tenants.shares.len() as u32);
            tenants.index_of.insert(config.name.clone(), index);
            tenants.roots.push(BlockHash::of_tenant(&config.name));
            last_slot += u32::from(config.slot.is_some());
            tenants.shares.push(TenantShare {
                weight: config.share,
                slot: match config.slot {
                    Some(_) => last_slot,
                    None => DEFAULT_SLOT,
                },
            });
            tenants.stats.push(TenantStats {
                name: Some(config.name.clone()),
                ..TenantStats::default()
            });
        }
        tenants
    }

    /// What the scheduler knows of each.
    pub(crate) fn shares(&self) -> &[TenantShare] {
        &self.shares
    }

    /// Segments that a step can have: each slot's, and again for what it tries. One where nobody is told apart.
    pub(crate) fn max_segments(&self) -> usize {
        let slots = self.shares.iter().map(|share| share.slot as usize + 1);
        match self.index_of.is_empty() {
            true => 1,
            false => 2 * slots.max().unwrap_or(1),
        }
    }

    /// The tenants that are configured.
    pub(crate) fn named(&self) -> impl Iterator<Item = (TenantIndex, &TenantName)> {
        let stats = (0..).map(TenantIndex).zip(&self.stats);
        stats.filter_map(|(index, stats)| Some((index, stats.name.as_ref()?)))
    }

    /// The slot that serves a tenant.
    pub(crate) fn slot(&self, tenant: TenantIndex) -> usize {
        self.shares[tenant.index()].slot as usize
    }

    /// A step has ended: whose rows it had, each with its tokens.
    pub(crate) fn count_step(&mut self, rows: impl Iterator<Item = (TenantIndex, usize)>) {
        self.step += 1;
        for (tenant, num_tokens) in rows {
            let stats = &mut self.stats[tenant.index()];
            stats.tokens_computed += num_tokens as u64;
            let last = &mut self.last_step[tenant.index()];
            stats.steps += u64::from(*last != self.step);
            *last = self.step;
        }
    }

    /// Whose request it is.
    ///
    /// # Errors
    /// A name that is not configured, where any is.
    pub(crate) fn owner(&self, name: Option<&TenantName>) -> Result<Owner, RequestError> {
        let Some(name) = name else {
            return Ok(Owner::default());
        };
        match self.index_of.get(name) {
            Some(&tenant) => Ok(Owner {
                tenant,
                prefix_root: self.roots[tenant.index()],
            }),
            None if self.index_of.is_empty() => Ok(Owner {
                prefix_root: BlockHash::of_tenant(name),
                ..Owner::default()
            }),
            None => {
                let names = self.stats.iter().filter_map(|stats| stats.name.as_ref());
                let known: Vec<&str> = names.map(TenantName::as_str).collect();
                Err(RequestError::UnknownTenant {
                    name: name.clone(),
                    known: known.join(", "),
                })
            }
        }
    }
}

/// What is wrong with the tenants that are configured.
pub(crate) fn check(tenants: &[TenantConfig], default_share: f64) -> Result<(), EngineError> {
    let refuse = |name, value: String, remedy| {
        Err(EngineError::Setting {
            name,
            value,
            remedy,
        })
    };
    if tenants.len() > MAX_TENANTS {
        let remedy = "at most 1024 tenants";
        return refuse("tenants", tenants.len().to_string(), remedy);
    }
    if !SHARES.contains(&default_share) {
        let remedy = "a share is a weight from 0.001 to 1000";
        return refuse("default_share", default_share.to_string(), remedy);
    }
    let mut names: Vec<&str> = tenants.iter().map(|tenant| tenant.name.as_str()).collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        let remedy = "a tenant is configured once; leave the second out";
        return refuse("tenants", pair[0].to_owned(), remedy);
    }
    match tenants
        .iter()
        .find(|tenant| !SHARES.contains(&tenant.share))
    {
        Some(tenant) => {
            let remedy = "a share is a weight from 0.001 to 1000";
            let value = format!("{} of tenant {}", tenant.share, tenant.name);
            refuse("share", value, remedy)
        }
        None => Ok(()),
    }
}
