//! Statistics of the KV tiers, exported on `/metrics` and over OTLP.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use engine::tiers::{Tier, TierStats};
use opentelemetry::KeyValue;
use telemetry::Metrics;

/// The latest statistics of each tier. The engine thread sets them, and a scrape reads them.
#[derive(Clone, Debug, Default)]
pub(crate) struct TierMetrics {
    latest: Arc<Mutex<Vec<LatestTierStats>>>,
}

/// The latest statistics of one tier, and when the engine thread set them.
#[derive(Debug)]
struct LatestTierStats {
    tier: Tier,
    stats: TierStats,
    at: Instant,
}

impl LatestTierStats {
    /// Returns the age of the oldest queued save in seconds; 0 without one. While a disk hangs on
    /// an idle node nothing changes, so the engine thread sets no new statistics, but the save
    /// grows older.
    fn queue_age(&self) -> f64 {
        let age = self.stats.queue_age;
        if age.is_zero() { 0.0 } else { (age + self.at.elapsed()).as_secs_f64() }
    }
}

impl TierMetrics {
    /// Registers the instruments. A block has `block_bytes` bytes.
    pub(crate) fn register(metrics: &Metrics, block_bytes: usize) -> Self {
        let this = Self::default();
        let observe = |name: &str, unit: u64, read: fn(&TierStats) -> u64| {
            let this = this.clone();
            metrics.observe(name, move |instrument| {
                for LatestTierStats { tier, stats, .. } in this.lock().iter() {
                    instrument.observe(read(stats) * unit, &[KeyValue::new("tier", tier.name())]);
                }
            });
        };
        let bytes = block_bytes as u64;
        observe("baton.tier.blocks", 1, |it| it.stored.into());
        observe("baton.tier.slots", 1, |it| it.slots.into());
        observe("baton.tier.saved_bytes", bytes, |it| it.saved);
        observe("baton.tier.loaded_bytes", bytes, |it| it.loaded);
        observe("baton.tier.hits", 1, |it| it.hits);
        observe("baton.tier.saves_dropped", 1, |it| it.dropped);
        observe("baton.tier.saves_cancelled", 1, |it| it.cancelled);
        observe("baton.tier.saves_failed", 1, |it| it.failed);
        observe("baton.tier.damaged", 1, |it| it.damaged);
        observe("baton.tier.loads_refused", 1, |it| it.refused);
        let ages = this.clone();
        metrics.observe_f64("baton.tier.queue_age", move |instrument| {
            for latest in ages.lock().iter() {
                let tier = KeyValue::new("tier", latest.tier.name());
                instrument.observe(latest.queue_age(), &[tier]);
            }
        });
        this
    }

    pub(crate) fn set(&self, tier: Tier, stats: TierStats) {
        let set = LatestTierStats { tier, stats, at: Instant::now() };
        let mut latest = self.lock();
        match latest.iter_mut().find(|before| before.tier == tier) {
            Some(before) => *before = set,
            None => latest.push(set),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<LatestTierStats>> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::testing;

    /// Returns the values of the series with this name and label.
    fn values(text: &str, name: &str, label: &str) -> Vec<f64> {
        let start = format!("{name}{{");
        let lines = text.lines().filter(|line| line.starts_with(&start) && line.contains(label));
        lines.map(|line| line.rsplit_once(' ').unwrap().1.parse().unwrap()).collect()
    }

    const QUEUE_AGE: &str = "baton_tier_queue_age_seconds";

    #[test]
    fn queued_save_grows_older_while_no_statistics_are_set() {
        let telemetry = testing::telemetry();
        let metrics = telemetry.metrics();
        let tiers = TierMetrics::register(&metrics, 1000);
        let age = || values(&metrics.render_prometheus(), QUEUE_AGE, r#"tier="disk""#)[0];
        tiers.set(Tier::Disk, TierStats::default());
        assert_eq!(age(), 0.0, "no save is queued");
        let queue_age = Duration::from_secs(3);
        tiers.set(Tier::Disk, TierStats { queue_age, ..TierStats::default() });
        let (first, deadline) = (age(), Instant::now() + Duration::from_secs(20));
        assert!(first >= 3.0, "{first}");
        while age() <= first {
            assert!(Instant::now() < deadline, "the age stands still");
        }
    }

    #[test]
    fn each_statistic_of_each_tier_has_a_series_of_its_own() {
        let telemetry = testing::telemetry();
        let metrics = telemetry.metrics();
        let tiers = TierMetrics::register(&metrics, 1000);
        let stats = |base: u64| TierStats {
            stored: base as u32 + 1,
            slots: base as u32 + 2,
            saved: base + 3,
            loaded: base + 4,
            hits: base + 10,
            dropped: base + 5,
            cancelled: base + 6,
            failed: base + 7,
            damaged: base + 8,
            refused: base + 9,
            queue_age: Duration::from_secs(base + 10),
            block_time: None,
        };
        tiers.set(Tier::Host, stats(50));
        tiers.set(Tier::Disk, stats(200));
        // Replaces the statistics of this tier only.
        tiers.set(Tier::Host, stats(100));
        let text = metrics.render_prometheus();
        for (label, base) in [(r#"tier="host""#, 100_u32), (r#"tier="disk""#, 200)] {
            for (name, value) in [
                ("baton_tier_blocks", base + 1),
                ("baton_tier_slots", base + 2),
                ("baton_tier_saved_bytes_total", (base + 3) * 1000),
                ("baton_tier_loaded_bytes_total", (base + 4) * 1000),
                ("baton_tier_hits_total", base + 10),
                ("baton_tier_saves_dropped_total", base + 5),
                ("baton_tier_saves_cancelled_total", base + 6),
                ("baton_tier_saves_failed_total", base + 7),
                ("baton_tier_damaged_total", base + 8),
                ("baton_tier_loads_refused_total", base + 9),
            ] {
                assert_eq!(values(&text, name, label), [f64::from(value)], "{name} {label}");
            }
            let [age] = values(&text, QUEUE_AGE, label)[..] else { panic!("no age of {label}") };
            assert!((f64::from(base) + 10.0..f64::from(base) + 100.0).contains(&age), "{age}");
        }
    }
}
