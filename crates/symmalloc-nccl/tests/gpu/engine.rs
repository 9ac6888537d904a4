//! `examples/inference_engine` as a test: every token equals the reference's, and nothing is mapped or registered after the warm-up.

use crate::job::devices;
use symmalloc_cuda::CudaDevice;

#[allow(dead_code, reason = "the example's main is not called")]
#[path = "../../examples/inference_engine/main.rs"]
mod inference_engine;

fn run(ranks: u32) {
    let options =
        inference_engine::Options { ranks: Some(ranks), requests: 200, rounds: 1, threads: true, ..Default::default() };
    let reports = inference_engine::run(&options).expect("all ranks should finish");
    print!("{}", inference_engine::Table(&reports));
    assert!(reports.iter().all(inference_engine::Report::is_right));
}

#[test]
fn the_inference_engine_is_correct_on_one_device() {
    if let Err(error) = CudaDevice::new(0) {
        println!("skipped: {error}");
        return;
    }
    run(1);
}

#[test]
fn the_inference_engine_is_correct_on_several_devices() {
    let count = devices().unwrap_or(0);
    [2, 4, 8].into_iter().filter(|ranks| *ranks <= count).for_each(run);
}
