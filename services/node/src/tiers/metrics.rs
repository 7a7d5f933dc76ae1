//! Statistics of the KV tiers, exported on `/metrics` and over OTLP.

use std::sync::{Arc, Mutex, PoisonError};

use engine::tiers::{Tier, TierStats};
use opentelemetry::{
    KeyValue,
    metrics::{AsyncInstrument, Meter},
};

/// The latest statistics of each tier. The engine thread sets them, and a scrape reads them.
#[derive(Clone, Debug, Default)]
pub(crate) struct TierMetrics {
    latest: Arc<Mutex<Vec<(Tier, TierStats)>>>,
}

impl TierMetrics {
    /// Registers the instruments. A block has `block_bytes` bytes.
    pub fn register(meter: &Meter, block_bytes: usize) -> Self {
        let this = Self::default();
        type Read = fn(&TierStats) -> u64;
        let observe = |unit: u64, read: Read| {
            let this = this.clone();
            move |instrument: &dyn AsyncInstrument<u64>| {
                for (tier, stats) in this.lock().iter() {
                    instrument.observe(read(stats) * unit, &[KeyValue::new("tier", tier.name())]);
                }
            }
        };
        let counter = |name: &'static str, description: &'static str, unit: u64, read: Read| {
            let counter = meter.u64_observable_counter(name).with_description(description);
            counter.with_callback(observe(unit, read)).build();
        };
        let gauge = |name: &'static str, description: &'static str, unit: u64, read: Read| {
            let gauge = meter.u64_observable_gauge(name).with_description(description);
            gauge.with_callback(observe(unit, read)).build();
        };
        let bytes = block_bytes as u64;
        gauge("baton.tier.blocks", "KV blocks that a tier holds, by tier", 1, |it| {
            it.stored.into()
        });
        gauge("baton.tier.slots", "KV blocks that fit into a tier, by tier", 1, |it| {
            it.slots.into()
        });
        counter("baton.tier.saved_bytes", "KV bytes saved, by tier", bytes, |it| it.saved);
        counter("baton.tier.loaded_bytes", "KV bytes loaded, by tier", bytes, |it| it.loaded);
        counter("baton.tier.hits", "KV blocks loaded instead of computed, by tier", 1, |it| {
            it.loaded
        });
        let dropped = "Saves dropped because the queue was full or every slot was in use, by tier";
        counter("baton.tier.saves_dropped", dropped, 1, |it| it.dropped);
        let cancelled = "Queued saves whose block was evicted before its copy, by tier";
        counter("baton.tier.saves_cancelled", cancelled, 1, |it| it.cancelled);
        counter("baton.tier.saves_failed", "Saves that failed, by tier", 1, |it| it.failed);
        let damaged = "KV blocks found damaged or missing by a load, by tier";
        counter("baton.tier.damaged", damaged, 1, |it| it.damaged);
        let refused = "KV blocks computed because loading was predicted to be slower, by tier";
        counter("baton.tier.loads_refused", refused, 1, |it| it.refused);
        let ages = this.clone();
        let age = meter.f64_observable_gauge("baton.tier.queue_age").with_unit("s");
        age.with_description("Age of the oldest queued save, by tier")
            .with_callback(move |instrument| {
                for (tier, stats) in ages.lock().iter() {
                    let tier = KeyValue::new("tier", tier.name());
                    instrument.observe(stats.queue_age.as_secs_f64(), &[tier]);
                }
            })
            .build();
        this
    }

    pub fn set(&self, tier: Tier, stats: TierStats) {
        let mut latest = self.lock();
        match latest.iter_mut().find(|(other, _)| *other == tier) {
            Some((_, before)) => *before = stats,
            None => latest.push((tier, stats)),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<(Tier, TierStats)>> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
