//! How much DRAM programs may have, as people write it: `8G`, `50%`.

use crate::size::Size;
use std::fmt;
use std::str::FromStr;

/// How much DRAM programs may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DramLimit {
    /// A share of the machine's memory.
    Percent(u8),
    /// So many bytes.
    Bytes(Size),
}

impl DramLimit {
    /// The limit on a machine with `total_bytes` of memory.
    #[must_use]
    pub const fn bytes(self, total_bytes: u64) -> u64 {
        match self {
            // Divided first: a machine's memory is large enough for that not to matter.
            Self::Percent(percent) => total_bytes / 100 * percent as u64,
            Self::Bytes(size) => size.0,
        }
    }
}

impl fmt::Display for DramLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Percent(percent) => write!(f, "{percent}%"),
            Self::Bytes(size) => size.fmt(f),
        }
    }
}

impl FromStr for DramLimit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim().strip_suffix('%') {
            Some(percent) => match percent.parse() {
                Ok(percent @ 1..=95) => Ok(Self::Percent(percent)),
                _ => Err("a share is from 1% to 95%".into()),
            },
            None => text.parse().map(Self::Bytes).map_err(|error| error.to_string()),
        }
    }
}

impl serde::Serialize for DramLimit {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for DramLimit {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(|reason| {
            serde::de::Error::custom(format!(
                "`{text}` is not a size or a share of the memory: {reason}"
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_of_the_machine() {
        assert_eq!(DramLimit::Percent(50).bytes(24 << 30), (24 << 30) / 100 * 50);
        assert_eq!(DramLimit::Bytes(Size(7)).bytes(1), 7);
    }

    #[test]
    fn what_is_printed_reads_back() {
        for text in ["50%", "1%", "95%", "8GiB", "4097B"] {
            let limit: DramLimit = text.parse().unwrap();
            assert_eq!(limit.to_string(), text);
        }
        for text in ["0%", "96%", "50.5%", "half", "%"] {
            assert!(text.parse::<DramLimit>().is_err(), "{text}");
        }
    }
}
