//! Checks that `include/symmalloc.h` matches the output of cbindgen. After a change, run `UPDATE_HEADER=1 cargo test -p symmalloc-torch
//! --test header`.

use std::path::Path;

#[test]
fn the_header_matches_the_sources() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut config = cbindgen::Config::from_file(package.join("cbindgen.toml")).expect("a configuration");
    config.after_includes = Some(format!("\n#define SYMMALLOC_VERSION \"{}\"", env!("CARGO_PKG_VERSION")));
    let sources = [
        "status.rs",
        "guard.rs",
        "device.rs",
        "c_interface/memory.rs",
        "c_interface/runtimes.rs",
        "c_interface/pools.rs",
        "c_interface/sleep.rs",
        "c_interface/dma_buf.rs",
        "c_interface/steps.rs",
        "c_interface/reports.rs",
        "alignment.rs",
        "registrations.rs",
        "c_interface/registrars.rs",
        "c_interface/all_to_all.rs",
        "c_interface/ranks.rs",
        "scopes.rs",
        "pytorch/memory.rs",
        "pytorch/addressed.rs",
        "pytorch/pools.rs",
        "pytorch/scopes.rs",
        "pytorch/settings.rs",
        "pytorch/counts.rs",
        "pytorch/blocks.rs",
        "pytorch/checkpoints.rs",
        "memory_events.rs",
        "pytorch/sharing.rs",
    ];
    let builder = sources.iter().fold(cbindgen::Builder::new().with_config(config), |builder, source| {
        builder.with_src(package.join("src").join(source))
    });
    let mut header = Vec::new();
    builder.generate().expect("sources that cbindgen understands").write(&mut header);
    let header = String::from_utf8(header).expect("text");
    let path = package.join("include/symmalloc.h");
    if std::env::var_os("UPDATE_HEADER").is_some() {
        std::fs::write(&path, &header).expect("the header can be written");
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        kept == header,
        "include/symmalloc.h is stale: UPDATE_HEADER=1 cargo test -p symmalloc-torch --test header"
    );
}
