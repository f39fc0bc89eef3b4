//! What the machine has, and what the daemon itself takes of it.

use std::fs;

/// Bytes of memory that the machine has.
#[must_use]
pub fn machine_bytes() -> Option<u64> {
    field_bytes(&fs::read_to_string("/proc/meminfo").ok()?, "MemTotal:")
}

/// Bytes of this process that are in memory now, shared pages and state files included.
#[must_use]
pub fn own_resident_bytes() -> Option<u64> {
    field_bytes(&fs::read_to_string("/proc/self/status").ok()?, "VmRSS:")
}

/// The value of a line such as `VmRSS:     1234 kB`.
fn field_bytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    let kib: u64 = line.get(name.len()..)?.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    kib.checked_mul(1 << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_proc_are_read() {
        let text = "Name:\tx\nVmPeak:\t  2 kB\nVmRSS:\t    1234 kB\nVmHuge: 1 GB\n";
        assert_eq!(field_bytes(text, "VmRSS:"), Some(1234 << 10));
        assert_eq!(field_bytes(text, "VmHuge:"), None);
        assert_eq!(field_bytes(text, "VmData:"), None);
        assert!(machine_bytes() > own_resident_bytes());
    }
}
