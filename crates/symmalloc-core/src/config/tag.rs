//! Tags: what several pools are for, in one short name, so that they sleep and wake together.

use std::fmt;
use std::str::FromStr;

/// The longest tag, in bytes.
const TAG_BYTES_MAX: usize = 24;

/// A short name that pools share: `weights`, `kv_cache`, `activations`. 1 to 24 lower-case letters, digits, `_` and `-`.
///
/// ```
/// use symmalloc_core::config::Tag;
/// let tag: Tag = "kv_cache".parse()?;
/// assert_eq!(tag.to_string(), "kv_cache");
/// # Ok::<(), symmalloc_core::config::TagError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag {
    /// Followed by zeros.
    name: [u8; TAG_BYTES_MAX],
}

/// A tag that is empty, too long, or has other characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a tag has 1 to {TAG_BYTES_MAX} lower-case letters, digits, `_` and `-`")]
pub struct TagError;

impl FromStr for Tag {
    type Err = TagError;

    fn from_str(text: &str) -> Result<Self, TagError> {
        let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'_' | b'-');
        if text.is_empty() || text.len() > TAG_BYTES_MAX || !text.bytes().all(is_allowed) {
            return Err(TagError);
        }
        let mut name = [0; TAG_BYTES_MAX];
        name[..text.len()].copy_from_slice(text.as_bytes());
        Ok(Tag { name })
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = self.name.iter().position(|byte| *byte == 0).unwrap_or(TAG_BYTES_MAX);
        f.write_str(std::str::from_utf8(&self.name[..end]).unwrap_or_default())
    }
}

impl fmt::Debug for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tag({self})")
    }
}
