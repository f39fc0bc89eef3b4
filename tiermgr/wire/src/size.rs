//! Sizes as people write them: `512MiB`, `64G`, `4096`.
//!
//! All units are powers of 1024, with and without the `i`: memory is sold and limited that way, and
//! a reader of `--dram 8G` expects what `ulimit` and systemd would give. A fraction may stand before a
//! unit (`1.5G`) and is rounded down to a whole number of bytes.

use std::fmt;
use std::str::FromStr;

/// A number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Size(pub u64);

/// Units by falling size. The first name of each is the one that is printed.
const UNITS: [(&[&str], u64); 5] = [
    (&["TiB", "T", "TB"], 1 << 40),
    (&["GiB", "G", "GB"], 1 << 30),
    (&["MiB", "M", "MB"], 1 << 20),
    (&["KiB", "K", "KB"], 1 << 10),
    (&["B", ""], 1),
];

/// Digits behind the point that are read; more would not name a byte more precisely.
const FRACTION_DIGITS_MAX: usize = 6;

/// A text that is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// No digits, or something other than digits before the unit.
    #[error("`{0}` is not a size; write for example 512MiB, 64G or 4096")]
    NotASize(String),
    /// The unit is not known.
    #[error(
        "`{unit}` in `{text}` is not a unit; known are B, KiB, MiB, GiB and TiB, also as K, M, G, T"
    )]
    Unit {
        /// The whole text.
        text: String,
        /// The part that was not understood.
        unit: String,
    },
    /// No path before the size.
    #[error("`{0}` names no file or device; write PATH or PATH:SIZE")]
    NoPath(String),
    /// More than 2^64 bytes.
    #[error("`{0}` is more bytes than a 64-bit number holds")]
    TooLarge(String),
}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let text = text.trim();
        let digits_end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(digits_end);
        let unit = unit.trim_start();
        let factor = UNITS
            .iter()
            .find(|(names, _)| names.iter().any(|name| name.eq_ignore_ascii_case(unit)))
            .map(|(_, factor)| *factor);
        let not_a_size = || SizeError::NotASize(text.to_owned());
        let too_large = || SizeError::TooLarge(text.to_owned());
        let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
        let all_digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        if !all_digits(whole) || !all_digits(fraction) || fraction.len() > FRACTION_DIGITS_MAX {
            return Err(not_a_size());
        }
        let factor = factor
            .ok_or_else(|| SizeError::Unit { text: text.to_owned(), unit: unit.to_owned() })?;
        // Only the number of digits can be wrong by now.
        let whole: u64 = whole.parse().ok().ok_or_else(too_large)?;
        let scale = fraction.bytes().fold(1_u64, |scale, _| scale * 10);
        let fraction: u64 = fraction.parse().ok().ok_or_else(not_a_size)?;
        // At most six digits of the largest unit: below 2^60.
        let part = fraction * factor;
        if factor == 1 && !part.is_multiple_of(scale) {
            return Err(not_a_size());
        }
        whole
            .checked_mul(factor)
            .and_then(|bytes| bytes.checked_add(part / scale))
            .map(Self)
            .ok_or_else(too_large)
    }
}

/// Exact: the largest unit of which the size is a whole multiple. What is printed reads back as the
/// same number.
impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (names, factor) = UNITS
            .iter()
            .find(|(_, factor)| self.0 >= *factor && self.0.is_multiple_of(*factor))
            .unwrap_or(&UNITS[4]);
        write!(f, "{}{}", self.0 / factor, names[0])
    }
}

impl Size {
    /// For people: three significant digits or so, never more than nine characters.
    #[must_use]
    pub fn rounded(self) -> String {
        let Some((names, factor)) =
            UNITS[..4].iter().find(|(_, factor)| self.0 >= *factor).copied()
        else {
            return format!("{} B", self.0);
        };
        // In tenths, so that no float is needed; rounds down.
        let tenths = u128::from(self.0) * 10 / u128::from(factor);
        if tenths >= 1000 {
            format!("{} {}", tenths / 10, names[0])
        } else {
            format!("{}.{} {}", tenths / 10, tenths % 10, names[0])
        }
    }
}

impl serde::Serialize for Size {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for Size {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Size;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as \"512MiB\" or a number of bytes")
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Size, E> {
                text.parse().map_err(E::custom)
            }
            fn visit_u64<E: serde::de::Error>(self, bytes: u64) -> Result<Size, E> {
                Ok(Size(bytes))
            }
            fn visit_i64<E: serde::de::Error>(self, bytes: i64) -> Result<Size, E> {
                u64::try_from(bytes)
                    .map(Size)
                    .map_err(|_negative| E::custom("a size cannot be negative"))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

/// `PATH[:SIZE]`, as `--store` and `--nvme` take it.
///
/// What follows the last colon is a size if it reads as one; so a path that itself ends like that
/// needs its size written behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathAndSize {
    /// The path.
    pub path: std::path::PathBuf,
    /// The size, if one was given.
    pub size: Option<Size>,
}

impl FromStr for PathAndSize {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        if text.is_empty() || text.starts_with(':') {
            return Err(SizeError::NoPath(text.to_owned()));
        }
        if let Some((path, size)) = text.rsplit_once(':') {
            match size.parse() {
                Ok(size) => return Ok(Self { path: path.into(), size: Some(size) }),
                // A number with a mistyped unit is a mistake, not a part of a file's name.
                Err(error @ (SizeError::Unit { .. } | SizeError::TooLarge(_))) => {
                    return Err(error);
                }
                Err(SizeError::NotASize(_) | SizeError::NoPath(_)) => {}
            }
        }
        Ok(Self { path: text.into(), size: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_powers_of_1024() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4096B", 4096),
            ("1k", 1 << 10),
            ("512MiB", 512 << 20),
            ("512 mib", 512 << 20),
            ("64G", 64 << 30),
            ("64GB", 64 << 30),
            ("1.5G", 3 << 29),
            ("0.000001T", 1_099_511),
            ("2TiB", 2 << 40),
            ("18446744073709551615", u64::MAX),
            ("16777215T", 16_777_215 << 40),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
    }

    #[test]
    fn nonsense_is_refused_with_the_reason() {
        for text in ["", "G", "-1", "1.", ".5G", "1.2.3G", "1.5", "1.0000001G", "٣"] {
            assert!(matches!(text.parse::<Size>(), Err(SizeError::NotASize(_))), "{text}");
        }
        for text in ["1X", "0x10", "5Mb/s", "7 giga"] {
            assert!(matches!(text.parse::<Size>(), Err(SizeError::Unit { .. })), "{text}");
        }
        for text in ["18446744073709551616", "16777216T", "99999999999999999999999"] {
            assert!(matches!(text.parse::<Size>(), Err(SizeError::TooLarge(_))), "{text}");
        }
    }

    #[test]
    fn what_is_printed_reads_back() {
        let mut bytes = 1_u64;
        for step in 0..64 {
            for size in [Size(bytes), Size(bytes + 1), Size(bytes.wrapping_mul(3))] {
                assert_eq!(size.to_string().parse(), Ok(size), "step {step}");
            }
            bytes = bytes.wrapping_shl(1).max(1);
        }
    }

    #[test]
    fn rounding_is_for_people() {
        assert_eq!(Size(0).rounded(), "0 B");
        assert_eq!(Size(1023).rounded(), "1023 B");
        assert_eq!(Size(1024).rounded(), "1.0 KiB");
        assert_eq!(Size((1 << 30) - 1).rounded(), "1023 MiB");
        assert_eq!(Size(3 << 29).rounded(), "1.5 GiB");
        assert_eq!(Size(u64::MAX).rounded(), "16777215 TiB");
    }

    #[test]
    fn a_path_keeps_its_colons() {
        let parse = |text: &str| text.parse::<PathAndSize>();
        let expect = |path: &str, size: Option<u64>| {
            Ok(PathAndSize { path: path.into(), size: size.map(Size) })
        };
        assert_eq!(parse("/dev/nvme0n1"), expect("/dev/nvme0n1", None));
        assert_eq!(parse("/a/b:64G"), expect("/a/b", Some(64 << 30)));
        assert_eq!(parse("/a:b/c"), expect("/a:b/c", None));
        assert_eq!(parse("/a:1G:64G"), expect("/a:1G", Some(64 << 30)));
        assert!(parse("/a/b:64X").is_err());
        assert!(matches!(parse(""), Err(SizeError::NoPath(_))));
        assert!(matches!(parse(":64G"), Err(SizeError::NoPath(_))));
    }
}
