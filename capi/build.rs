//! Compiles libzmq into the library.

fn main() {
    // Its sources come with the crate that compiles them, and change with that only.
    println!("cargo:rerun-if-changed=build.rs");
    zeromq_src::Build::new().build();
}
