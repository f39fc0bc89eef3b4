use super::*;

fn drop_command(start: u64) -> Command {
    Command::Drop { start, len: page_size() }
}

/// Plays the helper for one entry.
fn play(ring: &RingOwner, index: usize, state: u64, bytes: u64, errno: u64) {
    let word = ring.field(index, layout::WORD);
    let kept = word.load(Ordering::SeqCst) & !0xff;
    ring.field(index, layout::RESULT_BYTES).store(bytes, Ordering::SeqCst);
    ring.field(index, layout::RESULT_ERRNO).store(errno, Ordering::SeqCst);
    word.store(kept | state, Ordering::SeqCst);
}

#[test]
fn a_command_is_reported_once() {
    let mut ring = RingOwner::create().expect("ring");
    let ticket = ring.push(drop_command(0)).expect("room");
    assert_eq!(ring.poll(), Ok(None));
    play(&ring, 0, layout::TAKEN, 0, 0);
    assert_eq!(ring.poll(), Ok(None));
    assert!(!ring.cancel(ticket));
    play(&ring, 0, layout::DONE, page_size(), 0);
    let done = Completion::Done { bytes: page_size(), errno: 0 };
    assert_eq!(ring.poll(), Ok(Some((ticket, done))));
    assert_eq!(ring.poll(), Ok(None));
    assert_eq!(ring.command(ticket), None);
}

#[test]
fn a_cancelled_command_is_reported_as_cancelled() {
    let mut ring = RingOwner::create().expect("ring");
    let first = ring.push(drop_command(0)).expect("room");
    let second = ring.push(drop_command(1 << 20)).expect("room");
    assert!(ring.cancel(second));
    assert_eq!(ring.poll(), Ok(Some((second, Completion::Cancelled))));
    assert!(!ring.cancel(second), "it is not outstanding any more");
    assert_eq!(ring.outstanding().map(|(t, _)| t).collect::<Vec<_>>(), [first]);
}

#[test]
fn the_last_entry_is_given_out_and_one_more_refused() {
    let mut ring = RingOwner::create().expect("ring");
    let tickets: Vec<_> = (0..ENTRIES).map(|_| ring.push(drop_command(0)).expect("room")).collect();
    assert_eq!(ring.push(drop_command(0)), Err(RingError::Full));
    // One in the middle: the entries behind the oldest one stay in use.
    assert!(ring.cancel(tickets[5]));
    assert!(matches!(ring.poll(), Ok(Some((_, Completion::Cancelled)))));
    assert_eq!(ring.push(drop_command(0)), Err(RingError::Full));
    assert!(ring.cancel(tickets[0]));
    assert!(matches!(ring.poll(), Ok(Some((_, Completion::Cancelled)))));
    assert_eq!(ring.free(), 1);
    ring.push(drop_command(0)).expect("room again");
}

#[test]
fn values_that_no_helper_writes_are_refused() {
    let page = page_size();
    for (state, bytes, errno) in [
        (9, 0, 0),
        (0, 0, 0),
        (layout::DONE, page, 11),
        (layout::DONE, 0, 0),
        (layout::DONE, 2 * page, 0),
        (layout::DONE, page / 2, 11),
        (layout::DONE, 0, 5000),
        (layout::DONE, 0, u64::MAX),
    ] {
        let mut ring = RingOwner::create().expect("ring");
        ring.push(drop_command(0)).expect("room");
        play(&ring, 0, state, bytes, errno);
        assert_eq!(ring.poll(), Err(RingError::Broken), "{state} {bytes} {errno}");
    }
    let mut ring = RingOwner::create().expect("ring");
    ring.push(drop_command(0)).expect("room");
    ring.field(0, layout::WORD).store(u64::MAX, Ordering::SeqCst);
    assert_eq!(ring.poll(), Err(RingError::Broken));
}

#[test]
fn any_bytes_in_the_ring_leave_the_owner_whole() {
    // A fixed generator: the same bytes in every run.
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut draw = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    let mut ring = RingOwner::create().expect("ring");
    for _ in 0..2000 {
        let offset = usize::try_from(draw() % 8192).unwrap_or(0) / 8 * 8;
        if let Some(word) = ring.map.u64(offset) {
            word.store(draw() & 0xffff_ffff_0000_ff07, Ordering::SeqCst);
        }
        let pushed = ring.push(drop_command(0));
        if let (Ok(ticket), 0) = (pushed, draw() % 3) {
            ring.cancel(ticket);
        }
        while let Ok(Some(_)) = ring.poll() {}
        assert!(ring.outstanding().count() <= ENTRIES);
        if draw().is_multiple_of(50) {
            ring.new_epoch();
            ring.head(layout::EPOCH_ACK).store(ring.epoch, Ordering::SeqCst);
        }
    }
}

#[test]
fn a_successor_waits_for_the_acknowledgement() {
    let mut first = RingOwner::create().expect("ring");
    first.push(drop_command(0)).expect("room");
    let memfd = first.memfd().try_clone_to_owned().expect("dup");
    let event = first.eventfd().try_clone_to_owned().expect("dup");
    let mut second = RingOwner::open(memfd, event).expect("attach");
    assert!(!second.epoch_acknowledged());
    assert_eq!(second.push(drop_command(0)), Err(RingError::EpochPending));
    second.head(layout::EPOCH_ACK).store(second.epoch, Ordering::SeqCst);
    assert!(second.epoch_acknowledged());
    second.push(drop_command(0)).expect("acknowledged");
}

/// A helper that is stopped does not answer, and must not find anything to do when it goes on.
#[test]
fn what_nobody_has_taken_is_taken_back_by_a_successor() {
    let mut first = RingOwner::create().expect("ring");
    let duplicates = |ring: &RingOwner| {
        let memfd = ring.memfd().try_clone_to_owned().expect("dup");
        (memfd, ring.eventfd().try_clone_to_owned().expect("dup"))
    };
    first.push(drop_command(0)).expect("room");
    first.push(drop_command(0)).expect("room");
    let words: Vec<_> = (0..2).map(|at| first.field(at, layout::WORD)).collect();
    let word = |sequence, state| layout::word(1, sequence, state);
    words[0].store(word(0, layout::TAKEN), Ordering::SeqCst);
    let (memfd, event) = duplicates(&first);
    let second = RingOwner::open(memfd, event).expect("attach");
    assert!(!second.revoke_former(), "the first one may be running");
    words[0].store(word(0, layout::DONE), Ordering::SeqCst);
    assert!(second.revoke_former());
    assert_eq!(words[1].load(Ordering::SeqCst), word(1, layout::CANCELLED));
    assert!(!second.epoch_acknowledged());
}

#[test]
fn what_is_no_ring_is_not_attached_to() {
    let event = || eventfd().expect("eventfd");
    let short = sealed_memfd("short", 4096).expect("memfd");
    assert!(RingOwner::open(short, event()).is_err());
    let file = std::fs::File::open("/proc/self/exe").expect("a file");
    assert!(RingOwner::open(file.into(), event()).is_err());
}
