//! The functions behind ours. Each gives what it returns, or its errno.

use crate::errno;
use crate::libc_next;
use std::ffi::{CStr, c_int, c_long, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};
use syscalls::{Sysno, raw};

/// An errno.
pub(super) type Errno = c_int;

struct Symbol {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Symbol {
    const fn new(name: &'static CStr) -> Self {
        Self { name, found: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Null while the dynamic linker is still being asked: then nobody but the kernel is behind us.
    fn get(&self) -> *mut c_void {
        let found = self.found.load(Ordering::Acquire);
        if found.is_null() && libc_next::next().is_some() {
            return self.found.load(Ordering::Acquire);
        }
        found
    }
}

/// Looks all of them up, together with malloc's.
pub(crate) fn look_up(symbol: impl Fn(&CStr) -> *mut c_void) {
    for wanted in SYMBOLS {
        wanted.found.store(symbol(wanted.name), Ordering::Release);
    }
}

/// What a C function returns where it fails: -1, as a number or as a pointer.
trait Returned: Copy {
    fn value(self) -> Option<usize>;
}

impl Returned for c_int {
    fn value(self) -> Option<usize> {
        usize::try_from(self).ok()
    }
}

impl Returned for isize {
    fn value(self) -> Option<usize> {
        (self != -1).then_some(self.cast_unsigned())
    }
}

fn outcome(returned: impl Returned) -> Result<usize, Errno> {
    returned.value().ok_or_else(errno::get)
}

/// What the kernel itself returned.
fn of_kernel(returned: usize) -> Result<usize, Errno> {
    match returned.cast_signed() {
        error @ -4095..=-1 => Err(c_int::try_from(-error).unwrap_or(libc::EINVAL)),
        _ => Ok(returned),
    }
}

fn register(value: c_int) -> usize {
    (value as isize).cast_unsigned()
}

macro_rules! native {
    ($($name:ident($($argument:ident: $type:ty),*) is $function:ty, $symbol:ident = $text:literal,
       $raw:ident($number:ident $(, $in_register:expr)*);)*) => {
        $(static $symbol: Symbol = Symbol::new($text);)*
        static SYMBOLS: &[&Symbol] = &[$(&$symbol,)* &SYSCALL];

        $(
            /// # Safety
            /// That of the system call: whoever uses the range must be ready for what becomes of it.
            pub(super) unsafe fn $name($($argument: $type),*) -> Result<usize, Errno> {
                let next = $symbol.get();
                if next.is_null() {
                    // SAFETY: the arguments are those of this system call; by contract.
                    return of_kernel(unsafe { raw::$raw(Sysno::$number as usize $(, $in_register)*) });
                }
                // SAFETY: `look_up` found the C function of that name, whose type this is.
                let next = unsafe { std::mem::transmute::<*mut c_void, $function>(next) };
                // SAFETY: by contract.
                outcome(unsafe { next($($argument),*) })
            }
        )*
    };
}

native! {
    madvise(address: usize, bytes: usize, advice: c_int)
        is unsafe extern "C" fn(usize, usize, c_int) -> c_int, MADVISE = c"madvise",
        syscall3(madvise, address, bytes, register(advice));
    munmap(address: usize, bytes: usize)
        is unsafe extern "C" fn(usize, usize) -> c_int, MUNMAP = c"munmap",
        syscall2(munmap, address, bytes);
    mremap(address: usize, bytes: usize, new_bytes: usize, flags: c_int, to: usize)
        is unsafe extern "C" fn(usize, usize, usize, c_int, ...) -> isize, MREMAP = c"mremap",
        syscall5(mremap, address, bytes, new_bytes, register(flags), to);
    mmap(address: usize, bytes: usize, access: c_int, flags: c_int, fd: c_int, offset: usize)
        is unsafe extern "C" fn(usize, usize, c_int, c_int, c_int, usize) -> isize, MMAP = c"mmap",
        syscall6(mmap, address, bytes, register(access), register(flags), register(fd), offset);
    mprotect(address: usize, bytes: usize, access: c_int)
        is unsafe extern "C" fn(usize, usize, c_int) -> c_int, MPROTECT = c"mprotect",
        syscall3(mprotect, address, bytes, register(access));
    pkey_mprotect(address: usize, bytes: usize, access: c_int, key: c_int)
        is unsafe extern "C" fn(usize, usize, c_int, c_int) -> c_int, PKEY_MPROTECT = c"pkey_mprotect",
        syscall4(pkey_mprotect, address, bytes, register(access), register(key));
    mlock(address: usize, bytes: usize)
        is unsafe extern "C" fn(usize, usize) -> c_int, MLOCK = c"mlock",
        syscall2(mlock, address, bytes);
    mlock2(address: usize, bytes: usize, flags: c_int)
        is unsafe extern "C" fn(usize, usize, c_int) -> c_int, MLOCK2 = c"mlock2",
        syscall3(mlock2, address, bytes, register(flags));
    mlockall(flags: c_int)
        is unsafe extern "C" fn(c_int) -> c_int, MLOCKALL = c"mlockall",
        syscall1(mlockall, register(flags));
    munlockall()
        is unsafe extern "C" fn() -> c_int, MUNLOCKALL = c"munlockall",
        syscall0(munlockall);
    munlock(address: usize, bytes: usize)
        is unsafe extern "C" fn(usize, usize) -> c_int, MUNLOCK = c"munlock",
        syscall2(munlock, address, bytes);
}

static SYSCALL: Symbol = Symbol::new(c"syscall");

type Arguments = [usize; 6];

/// Any system call, as libc's `syscall` makes it.
///
/// # Safety
/// That of the system call.
pub(super) unsafe fn syscall(number: c_long, [a, b, c, d, e, f]: Arguments) -> c_long {
    let next = SYSCALL.get();
    if !next.is_null() {
        type Syscall = unsafe extern "C" fn(c_long, ...) -> c_long;
        // SAFETY: `look_up` found libc's `syscall`, whose type this is.
        let next = unsafe { std::mem::transmute::<*mut c_void, Syscall>(next) };
        // SAFETY: by contract. It takes six arguments from their registers whatever the number is.
        return unsafe { next(number, a, b, c, d, e, f) };
    }
    let number = isize::try_from(number).unwrap_or(-1).cast_unsigned();
    // SAFETY: by contract.
    match of_kernel(unsafe { raw::syscall6(number, a, b, c, d, e, f) }) {
        Ok(value) => value.cast_signed() as c_long,
        Err(why) => {
            errno::set(why);
            -1
        }
    }
}
