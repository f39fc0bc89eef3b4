//! The exported C functions: check arguments, convert, call. The contract of each is in
//! `include/tiermgr.h`.

use crate::client::{Client, Region};
use crate::link::{self, Config};
use crate::preloaded::Preloaded;
use crate::space;
use crate::status::{self, Error, Result, Status};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use tiermgr_wire::hello::Class;
use tiermgr_wire::request::Kind;

const OK: c_int = 0;
/// Longest name that lists show.
const NAME_BYTES_MAX: usize = 64;

/// `tiermgr_client_options`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ClientOptions {
    size: u32,
    class: u32,
    socket: *const c_char,
    name: *const c_char,
}

/// `tiermgr_region_options`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RegionOptions {
    size: u32,
    backing: u32,
    class: u32,
    kind: u32,
    name: *const c_char,
}

/// `tiermgr_residency`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Residency {
    size: u32,
    reserved: u32,
    resident_bytes: u64,
    parked_bytes: u64,
    absent_bytes: u64,
    unarmed_bytes: u64,
    poisoned_bytes: u64,
}

/// `tiermgr_statistics`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Statistics {
    size: u32,
    reserved: u32,
    faults: u64,
    recalled_pages: u64,
    prefetched_pages: u64,
    zeroed_pages: u64,
    rescued_pages: u64,
    parked_pages: u64,
    parked_clean_pages: u64,
    store_written_bytes: u64,
    store_read_bytes: u64,
    store_errors: u64,
    poisoned_pages: u64,
    forks: u64,
    dram_now_bytes: u64,
    limbo_now_bytes: u64,
    credit_now_bytes: u64,
    parked_now_bytes: u64,
    budget_now_bytes: u64,
    pinned_now_bytes: u64,
}

/// Structs of the header: they begin with their size, and zero is the default of each member.
///
/// # Safety
/// `repr(C)`, of integers and pointers only, the first member a `u32` that holds the size.
unsafe trait Sized32: Copy {}

// SAFETY: as the definitions above show.
unsafe impl Sized32 for ClientOptions {}
// SAFETY: as above.
unsafe impl Sized32 for RegionOptions {}
// SAFETY: as above.
unsafe impl Sized32 for Residency {}
// SAFETY: as above.
unsafe impl Sized32 for Statistics {}

/// Runs a call: no panic crosses into C, and an error is kept for `tiermgr_last_error`.
fn call(body: impl FnOnce() -> Result<()>) -> c_int {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => OK,
        Ok(Err(error)) => status::record(&error),
        Err(_) => status::record(&Error::new(
            Status::Internal,
            "the library found a defect in itself; standard error says where",
        )),
    }
}

fn null(what: &'static str) -> Error {
    Error::new(Status::InvalidArgument, what)
}

/// Reads options of a program that may have been compiled against an older or newer header.
///
/// # Safety
/// `from` is null, or points to as many bytes as its first member says.
unsafe fn read_options<T: Sized32>(from: *const T) -> Result<T> {
    // SAFETY: zero bytes are a value of every `Sized32`.
    let mut options: T = unsafe { std::mem::zeroed() };
    if from.is_null() {
        return Ok(options);
    }
    // SAFETY: the first member is there, by contract.
    let size = unsafe { from.cast::<u32>().read_unaligned() } as usize;
    if size < size_of::<u32>() {
        return Err(null("the size member of the options is not set"));
    }
    let known = size.min(size_of::<T>());
    let to = (&raw mut options).cast::<u8>();
    // SAFETY: both sides have `known` bytes: the caller's by its own word, ours by their type.
    unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), to, known) };
    for offset in known..size {
        // SAFETY: inside what the caller says is there.
        let at = unsafe { from.cast::<u8>().add(offset) };
        // SAFETY: as above; any byte is a `u8`.
        let byte = unsafe { at.read() };
        if byte != 0 {
            return Err(Error::new(
                Status::Unsupported,
                "the options ask for something that this version of the library does not know",
            ));
        }
    }
    Ok(options)
}

/// Writes a result for a program that may know fewer members of it. `value.size` is set.
///
/// # Safety
/// `to` points to as many writable bytes as its first member says.
unsafe fn write_sized<T: Sized32>(to: *mut T, value: &T) -> Result<()> {
    if to.is_null() {
        return Err(null("the result pointer is NULL"));
    }
    // SAFETY: the first member is there, by contract.
    let size = unsafe { to.cast::<u32>().read_unaligned() } as usize;
    if size < 2 * size_of::<u32>() {
        return Err(null("the size member of the result is not set"));
    }
    let header = size_of::<u32>();
    let known = size.min(size_of::<T>()) - header;
    // SAFETY: `header` lies inside `T`.
    let from = unsafe { (&raw const *value).cast::<u8>().add(header) };
    // SAFETY: `header` lies inside what the caller says is there.
    let to = unsafe { to.cast::<u8>().add(header) };
    // SAFETY: both sides have `known` bytes, and the caller's are not ours.
    unsafe { std::ptr::copy_nonoverlapping(from, to, known) };
    Ok(())
}

/// # Safety
/// `text` is null or ends with a zero byte.
unsafe fn text(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: by contract.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

fn shortened(mut name: String) -> String {
    name.truncate(status::cut(&name, NAME_BYTES_MAX));
    name
}

fn class_of(number: u32) -> Result<Option<Class>> {
    match number {
        0 => Ok(None),
        1 => Ok(Some(Class::Latency)),
        2 => Ok(Some(Class::Standard)),
        3 => Ok(Some(Class::Bulk)),
        _ => Err(null("no such tiermgr_class")),
    }
}

/// # Safety
/// `client` is null or came from `tiermgr_connect` and was not disconnected.
unsafe fn client_of<'a>(client: *const Client) -> Result<&'a Client> {
    // SAFETY: by contract.
    unsafe { client.as_ref() }.ok_or(null("the client is NULL"))
}

fn range_of(address: *const c_void, bytes: usize) -> Result<(usize, usize)> {
    let start = address as usize;
    let page = space::page_bytes();
    if bytes == 0 || start.checked_add(bytes).is_none() {
        return Err(null("the range is empty or goes beyond the last address"));
    }
    if !start.is_multiple_of(page) || !bytes.is_multiple_of(page) {
        return Err(null("address and length must be multiples of tiermgr_page_size()"));
    }
    Ok((start, bytes))
}

/// A short fixed name.
#[unsafe(no_mangle)]
pub extern "C" fn tiermgr_status_name(status: c_int) -> *const c_char {
    let known = Status::NAMES.iter().find(|(known, _)| known.code() == status);
    match (status, known) {
        (OK, _) => c"OK".as_ptr(),
        (_, Some((_, name))) => name.as_ptr(),
        (_, None) => c"UNKNOWN".as_ptr(),
    }
}

/// The message of this thread's last failure.
#[unsafe(no_mangle)]
pub extern "C" fn tiermgr_last_error() -> *const c_char {
    status::last_error()
}

/// The version.
#[unsafe(no_mangle)]
pub extern "C" fn tiermgr_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Bytes of a page.
#[unsafe(no_mangle)]
pub extern "C" fn tiermgr_page_size() -> usize {
    space::page_bytes()
}

/// Connects.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tiermgr_connect(
    options: *const ClientOptions,
    client_out: *mut *mut Client,
) -> c_int {
    call(|| {
        if client_out.is_null() {
            return Err(null("the result pointer is NULL"));
        }
        // SAFETY: by contract.
        let options = unsafe { read_options(options) }?;
        // SAFETY: by contract.
        let socket = unsafe { text(options.socket) }.map(PathBuf::from);
        // SAFETY: by contract.
        let name = unsafe { text(options.name) };
        let config = Config {
            socket: socket.unwrap_or_else(link::usual_socket),
            name: shortened(name.unwrap_or_else(link::program_name)),
            class: class_of(options.class)?.unwrap_or_default(),
            extents: false,
        };
        let client = Client::connect(config)?;
        // SAFETY: not null, and writable by contract.
        unsafe { client_out.write(Box::into_raw(client)) };
        Ok(())
    })
}

/// Disconnects.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tiermgr_disconnect(client: *mut Client) -> c_int {
    call(|| {
        if client.is_null() {
            return Ok(());
        }
        // SAFETY: it came from `Box::into_raw` in `tiermgr_connect`, and the caller gives it up.
        unsafe { Box::from_raw(client) }.disconnect()
    })
}

/// Makes a region.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tiermgr_region_create(
    client: *mut Client,
    bytes: usize,
    options: *const RegionOptions,
    region_out: *mut *const Region,
) -> c_int {
    call(|| {
        // SAFETY: by contract.
        let client = unsafe { client_of(client) }?;
        if region_out.is_null() {
            return Err(null("the result pointer is NULL"));
        }
        // SAFETY: by contract.
        let options = unsafe { read_options(options) }?;
        match options.backing {
            0 | 1 => {}
            2 => {
                return Err(Error::new(
                    Status::Unsupported,
                    "shared backing is not in this version",
                ));
            }
            _ => return Err(null("no such tiermgr_backing")),
        }
        if class_of(options.class)?.is_some_and(|class| class != client.class()) {
            return Err(Error::new(
                Status::Unsupported,
                "a region has the class of its client; connect a second client for another class",
            ));
        }
        let kind = match options.kind {
            0 => Kind::Heap,
            1 => Kind::Weights,
            2 => Kind::Kv,
            3 => Kind::Activation,
            _ => return Err(null("no such tiermgr_kind")),
        };
        // SAFETY: by contract.
        let name = shortened(unsafe { text(options.name) }.unwrap_or_default());
        let region = client.create_region(bytes, kind, &name)?;
        // SAFETY: not null, and writable by contract.
        unsafe { region_out.write(region) };
        Ok(())
    })
}

/// Frees a region.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tiermgr_region_destroy(region: *const Region) -> c_int {
    call(|| {
        if region.is_null() {
            return Ok(());
        }
        // SAFETY: a live region of a live client, by contract.
        let client = unsafe { (*region).client() };
        // SAFETY: clients outlive their regions.
        unsafe { client_of(client) }?.destroy_region(region)
    })
}

/// First byte of a region.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tiermgr_region_address(region: *const Region) -> *mut c_void {
    // SAFETY: a live region, by contract.
    unsafe { region.as_ref() }.map_or(std::ptr::null_mut(), |region| region.start() as *mut c_void)
}

/// Length of a region.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tiermgr_region_bytes(region: *const Region) -> usize {
    // SAFETY: a live region, by contract.
    unsafe { region.as_ref() }.map_or(0, Region::bytes)
}

/// # Safety
/// As the header says for `tiermgr_alloc`.
unsafe fn allocate(
    client: *mut Client,
    bytes: usize,
    alignment: usize,
    zeroed: bool,
    address_out: *mut *mut c_void,
) -> Result<()> {
    // SAFETY: by contract.
    let client = unsafe { client_of(client) }?;
    if address_out.is_null() {
        return Err(null("the result pointer is NULL"));
    }
    if bytes == 0 {
        return Err(null("an allocation needs at least one byte"));
    }
    let block = client.allocate(bytes, alignment.max(1))?;
    let address = block.address as *mut c_void;
    if zeroed && !block.is_zero {
        // SAFETY: the block is new, ours, and at least `bytes` long.
        unsafe { address.cast::<u8>().write_bytes(0, bytes) };
    }
    // SAFETY: not null, and writable by contract.
    unsafe { address_out.write(address) };
    Ok(())
}

/// Allocates.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tiermgr_alloc(
    client: *mut Client,
    bytes: usize,
    alignment: usize,
    address_out: *mut *mut c_void,
) -> c_int {
    // SAFETY: by contract.
    call(|| unsafe { allocate(client, bytes, alignment, false, address_out) })
}

/// Allocates zeros.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tiermgr_alloc_zeroed(
    client: *mut Client,
    bytes: usize,
    alignment: usize,
    address_out: *mut *mut c_void,
) -> c_int {
    // SAFETY: by contract.
    call(|| unsafe { allocate(client, bytes, alignment, true, address_out) })
}

/// Frees an allocation.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tiermgr_free(client: *mut Client, address: *mut c_void) -> c_int {
    call(|| {
        // SAFETY: by contract.
        let client = unsafe { client_of(client) }?;
        if address.is_null() {
            return Ok(());
        }
        client
            .free(address as usize)
            .map_err(|_not_live| null("not the address of a live allocation of this client"))
    })
}

/// Gives advice.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tiermgr_advise(
    client: *mut Client,
    address: *mut c_void,
    bytes: usize,
    advice: c_int,
) -> c_int {
    call(|| {
        // SAFETY: by contract.
        let client = unsafe { client_of(client) }?;
        let (start, len) = range_of(address, bytes)?;
        match Preloaded::of_range(start) {
            Some(preloaded) => preloaded.advise(start, len, advice),
            None => client.advise(start, len, advice),
        }
    })
}

/// Starts to bring a range in.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tiermgr_prefetch(
    client: *mut Client,
    address: *mut c_void,
    bytes: usize,
) -> c_int {
    call(|| {
        // SAFETY: by contract.
        let client = unsafe { client_of(client) }?;
        let (start, len) = range_of(address, bytes)?;
        match Preloaded::of_range(start) {
            Some(preloaded) => preloaded.prefetch(start, len),
            None => client.prefetch(start, len),
        }
    })
}

/// Brings a range in and holds it.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tiermgr_pin(
    client: *mut Client,
    address: *mut c_void,
    bytes: usize,
    lease_out: *mut u64,
) -> c_int {
    call(|| {
        // SAFETY: by contract.
        let client = unsafe { client_of(client) }?;
        if lease_out.is_null() {
            return Err(null("the result pointer is NULL"));
        }
        let (start, len) = range_of(address, bytes)?;
        let lease = match Preloaded::of_range(start) {
            Some(preloaded) => preloaded.pin(start, len),
            None => client.pin(start, len),
        }?;
        // SAFETY: not null, and writable by contract.
        unsafe { lease_out.write(lease) };
        Ok(())
    })
}

/// Ends a lease.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tiermgr_unpin(client: *mut Client, lease: u64) -> c_int {
    call(|| {
        // SAFETY: by contract.
        let client = unsafe { client_of(client) }?;
        match Preloaded::of_lease(lease) {
            Some(preloaded) => preloaded.unpin(lease),
            None => client.unpin(lease),
        }
    })
}

/// Where a range is.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tiermgr_residency_query(
    client: *mut Client,
    address: *const c_void,
    bytes: usize,
    residency: *mut Residency,
) -> c_int {
    call(|| {
        // SAFETY: by contract.
        let client = unsafe { client_of(client) }?;
        let (start, len) = range_of(address, bytes)?;
        let found = match Preloaded::of_range(start) {
            Some(preloaded) => preloaded.residency(start, len),
            None => client.residency(start, len),
        }?;
        let value = Residency {
            size: 0,
            reserved: 0,
            resident_bytes: found.resident_bytes,
            parked_bytes: found.parked_bytes,
            absent_bytes: found.absent_bytes,
            unarmed_bytes: found.unarmed_bytes,
            poisoned_bytes: found.poisoned_bytes,
        };
        // SAFETY: by contract.
        unsafe { write_sized(residency, &value) }
    })
}

/// Counters of the family.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tiermgr_statistics_query(
    client: *mut Client,
    statistics: *mut Statistics,
) -> c_int {
    call(|| {
        // SAFETY: by contract.
        let stats = unsafe { client_of(client) }?.statistics()?;
        let value = Statistics {
            size: 0,
            reserved: 0,
            faults: stats.faults,
            recalled_pages: stats.recalled_pages,
            prefetched_pages: stats.prefetched_pages,
            zeroed_pages: stats.zeroed_pages,
            rescued_pages: stats.rescued_pages,
            parked_pages: stats.parked_pages,
            parked_clean_pages: stats.parked_clean_pages,
            store_written_bytes: stats.store_written_bytes,
            store_read_bytes: stats.store_read_bytes,
            store_errors: stats.store_errors,
            poisoned_pages: stats.poisoned_pages,
            forks: stats.forks,
            dram_now_bytes: stats.dram_now_bytes,
            limbo_now_bytes: stats.limbo_now_bytes,
            credit_now_bytes: stats.credit_now_bytes,
            parked_now_bytes: stats.parked_now_bytes,
            budget_now_bytes: stats.budget_now_bytes,
            pinned_now_bytes: stats.pinned_now_bytes,
        };
        // SAFETY: by contract.
        unsafe { write_sized(statistics, &value) }
    })
}
