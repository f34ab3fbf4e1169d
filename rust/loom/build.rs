//! The models are worthless without loom's atomics, so the flag that selects them cannot be forgotten.

fn main() {
    println!("cargo::rustc-cfg=loom");
    println!("cargo::rerun-if-changed=build.rs");
}
