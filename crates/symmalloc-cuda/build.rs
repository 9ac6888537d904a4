//! Explains a build failure of cudarc before it happens: cudarc has one set of bindings for each version of the CUDA headers, and enabling
//! two sets defines everything twice. This script only knows the features of this crate; other crates may enable features of cudarc
//! directly.

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
            "cargo::error={} versions of the CUDA headers are selected for symmalloc-cuda, but cudarc supports only one: {}. Keep the \
             oldest that the program must support; `cargo tree -e features -i symmalloc-cuda` shows which crate enables which",
            chosen.len(),
            chosen.join(", ")
        );
    }
}
