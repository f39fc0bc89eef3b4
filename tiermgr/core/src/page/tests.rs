use super::*;
use std::fmt::Write;

/// The event that follows in the list of all events.
const fn after(event: PageEvent) -> Option<PageEvent> {
    // A match, so that a new event cannot be forgotten here.
    Some(match event {
        E::ZeroInstalled => E::LimboBegun,
        E::LimboBegun => E::LimboRefused,
        E::LimboRefused => E::LimboEmpty,
        E::LimboEmpty => E::RescuedClean,
        E::RescuedClean => E::RescuedDirty,
        E::RescuedDirty => E::SlotWritten,
        E::SlotWritten => E::ParkRecorded,
        E::ParkRecorded => E::FillBegun,
        E::FillBegun => E::FilledClean,
        E::FilledClean => E::FilledDirty,
        E::FilledDirty => E::FillCancelled,
        E::FillCancelled => E::Written,
        E::Written => E::Lost,
        E::Lost => E::Discarded,
        E::Discarded => E::FoundPresent,
        E::FoundPresent => return None,
    })
}

fn all_events() -> impl Iterator<Item = PageEvent> {
    std::iter::successors(Some(E::ZeroInstalled), |&event| after(event))
}

#[test]
fn every_state_and_event_is_the_reviewed_one() {
    let mut table = format!("{:<14}", "");
    for state in PageState::ALL {
        write!(table, " {:<10}", format!("{state:?}")).unwrap();
    }
    for event in all_events() {
        write!(table, "\n{:<14}", format!("{event:?}")).unwrap();
        for state in PageState::ALL {
            let next = state.next(event).map_or("-".to_owned(), |next| format!("{next:?}"));
            write!(table, " {next:<10}").unwrap();
        }
    }
    let table: Vec<&str> = table.lines().map(str::trim_end).collect();
    insta::assert_snapshot!(table.join("\n"));
}

#[test]
fn codes_are_read_back_as_written() {
    for state in PageState::ALL {
        for page in 0..EXTENT_PAGES_MAX {
            let mut states = PageStates::all(PageState::Poisoned, EXTENT_PAGES_MAX);
            states.set(page, state);
            assert_eq!(states.get(page), state);
            let others = states.count(|s| s == PageState::Poisoned);
            assert_eq!(others, EXTENT_PAGES_MAX - u32::from(state != PageState::Poisoned));
        }
    }
}

#[test]
fn a_code_that_was_never_written_releases_no_bytes() {
    for code in 8..16 {
        assert_eq!(PageStates(code).get(0), PageState::Poisoned);
    }
}

#[test]
fn an_event_that_one_page_cannot_have_changes_none() {
    let mut states = PageStates::all(PageState::Parked, 2);
    states.set(1, PageState::Dirty);
    assert_eq!(states.after(0b11, PageEvent::FillBegun), None);
    let after = states.after(0b01, PageEvent::FillBegun).unwrap();
    assert_eq!((after.get(0), after.get(1)), (PageState::Filling, PageState::Dirty));
}

#[test]
fn a_page_that_needs_its_slot_is_never_dirty() {
    for state in PageState::ALL {
        for event in all_events() {
            // What is newer than the slot must not be parked without being written.
            let forgot = !state.needs_slot() && state != PageState::Poisoned;
            let gained = state.next(event).is_some_and(PageState::needs_slot);
            assert!(!(forgot && gained) || event == PageEvent::SlotWritten, "{state:?} {event:?}");
        }
    }
}
