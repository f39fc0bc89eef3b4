//! Numbers from `/proc`.

use std::fs;

/// A field of `/proc/meminfo`, such as `MemTotal`, in bytes. `None` where there is none.
#[must_use]
pub fn meminfo_bytes(field: &str) -> Option<u64> {
    field_bytes(&fs::read_to_string("/proc/meminfo").ok()?, field)
}

/// A field of `/proc/PID/status`, such as `VmRSS`, in bytes. `None` where there is none, or no such process.
#[must_use]
pub fn status_bytes(pid: i32, field: &str) -> Option<u64> {
    field_bytes(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?, field)
}

/// The value of a line such as `VmRSS:     1234 kB`.
fn field_bytes(text: &str, field: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    let kib: u64 = value.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    kib.checked_mul(1 << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_in_bytes() {
        let text = "Name:\tx\nVmRSSx:\t 7 kB\nVmRSS:\t    1234 kB\nVmHuge: 1 GB\n";
        assert_eq!(field_bytes(text, "VmRSS"), Some(1234 << 10));
        assert_eq!(field_bytes(text, "VmHuge"), None);
        assert_eq!(field_bytes(text, "VmData"), None);
        let me = std::process::id().cast_signed();
        assert!(meminfo_bytes("MemTotal") > status_bytes(me, "VmRSS"));
        assert!(status_bytes(me, "VmRSS").is_some());
    }
}
