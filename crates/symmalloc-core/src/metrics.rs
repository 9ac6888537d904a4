//! Publication of allocator statistics through the [`metrics`] facade, with stable names, kinds, units and labels that
//! dashboards can rely on.
//!
//! ```text
//!  Allocator ──┐                        ┌─ Prometheus
//!  Registrar ──┼─ Source ─► Publisher ──┼─ StatsD
//!  your source ┘       on request       └─ any other recorder
//! ```
//!
//! Requires the feature `metrics`. An allocator maintains its statistics with or without this feature. When the program
//! requests it, a [`Publisher`] reads the statistics and updates gauges and counters, so publishing adds no cost to an
//! allocation. `docs/events.md` describes every metric.
//!
//! # Examples
//! ```
//! use symmalloc::metrics::Publisher;
//! use symmalloc::{Allocator, Config, PoolId};
//! use symmalloc::sim::SimBackend;
//!
//! let allocator = Allocator::new(SimBackend::builder().build(), Config::default())?;
//! let stream = allocator.register_stream()?;
//! allocator.allocate(PoolId::DEFAULT, stream, 3 << 20)?;
//!
//! let publisher = Publisher::new().with_label("rank", "3");
//! publisher.publish(&allocator); // call it every few seconds, from any thread that can use the allocator
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod memory;

use ::metrics::{Key, Label, Level, Metadata, SharedString, Unit, with_recorder};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A source of metrics that can be published.
pub trait Source {
    /// Updates the metrics of this source with the publisher's labels and the source's additional labels.
    fn publish(&self, to: &Publisher);
}

/// A publisher of metrics under labels chosen by the program.
///
/// It stores its own labels and those of the heaps that it published. The values go to the recorder that is installed
/// at the time of publication.
#[derive(Clone, Debug, Default)]
pub struct Publisher {
    labels: Vec<Label>,
    /// The pool of each heap that was published, by the heap's labels. The heap's gauges are set to zero once the pool
    /// is destroyed.
    heaps: Arc<Mutex<BTreeMap<Vec<Label>, u32>>>,
}

impl PartialEq for Publisher {
    fn eq(&self, other: &Self) -> bool {
        self.labels == other.labels
    }
}

impl Eq for Publisher {}

/// A metric. Its name is stable.
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
    /// Creates a metric whose value rises and falls. A ratio has no unit.
    pub const fn gauge(name: &'static str, unit: Option<Unit>, help: &'static str) -> Self {
        Metric { name, kind: MetricKind::Gauge, unit, help }
    }

    /// Creates a metric whose value only rises.
    pub const fn counter(name: &'static str, unit: Option<Unit>, help: &'static str) -> Self {
        Metric { name, kind: MetricKind::Counter, unit, help }
    }

    /// Creates a metric that records the distribution of individual values.
    pub const fn histogram(name: &'static str, unit: Option<Unit>, help: &'static str) -> Self {
        Metric { name, kind: MetricKind::Histogram, unit, help }
    }

    /// Returns the name of the metric.
    pub const fn name(&self) -> &'static str {
        self.name
    }
}

impl Publisher {
    /// Creates a publisher without labels.
    pub fn new() -> Self {
        Publisher::default()
    }

    /// Returns a copy of this publisher with an additional label on all metrics.
    #[must_use]
    pub fn with_label(&self, key: impl Into<SharedString>, value: impl Into<SharedString>) -> Self {
        let mut labels = self.labels.clone();
        labels.push(Label::new(key, value));
        Publisher { labels, heaps: Arc::clone(&self.heaps) }
    }

    /// Updates the metrics of a source.
    pub fn publish(&self, source: &(impl Source + ?Sized)) {
        source.publish(self);
    }

    /// Records that a heap of this pool is published under the labels of `heap`.
    fn note_heap(&self, heap: &Publisher, pool: u32) {
        lock(&self.heaps).entry(heap.labels.clone()).or_insert(pool);
    }

    /// Removes and returns the heaps that were published under these labels and whose pools no longer exist.
    fn take_gone(&self, is_gone: impl Fn(u32) -> bool) -> Vec<Publisher> {
        let mut heaps = lock(&self.heaps);
        let gone = heaps.iter().filter(|(labels, pool)| labels.starts_with(&self.labels) && is_gone(**pool));
        let gone: Vec<Vec<Label>> = gone.map(|(labels, _)| labels.clone()).collect();
        heaps.retain(|labels, _| !gone.contains(labels));
        gone.into_iter().map(|labels| Publisher { labels, heaps: Arc::clone(&self.heaps) }).collect()
    }

    /// Sets a gauge to `value`, raises a counter to it, or records it in a histogram.
    pub fn record(&self, metric: &Metric, value: f64) {
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
