//! Compiles libzmq into the library.

fn main() {
    // Its sources come with the crate that compiles them, and change with that only.
    println!("cargo:rerun-if-changed=build.rs");
    // Clippy links nothing, and would compile libzmq once more.
    let wrapper = std::env::var("RUSTC_WORKSPACE_WRAPPER").unwrap_or_default();
    if !wrapper.contains("clippy") {
        zeromq_src::Build::new().build();
    }
}
