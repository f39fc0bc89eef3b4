//! Finds sequential accesses among faults, and says how far to read ahead.
//!
//! Everything is counted in extents; the number of an extent is its address divided by its size. A
//! stream is confirmed by its second fault; from then on its window doubles with each fault up to a
//! maximum, as Linux' own readahead does (`mm/readahead.c`). Pages that were read ahead raise no
//! faults, so a fault on an extent that is still on its way counts as progress too: it comes from a
//! program that is faster than the device.

/// Streams followed at once for one process.
const STREAMS: usize = 8;
/// Longest window: 8 MiB.
pub const WINDOW_EXTENTS_MAX: u32 = 128;
const WINDOW_EXTENTS_FIRST: u32 = 4;

#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    /// The extent after the last one that faulted.
    next: u64,
    /// First extent that nobody has asked for yet.
    ahead: u64,
    window: u32,
    used_at: u64,
}

/// The streams of one process.
#[derive(Clone, Debug, Default)]
pub struct Streams {
    streams: [Stream; STREAMS],
    clock: u64,
}

impl Streams {
    /// Notes a fault on extent `extent`, and gives the range of extents to read ahead, where there is
    /// one: `(first, count)`.
    pub fn faulted(&mut self, extent: u64) -> Option<(u64, u32)> {
        self.clock += 1;
        let clock = self.clock;
        let found = self.streams.iter_mut().find(|s| {
            // Inside what was read ahead, or right behind it.
            s.used_at != 0 && extent.wrapping_add(1) >= s.next && extent <= s.ahead.max(s.next)
        });
        let Some(stream) = found else {
            let oldest = self.streams.iter_mut().min_by_key(|s| s.used_at)?;
            *oldest = Stream { next: extent + 1, ahead: extent + 1, window: 0, used_at: clock };
            return None;
        };
        stream.used_at = clock;
        if extent < stream.next {
            // The same extent again: a second thread, or a page of it that was not there.
            return None;
        }
        stream.next = extent + 1;
        stream.window = (stream.window * 2).clamp(WINDOW_EXTENTS_FIRST, WINDOW_EXTENTS_MAX);
        let first = stream.ahead.max(extent + 1);
        let end = extent + 1 + u64::from(stream.window);
        if end <= first {
            return None;
        }
        stream.ahead = end;
        u32::try_from(end - first).ok().map(|count| (first, count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_fault_reads_nothing_ahead() {
        assert_eq!(Streams::default().faulted(100), None);
    }

    #[test]
    fn the_window_doubles_up_to_its_maximum() {
        let mut streams = Streams::default();
        streams.faulted(0);
        let mut at = 1;
        let mut windows = Vec::new();
        for _ in 0..8 {
            let (first, count) = streams.faulted(at).unwrap();
            windows.push(count);
            at = first + u64::from(count);
        }
        assert_eq!(windows, [4, 8, 16, 32, 64, 128, 128, 128]);
    }

    #[test]
    fn random_faults_read_nothing_ahead() {
        let mut streams = Streams::default();
        for n in 0..100_u64 {
            assert_eq!(streams.faulted(n * 7919 % 4096 * 3), None);
        }
    }

    #[test]
    fn a_second_fault_on_the_same_extent_is_no_progress() {
        let mut streams = Streams::default();
        streams.faulted(0);
        streams.faulted(1);
        assert_eq!(streams.faulted(1), None);
    }

    #[test]
    fn interleaved_streams_are_told_apart() {
        let mut streams = Streams::default();
        for step in 0..3 {
            for stream in 0..4_u64 {
                let ahead = streams.faulted(stream * 1_000_000 + step);
                assert_eq!(ahead.is_some(), step > 0, "stream {stream} step {step}");
            }
        }
    }
}
