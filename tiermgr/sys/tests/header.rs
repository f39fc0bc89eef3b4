//! Compares `abi.rs` with the kernel header that is installed here, by a C compiler.
//!
//! A header older than a constant is no contradiction: such a line is left out by the preprocessor, and the
//! formula that is checked at compile time stands for it.

use std::fmt::Write;
use std::path::Path;
use std::process::Command;
use tiermgr_sys::abi;

/// Name in the header, value here. Names that a header may lack are macros, which `#ifdef` sees.
const VALUES: &[(&str, u64)] = &[
    ("UFFD_API", abi::UFFD_API),
    ("USERFAULTFD_IOC_NEW", abi::USERFAULTFD_IOC_NEW as u64),
    ("UFFDIO_API", abi::UFFDIO_API as u64),
    ("UFFDIO_REGISTER", abi::UFFDIO_REGISTER as u64),
    ("UFFDIO_UNREGISTER", abi::UFFDIO_UNREGISTER as u64),
    ("UFFDIO_WAKE", abi::UFFDIO_WAKE as u64),
    ("UFFDIO_COPY", abi::UFFDIO_COPY as u64),
    ("UFFDIO_MOVE", abi::UFFDIO_MOVE as u64),
    ("UFFDIO_WRITEPROTECT", abi::UFFDIO_WRITEPROTECT as u64),
    ("UFFDIO_CONTINUE", abi::UFFDIO_CONTINUE as u64),
    ("UFFDIO_POISON", abi::UFFDIO_POISON as u64),
    ("UFFD_FEATURE_PAGEFAULT_FLAG_WP", abi::FEATURE_PAGEFAULT_FLAG_WP),
    ("UFFD_FEATURE_EVENT_FORK", abi::FEATURE_EVENT_FORK),
    ("UFFD_FEATURE_EVENT_REMAP", abi::FEATURE_EVENT_REMAP),
    ("UFFD_FEATURE_EVENT_REMOVE", abi::FEATURE_EVENT_REMOVE),
    ("UFFD_FEATURE_MISSING_HUGETLBFS", abi::FEATURE_MISSING_HUGETLBFS),
    ("UFFD_FEATURE_MISSING_SHMEM", abi::FEATURE_MISSING_SHMEM),
    ("UFFD_FEATURE_EVENT_UNMAP", abi::FEATURE_EVENT_UNMAP),
    ("UFFD_FEATURE_SIGBUS", abi::FEATURE_SIGBUS),
    ("UFFD_FEATURE_THREAD_ID", abi::FEATURE_THREAD_ID),
    ("UFFD_FEATURE_MINOR_HUGETLBFS", abi::FEATURE_MINOR_HUGETLBFS),
    ("UFFD_FEATURE_MINOR_SHMEM", abi::FEATURE_MINOR_SHMEM),
    ("UFFD_FEATURE_EXACT_ADDRESS", abi::FEATURE_EXACT_ADDRESS),
    ("UFFD_FEATURE_WP_HUGETLBFS_SHMEM", abi::FEATURE_WP_HUGETLBFS_SHMEM),
    ("UFFD_FEATURE_WP_UNPOPULATED", abi::FEATURE_WP_UNPOPULATED),
    ("UFFD_FEATURE_POISON", abi::FEATURE_POISON),
    ("UFFD_FEATURE_WP_ASYNC", abi::FEATURE_WP_ASYNC),
    ("UFFD_FEATURE_MOVE", abi::FEATURE_MOVE),
    ("UFFDIO_REGISTER_MODE_MISSING", abi::REGISTER_MODE_MISSING),
    ("UFFDIO_REGISTER_MODE_WP", abi::REGISTER_MODE_WP),
    ("UFFDIO_REGISTER_MODE_MINOR", abi::REGISTER_MODE_MINOR),
    ("UFFDIO_COPY_MODE_DONTWAKE", abi::COPY_MODE_DONTWAKE),
    ("UFFDIO_COPY_MODE_WP", abi::COPY_MODE_WP),
    ("UFFDIO_MOVE_MODE_ALLOW_SRC_HOLES", abi::MOVE_MODE_ALLOW_SRC_HOLES),
    ("UFFDIO_WRITEPROTECT_MODE_WP", abi::WRITEPROTECT_MODE_WP),
    ("UFFDIO_WRITEPROTECT_MODE_DONTWAKE", abi::WRITEPROTECT_MODE_DONTWAKE),
    ("UFFD_EVENT_PAGEFAULT", abi::EVENT_PAGEFAULT as u64),
    ("UFFD_EVENT_FORK", abi::EVENT_FORK as u64),
    ("UFFD_EVENT_REMAP", abi::EVENT_REMAP as u64),
    ("UFFD_EVENT_REMOVE", abi::EVENT_REMOVE as u64),
    ("UFFD_EVENT_UNMAP", abi::EVENT_UNMAP as u64),
    ("UFFD_PAGEFAULT_FLAG_WRITE", abi::PAGEFAULT_FLAG_WRITE),
    ("UFFD_PAGEFAULT_FLAG_WP", abi::PAGEFAULT_FLAG_WP),
    ("UFFD_PAGEFAULT_FLAG_MINOR", abi::PAGEFAULT_FLAG_MINOR),
];

/// Struct in the header, the macro that says it exists, its size and the offset of a field of it.
const LAYOUTS: &[(&str, &str, usize, &str, usize)] = &[
    ("uffdio_api", "UFFDIO_API", size_of::<abi::UffdioApi>(), "ioctls", 16),
    ("uffdio_range", "UFFDIO_WAKE", size_of::<abi::UffdioRange>(), "len", 8),
    ("uffdio_register", "UFFDIO_REGISTER", size_of::<abi::UffdioRegister>(), "mode", 16),
    ("uffdio_copy", "UFFDIO_COPY", size_of::<abi::UffdioCopy>(), "copy", 32),
    ("uffdio_move", "UFFDIO_MOVE", size_of::<abi::UffdioMove>(), "move", 32),
    (
        "uffdio_writeprotect",
        "UFFDIO_WRITEPROTECT",
        size_of::<abi::UffdioWriteprotect>(),
        "mode",
        16,
    ),
    ("uffdio_continue", "UFFDIO_CONTINUE", size_of::<abi::UffdioContinue>(), "mapped", 24),
    ("uffdio_poison", "UFFDIO_POISON", size_of::<abi::UffdioPoison>(), "updated", 24),
    ("uffd_msg", "UFFD_API", abi::MSG_BYTES, "arg.pagefault.address", 16),
    ("uffd_msg", "UFFD_API", abi::MSG_BYTES, "arg.fork.ufd", 8),
    ("uffd_msg", "UFFD_API", abi::MSG_BYTES, "arg.remap.len", 24),
    ("uffd_msg", "UFFD_API", abi::MSG_BYTES, "arg.remove.end", 16),
];

fn skip(reason: &str) {
    eprintln!("skipped: {reason}");
    assert!(std::env::var_os("TIERMGR_CI_STRICT").is_none(), "{reason}");
}

#[test]
fn the_installed_header_says_the_same() {
    if !Path::new("/usr/include/linux/userfaultfd.h").exists() {
        return skip("no kernel headers (linux-libc-dev)");
    }
    let mut source = String::from(
        "#include <linux/userfaultfd.h>\n#include <stddef.h>\n#include <sys/ioctl.h>\n",
    );
    for (name, value) in VALUES {
        writeln!(
            source,
            "#ifdef {name}\n_Static_assert((unsigned long long)({name}) == {value}ull, \"{name}\");\n#endif"
        )
        .expect("to a string");
    }
    for (name, macro_name, size, field, offset) in LAYOUTS {
        writeln!(
            source,
            "#ifdef {macro_name}\n\
             _Static_assert(sizeof(struct {name}) == {size}, \"size of {name}\");\n\
             _Static_assert(offsetof(struct {name}, {field}) == {offset}, \"{name}.{field}\");\n#endif"
        )
        .expect("to a string");
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let file = folder.join(format!("userfaultfd-{}.c", std::process::id()));
    std::fs::write(&file, source).expect("write");
    let compiler = std::env::var("CC").unwrap_or_else(|_unset| "cc".to_owned());
    let output = Command::new(&compiler).args(["-std=c11", "-fsyntax-only"]).arg(&file).output();
    std::fs::remove_file(&file).expect("clean");
    match output {
        Err(error) => skip(&format!("no C compiler `{compiler}`: {error}")),
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
    }
}
