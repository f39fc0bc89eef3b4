//! One module for each verb.

pub(crate) mod clients;
pub(crate) mod completions;
pub(crate) mod doctor;
pub(crate) mod man;
pub(crate) mod regions;
pub(crate) mod run;
pub(crate) mod status;
pub(crate) mod tiers;

use crate::connect::ConnectError;
use std::io;
use std::path::PathBuf;

/// Why a verb failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VerbError {
    /// The daemon could not be asked.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// Stdout does not take it.
    #[error("writing to stdout")]
    Output(#[from] io::Error),
    /// A file does not take it.
    #[error("writing {}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}
