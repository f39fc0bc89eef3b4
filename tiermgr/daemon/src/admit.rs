//! Who may connect: bounds on what one user, and all of them together, can make the daemon hold.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Connections in all. Each costs a thread with a small stack and two descriptors.
pub const CONNECTIONS_MAX: u32 = 8192;

/// Counts connections.
#[derive(Debug)]
pub struct Admission {
    per_uid_max: u32,
    total_max: u32,
    counts: Mutex<Counts>,
}

/// `total` is the sum of `by_uid`, whose entries are never 0.
#[derive(Debug, Default)]
struct Counts {
    by_uid: BTreeMap<u32, u32>,
    total: u32,
}

/// A connection that was let in. Gives its place back when dropped.
#[derive(Debug)]
pub struct Admitted {
    admission: Arc<Admission>,
    uid: u32,
}

/// A connection that was not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAdmitted {
    /// This user has as many as one user may have.
    #[error(
        "user {uid} already has {max} connections (`connections_per_uid` in the configuration)"
    )]
    User {
        /// Who.
        uid: u32,
        /// How many.
        max: u32,
    },
    /// There are as many as the daemon holds.
    #[error("the daemon already has {0} connections")]
    Total(u32),
}

impl Admission {
    /// `per_uid_max` does not bind root, who could end the daemon anyway; `total_max` binds all.
    #[must_use]
    pub fn new(per_uid_max: u32, total_max: u32) -> Arc<Self> {
        Arc::new(Self { per_uid_max, total_max, counts: Mutex::default() })
    }

    /// Lets a connection of `uid` in.
    ///
    /// # Errors
    /// [`NotAdmitted`] where a limit is reached.
    pub fn admit(self: &Arc<Self>, uid: u32) -> Result<Admitted, NotAdmitted> {
        // A count is whole even if somebody panicked while holding it.
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.total >= self.total_max {
            return Err(NotAdmitted::Total(self.total_max));
        }
        let count = counts.by_uid.entry(uid).or_insert(0);
        if uid != 0 && *count >= self.per_uid_max {
            return Err(NotAdmitted::User { uid, max: self.per_uid_max });
        }
        *count += 1;
        counts.total += 1;
        Ok(Admitted { admission: Arc::clone(self), uid })
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut counts = self.admission.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.total = counts.total.saturating_sub(1);
        if let Some(count) = counts.by_uid.get_mut(&self.uid) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                counts.by_uid.remove(&self.uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_user_cannot_take_the_places_of_another() {
        let admission = Admission::new(2, 100);
        let _first = admission.admit(1000).unwrap();
        let second = admission.admit(1000).unwrap();
        assert_eq!(admission.admit(1000).unwrap_err(), NotAdmitted::User { uid: 1000, max: 2 });
        let _other = admission.admit(1001).unwrap();
        drop(second);
        let _again = admission.admit(1000).unwrap();
    }

    #[test]
    fn root_is_bound_by_the_total_only() {
        let admission = Admission::new(1, 3);
        let held: Vec<_> = (0..3).map(|_| admission.admit(0).unwrap()).collect();
        assert_eq!(admission.admit(0).unwrap_err(), NotAdmitted::Total(3));
        assert_eq!(admission.admit(1).unwrap_err(), NotAdmitted::Total(3));
        drop(held);
        assert_eq!(admission.counts.lock().unwrap().total, 0);
        assert!(admission.counts.lock().unwrap().by_uid.is_empty());
    }
}
