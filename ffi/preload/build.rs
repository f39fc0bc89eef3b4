//! Passes a script to the linker, which explains itself.

fn main() {
    println!("cargo::rerun-if-changed=lazy_jemalloc.ld");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-T,{}/lazy_jemalloc.ld", env!("CARGO_MANIFEST_DIR"));
}
