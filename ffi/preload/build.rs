//! Passes a script to the linker, which explains itself, and has the library stay for as long as the process lives:
//! what it made (blocks, the helper, jemalloc's threads' data) outlives every `dlclose`.

fn main() {
    println!("cargo::rerun-if-changed=lazy_jemalloc.ld");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-T,{}/lazy_jemalloc.ld", env!("CARGO_MANIFEST_DIR"));
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
