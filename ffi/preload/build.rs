//! Passes to the linker a script, which explains itself; that what jemalloc and Rust's library call `mmap` is not the
//! function of that name which this library exports (`vm`); that jemalloc's locks are counted (`held_locks`); and that
//! the library stays for as long as the process lives: what it made (blocks, the helper, jemalloc's threads' data)
//! outlives every `dlclose`.

fn main() {
    println!("cargo::rerun-if-changed=lazy_jemalloc.ld");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-T,{}/lazy_jemalloc.ld", env!("CARGO_MANIFEST_DIR"));
    println!("cargo::rustc-cdylib-link-arg=-Wl,--wrap=mmap,--wrap=mmap64");
    println!(
        "cargo::rustc-cdylib-link-arg=-Wl,--wrap=pthread_mutex_lock,--wrap=pthread_mutex_trylock,\
         --wrap=pthread_mutex_unlock"
    );
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
