//! Groups of streams. The program names the group when it registers a stream.
//!
//! A group is named after its first stream. Each stream is in one group, from its registration on:
//!
//! ```text
//!  registered as   s0      s1 in s0    s2      s3 in s0    s4 in s2
//!  groups          s0+ = s0 s1 s3              s2+ = s2 s4
//! ```
//!
//! A pool with `streams:grouped` has one heap per group. All other pools ignore groups.

use crate::types::ids::StreamId;

/// The group of each registered stream.
///
/// # Examples
/// ```
/// use symmalloc::StreamId;
/// use symmalloc::groups::Groups;
///
/// let mut groups = Groups::default();
/// let main = groups.register(None).expect("a new group should always be possible");
/// let copies = groups.register(Some(main)).expect("main names a group");
/// assert_eq!(groups.first_of(copies), main);
/// assert_eq!(groups.register(Some(copies)), None, "copies names no group");
/// assert_eq!(groups.register(Some(StreamId(2))), None, "it is not registered yet");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Groups {
    /// The first stream of each stream's group. A first stream has itself as its first stream.
    firsts: Vec<StreamId>,
}

impl Groups {
    /// Registers the next stream in the group with this first stream, or in a new group, which is named after the
    /// stream. Returns the stream. Returns `None`, and changes nothing, if there is no such group or all ids are in use.
    pub fn register(&mut self, group: Option<StreamId>) -> Option<StreamId> {
        let stream = u16::try_from(self.firsts.len()).ok().map(StreamId).filter(|stream| *stream <= StreamId::MAX)?;
        if let Some(group) = group
            && self.firsts.get(group.index()) != Some(&group)
        {
            return None;
        }
        self.firsts.push(group.unwrap_or(stream));
        Some(stream)
    }

    /// Returns the first stream of a stream's group. Returns the stream itself if it is not registered.
    pub fn first_of(&self, stream: StreamId) -> StreamId {
        self.firsts.get(stream.index()).copied().unwrap_or(stream)
    }

    /// Returns the number of registered streams.
    pub fn stream_count(&self) -> usize {
        self.firsts.len()
    }
}
