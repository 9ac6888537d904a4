//! What the [`metrics`] facade is told: names, kinds, units and labels that dashboards may rely on.
//!
//! ```text
//!  Allocator ─┐                        ┌─ Prometheus
//!  Registrar ─┼─ Source ─► Publisher ──┼─ StatsD
//!  your own  ─┘      when told to      └─ whatever else records
//! ```
//!
//! An allocator counts for itself, with or without this crate. A [`Publisher`] reads these counts when the program says so
//! and sets gauges and counters to them, so an allocation costs nothing more than it does without. `docs/metrics.md`
//! lists every metric, and what it tells.
//!
//! # Examples
//! ```
//! use symmalloc_core::{Allocator, Config, PoolId};
//! use symmalloc_metrics::Publisher;
//! use symmalloc_sim::SimBackend;
//!
//! let allocator: Allocator<_> = Allocator::new(SimBackend::builder().build(), Config::default())?;
//! let stream = allocator.register_stream()?;
//! allocator.allocate(PoolId::DEFAULT, stream, 3 << 20)?;
//!
//! let publisher = Publisher::new().with_label("rank", "3");
//! publisher.publish(&allocator); // every few seconds, from any thread that has the allocator
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod memory;

use metrics::{Key, Label, Level, Metadata, SharedString, Unit, with_recorder};

/// Whose numbers can be published.
pub trait Source {
    /// Sets its metrics to what they are now, with the publisher's labels and its own.
    fn publish(&self, to: &Publisher);
}

/// Sets metrics to what sources say, under labels of the program's choice.
///
/// It holds nothing but the labels: whichever recorder is installed when it publishes gets the numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Publisher {
    labels: Vec<Label>,
}

/// A metric: its name is stable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metric {
    name: &'static str,
    kind: MetricKind,
    unit: Option<Unit>,
    help: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MetricKind {
    Gauge,
    Counter,
    Histogram,
}

impl Metric {
    /// A quantity that rises and falls. A ratio has no unit.
    pub const fn gauge(name: &'static str, unit: Option<Unit>, help: &'static str) -> Self {
        Metric { name, kind: MetricKind::Gauge, unit, help }
    }

    /// A number that only rises.
    pub const fn counter(name: &'static str, unit: Option<Unit>, help: &'static str) -> Self {
        Metric { name, kind: MetricKind::Counter, unit, help }
    }

    /// Values of which each counts.
    pub const fn histogram(name: &'static str, unit: Option<Unit>, help: &'static str) -> Self {
        Metric { name, kind: MetricKind::Histogram, unit, help }
    }

    /// Its name.
    pub const fn name(&self) -> &'static str {
        self.name
    }
}

impl Publisher {
    /// A publisher without labels of its own.
    pub fn new() -> Self {
        Publisher::default()
    }

    /// As this one, with one more label on everything.
    #[must_use]
    pub fn with_label(&self, key: impl Into<SharedString>, value: impl Into<SharedString>) -> Self {
        let mut labels = self.labels.clone();
        labels.push(Label::new(key, value));
        Publisher { labels }
    }

    /// Sets the metrics of a source to what they are now.
    pub fn publish(&self, source: &(impl Source + ?Sized)) {
        source.publish(self);
    }

    /// Sets a gauge to a value, brings a counter up to it, or adds it to a histogram.
    pub fn tell(&self, metric: &Metric, value: f64) {
        const METADATA: Metadata<'static> = Metadata::new("symmalloc", Level::INFO, Some(module_path!()));
        let Metric { name, kind, unit, help } = *metric;
        let key = Key::from_parts(name, self.labels.clone());
        with_recorder(|recorder| match kind {
            MetricKind::Gauge => {
                recorder.describe_gauge(name.into(), unit, help.into());
                recorder.register_gauge(&key, &METADATA).set(value);
            }
            MetricKind::Counter => {
                recorder.describe_counter(name.into(), unit, help.into());
                recorder.register_counter(&key, &METADATA).absolute(value as u64);
            }
            MetricKind::Histogram => {
                recorder.describe_histogram(name.into(), unit, help.into());
                recorder.register_histogram(&key, &METADATA).record(value);
            }
        });
    }
}
