//! Unit tests of `history/digest.rs`.

use super::*;
use std::collections::BTreeSet;

#[test]
fn near_histories_have_different_digests() {
    let histories: [&[(u64, u64)]; 8] = [
        &[],
        &[(1, 2)],
        &[(2, 1)],
        &[(1, 2), (3, 4)],
        &[(3, 4), (1, 2)],
        &[(1, 2), (4, 3)],
        &[(0, 0)],
        &[(0, 0), (0, 0)],
    ];
    let values: BTreeSet<u64> = histories
        .iter()
        .map(|history| {
            let mut digest = Digest::new(9);
            history.iter().for_each(|(op, decision)| digest.fold(*op, *decision));
            digest.value
        })
        .collect();
    assert_eq!(values.len(), histories.len());
}

#[test]
fn words_decode_to_their_ops() {
    for (number, mark) in (1..).zip(MARKS.iter().copied()) {
        assert_eq!(op_word(mark, StreamId(0), 0) >> 58, number);
        assert_eq!(unpack_op(op_word(mark, StreamId(7), 99)), Some((mark, StreamId(7), 99)));
    }
    assert_eq!((unpack_op(0), unpack_op(u64::MAX)), (None, None));
    let placement = Placement { segment: SegmentId(3), offset_bytes: 5 * UNIT_BYTES };
    assert_eq!(unpack_placement(3 << 32 | 5), placement);
}

#[test]
fn marks_streams_and_amounts_do_not_overlap() {
    let most = op_word(Mark::RefusedBySegment, StreamId(u16::MAX), (1 << 42) - 1);
    assert_eq!(most >> 58, Mark::RefusedBySegment as u64 + 1);
    assert_eq!((most >> 42) & 0xffff, 0xffff);
    assert_eq!(unpack_op(most), Some((Mark::RefusedBySegment, StreamId(u16::MAX), (1 << 42) - 1)));
}
