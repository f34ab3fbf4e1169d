//! Compiles libzmq into the library.

fn main() {
    // Its sources are part of the crate that compiles them.
    println!("cargo:rerun-if-changed=build.rs");
    // Clippy links nothing, and would compile libzmq again.
    let wrapper = std::env::var("RUSTC_WORKSPACE_WRAPPER").unwrap_or_default();
    if !wrapper.contains("clippy") {
        zeromq_src::Build::new().build();
    }
}
