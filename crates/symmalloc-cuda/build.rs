//! Says why cudarc is about to fail: it has one set of bindings for each version of the CUDA headers, and two of them together
//! define everything twice. Only what was chosen here is known here; other crates may have chosen on cudarc as well.

use std::env;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=CUDARC_CUDA_VERSION");
    let mut chosen: Vec<String> = env::vars()
        .filter_map(|(name, _)| name.strip_prefix("CARGO_FEATURE_CUDA_").map(str::to_owned))
        .filter(|version| version.bytes().all(|byte| byte.is_ascii_digit()))
        .map(|version| format!("the feature cuda-{version}"))
        .collect();
    if let Ok(version) = env::var("CUDARC_CUDA_VERSION") {
        let same = format!("the feature cuda-{version}");
        chosen.retain(|feature| *feature != same);
        chosen.push(format!("CUDARC_CUDA_VERSION={version} in the environment"));
    }
    if chosen.len() > 1 {
        chosen.sort();
        println!(
            "cargo::error=symmalloc-cuda was told {} versions of the CUDA headers, and cudarc compiles with one only: {}. Keep the \
             oldest that the program must run with; `cargo tree -e features -i symmalloc-cuda` says who asked for which",
            chosen.len(),
            chosen.join(", ")
        );
    }
}
