//! How a step's tokens are dealt among tenants that compete for them: by weight, so that no token is left over while anybody
//! could use it, and so that what rounding or a missed turn takes from one is made up for later.
//!
//! Each tenant has a *level*: the tokens that it was served, over its weight. Dealing raises the lowest levels first, as water
//! rises in a vessel, until the step is full. This module must never know a request or a block.

/// What one tenant could use of a step, and what it gets.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Claim {
    /// Above 0.
    pub weight: f64,
    /// Tokens served over weight, from steps in which it competed.
    pub level: f64,
    /// Tokens that it could use.
    pub demand: usize,
    /// Tokens that it gets.
    pub quota: usize,
}

impl Claim {
    fn below(&self, level: f64) -> f64 {
        ((level - self.level) * self.weight).clamp(0.0, self.demand as f64)
    }
}

/// Sets each claim's quota: in all `budget` tokens, or the demand if that is less. Returns the level up to which everybody was
/// served whose demand reaches it.
pub(super) fn deal(claims: &mut [Claim], budget: usize) -> f64 {
    // Enough halvings for a level that is exact to less than a token.
    const HALVINGS: usize = 60;
    let wanted: usize = claims.iter().map(|claim| claim.demand).sum();
    let budget = budget.min(wanted);
    let competing = || claims.iter().filter(|claim| claim.demand > 0);
    let (mut low, mut high) = competing().fold((f64::MAX, f64::MIN), |(low, high), claim| {
        let end = claim.level + claim.demand as f64 / claim.weight;
        (low.min(claim.level), high.max(end))
    });
    if low > high {
        return 0.0;
    }
    if wanted > budget {
        for _ in 0..HALVINGS {
            let middle = low.midpoint(high);
            let dealt: f64 = claims.iter().map(|claim| claim.below(middle)).sum();
            if dealt > budget as f64 {
                high = middle;
            } else {
                low = middle;
            }
        }
    } else {
        low = high;
    }
    let mut left = budget;
    for claim in &mut *claims {
        claim.quota = (claim.below(low) as usize).min(left);
        left -= claim.quota;
    }
    // Whole tokens for what rounding left, to whoever is lowest.
    while left > 0 {
        let after = |claim: &Claim| claim.level + (claim.quota + 1) as f64 / claim.weight;
        let lowest = claims
            .iter_mut()
            .filter(|claim| claim.quota < claim.demand)
            .min_by(|a, b| after(a).total_cmp(&after(b)));
        let Some(lowest) = lowest else { break };
        lowest.quota += 1;
        left -= 1;
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claims(of: &[(f64, f64, usize)]) -> Vec<Claim> {
        of.iter()
            .map(|&(weight, level, demand)| Claim {
                weight,
                level,
                demand,
                quota: 0,
            })
            .collect()
    }

    fn dealt(of: &[(f64, f64, usize)], budget: usize) -> Vec<usize> {
        let mut claims = claims(of);
        deal(&mut claims, budget);
        claims.iter().map(|claim| claim.quota).collect()
    }

    #[test]
    fn by_weight_and_nothing_is_left_over() {
        assert_eq!(dealt(&[(1.0, 0.0, 100), (3.0, 0.0, 100)], 40), [10, 30]);
        // One wants little: the other gets the rest.
        assert_eq!(dealt(&[(1.0, 0.0, 3), (3.0, 0.0, 100)], 40), [3, 37]);
        assert_eq!(dealt(&[(1.0, 0.0, 0), (3.0, 0.0, 100)], 40), [0, 40]);
        // All is wanted less than there is.
        assert_eq!(dealt(&[(1.0, 5.0, 3), (3.0, 0.0, 7)], 40), [3, 7]);
        // One was left out before: it comes first.
        assert_eq!(dealt(&[(1.0, 0.0, 100), (1.0, 10.0, 100)], 30), [20, 10]);
        assert_eq!(dealt(&[], 8), [0_usize; 0]);
        assert_eq!(dealt(&[(1.0, 0.0, 0)], 8), [0]);
    }

    #[test]
    fn every_token_is_dealt_whatever_the_weights() {
        for (budget, weights) in [(1, [0.001, 1000.0]), (7, [1.0, 3.0]), (4096, [0.3, 0.7])] {
            let claims = [(weights[0], 0.0, 5000), (weights[1], 0.5, 5000)];
            assert_eq!(dealt(&claims, budget).iter().sum::<usize>(), budget);
        }
    }
}
