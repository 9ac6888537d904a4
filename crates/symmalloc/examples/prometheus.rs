//! Renders an allocator's statistics in the text format of Prometheus:
//!
//! ```sh
//! cargo run -p symmalloc --features metrics --example prometheus
//! ```
//!
//! A program that serves them installs the exporter with its HTTP listener (`PrometheusBuilder::new().install()`,
//! feature `http-listener`) instead of the local recorder used here, and publishes from a dedicated thread every few
//! seconds.

use metrics_exporter_prometheus::PrometheusBuilder;
use symmalloc::metrics::Publisher;
use symmalloc::sim::SimBackend;
use symmalloc::{Allocator, Config, PoolId};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let allocator = Allocator::new(SimBackend::builder().build(), Config::default())?;
    let stream = allocator.register_stream()?;
    let weights = allocator.allocate(PoolId::DEFAULT, stream, 48 << 20)?;
    let _live = allocator.allocate(PoolId::DEFAULT, stream, 5 << 20)?;
    allocator.free(weights.handle)?;

    let recorder = PrometheusBuilder::new().build_recorder();
    let publisher = Publisher::new().with_label("rank", "0");
    metrics::with_local_recorder(&recorder, || publisher.publish(&allocator));
    println!("{}", recorder.handle().render());
    Ok(())
}
