//! Makes the stub call its own functions, regardless of other libraries' definitions, as libcuda does.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo::rerun-if-changed=build.rs");
}
