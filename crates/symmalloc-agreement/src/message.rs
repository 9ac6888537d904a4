//! The messages of an agreement. All integers are little-endian.
//!
//! ```text
//!  question      answer of one rank
//!  compare       RankSummaryMessage, 41 bytes
//!  policies      PolicyPage: count, 120 digests
//!  policy        PolicyText: presence, Text of up to 1000 bytes
//!  heaps         HeapPage: count, 31 heaps of 32 bytes
//!  digests       DigestPage: count, 96 digests of 9 bytes
//!  checkpoints   CheckpointPage: count, 35 digests of 16 bytes
//!  ops           OpPage: 16 ops of 25 bytes
//!  details       DetailsMessage: count, 8 steps of 16 bytes, Text of up to 64 bytes
//! ```
//!
//! All messages of a round have the same length, determined by the question, so any all-gather can carry them: 64 bytes for `compare`,
//! otherwise 1024. Zeros fill the unused rest of a message and the unused entries of a page.
//!
//! Received bytes are untrusted. The structs accept every bit pattern. The functions that decode them return an error for a value that no
//! correct rank sends, and never panic. Texts are escaped when they are decoded.

use super::protocol::{ProtocolError, VERSION};
use super::transport::Gathered;
use std::borrow::Cow;
use symmalloc_core::Digest;
use symmalloc_core::histories::{CHECKPOINTS_MAX, NAME_BYTES_MAX};
use symmalloc_text::visible_line;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Size of a message in bytes, except in the first round.
pub(crate) const MESSAGE_BYTES: usize = 1024;
/// Size in bytes of a message of the first round, which is the only round if the ranks agree.
pub(crate) const COMPARE_BYTES: usize = 64;

pub(crate) const POLICIES_PER_PAGE: usize = 120;
pub(crate) const POLICY_BYTES_MAX: usize = 1000;
pub(crate) const HEAPS_PER_PAGE: usize = 31;
/// Maximum number of digests that one round requests.
pub(crate) const PROBES_MAX: usize = 96;
/// Maximum number of checkpoints of a rank, including its current digest.
pub(crate) const CHECKPOINTS_PER_PAGE: usize = CHECKPOINTS_MAX + 3;
/// Maximum number of heaps that are searched at once.
pub(crate) const SEARCHES_MAX: usize = 16;
/// Number of requests, from the first difference on, that are compared to determine the cause.
pub(crate) const WINDOW: usize = 8;

const _: () = {
    assert!(size_of::<RankSummaryMessage>() <= COMPARE_BYTES);
    assert!(size_of::<PolicyPage>() <= MESSAGE_BYTES);
    assert!(size_of::<PolicyText>() <= MESSAGE_BYTES);
    assert!(size_of::<HeapPage>() <= MESSAGE_BYTES);
    assert!(size_of::<DigestPage>() <= MESSAGE_BYTES);
    assert!(size_of::<CheckpointPage>() <= MESSAGE_BYTES);
    assert!(size_of::<OpPage>() <= MESSAGE_BYTES);
    assert!(size_of::<DetailsMessage>() <= MESSAGE_BYTES);
};

/// A message, or a part of one.
pub(crate) trait Message: FromBytes + IntoBytes + Immutable + KnownLayout + Unaligned {}

impl<T: FromBytes + IntoBytes + Immutable + KnownLayout + Unaligned> Message for T {}

/// Appends a message of `message_bytes` bytes.
pub(crate) fn append(out: &mut Vec<u8>, message: &impl Message, message_bytes: usize) {
    let end = out.len() + message_bytes;
    out.extend_from_slice(message.as_bytes());
    out.resize(end, 0);
}

/// Returns the message of each rank.
pub(crate) fn messages<M: Message + 'static>(
    gathered: &Gathered,
) -> impl Iterator<Item = Result<(u32, &M), ProtocolError>> {
    (0..).zip(gathered.iter()).map(|(rank, bytes)| match M::ref_from_prefix(bytes) {
        Ok((message, _)) => Ok((rank, message)),
        Err(_) => Err(ProtocolError::Garbled { rank }),
    })
}

/// A list of up to `ENTRIES` entries, preceded by the number of entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct Page<T, const ENTRIES: usize> {
    count: U32,
    entries: [T; ENTRIES],
}

impl<T: Message + Copy, const ENTRIES: usize> Page<T, ENTRIES> {
    /// Creates a page of these entries. There must be at most `ENTRIES`.
    pub(crate) fn new(entries: impl IntoIterator<Item = T>) -> Self {
        let mut page = Page { count: U32::ZERO, entries: [T::new_zeroed(); ENTRIES] };
        let mut count = 0;
        for entry in entries {
            page.entries[count] = entry;
            count += 1;
        }
        page.count = (count as u32).into();
        page
    }

    /// Returns the entries, or an error if the count exceeds the page.
    pub(crate) fn entries(&self, rank: u32) -> Result<&[T], ProtocolError> {
        self.entries.get(..self.count.get() as usize).ok_or(ProtocolError::Garbled { rank })
    }
}

/// A text of limited length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct Text<const BYTES: usize> {
    length: U16,
    bytes: [u8; BYTES],
}

impl<const BYTES: usize> Text<BYTES> {
    /// Truncates the text at a character boundary if it is too long.
    pub(crate) fn new(text: &str) -> Self {
        const { assert!(BYTES <= u16::MAX as usize) };
        let end = (0..=BYTES.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        let mut bytes = [0; BYTES];
        bytes[..end].copy_from_slice(&text.as_bytes()[..end]);
        Text { length: (end as u16).into(), bytes }
    }

    /// Returns the text as one line of visible characters, because reports quote it. Returns an error if the length is too large or the
    /// text is not UTF-8.
    pub(crate) fn get(&self, rank: u32) -> Result<Cow<'_, str>, ProtocolError> {
        let bytes = self.bytes.get(..self.length.get().into()).ok_or(ProtocolError::Garbled { rank })?;
        std::str::from_utf8(bytes).map(visible_line).map_err(|_| ProtocolError::Garbled { rank })
    }
}

/// The answer to `compare`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct RankSummaryMessage {
    magic: [u8; 4],
    version: U32,
    /// The [`Point`](super::Point) that the rank has reached.
    point: u8,
    /// Number of configurations.
    policies: U32,
    /// Digest of the configurations.
    policy_digest: U64,
    /// Number of heaps.
    heaps: U32,
    /// Digest of all heaps.
    digest: DigestMessage,
}

const MAGIC: [u8; 4] = *b"symm";

/// The content of a [`RankSummaryMessage`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RankSummary {
    pub(crate) point: u8,
    pub(crate) policies: u32,
    pub(crate) policy_digest: u64,
    pub(crate) heaps: u32,
    pub(crate) digest: Digest,
}

impl From<RankSummary> for RankSummaryMessage {
    fn from(summary: RankSummary) -> Self {
        let RankSummary { point, policies, policy_digest, heaps, digest } = summary;
        RankSummaryMessage {
            magic: MAGIC,
            version: VERSION.into(),
            point,
            policies: policies.into(),
            policy_digest: policy_digest.into(),
            heaps: heaps.into(),
            digest: digest.into(),
        }
    }
}

impl RankSummaryMessage {
    /// Returns the content, or an error if the rank runs a different version.
    pub(crate) fn decode(&self, rank: u32) -> Result<RankSummary, ProtocolError> {
        if self.magic != MAGIC {
            return Err(ProtocolError::Garbled { rank });
        }
        if self.version != VERSION {
            return Err(ProtocolError::VersionMismatch { rank, version: self.version.get() });
        }
        Ok(RankSummary {
            point: self.point,
            policies: self.policies.get(),
            policy_digest: self.policy_digest.get(),
            heaps: self.heaps.get(),
            digest: self.digest.into(),
        })
    }
}

/// A digest after a number of ops. 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct DigestMessage {
    ops: U64,
    value: U64,
}

impl From<Digest> for DigestMessage {
    fn from(digest: Digest) -> Self {
        DigestMessage { ops: digest.ops.into(), value: digest.value.into() }
    }
}

impl From<DigestMessage> for Digest {
    fn from(digest: DigestMessage) -> Self {
        Digest { ops: digest.ops.get(), value: digest.value.get() }
    }
}

/// The answer to `policies`: digests of configurations.
pub(crate) type PolicyPage = Page<U64, POLICIES_PER_PAGE>;

/// The answer to `policy`: the text of a configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct PolicyText {
    /// 1 if the configuration exists, otherwise 0.
    is_present: u8,
    text: Text<POLICY_BYTES_MAX>,
}

impl PolicyText {
    pub(crate) fn new(text: Option<&str>) -> Self {
        PolicyText { is_present: text.is_some().into(), text: Text::new(text.unwrap_or_default()) }
    }

    pub(crate) fn decode(&self, rank: u32) -> Result<Option<Cow<'_, str>>, ProtocolError> {
        match self.is_present {
            0 => Ok(None),
            1 => self.text.get(rank).map(Some),
            _ => Err(ProtocolError::Garbled { rank }),
        }
    }
}

/// The answer to `heaps`.
pub(crate) type HeapPage = Page<HeapMessage, HEAPS_PER_PAGE>;

/// A summary of one heap. 32 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct HeapMessage {
    pub(crate) pool: U32,
    /// [`StreamGroup::code`](symmalloc_core::ids::StreamGroup::code).
    pub(crate) streams: U32,
    pub(crate) ops: U64,
    pub(crate) oldest: U64,
    pub(crate) digest: U64,
}

/// The answer to `digests`.
pub(crate) type DigestPage = Page<ProbeMessage, PROBES_MAX>;

/// The digest at one probe. 9 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct ProbeMessage {
    /// 1 if the rank remembers the digest, otherwise 0.
    is_present: u8,
    digest: U64,
}

impl From<Option<u64>> for ProbeMessage {
    fn from(digest: Option<u64>) -> Self {
        ProbeMessage { is_present: digest.is_some().into(), digest: digest.unwrap_or(0).into() }
    }
}

impl ProbeMessage {
    pub(crate) fn decode(&self, rank: u32) -> Result<Option<u64>, ProtocolError> {
        match self.is_present {
            0 => Ok(None),
            1 => Ok(Some(self.digest.get())),
            _ => Err(ProtocolError::Garbled { rank }),
        }
    }
}

/// The answer to `checkpoints`: digests retained from before the journal, and the current digest.
pub(crate) type CheckpointPage = Page<DigestMessage, CHECKPOINTS_PER_PAGE>;

/// The answer to `ops`: one entry per requested op, then zeros.
pub(crate) type OpPage = [OpMessage; SEARCHES_MAX];

/// One op. 25 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct OpMessage {
    /// 0: the heap has fewer ops; 1: an op; 2: a forgotten op, with the order of the journal's oldest entry; 3: a forgotten op, and the
    /// journal is empty.
    pub(crate) kind: u8,
    pub(crate) op: U64,
    pub(crate) decision: U64,
    pub(crate) order: U64,
}

/// One request. 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct StepMessage {
    pub(crate) op: U64,
    pub(crate) place: U64,
}

/// The answer to `details`: the requests that follow an op, and the op's name, which can be empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct DetailsMessage {
    pub(crate) steps: Page<StepMessage, WINDOW>,
    pub(crate) name: Text<NAME_BYTES_MAX>,
}

#[cfg(test)]
mod tests {
    use super::*;

    const GARBLED: ProtocolError = ProtocolError::Garbled { rank: 3 };

    fn summary() -> RankSummary {
        RankSummary { point: 1, policies: 2, policy_digest: 3, heaps: 4, digest: Digest { ops: 5, value: 6 } }
    }

    #[test]
    fn messages_have_the_documented_layout() {
        let sizes = [size_of::<HeapMessage>(), size_of::<ProbeMessage>(), size_of::<DigestMessage>()];
        assert_eq!(sizes, [32, 9, 16]);
        assert_eq!([size_of::<OpMessage>(), size_of::<StepMessage>()], [25, 16]);
        let mut bytes = vec![0xff];
        append(&mut bytes, &RankSummaryMessage::from(summary()), COMPARE_BYTES);
        let mut expected = vec![0xff];
        expected.extend(b"symm\x02\0\0\0\x01\x02\0\0\0\x03\0\0\0\0\0\0\0\x04\0\0\0\x05\0\0\0\0\0\0\0\x06");
        expected.resize(1 + COMPARE_BYTES, 0);
        assert_eq!(bytes, expected);
        let page = PolicyPage::new([0x0102_u64, 3].map(U64::new));
        assert_eq!(page.as_bytes()[..20], *b"\x02\0\0\0\x02\x01\0\0\0\0\0\0\x03\0\0\0\0\0\0\0");
        assert_eq!(PolicyText::new(Some("ab")).as_bytes()[..6], *b"\x01\x02\0ab\0");
        let details = DetailsMessage { steps: Page::new([]), name: Text::new("op") };
        assert_eq!(details.as_bytes()[4 + WINDOW * 16..][..5], *b"\x02\0op\0");
    }

    #[test]
    fn decoding_inverts_encoding() {
        let gathered =
            Gathered::new([RankSummaryMessage::from(summary()).as_bytes(), &[0; 23]].concat(), COMPARE_BYTES);
        let decoded = messages::<RankSummaryMessage>(&gathered).map(|message| {
            let (rank, message) = message.expect("the message is long enough");
            message.decode(rank).expect("the message is valid")
        });
        assert_eq!(decoded.collect::<Vec<_>>(), [summary()]);
        for digest in [None, Some(0), Some(u64::MAX)] {
            assert_eq!(ProbeMessage::from(digest).decode(3), Ok(digest));
        }
        for text in [None, Some(""), Some("segments:fixed")] {
            assert_eq!(PolicyText::new(text).decode(3), Ok(text.map(Cow::from)));
        }
    }

    #[test]
    fn other_versions_and_other_protocols_are_distinguished() {
        let mut other = RankSummaryMessage::from(summary());
        other.version = 7.into();
        assert_eq!(other.decode(3), Err(ProtocolError::VersionMismatch { rank: 3, version: 7 }));
        other.magic = *b"http";
        assert_eq!(other.decode(3), Err(GARBLED));
    }

    #[test]
    fn values_that_no_rank_sends_are_errors() {
        let mut page = DigestPage::new([]);
        page.count = (PROBES_MAX as u32).into();
        assert_eq!(page.entries(3).map(<[_]>::len), Ok(PROBES_MAX));
        page.count = (PROBES_MAX as u32 + 1).into();
        assert_eq!(page.entries(3), Err(GARBLED));
        let mut probe = ProbeMessage::from(Some(1));
        probe.is_present = 2;
        assert_eq!(probe.decode(3), Err(GARBLED));
        let mut text = Text::<4>::new("abc");
        text.length = 5.into();
        assert_eq!(text.get(3), Err(GARBLED));
        text = Text { length: 4.into(), bytes: [b'a', 0xff, b'b', b'c'] };
        assert_eq!(text.get(3), Err(GARBLED));
        let short = Gathered::new(vec![0; 40], 40);
        assert_eq!(
            messages::<RankSummaryMessage>(&short).next().map(|message| message.map(drop)),
            Some(Err(ProtocolError::Garbled { rank: 0 }))
        );
    }

    #[test]
    fn a_long_text_is_truncated_at_a_character_boundary() {
        assert_eq!(Text::<4>::new("aäää").get(3), Ok("aä".into()));
        assert_eq!(Text::<4>::new("abcd").get(3), Ok("abcd".into()));
    }

    #[test]
    fn every_text_is_escaped_when_it_is_decoded() {
        let (hostile, shown) = ("a\u{1b}[1m\n\u{202e}", r"a\u{1b}[1m\n\u{202e}");
        assert_eq!(PolicyText::new(Some(hostile)).decode(3), Ok(Some(shown.into())));
        let details = DetailsMessage { steps: Page::new([]), name: Text::new(hostile) };
        assert_eq!(details.name.get(3), Ok(shown.into()));
    }
}
