//! As libcuda does, the stub calls its own functions whatever other libraries define.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo::rerun-if-changed=build.rs");
}
